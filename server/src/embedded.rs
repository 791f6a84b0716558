//! A server inside another program's process, for runs without `--servers`.

use std::{
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use longshore_wire::local::Local;
use tokio::{
    runtime::{Builder, Runtime},
    time::timeout,
};

use crate::{
    config::Config,
    jobs::Jobs,
    lifecycle::{Server, ServerError},
    unix::SocketFolder,
};

/// Longest wait at a server's end for calls that work on files. The wait for updates in progress has this limit too.
const LET_GO: Duration = Duration::from_secs(10);

/// A server on a Unix socket that only this user and root may dial, ended by drop. Sessions of this process need no
/// socket. Its stored jobs are recovered by the next server with the same folders, even in another process.
pub struct Embedded {
    address: String,
    /// Entry by which calls of this process reach the server. None once the server has ended.
    here: Option<Arc<Local>>,
    /// None once ended.
    running: Option<(Server, Runtime)>,
    /// Folder of the socket, removed after the socket.
    _folder: SocketFolder,
}

impl Embedded {
    /// Starts a server with the configuration that `change` derives from the defaults.
    ///
    /// # Errors
    /// On an invalid configuration, and as [`Server::start`].
    pub fn start(change: impl FnOnce(Config) -> Config) -> Result<Embedded, ServerError> {
        let folder =
            SocketFolder::make().map_err(|(path, source)| ServerError::SocketFolder { path, source })?;
        let config = change(Config { listen_unix: Some(folder.socket()), ..Config::nowhere() });
        config.check()?;
        let runtime = crate::runtime("server")
            .map_err(|error| ServerError::Threads { threads: 1, reason: error.to_string() })?;
        let server = runtime.block_on(Server::start(config))?;
        server.refuse_drains();
        let here = {
            let _entered = runtime.enter();
            Some(server.serve_here())
        };
        Ok(Embedded { address: server.shown(), here, running: Some((server, runtime)), _folder: folder })
    }

    /// Returns the address for `--servers` of other processes of this host: `unix:/path`.
    pub fn address(&self) -> &str {
        &self.address
    }
}

impl Drop for Embedded {
    /// Waits until nothing uses the jobs' folders, since the next server locks them. Work that outlasts the wait
    /// continues in the background.
    fn drop(&mut self) {
        // Calls of this process hold jobs, and run on its own threads, which the runtime's end does not stop.
        self.here = None;
        let Some((server, runtime)) = self.running.take() else { return };
        // The caller may be a runtime thread, where blocking would panic. The server is handed over only once the
        // ending thread exists.
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

/// Ends the server's calls, waits for the threads of its jobs, and then releases the locks on their folders.
fn end(server: Server, runtime: Runtime) {
    let (jobs, directories) = server.into_parts();
    jobs.open_no_more();
    runtime.shutdown_timeout(LET_GO);
    // A job's threads end with the job's last user. No runtime owns these threads, so a new runtime can wait for them.
    if let Ok(waiting) = Builder::new_current_thread().enable_time().build() {
        let _ = waiting.block_on(async { timeout(LET_GO, Jobs::ended(jobs)).await });
    }
    drop(directories);
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::PermissionsExt,
        path::{Path, PathBuf},
    };

    use longshore_wire::{
        local,
        v1::{DrainRequest, ListJobsRequest, admin_client::AdminClient},
    };
    use tonic::Code;
    use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

    use super::*;

    #[test]
    fn calls_of_this_process_need_no_socket_and_end_with_the_server() {
        let server = Embedded::start(|config| Config { memory: 1 << 24, threads: 1, ..config }).unwrap();
        let socket = server.address().strip_prefix("unix:").unwrap();
        fs::remove_file(socket).unwrap();
        let channel = local::channel(server.address()).unwrap();
        let caller = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut admin = AdminClient::new(channel.clone());
        let listed = caller.block_on(admin.list_jobs(ListJobsRequest::default())).unwrap().into_inner();
        assert!(listed.jobs.is_empty() && listed.unix_micros > 0);
        let drained = caller.block_on(admin.drain(DrainRequest {}));
        assert_eq!(drained.unwrap_err().code(), Code::FailedPrecondition);
        let mut health = HealthClient::new(channel);
        let watched = caller.block_on(health.watch(HealthCheckRequest::default()));
        let mut healths = watched.unwrap().into_inner();
        assert!(caller.block_on(healths.message()).unwrap().is_some());
        let address = server.address().to_string();
        drop(server);
        assert_eq!(caller.block_on(healths.message()).unwrap_err().code(), Code::Unavailable);
        assert_eq!(
            caller.block_on(admin.list_jobs(ListJobsRequest::default())).unwrap_err().code(),
            Code::Unavailable
        );
        assert!(local::channel(&address).is_none());
    }

    #[test]
    fn no_other_user_can_dial_it_and_its_socket_goes_with_it() {
        let server = Embedded::start(|config| Config { memory: 1 << 24, threads: 1, ..config }).unwrap();
        let socket = PathBuf::from(server.address().strip_prefix("unix:").unwrap());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&socket), mode(socket.parent().unwrap())), (0o600, 0o700));
        let (running, _) = server.running.as_ref().unwrap();
        assert_eq!(running.address().port(), 0, "a port");
        drop(server);
        assert!(!socket.parent().unwrap().exists());
    }
}
