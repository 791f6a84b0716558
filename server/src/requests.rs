//! Incoming request messages: memory for large ones, and a deadline for incomplete ones.
//!
//! Generated code buffers a message until it is complete. A rank's messages are counted when its job is
//! admitted; strangers' messages share a common limit.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::Request;
use http_body::Frame;
use longshore_proto::{
    Fault, FaultKind,
    limits::{MAX_UNFINISHED_BYTES, MESSAGE_DEADLINE, SMALL_MESSAGE_BYTES},
};
use longshore_wire::{
    direct::{Bounds, Connection, Held, Taps},
    frame::PUSH,
};
use tokio::time::{Sleep, sleep};
use tonic::{Status, body::Body, server::NamedService};
use tower_service::Service;

use crate::refusals;

/// Length of gRPC's message prefix: a compression flag and the message's length.
const PREFIX_BYTES: usize = 5;

/// A service whose request bodies are metered on arrival.
#[derive(Clone)]
pub(crate) struct Metered<S> {
    service: S,
    bounds: Arc<Bounds>,
}

impl<S> Metered<S> {
    pub(crate) fn new(service: S, bounds: &Arc<Bounds>) -> Metered<S> {
        Metered { service, bounds: Arc::clone(bounds) }
    }
}

impl<S: NamedService> NamedService for Metered<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<Request<Body>, Error = Infallible>> Service<Request<Body>> for Metered<S> {
    type Response = S::Response;
    type Error = Infallible;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> S::Future {
        // Push payloads are not buffered, and the stream may wait for the next one indefinitely.
        if request.uri().path() == PUSH {
            return self.service.call(request);
        }
        let connection = Connection::of(request.extensions()).map(|of| of.taps.clone());
        let bounds = Arc::clone(&self.bounds);
        self.service.call(request.map(|body| Body::new(Metering::new(body, bounds, connection))))
    }
}

/// A request body with its metering.
struct Metering {
    body: Body,
    bounds: Arc<Bounds>,
    connection: Option<Taps>,
    message: Message,
    room: Option<Held>,
    timer: Option<Pin<Box<Sleep>>>,
}

/// Position in the stream of messages.
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
    fn new(body: Body, bounds: Arc<Bounds>, connection: Option<Taps>) -> Metering {
        Metering { body, bounds, connection, message: Message::default(), room: None, timer: None }
    }

    fn take(&mut self, bytes: &[u8]) -> Result<(), Status> {
        let unfinished = self.message.follow(bytes);
        if !self.message.is_waited_for() {
            self.timer = None;
        }
        let vouched = self.connection.as_ref().is_some_and(Taps::is_vouched);
        if unfinished <= SMALL_MESSAGE_BYTES || vouched {
            self.room = None;
            return Ok(());
        }
        let held = match &mut self.room {
            Some(room) => room.resize(unfinished),
            None => {
                self.room = self.bounds.hold(unfinished);
                self.room.is_some()
            }
        };
        if held { Ok(()) } else { Err(no_room(unfinished)) }
    }

    /// Ready once the awaited message has passed its deadline.
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

fn no_room(bytes: usize) -> Status {
    let value = format!("{bytes} bytes of a message, among others that are not whole");
    let limit = format!("within {MAX_UNFINISHED_BYTES} bytes with them");
    refusals::status(&Fault::new(
        FaultKind::Unavailable,
        "request",
        value,
        limit,
        "try again when they have come",
    ))
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
    fn what_there_is_no_room_for_is_refused() {
        let bounds = Arc::new(Bounds::default());
        let metering = |connection| Metering::new(Body::empty(), Arc::clone(&bounds), connection);
        let large = message(10_000);
        let mut first = metering(None);
        first.take(&large[..9000]).unwrap();
        let rest = bounds.hold(MAX_UNFINISHED_BYTES - 9000).unwrap();
        assert_eq!(first.take(&large[9000..9500]).unwrap_err().code(), tonic::Code::Unavailable);
        assert_eq!(metering(None).take(&large[..9000]).unwrap_err().code(), tonic::Code::Unavailable);
        let known = Taps::default();
        known.vouch();
        assert!(metering(Some(known)).take(&large[..9000]).is_ok());
        assert!(metering(None).take(&message(1000)).is_ok());
        drop((first, rest));
        assert!(bounds.hold(MAX_UNFINISHED_BYTES).is_some());
    }
}
