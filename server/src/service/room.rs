//! Room for messages and answers: reserved in the account of their call's connection before they are kept.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http::Extensions;
use longshore_proto::{
    Fault,
    limits::{SHARE_BYTES, SMALL_MESSAGE_BYTES},
};
use longshore_wire::{
    direct::{Account, Bounds, Connection, Held, Owner},
    no_room,
};
use prost::Message;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tokio_stream::Stream;
use tonic::{Response, Status};

use crate::tasks::blocking;

/// Memory of an answer of many elements, as a multiple of its encoded size. The memory holds the message itself and its
/// encoding.
const COPIES: usize = 3;

/// A call's room.
#[derive(Clone)]
pub(super) struct Room(Arc<Account>);

impl Room {
    /// Returns the room of the call with these extensions. A call without a connection has a room of its own.
    pub(super) fn of(extensions: &Extensions) -> Room {
        let connection = Connection::of(extensions).map(|of| Arc::clone(&of.account));
        Room(connection.unwrap_or_else(|| Bounds::default().account(Owner::Local)))
    }

    pub(super) fn is_ranks(&self) -> bool {
        self.0.is_vouched()
    }

    /// Waits until there is room, and reserves it.
    ///
    /// # Errors
    /// `Unavailable` at the deadline, and `Exhausted` at once if it never fits.
    pub(super) async fn hold(&self, bytes: usize, deadline: Instant) -> Result<Held, Fault> {
        if bytes > SHARE_BYTES {
            return Err(no_room("answer", bytes));
        }
        timeout_at(deadline, self.0.room(bytes)).await.map_err(|_| no_room("answer", bytes))
    }

    /// Reserves room, if there is room now.
    pub(super) fn hold_now(&self, field: &str, bytes: usize) -> Result<Held, Fault> {
        self.0.hold(bytes).ok_or_else(|| no_room(field, bytes))
    }

    /// Builds an answer that is kept within the call's room. Without room the message is dropped, and built again once
    /// there is room, so no waiting call keeps a message.
    pub(super) async fn make<T: Message>(
        &self,
        deadline: Instant,
        build: impl Fn() -> Result<T, Fault>,
    ) -> Result<Kept<T>, Fault> {
        loop {
            let bytes = {
                let message = build()?;
                let bytes = COPIES * message.encoded_len();
                if bytes <= SMALL_MESSAGE_BYTES {
                    return Ok(Kept { message, room: None });
                }
                if let Some(held) = self.0.hold(bytes) {
                    return Ok(Kept { message, room: Some(held.as_answer()) });
                }
                bytes
            };
            drop(self.hold(bytes, deadline).await?);
        }
    }

    /// Builds an answer that waits for a drive, away from network threads. Room for `bytes` encoded bytes is reserved
    /// first, so the answer is built once.
    pub(super) async fn make_blocking<T: Message + 'static>(
        &self,
        bytes: usize,
        deadline: Instant,
        build: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> Result<Kept<T>, Fault> {
        let held = self.hold(COPIES * bytes, deadline).await?;
        let message = blocking(build).await?;
        Ok(Kept { message, room: Some(held.as_answer()) })
    }
}

/// An answer's message and its room.
pub(super) struct Kept<T> {
    pub(super) message: T,
    pub(super) room: Option<Held>,
}

impl<T> Kept<T> {
    /// Returns the answer. The body of the answer releases its room once the reader has taken it.
    pub(super) fn answer(self) -> Response<T> {
        let mut response = Response::new(self.message);
        if let Some(room) = self.room {
            response.extensions_mut().insert(Arc::new(room));
        }
        response
    }
}

/// A stream of answers. The room of an answer is released when HTTP/2 asks for the next answer, since the reader then
/// takes bytes.
pub(crate) struct Answers<T> {
    receiver: mpsc::Receiver<Result<Kept<T>, Status>>,
    last: Option<Held>,
}

/// Creates a stream with room for one answer ahead of its reader.
pub(super) fn answers<T>() -> (mpsc::Sender<Result<Kept<T>, Status>>, Answers<T>) {
    let (sender, receiver) = mpsc::channel(1);
    (sender, Answers { receiver, last: None })
}

impl<T> Unpin for Answers<T> {}

impl<T> Stream for Answers<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.last = None;
        let answer = ready!(self.receiver.poll_recv(context));
        Poll::Ready(answer.map(|answer| {
            answer.map(|Kept { message, room }| {
                self.last = room;
                message
            })
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use longshore_proto::{FaultKind, limits::MAX_UNFINISHED_BYTES};
    use longshore_wire::v1::ListJobsResponse;
    use tokio_stream::StreamExt;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    fn jobs(bytes: usize) -> Result<ListJobsResponse, Fault> {
        Ok(ListJobsResponse { jobs: vec!["j".repeat(bytes)], ..Default::default() })
    }

    #[tokio::test]
    async fn an_answer_waits_for_room_and_is_refused_without() {
        let bounds = Bounds::default();
        let [first, other] = [1, 2].map(|host| Room(bounds.account(Owner::Address([10, 0, 0, host].into()))));
        let flood = first.hold(SHARE_BYTES, soon()).await.unwrap();
        assert_eq!(first.hold(1, soon()).await.err().map(|fault| fault.kind), Some(FaultKind::Unavailable));
        let small = first.make(soon(), || jobs(100)).await.unwrap();
        assert!(small.room.is_none(), "small answers are counted with their call");
        assert!(first.make(soon(), || jobs(10_000)).await.is_err());
        let kept = other.make(soon(), || jobs(10_000)).await.unwrap();
        assert!((30_000..31_000).contains(&kept.room.unwrap().bytes()));
        let never = other.make(soon(), || jobs(MAX_UNFINISHED_BYTES)).await.err();
        assert_eq!(never.map(|fault| fault.kind), Some(FaultKind::Exhausted));
        let waits = tokio::spawn(async move {
            first.make(Instant::now() + Duration::from_secs(60), || jobs(10_000)).await.is_ok()
        });
        tokio::task::yield_now().await;
        drop(flood);
        assert!(waits.await.unwrap());
    }

    #[tokio::test]
    async fn a_stream_keeps_the_room_of_what_is_being_sent() {
        let room = Room(Bounds::default().account(Owner::Local));
        let (sender, mut answers) = answers();
        for _ in 0..2 {
            let kept = room.make(soon(), || jobs(SHARE_BYTES / 7)).await;
            sender.send(Ok(kept.unwrap())).await.ok().unwrap();
            assert!(answers.next().await.unwrap().is_ok());
        }
        assert!(room.hold_now("answer", SHARE_BYTES).is_err());
        drop((answers, sender));
        assert!(room.hold_now("answer", SHARE_BYTES).is_ok());
    }
}
