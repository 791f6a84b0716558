//! The messages of a request or an answer as they arrive.

use std::{future::poll_fn, pin::Pin};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Body as _;
use tonic::{Code, Status, body::Body};

use super::{Event, Frame, Parser, SharedIntake};
use crate::{mark::Mark, sink::MessageSink, status};

/// Reader of a body's events. Between calls of [`Incoming::next`], HTTP/2's windows hold the sender back.
pub struct Incoming<M> {
    body: Body,
    parser: Parser<M>,
    piece: Bytes,
    /// Mark at the start of the first piece.
    mark: Option<Mark>,
    begun: bool,
    /// The body is an answer, which ends with the call's status in its trailers. A request has no trailers.
    is_answer: bool,
    trailers: Option<HeaderMap>,
}

impl<M: Frame> Incoming<M> {
    pub fn request(body: Body) -> Incoming<M> {
        Incoming {
            body,
            parser: Parser::new(),
            piece: Bytes::new(),
            mark: None,
            begun: false,
            is_answer: false,
            trailers: None,
        }
    }

    pub(super) fn answer(body: Body) -> Incoming<M> {
        Incoming { is_answer: true, ..Incoming::request(body) }
    }

    /// Returns the mark at the start of the body, once bytes have come.
    pub fn mark(&self) -> Option<Mark> {
        self.mark
    }

    /// Returns the next event, or None at the end. The future is cancel-safe.
    ///
    /// # Errors
    /// The status of a failed call or connection; `InvalidArgument` for an invalid message.
    pub async fn next(&mut self) -> Result<Option<Event<M>>, Status> {
        loop {
            let event = self.parser.next(&mut self.piece).map_err(|fault| status(&fault))?;
            if event.is_some() {
                return Ok(event);
            }
            match self.data().await? {
                Some(data) => {
                    if !std::mem::replace(&mut self.begun, true) {
                        self.mark = Mark::find(&data);
                    }
                    self.piece = data;
                }
                None => {
                    self.outcome()?;
                    return self.parser.finish().map(|()| None).map_err(|fault| status(&fault));
                }
            }
        }
    }

    /// Returns the bytes of the next DATA frame, or None at the end. Keeps trailers.
    async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await.transpose()?;
            match frame.map(http_body::Frame::into_data) {
                Some(Ok(data)) => return Ok(Some(data)),
                Some(Err(frame)) => self.trailers = frame.into_trailers().ok(),
                None => return Ok(None),
            }
        }
    }

    /// Passes all messages to the sink, including payloads that bypass h2. Returns at the end of the stream or on a
    /// fault: see [`Intake::fault`](super::Intake::fault). The sink must not stall.
    ///
    /// # Errors
    /// The status of a failed call or connection.
    pub async fn pour<S: MessageSink<M>>(mut self, intake: &SharedIntake<M, S>) -> Result<(), Status> {
        while intake.lock().fault().is_none() {
            let data = tokio::select! {
                data = self.data() => data?,
                () = intake.changed() => continue,
            };
            let Some(mut data) = data else { return self.outcome() };
            intake.take(&mut data);
        }
        Ok(())
    }

    fn outcome(&self) -> Result<(), Status> {
        if !self.is_answer {
            return Ok(());
        }
        let absent = || Status::unavailable("the answer ended without a status");
        let outcome = self.trailers.as_ref().and_then(Status::from_header_map).ok_or_else(absent)?;
        if outcome.code() == Code::Ok { Ok(()) } else { Err(outcome) }
    }
}
