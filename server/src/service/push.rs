//! Push: contributions in, acknowledgements out.
//!
//! A chunk's fields precede its payload. So the chunk is admitted first. The connection's task then reads the payload
//! from the socket straight into its slot. Without a mark the payload is copied there from HTTP/2's frames.
//!
//! The stream is not read further while the chunk's slot is busy: HTTP/2 flow control holds a fast rank back. Beside
//! the slots the server buffers only the HTTP/2 window. A payload of a link is lent from the worker's memory, or copied
//! from there once its slot is free.

mod place;
mod receiving;

use std::{future::poll_fn, mem, pin::Pin, time::Duration};

use bytes::Bytes;
use http::Response;
use http_body::Body as _;
use longshore_proto::Fault;
use longshore_wire::{
    direct::{Claim, Connection, Mark, Taps},
    frame::{self, Pieces, SharedIntake},
    v1::{PushRequest, PushResponse},
};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};
use tonic::{Status, body::Body};

use self::{
    place::{Destination, place_now},
    receiving::{RESULTS_BATCHED, Receiving, Waiting},
};
use super::{Services, refuse};
use crate::trust::Caller;

/// Longest time that an acknowledgement waits for others to share its message. No worker waits for an acknowledgement:
/// a commit releases the gradients that the worker retains. With 1 ms each step of a small job woke both ends once
/// more.
const RESULTS_DELAY: Duration = Duration::from_millis(10);
/// Longest silence in the middle of a chunk. A silent peer is detected after 10 to 20 s.
const CHUNK_SILENCE: Duration = Duration::from_secs(10);

/// Answers a Push call.
pub(super) fn answer(
    services: Services,
    caller: Caller,
    connection: Option<Connection>,
    body: Body,
) -> Response<Body> {
    let (answers, pieces) = mpsc::channel(2);
    let taps = connection.as_ref().map(|of| of.taps.clone());
    let receiving = Receiving::new(services, caller, connection);
    let stream = Stream {
        intake: SharedIntake::new(receiving),
        body,
        taps,
        rest: Bytes::new(),
        following: None,
        claim: None,
        ended: false,
        answers,
        due: None,
    };
    tokio::spawn(stream.run());
    frame::answer(pieces)
}

/// State of one Push call, owned by its task.
struct Stream {
    intake: SharedIntake<PushRequest, Receiving>,
    body: Body,
    /// Taps of the connection. None once the first bytes have come, which show whether the call is marked.
    taps: Option<Taps>,
    /// Bytes from h2 that the intake has not taken yet.
    rest: Bytes,
    /// Claim of a marked stream to bypass h2, until the bytes in `rest` are taken and the claim is installed.
    following: Option<Claim>,
    claim: Option<Claim>,
    ended: bool,
    answers: Pieces,
    /// Time at which acknowledgements must be sent.
    due: Option<Instant>,
}

/// The call is over. The caller has been told, or has left.
struct Over;

impl Stream {
    async fn run(mut self) {
        let (intake, mut fences) = (self.intake.clone(), self.intake.lock().sink.fences());
        // Runs beside the call, which may wait for a stopped process to read an acknowledgement.
        let cut = async {
            while fences.changed().await.is_ok() {
                let sink = &mut intake.lock().sink;
                sink.end_if_fenced();
                if sink.must_rejoin() {
                    return;
                }
            }
        };
        // An aborted call is dropped, and an unfinished chunk releases its slot.
        tokio::select! {
            Err(Over) = self.receive() => {}
            () = cut => {}
        }
    }

    async fn receive(&mut self) -> Result<std::convert::Infallible, Over> {
        loop {
            let (fault, waiting, results, full) = {
                let mut intake = self.intake.lock();
                let waiting = intake.sink.waiting.take();
                let full = intake.sink.held_back.is_some();
                (intake.fault().cloned(), waiting, intake.sink.results.len(), full)
            };
            if let Some(fault) = fault {
                return self.over(Some(refuse("Push", "", fault))).await;
            }
            if results == 0 {
                self.due = None;
            } else if full || results >= RESULTS_BATCHED || self.due.is_some_and(|due| due <= Instant::now())
            {
                self.acknowledge().await?;
            } else {
                self.due.get_or_insert_with(|| Instant::now() + RESULTS_DELAY);
            }
            if self.take_held_back() {
                continue;
            }
            if let Some((request, waiting)) = waiting {
                let chunk = waiting.chunk;
                let place = self.place(waiting).await?;
                self.intake.lock().sink.placed(request, &chunk, place);
                self.intake.go_on();
                self.claim.iter().for_each(Claim::resume);
            } else if !self.rest.is_empty() {
                self.intake.take(&mut self.rest);
            } else if let Some(claim) = self.following.take() {
                claim.install(Box::new(self.intake.clone()));
                self.claim = Some(claim);
            } else if self.ended && self.claim.as_ref().is_none_or(Claim::is_drained) {
                let finished = self.intake.lock().finish();
                return self.over(finished.err().map(|fault| refuse("Push", "", fault))).await;
            } else {
                self.more().await?;
            }
        }
    }

    /// Starts the chunk that was held back, once the earlier results are sent.
    fn take_held_back(&self) -> bool {
        let has_place = {
            let mut intake = self.intake.lock();
            let Some((request, bytes)) = intake.sink.held_back.take() else { return false };
            intake.sink.start(request, bytes)
        };
        if has_place {
            self.intake.go_on();
            self.claim.iter().for_each(Claim::resume);
        }
        true
    }

    async fn more(&mut self) -> Result<(), Over> {
        let (received, closing) = {
            let intake = self.intake.lock();
            (intake.received(), intake.sink.closing.clone())
        };
        let closed = async { closing?.wait_for(Option::is_some).await.ok()?.clone() };
        let patience = self.due.unwrap_or_else(|| Instant::now() + CHUNK_SILENCE);
        let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context));
        tokio::select! {
            frame = frame, if !self.ended => match frame {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.following = self.taps.take().and_then(|taps| taps.claim(Mark::find(&data)?));
                        self.rest = data;
                    }
                }
                Some(Err(status)) => self.over(Some(status)).await.map(|_| ())?,
                None => self.ended = true,
            },
            () = self.intake.changed() => {}
            Some(fault) = closed => self.over(Some(refuse("Push", "", fault))).await.map(|_| ())?,
            () = sleep_until(patience) => {
                let silent = self.due.is_none() && {
                    let intake = self.intake.lock();
                    intake.received() == received && !intake.is_between_messages()
                };
                if silent {
                    let status = Status::unavailable("a chunk was not sent to its end");
                    self.over(Some(status)).await.map(|_| ())?;
                }
            }
        }
        Ok(())
    }

    async fn over(&mut self, status: Option<Status>) -> Result<std::convert::Infallible, Over> {
        self.acknowledge().await?;
        if let Some(status) = status {
            // The peer disconnected, or sent an invalid message. Nothing of the message was stored.
            tracing::debug!(%status, "push stream ended");
            let _ = self.answers.send(Err(status)).await;
        }
        Err(Over)
    }

    async fn acknowledge(&mut self) -> Result<(), Over> {
        self.due = None;
        let results = mem::take(&mut self.intake.lock().sink.results);
        if results.is_empty() {
            return Ok(());
        }
        self.answers.send(Ok(frame::encode(&PushResponse { results }))).await.map_err(|_| Over)
    }

    async fn place(&mut self, waiting: Waiting) -> Result<Result<Destination, Fault>, Over> {
        let Waiting { handle, chunk, payload, patience } = waiting;
        // The wait may take a whole step, so earlier results are acknowledged first.
        self.acknowledge().await?;
        let late = || handle.late("push", chunk.contribution);
        tokio::select! {
            place = handle.until(Instant::now() + patience, || place_now(&handle, &chunk), late) => {
                Ok(place.and_then(|place| place.holding(payload, chunk.lent)))
            }
            () = self.answers.closed() => Err(Over),
        }
    }
}
