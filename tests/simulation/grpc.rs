//! gRPC messages in HTTP bodies, as the simulated servers read and write them.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use longshore_proto::Fault;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, body::Body};

/// Length of a message's header: one byte for no compression, and four for the message's length.
const HEADER: usize = 5;

/// Messages of a request or an answer as they arrive.
pub(crate) struct Incoming {
    body: Body,
    bytes: BytesMut,
}

impl Incoming {
    pub(crate) fn new(body: Body) -> Incoming {
        Incoming { body, bytes: BytesMut::new() }
    }

    /// Returns the next message; None at the end.
    pub(crate) async fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Status> {
        loop {
            if self.bytes.len() >= HEADER {
                let bytes = (&self.bytes[1..HEADER]).get_u32() as usize;
                if self.bytes.len() >= HEADER + bytes {
                    self.bytes.advance(HEADER);
                    let message = M::decode(self.bytes.split_to(bytes).freeze());
                    return message.map(Some).map_err(|error| Status::internal(error.to_string()));
                }
            }
            match self.body.frame().await {
                None => return Ok(None),
                Some(Err(status)) => return Err(status),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.bytes.extend_from_slice(&data);
                    }
                }
            }
        }
    }
}

/// The sender of an answer's messages.
pub(crate) struct Outgoing(mpsc::Sender<Result<Frame<Bytes>, Status>>);

/// Makes a body that passes frames on as `frames` receives them.
pub(crate) fn body(frames: mpsc::Receiver<Result<Frame<Bytes>, Status>>) -> Body {
    Body::new(StreamBody::new(ReceiverStream::new(frames)))
}

pub(crate) fn answer() -> (Outgoing, Response<Body>) {
    let (sender, frames) = mpsc::channel(4);
    let response = Response::builder().header("content-type", "application/grpc");
    (Outgoing(sender), response.body(body(frames)).expect("a well-known header"))
}

impl Outgoing {
    /// Sends a message. Returns false if the caller is gone.
    pub(crate) async fn send(&self, message: &impl Message) -> bool {
        let mut framed = BytesMut::with_capacity(HEADER + message.encoded_len());
        framed.put_u8(0);
        framed.put_u32(message.encoded_len() as u32);
        message.encode(&mut framed).expect("a buffer that grows");
        self.0.send(Ok(Frame::data(framed.freeze()))).await.is_ok()
    }

    pub(crate) async fn end(self, ended: Result<(), Fault>) {
        let done = (HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"));
        let last = match ended {
            Ok(()) => Ok(Frame::trailers(HeaderMap::from_iter([done]))),
            Err(fault) => Err(longshore_wire::status(&fault)),
        };
        _ = self.0.send(last).await;
    }

    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}
