//! Fake servers with scripted answers, for cases that real servers produce seldom or late.

use std::{
    convert::Infallible,
    future::{Future, ready},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use http_body_util::{BodyExt, Full};
use longshore_proto::{Fault, FaultKind, JobName, JobSpec, Param, Rank, TierKind, limits::BLOCK_ELEMENTS};
use longshore_wire::v1::{DescribeResponse, JobProgress, JoinResponse, Phase};
use prost::Message;
use tokio::runtime::Runtime;
use tonic::{
    body::Body,
    server::NamedService,
    transport::{Server, server::TcpIncoming},
};

use super::{Cluster, Options, Transport};

/// A server's answer to one call.
pub(crate) struct Answer {
    after: Duration,
    message: Result<Vec<u8>, Fault>,
}

impl Answer {
    pub(crate) fn new(message: &impl Message) -> Answer {
        Answer { after: Duration::ZERO, message: Ok(message.encode_to_vec()) }
    }

    pub(crate) fn fault(kind: FaultKind, field: &str) -> Answer {
        let fault = Fault::new(kind, field, "as the test says", "otherwise", "none");
        Answer { after: Duration::ZERO, message: Err(fault) }
    }

    /// The answer of a server that recovers the job.
    pub(crate) fn recovering() -> Answer {
        Answer::fault(FaultKind::Unavailable, "job")
    }

    /// Answer to `Join` for a job that trains.
    pub(crate) fn joined(version: u64) -> Answer {
        Answer::new(&JoinResponse { progress: Some(training(version)), ..JoinResponse::default() })
    }

    /// Answer to `Describe` for a job that trains.
    pub(crate) fn described(version: u64) -> Answer {
        Answer::new(&DescribeResponse { progress: Some(training(version)), ..Default::default() })
    }

    /// Delays the answer by `after`.
    pub(crate) fn after(self, after: Duration) -> Answer {
        Answer { after, ..self }
    }

    async fn send(self) -> Result<http::Response<Body>, Infallible> {
        tokio::time::sleep(self.after).await;
        Ok(match self.message {
            Err(fault) => longshore_wire::status(&fault).into_http(),
            Ok(message) => {
                // gRPC frame: a flag for no compression, the length, the message.
                let mut framed = BytesMut::with_capacity(5 + message.len());
                framed.put_u8(0);
                framed.put_u32(message.len() as u32);
                framed.put_slice(&message);
                let done = HeaderMap::from_iter([(
                    HeaderName::from_static("grpc-status"),
                    HeaderValue::from_static("0"),
                )]);
                let body = Full::<Bytes>::new(framed.freeze());
                let body = Body::new(body.with_trailers(ready(Some(Ok::<_, Infallible>(done)))));
                let response = http::Response::builder().header("content-type", "application/grpc");
                response.body(body).expect("a response with a well-known header")
            }
        })
    }
}

fn training(version: u64) -> JobProgress {
    JobProgress { phase: Phase::Training.into(), version, ..Default::default() }
}

/// Maps the name of a call, such as `Join`, to its answer.
pub(crate) type Says = Arc<dyn Fn(&str) -> Answer + Send + Sync>;

pub(crate) fn says(answer: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Says {
    Arc::new(answer)
}

/// A gRPC service of the fake server: Training or Admin.
#[derive(Clone)]
struct Service<const TRAINING: bool>(Says);

impl NamedService for Service<true> {
    const NAME: &'static str = "longshore.v1.Training";
}

impl NamedService for Service<false> {
    const NAME: &'static str = "longshore.v1.Admin";
}

impl<const TRAINING: bool> tower_service::Service<http::Request<Body>> for Service<TRAINING> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let name = request.uri().path().rsplit('/').next().unwrap_or_default();
        Box::pin((self.0)(name).send())
    }
}

/// Starts the servers. Returns rank 0's options for a job on them, and the runtime that runs them.
pub(crate) fn start(servers: Vec<Says>) -> (Options, Runtime) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let entered = runtime.enter();
    let elements = BLOCK_ELEMENTS * servers.len() as u64;
    let mut addresses = Vec::new();
    for says in servers {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        addresses.push(incoming.local_addr().unwrap().to_string());
        let server = Server::builder().add_service(Service::<true>(says.clone()));
        runtime.spawn(server.add_service(Service::<false>(says)).serve_with_incoming(incoming));
    }
    let spec = JobSpec {
        shard_elements: BLOCK_ELEMENTS,
        tier: TierKind::Nvme,
        ..JobSpec::new(
            JobName::parse("name", "faked").unwrap(),
            vec![Param { name: "all".into(), shape: vec![elements], group: 0 }],
        )
    };
    let options = Options { transport: Transport::Tcp, ..Options::new(addresses, spec, Rank(0)) };
    drop(entered);
    (options, runtime)
}

/// Deadline of the session that [`cluster`] returns.
pub(crate) const DEADLINE: Duration = Duration::from_millis(300);

/// Returns a connected cluster of fake servers. Its calls have the short `DEADLINE`.
pub(crate) fn cluster(servers: Vec<Says>) -> (Cluster, Runtime) {
    let (options, runtime) = start(servers);
    // Connecting has a longer deadline: the machine may be busy.
    let mut cluster = Cluster::connect(options).unwrap();
    cluster.options.deadline = DEADLINE;
    (cluster, runtime)
}
