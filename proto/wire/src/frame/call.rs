//! Calls and answers as HTTP: the work that tonic's generated code does around a codec. The messages of a call are the
//! body of its request, or of its answer.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use tokio::sync::mpsc;
use tonic::{Code, Status, body::Body};
use tower_service::Service;

use super::{Frame, Incoming, Piece};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// Paths of the two calls with payloads.
pub const PUSH: &str = "/longshore.v1.Tensors/Push";
pub const PULL: &str = "/longshore.v1.Tensors/Pull";

/// Sender of a call's request messages, or of a server's answers.
pub type Pieces = mpsc::Sender<Result<Piece, Status>>;

/// Makes a streaming call, which sends `pieces` until its senders are dropped.
///
/// # Errors
/// The server's refusal, or `Unavailable` and the like from the connection.
pub async fn call<M: Frame>(
    channel: &mut impl Service<Request<Body>, Response = Response<Body>, Error: Into<BoxError>>,
    path: &'static str,
    pieces: mpsc::Receiver<Result<Piece, Status>>,
) -> Result<Incoming<M>, Status> {
    let mut request = Request::new(Body::new(Outgoing::new(pieces, false)));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = http::Uri::from_static(path);
    request.headers_mut().insert(header::TE, HeaderValue::from_static("trailers"));
    request.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    fn failed(error: impl Into<BoxError>) -> Status {
        Status::from_error(error.into())
    }
    std::future::poll_fn(|context| channel.poll_ready(context)).await.map_err(failed)?;
    let response = channel.call(request).await.map_err(failed)?;
    match Status::from_header_map(response.headers()) {
        Some(status) if status.code() != Code::Ok => return Err(status),
        _ if response.status() != http::StatusCode::OK => {
            return Err(Status::unavailable(format!("answered with HTTP status {}", response.status())));
        }
        _ => {}
    }
    Ok(Incoming::answer(response.into_body()))
}

/// Makes a call with one request.
///
/// # Errors
/// As [`call`].
pub async fn call_once<M: Frame>(
    channel: &mut impl Service<Request<Body>, Response = Response<Body>, Error: Into<BoxError>>,
    path: &'static str,
    request: Piece,
) -> Result<Incoming<M>, Status> {
    let (sender, pieces) = mpsc::channel(1);
    // The channel has room for one message.
    let _ = sender.try_send(Ok(request));
    drop(sender);
    call(channel, path, pieces).await
}

/// Returns a server's answer, which sends `pieces`. An error ends the answer with that status.
pub fn answer(pieces: mpsc::Receiver<Result<Piece, Status>>) -> Response<Body> {
    let mut response = Response::new(Body::new(Outgoing::new(pieces, true)));
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

/// A body that sends the pieces of a channel. A server's answer ends with the status in its trailers; a request
/// has no trailers.
struct Outgoing {
    pieces: mpsc::Receiver<Result<Piece, Status>>,
    payload: Bytes,
    trailers: bool,
    done: bool,
}

impl Outgoing {
    fn new(pieces: mpsc::Receiver<Result<Piece, Status>>, trailers: bool) -> Outgoing {
        Outgoing { pieces, payload: Bytes::new(), trailers, done: false }
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
