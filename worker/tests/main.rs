//! The worker's tests against servers of the same process, as one program.

mod feeds;
mod transports;

use std::net::SocketAddr;

use longshore_proto::Param;
use longshore_server::{Config, Server};
use tokio::runtime::Runtime;

fn config() -> Config {
    Config { memory: 1 << 30, threads: 1, ..Config::default_on(SocketAddr::from(([127, 0, 0, 1], 0))) }
}

/// Starts a server on a runtime of its own.
fn serve(config: Config) -> (Server, Runtime) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let server = runtime.block_on(Server::start(config)).unwrap();
    (server, runtime)
}

/// Parameters of these sizes.
fn params(sizes: &[u64]) -> Vec<Param> {
    let param =
        |(index, &size): (usize, &u64)| Param { name: format!("p{index}"), shape: vec![size], group: 0 };
    sizes.iter().enumerate().map(param).collect()
}
