//! A stock gRPC server that answers every call with one message, after a set delay.

use std::{
    convert::Infallible,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    thread,
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use longshore_wire::v1::ListJobsResponse;
use prost::Message;
use tokio::{net::TcpListener, runtime::Runtime, sync::oneshot};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{body::Body, server::NamedService};
use tower_service::Service;

/// A server of the Admin service. Drop stops it.
pub struct Stock {
    address: String,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

#[derive(Clone)]
struct Answers {
    message: Bytes,
    late: Duration,
}

impl NamedService for Answers {
    const NAME: &'static str = "longshore.v1.Admin";
}

impl Service<Request<Body>> for Answers {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        let Answers { message, late } = self.clone();
        Box::pin(async move {
            tokio::time::sleep(late).await;
            let trailers =
                HeaderMap::from_iter([("grpc-status".parse().unwrap(), HeaderValue::from_static("0"))]);
            let body = Full::new(message).with_trailers(async { Some(Ok(trailers)) });
            let mut answer = Response::new(Body::new(body));
            answer.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
            Ok(answer)
        })
    }
}

impl Stock {
    /// Starts a server that answers with `list` after the delay `late`.
    pub fn start(list: &ListJobsResponse, late: Duration) -> Stock {
        let mut message = BytesMut::new();
        message.put_u8(0);
        message.put_u32(list.encoded_len() as u32);
        list.encode(&mut message).expect("room for the message");
        let service = Answers { message: message.freeze(), late };
        let runtime = Runtime::new().expect("a runtime");
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let (stop, stopped) = oneshot::channel();
        let serve = async move {
            let incoming = TcpListenerStream::new(listener);
            let serving =
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming);
            tokio::select! {
                served = serving => served.expect("it serves"),
                _ = stopped => {}
            }
        };
        let thread = thread::spawn(move || runtime.block_on(serve));
        Stock { address, stop: Some(stop), thread: Some(thread) }
    }

    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
