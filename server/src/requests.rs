//! Incoming request messages: memory for large ones, and a deadline for incomplete ones.
//!
//! Generated code buffers a message until it is complete, and keeps an answer until its reader takes it. Both count in
//! the account of their connection.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use longshore_proto::{
    Fault, FaultKind,
    limits::{MESSAGE_DEADLINE, SMALL_MESSAGE_BYTES},
};
use longshore_wire::{
    self as wire, Scope,
    direct::{Account, Connection, Held},
    frame::PUSH,
};
use tokio::time::{Sleep, sleep};
use tonic::{Status, body::Body};
use tower_service::Service;

use crate::refusals;

/// Length of gRPC's message prefix: a compression flag and the message's length.
const PREFIX_BYTES: usize = 5;
/// Start of the paths of gRPC reflection. A call there takes [`REFLECTION_BYTES`], since its answers quote whole
/// descriptors.
const REFLECTION: &str = "/grpc.reflection.";
const REFLECTION_BYTES: usize = 256 * 1024;

/// The answer of a service in progress.
pub(crate) type Answering = BoxFuture<'static, Result<Response<Body>, Infallible>>;

/// Makes a call whose messages and answer count in the account of its connection.
pub(crate) fn metered<S>(service: &mut S, request: Request<Body>) -> Answering
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    let path = request.uri().path();
    let connection = Connection::of(request.extensions()).map(|of| Arc::clone(&of.account));
    // Push payloads are not buffered, and the stream may wait for the next payload without a limit.
    let Some(account) = connection.filter(|_| path != PUSH) else {
        return Box::pin(service.call(request));
    };
    let mut room = None;
    if path.starts_with(REFLECTION) {
        room = account.hold(REFLECTION_BYTES).map(|held| Arc::new(held.as_answer()));
        if room.is_none() {
            let refused = refusals::status(&wire::no_room("answer", REFLECTION_BYTES)).into_http();
            return Box::pin(std::future::ready(Ok(refused)));
        }
    }
    let scope = Scope::new(Arc::clone(&account), path);
    let call = service.call(request.map(|body| Body::new(Metering::new(body, account))));
    Box::pin(async move {
        let mut answer = scope.run(call).await?;
        Ok(match room.or_else(|| answer.extensions_mut().remove::<Arc<Held>>()) {
            Some(room) => answer.map(|body| kept_until_sent(body, room)),
            None => answer,
        })
    })
}

/// Returns an answer whose room is released once its last bytes are sent, or dropped.
fn kept_until_sent(body: Body, room: Arc<Held>) -> Body {
    let counted = move |bytes| Bytes::from_owner(Bytewise { bytes, _room: Arc::clone(&room) });
    Body::new(body.map_frame(move |frame| frame.map_data(&counted)))
}

/// Bytes of an answer, which keep the answer's room until they are dropped.
struct Bytewise {
    bytes: Bytes,
    _room: Arc<Held>,
}

impl AsRef<[u8]> for Bytewise {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A request body with its metering.
struct Metering {
    body: Body,
    account: Arc<Account>,
    message: Message,
    room: Option<Held>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// Position in a body's stream of messages.
#[derive(Debug, Default)]
struct Message {
    prefix: [u8; PREFIX_BYTES],
    have: usize,
    /// Bytes of the message still to come.
    left: usize,
    received: usize,
    /// The first message is complete.
    begun: bool,
}

impl Message {
    fn is_waited_for(&self) -> bool {
        !self.begun || self.have > 0
    }

    /// Advances by `bytes`. Returns the received bytes of an incomplete message.
    fn follow(&mut self, mut bytes: &[u8]) -> usize {
        while !bytes.is_empty() {
            if self.have < PREFIX_BYTES {
                let now = bytes.len().min(PREFIX_BYTES - self.have);
                self.prefix[self.have..self.have + now].copy_from_slice(&bytes[..now]);
                self.have += now;
                bytes = &bytes[now..];
                let [_, a, b, c, d] = self.prefix;
                (self.left, self.received) = (u32::from_be_bytes([a, b, c, d]) as usize, 0);
            } else {
                let now = bytes.len().min(self.left);
                (self.left, self.received) = (self.left - now, self.received + now);
                bytes = &bytes[now..];
            }
            if self.have == PREFIX_BYTES && self.left == 0 {
                *self = Message { begun: true, ..Message::default() };
            }
        }
        self.received
    }
}

impl Metering {
    fn new(body: Body, account: Arc<Account>) -> Metering {
        Metering { body, account, message: Message::default(), room: None, timer: None }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Status> {
        let unfinished = self.message.follow(bytes);
        if !self.message.is_waited_for() {
            self.timer = None;
        }
        if unfinished <= SMALL_MESSAGE_BYTES {
            self.room = None;
            return Ok(());
        }
        let held = match &mut self.room {
            Some(room) => room.resize(unfinished),
            None => {
                self.room = self.account.hold(unfinished);
                self.room.is_some()
            }
        };
        if held { Ok(()) } else { Err(refusals::status(&wire::no_room("request", unfinished))) }
    }

    /// Becomes ready once the awaited message has passed its deadline.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if !self.message.is_waited_for() {
            return Poll::Pending;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(MESSAGE_DEADLINE)));
        timer.as_mut().poll(context).map(|()| {
            let value = format!("not whole after {MESSAGE_DEADLINE:?}");
            refusals::status(&Fault::new(
                FaultKind::Deadline,
                "request",
                value,
                "sent to its end",
                "send it again",
            ))
        })
    }
}

impl http_body::Body for Metering {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                let taken = frame.data_ref().map_or(Ok(()), |data| self.take(data));
                if let Err(status) = taken {
                    return Poll::Ready(Some(Err(status)));
                }
            }
            Poll::Pending => return self.poll_late(context).map(|status| Some(Err(status))),
            Poll::Ready(_) => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::limits::{CHUNK_BYTES, RANK_SHARE_BYTES, SHARE_BYTES};
    use longshore_wire::direct::{Bounds, Owner};

    use super::*;

    fn message(len: usize) -> Vec<u8> {
        [&[0][..], &(len as u32).to_be_bytes(), &vec![7; len]].concat()
    }

    #[test]
    fn messages_are_followed_in_any_pieces() {
        let whole = [message(0), message(3), message(70_000), message(1)].concat();
        for piece in [1, 2, 5, 7, 4096, whole.len()] {
            let (mut following, mut most) = (Message::default(), 0);
            assert!(following.is_waited_for());
            for bytes in whole.chunks(piece) {
                most = most.max(following.follow(bytes));
            }
            assert!(!following.is_waited_for(), "{following:?}");
            let expected = if piece <= 4096 { 60_000..70_000 } else { 0..1 };
            assert!(expected.contains(&most), "{most} in pieces of {piece}");
        }
    }

    #[test]
    fn what_there_is_no_room_for_is_refused_to_ranks_too() {
        let bounds = Bounds::default();
        let account = bounds.account(Owner::Local);
        let metering = |account: &Arc<Account>| Metering::new(Body::empty(), Arc::clone(account));
        let large = message(10_000);
        let mut first = metering(&account);
        first.take(&large[..9000]).unwrap();
        let rest = account.hold(SHARE_BYTES - 9000).unwrap();
        assert_eq!(first.take(&large[9000..9500]).unwrap_err().code(), tonic::Code::Unavailable);
        assert_eq!(metering(&account).take(&large[..9000]).unwrap_err().code(), tonic::Code::Unavailable);
        assert!(metering(&account).take(&message(1000)).is_ok());
        let rank = bounds.account(Owner::Local);
        rank.vouch();
        let parts: Vec<Metering> = (0..64)
            .map_while(|_| {
                let mut part = metering(&rank);
                part.take(&message(CHUNK_BYTES)[..CHUNK_BYTES]).is_ok().then_some(part)
            })
            .collect();
        assert_eq!(parts.len() * CHUNK_BYTES, RANK_SHARE_BYTES, "what admission has counted");
        drop((first, rest, parts));
        assert!(account.hold(SHARE_BYTES).is_some());
    }
}
