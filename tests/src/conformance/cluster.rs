//! Servers inside the test's process, on free loopback ports, with one checkpoint folder between them.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::{Duration, Instant},
};

use longshore_proto::{JobSpec, Rank};
use longshore_server::{Config, Server};
use longshore_worker::Options;
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::raw::Raw;

/// Servers in this process. Drop ends their runtime, and with it their tasks.
pub struct Cluster {
    runtime: Runtime,
    servers: Vec<Server>,
    checkpoints: TempDir,
}

/// Longest wait for an answer that a healthy job gives at once. 60 s suffice on a busy machine.
pub const DEADLINE: Duration = Duration::from_secs(60);

impl Cluster {
    pub fn start(servers: usize) -> Cluster {
        let checkpoints = tempfile::tempdir().expect("a temporary folder");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let start = |_| {
            let defaults = Config::default_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
            let checkpoint_dir = Some(checkpoints.path().to_owned());
            let config = Config { threads: 2, checkpoint_dir, ..defaults };
            runtime.block_on(Server::start(config)).expect("a server on a free port")
        };
        let servers = (0..servers).map(start).collect();
        Cluster { servers, checkpoints, runtime }
    }

    pub fn addresses(&self) -> Vec<String> {
        self.servers.iter().map(|server| server.address().to_string()).collect()
    }

    pub fn address(&self, server: usize) -> SocketAddr {
        self.servers[server].address()
    }

    pub fn options(&self, spec: &JobSpec, rank: u32) -> Options {
        Options {
            deadline: DEADLINE,
            slow_deadline: DEADLINE,
            pause_deadline: DEADLINE,
            ..Options::new(self.addresses(), spec.clone(), Rank(rank))
        }
    }

    /// Returns a stock gRPC client of one server.
    pub fn raw(&self, server: usize) -> Raw {
        Raw::connect(self.runtime.handle().clone(), self.address(server))
    }

    pub fn checkpoint(&self, job: &str, name: &str) -> PathBuf {
        self.checkpoints.path().join(job).join(name)
    }
}

/// Repeats `ask` until it returns a value.
pub fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(start.elapsed() < DEADLINE, "waited {DEADLINE:?} for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
