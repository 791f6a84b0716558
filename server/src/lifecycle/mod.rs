//! Life of a server: start, serve, drain, stop.

mod drain;
mod here;
mod prepared;
mod serving;

use std::{net::SocketAddr, path::PathBuf, sync::Arc};

use longshore_engine::kernels::Isa;
use longshore_proto::{Fault, FaultKind};
use longshore_wire::{self as wire, local::Local};
use tokio::{
    runtime::Handle,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    task::JoinHandle,
};
use tonic::service::Routes;

use self::{
    prepared::{Listening, Prepared},
    serving::Served,
};
use crate::{
    config::{Config, ConfigError},
    directories::Directories,
    jobs::Jobs,
    service::Services,
    unix::SocketFile,
};

fn shown(address: Option<SocketAddr>, config: &Config) -> String {
    let socket = || config.listen_unix.as_deref().map(|path| format!("unix:{}", path.display()));
    address.map(|address| address.to_string()).or_else(socket).unwrap_or_default()
}

/// A running server.
pub struct Server {
    address: Option<SocketAddr>,
    config: Config,
    services: Services,
    /// The services as callers of this process reach them, without a socket.
    users: Routes,
    stop: watch::Sender<bool>,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
    health: tonic_health::server::HealthReporter,
    _socket_file: Option<SocketFile>,
    directories: Directories,
}

impl Server {
    /// Binds, starts the update threads and serves. The caller must be inside a tokio runtime.
    pub async fn start(config: Config) -> Result<Server, ServerError> {
        wire::frame::keep_buffers();
        let descriptors = prepared::raise_descriptors();
        prepared::warn_of_limits(&config, descriptors);
        let isa = Isa::from_env()?;
        let prepared = Prepared::new(&config, isa)?;
        let mut listening = Listening::bind(&config).await?;
        let (address, http) = (listening.address(), listening.http());
        let _socket_file = listening.socket_file.take();
        let (stop, stopped) = watch::channel(false);
        let Prepared { services, stored, directories, register, linking } = prepared;
        let serving = serving::Serving { services: services.clone(), register, linking, descriptors };
        let Served { task: serving, health, users } = serving.start(&config, listening, &stopped).await?;
        if let Some(http) = http {
            let scheme = if config.http_tls { "https" } else { "http" };
            tracing::info!(url = %format_args!("{scheme}://{http}/"), "status page and metrics");
        }
        let shown = shown(address, &config);
        tracing::info!(address = shown, threads = config.threads, %isa, memory = config.memory, "serving");
        // Recovery runs while calls are answered, so that clients learn why they wait. Its own thread keeps a stopping
        // server from waiting for it.
        let (jobs, runtime) = (services.jobs.clone(), tokio::runtime::Handle::current());
        let recover = move || {
            let _spawns = runtime.enter();
            jobs.recover(stored);
            jobs.all().iter().for_each(|handle| jobs.end_unused(handle));
        };
        std::thread::Builder::new()
            .name("recover".into())
            .spawn(recover)
            .map_err(|error| ServerError::Threads { threads: 1, reason: error.to_string() })?;
        Ok(Server { address, config, services, users, stop, serving, health, _socket_file, directories })
    }

    /// Returns the TCP address. Without one the port is 0.
    pub fn address(&self) -> SocketAddr {
        self.address.unwrap_or_else(|| ([0, 0, 0, 0], 0).into())
    }

    /// Returns the address for `--servers`: the TCP address, or else the Unix socket.
    pub fn shown(&self) -> String {
        shown(self.address, &self.config)
    }

    /// Answers the calls that this process makes to the server's own address, until the returned value is dropped. The
    /// caller must be inside the server's runtime.
    pub(crate) fn serve_here(&self) -> Arc<Local> {
        let (users, runtime) = (self.users.clone(), Handle::current());
        wire::local::serve(&self.shown(), &self.services.bounds, move |request| {
            here::carry(&users, &runtime, request)
        })
    }

    /// Refuses all calls of Admin.Drain: the program that embeds this server ends it.
    pub(crate) fn refuse_drains(&self) {
        let remedy = "end the program that it serves: its server ends with it";
        let value = "embedded in another program";
        let refused = Fault::new(FaultKind::Precondition, "server", value, "a longshored", remedy);
        self.services.draining.end(Err(refused));
    }

    /// Returns the jobs, and the locks on their folders, after serving has ended.
    pub(crate) fn into_parts(self) -> (Arc<Jobs>, Directories) {
        (self.services.jobs, self.directories)
    }

    /// Serves until a signal or Admin.Drain, then drains.
    ///
    /// # Errors
    /// If serving or the drain fails. A second signal during the drain returns at once, while parts of the drain may
    /// still run.
    pub async fn run_until(mut self, mut signals: StopSignals) -> Result<(), ServerError> {
        let draining = self.services.draining.clone();
        tokio::select! {
            () = signals.any() => {}
            () = draining.wait() => {}
            ended = &mut self.serving => return Err(ServerError::Serve(format!("{ended:?}"))),
        }
        // The drain is a task of its own: dropping it here would block on the work that it drains.
        let drain = tokio::spawn(self.drain());
        tokio::select! {
            drained = drain => drained.unwrap_or_else(|error| Err(ServerError::Serve(error.to_string()))),
            () = signals.any() => Err(ServerError::BrokenOff),
        }
    }
}

/// SIGTERM and SIGINT, caught from here on, so that a signal during startup still ends in a drain. SIGHUP is caught
/// as well: its default would end a server that has nothing to reload.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl StopSignals {
    /// Installs the handlers. The caller must be inside a tokio runtime.
    pub fn catch() -> Result<StopSignals, ServerError> {
        Ok(StopSignals {
            terminate: signal(SignalKind::terminate()).map_err(ServerError::Signals)?,
            interrupt: signal(SignalKind::interrupt()).map_err(ServerError::Signals)?,
            hang_up: signal(SignalKind::hangup()).map_err(ServerError::Signals)?,
        })
    }

    async fn any(&mut self) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hang_up.recv() => {
                    tracing::info!("SIGHUP: only the folder of --tls-dir is read again; where there is none, nothing is");
                }
            }
        }
    }
}

/// Errors of a server's start and stop.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot listen on {address}: {source}. Choose another --listen, or stop what uses the port")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("cannot listen on {address}: {source}. Choose another --http, or stop what uses the port")]
    BindHttp { address: SocketAddr, source: std::io::Error },
    #[error("cannot listen on {}: {source}. Choose another --listen-unix, or stop what uses it", path.display())]
    BindUnix { path: PathBuf, source: std::io::Error },
    #[error("cannot make a folder for the Unix socket in {}: {source}. Name a folder that this user may write to with TMPDIR", path.display())]
    SocketFolder { path: PathBuf, source: std::io::Error },
    #[error("cannot let a group use the Unix socket: {0}. Choose another --unix-group")]
    UnixGroup(std::io::Error),
    #[error("cannot start {threads} update threads: {reason}. Lower --threads or raise the process limit")]
    Threads { threads: usize, reason: String },
    #[error("{0}")]
    StateDir(Fault),
    #[error("{0}")]
    Tls(Fault),
    #[error(transparent)]
    Isa(#[from] longshore_engine::kernels::IsaError),
    #[error(transparent)]
    Checkpoints(#[from] Fault),
    #[error("cannot handle signals: {0}")]
    Signals(std::io::Error),
    #[error("serving ended: {0}")]
    Serve(String),
    #[error("told to stop a second time: the drain was broken off")]
    BrokenOff,
}
