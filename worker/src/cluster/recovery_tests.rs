//! A server that recovers the job is alive, however long that takes.

use std::{
    convert::Infallible,
    future::{Ready, ready},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use longshore_proto::{
    Dtype, FaultKind, JobName, Param, Rank, Rule, ServerId, TierKind, limits::BLOCK_ELEMENTS,
};
use tonic::{
    body::Body,
    server::NamedService,
    transport::{Server, server::TcpIncoming},
};

use super::*;
use crate::error::Error;

/// A server that says for some time that it recovers the job, and then that a version is not there.
#[derive(Clone)]
struct Recovering {
    since: Instant,
    lasts: Duration,
}

impl NamedService for Recovering {
    const NAME: &'static str = "longshore.v1.Admin";
}

impl tower_service::Service<http::Request<Body>> for Recovering {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: http::Request<Body>) -> Self::Future {
        let fault = match self.since.elapsed() < self.lasts {
            true => Fault::new(FaultKind::Unavailable, "job", "recovering, being recovered", "open", "wait"),
            false => Fault::new(FaultKind::NotFound, "version", 7, "one that is kept", "ask for another one"),
        };
        ready(Ok(longshore_wire::status(&fault).into_http()))
    }
}

const DEADLINE: Duration = Duration::from_millis(300);

/// A cluster of one such server, and the runtime that the server runs on.
fn cluster(lasts: Duration) -> (Cluster, tokio::runtime::Runtime) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let entered = runtime.enter();
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap().to_string();
    let service = Recovering { since: Instant::now(), lasts };
    runtime.spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
    drop(entered);
    let spec = JobSpec {
        name: JobName::parse("name", "recovering").unwrap(),
        params: vec![Param { name: "all".into(), shape: vec![BLOCK_ELEMENTS], group: 0 }],
        groups: vec!["all".into()],
        rule: Rule::AdamW,
        gradient_dtype: Dtype::Bf16,
        image_dtype: Dtype::Bf16,
        world_size: 1,
        micro_steps: 1,
        max_delay: 0,
        shard_elements: BLOCK_ELEMENTS,
        tier: TierKind::Nvme,
        formats: Default::default(),
        unchecked: false,
        partitions: Vec::new(),
        worker_local: false,
        leave_out: false,
    };
    let options = Options { transport: Transport::Tcp, ..Options::new(vec![address], spec, Rank(0)) };
    // Connecting has a longer one: the machine may be busy.
    let mut cluster = Cluster::connect(options).unwrap();
    cluster.options.deadline = DEADLINE;
    (cluster, runtime)
}

#[test]
fn a_call_is_made_again_until_the_job_is_recovered() {
    let (cluster, _runtime) = cluster(DEADLINE * 6);
    let asked = cluster.runtime.block_on(cluster.describe(ServerId(0), false, DEADLINE));
    let Err(Error::Call(failed)) = asked else { panic!("{asked:?}") };
    assert_eq!(failed.fault.kind, FaultKind::NotFound, "{failed}");
}

#[test]
fn a_wait_outlasts_the_deadline_while_a_server_recovers_the_job() {
    let (cluster, _runtime) = cluster(Duration::from_secs(60));
    let comes = async { tokio::time::sleep(Duration::from_secs(5)).await };
    let waited = async { Ok(cluster.patiently(comes).await) };
    match cluster.runtime.block_on(waited).unwrap() {
        Ok(()) => {}
        Err(Impatience::Failed(error)) => panic!("{error}"),
        Err(Impatience::Elapsed(waited)) => panic!("it gave up after {waited:?}"),
    }
    // Nobody who waits for something else stays with it.
    let begun = Instant::now();
    let glance = cluster.runtime.block_on(cluster.glance(ServerId(0)));
    assert!(matches!(&glance, Err(Error::Call(failed)) if call::recovers(&failed.fault)), "{glance:?}");
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}
