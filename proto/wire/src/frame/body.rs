//! A stream of encoded messages as the body of a request or an answer.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use tokio::sync::mpsc;
use tonic::{Code, Status};

use crate::piece::Piece;

/// A body that sends the pieces of a channel. A server's answer ends with the status in its trailers; a request
/// has no trailers.
pub(super) struct Outgoing {
    pieces: mpsc::Receiver<Result<Piece, Status>>,
    payload: Bytes,
    trailers: bool,
    done: bool,
}

impl Outgoing {
    pub(super) fn request(pieces: mpsc::Receiver<Result<Piece, Status>>) -> Outgoing {
        Outgoing { pieces, payload: Bytes::new(), trailers: false, done: false }
    }

    pub(super) fn answer(pieces: mpsc::Receiver<Result<Piece, Status>>) -> Outgoing {
        Outgoing { trailers: true, ..Outgoing::request(pieces) }
    }

    fn end(&mut self, status: Status) -> Option<Result<http_body::Frame<Bytes>, Status>> {
        self.done = true;
        if !self.trailers {
            return (status.code() != Code::Ok).then_some(Err(status));
        }
        let mut trailers = HeaderMap::new();
        Some(status.add_header(&mut trailers).map(|()| http_body::Frame::trailers(trailers)))
    }
}

impl http_body::Body for Outgoing {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        if !self.payload.is_empty() {
            let payload = std::mem::take(&mut self.payload);
            return Poll::Ready(Some(Ok(http_body::Frame::data(payload))));
        }
        if self.done {
            return Poll::Ready(None);
        }
        Poll::Ready(match ready!(self.pieces.poll_recv(context)) {
            Some(Ok(piece)) => {
                self.payload = piece.payload;
                Some(Ok(http_body::Frame::data(piece.head)))
            }
            Some(Err(status)) => self.end(status),
            None => self.end(Status::ok("")),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.done && self.payload.is_empty()
    }
}
