//! A server inside another program's process, for runs that name none.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::mpsc,
    thread,
    time::Duration,
};

use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

use crate::{
    config::Config,
    jobs::Jobs,
    lifecycle::{Server, ServerError},
};

/// How long the end of a server waits for calls that work on files, and then for updates under way.
const LET_GO: Duration = Duration::from_secs(10);

/// A server on a free loopback port. It ends when this is dropped, and with the process. What it keeps in folders is
/// found by the next server that has them, in this process or another, which may have another port.
pub struct Embedded {
    address: SocketAddr,
    /// None once it has ended.
    running: Option<(Server, Runtime)>,
}

impl Embedded {
    /// Starts a server with what `change` makes of the defaults.
    ///
    /// # Errors
    /// Those of a configuration that cannot be, and of [`Server::start`].
    pub fn start(change: impl FnOnce(Config) -> Config) -> Result<Embedded, ServerError> {
        let config = change(Config::default_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
        config.check()?;
        let runtime = crate::runtime("server")
            .map_err(|error| ServerError::Threads { threads: 1, reason: error.to_string() })?;
        let server = runtime.block_on(Server::start(config))?;
        Ok(Embedded { address: server.address(), running: Some((server, runtime)) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Embedded {
    /// Waits until nothing uses the jobs' folders any more, since the next server locks them. Whatever is not done by the end of the
    /// wait goes on by itself.
    fn drop(&mut self) {
        let Some((server, runtime)) = self.running.take() else { return };
        // The caller may be a runtime's own thread, where waiting would panic. What is to end is handed over once there is a
        // thread for it.
        let (hand_over, handed_over) = mpsc::channel::<(Server, Runtime)>();
        let ending = thread::Builder::new().name("server-end".into()).spawn(move || {
            if let Ok((server, runtime)) = handed_over.recv() {
                end(server, runtime);
            }
        });
        match ending {
            Ok(ending) => {
                let _ = hand_over.send((server, runtime));
                let _ = ending.join();
            }
            Err(_) => {
                drop(server);
                runtime.shutdown_background();
            }
        }
    }
}

/// Ends the server's calls, waits for the threads of its jobs, and only then gives up the claim on their folders.
fn end(server: Server, runtime: Runtime) {
    let (jobs, directories) = server.into_parts();
    jobs.open_no_more();
    runtime.shutdown_timeout(LET_GO);
    // A job's threads end with its last user. They run in no runtime, so another one can wait for them.
    if let Ok(waiting) = Builder::new_current_thread().enable_time().build() {
        let _ = waiting.block_on(async { timeout(LET_GO, Jobs::ended(jobs)).await });
    }
    drop(directories);
}
