//! A server inside another program's process, for runs that name none.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::runtime::Runtime;

use crate::{
    config::Config,
    lifecycle::{Server, ServerError},
};

/// A server on a free loopback port. It ends when this is dropped, and with the process. What it keeps in folders is
/// found by the next run's server, which may have another port.
pub struct Embedded {
    address: SocketAddr,
    /// It is dropped before the runtime is given up, so that nothing serves any more by then.
    server: Option<Server>,
    runtime: Option<Runtime>,
}

impl Embedded {
    /// Starts a server with what `change` makes of the defaults.
    ///
    /// # Errors
    /// Those of [`Server::start`].
    pub fn start(change: impl FnOnce(Config) -> Config) -> Result<Embedded, ServerError> {
        let config = change(Config::default_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
        let runtime = crate::runtime("server")
            .map_err(|error| ServerError::Threads { threads: 1, reason: error.to_string() })?;
        let server = runtime.block_on(Server::start(config))?;
        Ok(Embedded { address: server.address(), server: Some(server), runtime: Some(runtime) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        drop(self.server.take());
        if let Some(runtime) = self.runtime.take() {
            // The caller may be a runtime's own thread, where waiting would panic.
            runtime.shutdown_background();
        }
    }
}
