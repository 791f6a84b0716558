//! Start, serve, drain, stop.
//!
//! A drain (SIGTERM, SIGINT or Admin.Drain) first says NOT_SERVING, then takes contributions to the step in hand
//! only, waits until that step is decided and updated, writes checkpoints if configured, and then stops serving.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use futures_util::{FutureExt, future::OptionFuture};
use longshore_engine::{
    admission::Budget, checkpoint::Store, io::Drives, job::Compute, kernels::Isa, step::Phase, tier::Storage,
};
use longshore_proto::{
    Fault, FaultKind,
    limits::{
        MAX_CONNECTION_CALLS, MAX_CONTROL_MESSAGE_BYTES, MAX_HEADER_LIST_BYTES, SPARE_CONNECTIONS,
        WINDOW_BYTES,
    },
};
use longshore_wire::{
    self as wire,
    direct::Bounds,
    v1::{admin_server::AdminServer, tensors_server::TensorsServer, training_server::TrainingServer},
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    task::JoinHandle,
    time::{Instant, timeout},
};

use crate::{
    accept,
    config::{Config, total_memory},
    connections::Connections,
    descriptors,
    directories::Directories,
    draining::Draining,
    eviction, http,
    jobs::{JobHandle, Jobs},
    memfd::{self, Links},
    requests::Metered,
    service::{DataPlane, Services},
    terms::Owners,
    trust::{Guard, Handshakes, Register, Trust},
    unasked::{self, Written},
    unix::{self, SocketFile},
};

/// The largest HTTP/2 DATA frame, which holds a chunk. 1 MiB takes the least CPU time of both ends for a push: 0.38
/// s/GB on loopback TCP, where 64 KiB take 0.52. With the default of 16 KiB a payload costs 64 writes and as many
/// reads.
pub(crate) const FRAME_BYTES: u32 = 1024 * 1024;
/// A dead peer is noticed after this and as much again.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// How many calls a peer may open beyond its number or against the protocol before its connection is ended.
const MAX_REFUSED_CALLS: usize = 1024;
/// How long open streams may finish once a drain is over.
const STOP_GRACE: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("cannot listen on {address}: {source}. Choose another --listen, or stop what uses the port")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("cannot listen on {address}: {source}. Choose another --http, or stop what uses the port")]
    BindHttp { address: SocketAddr, source: std::io::Error },
    #[error("cannot listen on {}: {source}. Choose another --listen-unix, or stop what uses it", path.display())]
    BindUnix { path: PathBuf, source: std::io::Error },
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

/// SIGTERM and SIGINT. They are caught from here on, so that one which comes while the server starts still ends in a
/// drain. SIGHUP is caught as well, which would otherwise end a server that has nothing to reload.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl StopSignals {
    /// Must be called inside a tokio runtime.
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

/// A running server.
pub struct Server {
    address: SocketAddr,
    config: Config,
    services: Services,
    stop: watch::Sender<bool>,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
    health: tonic_health::server::HealthReporter,
    _socket_file: Option<SocketFile>,
    _directories: Directories,
}

impl Server {
    /// Binds, starts the update threads and serves. Must be called inside a tokio runtime.
    pub async fn start(config: Config) -> Result<Server, ServerError> {
        wire::frame::keep_buffers();
        let descriptors = descriptors::raise();
        warn_of_limits(&config, descriptors);
        let isa = Isa::from_env()?;
        let threads = config.threads;
        let compute = Compute::new(threads, isa)
            .map_err(|error| ServerError::Threads { threads, reason: error.to_string() })?;
        let checkpoints = config.checkpoint_dir.as_ref().map(|dir| Arc::new(Store::new(dir)));
        checkpoints.as_deref().map(check_checkpoints).transpose()?;
        let directories =
            Directories::claim(&config.storage, config.listen.port()).map_err(ServerError::StateDir)?;
        let storage = config.storage.to_engine(directories.shm.clone(), !config.no_memfd);
        let drives = Arc::new(Drives::new(&storage.dirs));
        let storage = Storage { drives: Some(Arc::clone(&drives)), ..storage };
        let register = config.tls_dir.as_deref().map(Register::open).transpose().map_err(ServerError::Tls)?;
        let owners = register.clone().map(|register| register as Arc<dyn Owners>);
        let budget = Budget::new(config.memory);
        let (jobs, stored) = Jobs::new(budget, storage, Arc::new(compute), owners, config.idle_limit);
        let jobs = Arc::new(jobs);
        let (links, linking) = Links::new(!config.no_memfd);
        let bounds = Arc::new(Bounds::default());
        let services = Services {
            bounds: Arc::clone(&bounds),
            jobs: Arc::clone(&jobs),
            drive_endurance: config.storage.drive_endurance,
            drives,
            draining: Draining::new(),
            checkpoints,
            checkpoint_log: Arc::default(),
            checkpoint_keep: (config.checkpoint_keep > 0).then_some(config.checkpoint_keep),
            links,
            transport: "tcp",
        };
        let bind = |source| ServerError::Bind { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(bind)?;
        let address = listener.local_addr().map_err(bind)?;
        let page = OptionFuture::from(config.http.map(listen_http)).await.transpose()?;
        let http = page.as_ref().map(|(_, address)| *address);
        let local = config.listen_unix.as_deref().map(|path| {
            unix::listen_on(path).map_err(|source| ServerError::BindUnix { path: path.into(), source })
        });
        let local = local.transpose()?;
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<TrainingServer<Services>>().await;
        health.set_serving::<TensorsServer<Services>>().await;
        health.set_serving::<AdminServer<Services>>().await;
        let (stop, stopped) = watch::channel(false);
        let most = descriptors::for_connections(descriptors);
        let connections = Connections::new(&bounds, config.max_connections, most, Arc::clone(&jobs));
        let routes = |transport: &'static str, trust: &Trust| {
            let services = Services { transport, ..services.clone() };
            let health = Guard::new(Metered::new(health_service.clone(), &bounds), trust);
            Ok::<_, ServerError>(router(services, &bounds, trust)?.add_service(health))
        };
        let stopping = stop_of(&stopped);
        let tcp = match &register {
            Some(register) => {
                let handshakes = Handshakes::new(listener, Arc::clone(register), most);
                let incoming = accept::incoming(handshakes, Arc::clone(&connections));
                let routes = routes("tls", &Trust::Listed(Arc::clone(register)))?;
                routes.serve_with_incoming_shutdown(incoming, stopping).boxed()
            }
            None => {
                let incoming = accept::incoming(listener, Arc::clone(&connections));
                routes("tcp", &Trust::Anybody)?.serve_with_incoming_shutdown(incoming, stopping).boxed()
            }
        };
        let (socket, socket_file) = local.unzip();
        let expiring = Arc::clone(&connections).watch_expiry();
        let unix = match socket.map(|socket| accept::incoming(socket, connections)) {
            Some(incoming) => {
                let routes = routes("unix", &Trust::User)?;
                Some(routes.serve_with_incoming_shutdown(incoming, stop_of(&stopped)))
            }
            None => None,
        };
        let unix = OptionFuture::from(unix).map(Option::transpose);
        let watched = register.is_some();
        let watching = register.map(|register| register.watch()).transpose().map_err(ServerError::Signals)?;
        let linked = linking.is_some();
        let linking = linking
            .map(|listener| memfd::serve(listener, Arc::clone(&services.links), Arc::clone(&services.jobs)));
        let page = page.map(|(listener, _)| http::serve(listener, services.clone()));
        let evicting = eviction::watch(services.clone());
        let serving = tokio::spawn(async move {
            // Links end with the calls that refer to them.
            let both = async { tokio::try_join!(tcp, unix).map(|_| ()) };
            tokio::select! {
                served = both => served,
                _ = OptionFuture::from(linking), if linked => Ok(()),
                Some(never) = OptionFuture::from(page) => match never {},
                never = evicting => match never {},
                never = expiring => match never {},
                _ = OptionFuture::from(watching), if watched => Ok(()),
            }
        });
        if let Some(http) = http {
            tracing::info!(url = %format_args!("http://{http}/"), "status page and metrics");
        }
        tracing::info!(%address, threads, %isa, memory = config.memory, "serving");
        // Recovery runs while calls are answered, so that whoever waits for a job is told what it waits for. It has a
        // thread of its own, so that a server which is told to stop does not wait for it.
        std::thread::Builder::new()
            .name("recover".into())
            .spawn(move || jobs.recover(stored))
            .map_err(|error| ServerError::Threads { threads: 1, reason: error.to_string() })?;
        let (_directories, _socket_file) = (directories, socket_file);
        Ok(Server { address, config, services, stop, serving, health, _socket_file, _directories })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until a signal or Admin.Drain, then drains.
    ///
    /// # Errors
    /// When serving or the drain fails, and at once when a signal comes during the drain; some of it may still run then.
    pub async fn run_until(mut self, mut signals: StopSignals) -> Result<(), ServerError> {
        let draining = self.services.draining.clone();
        tokio::select! {
            () = signals.any() => {}
            () = draining.wait() => {}
            ended = &mut self.serving => return Err(ServerError::Serve(format!("{ended:?}"))),
        }
        // The drain is a task of its own: dropped here, it would wait for what it drains.
        let drain = tokio::spawn(self.drain());
        tokio::select! {
            drained = drain => drained.unwrap_or_else(|error| Err(ServerError::Serve(error.to_string()))),
            () = signals.any() => Err(ServerError::BrokenOff),
        }
    }

    /// Finishes the step in hand, writes checkpoints if configured, and stops.
    pub async fn drain(mut self) -> Result<(), ServerError> {
        self.services.draining.begin();
        self.health.set_not_serving::<TrainingServer<Services>>().await;
        self.health.set_not_serving::<TensorsServer<Services>>().await;
        let deadline = Instant::now() + self.config.drain_deadline;
        let handles = self.services.jobs.all();
        tracing::info!(jobs = handles.len(), "draining");
        let mut failed = None;
        for handle in &handles {
            finish(handle, deadline).await;
            if self.config.checkpoint_on_drain
                && let Err(fault) = self.checkpoint(handle).await
            {
                tracing::error!(job = %handle.job.spec().name, %fault, "no checkpoint written");
                failed = Some(fault);
            }
        }
        self.stop.send_replace(true);
        if timeout(STOP_GRACE, &mut self.serving).await.is_err() {
            // Some clients wait long and do not hang up.
            self.serving.abort();
        }
        tracing::info!("stopped");
        failed.map_or(Ok(()), |fault| Err(fault.into()))
    }

    async fn checkpoint(&self, handle: &Arc<JobHandle>) -> Result<(), Fault> {
        let Some(store) = self.services.checkpoints.clone() else { return Ok(()) };
        let (job, keep) = (Arc::clone(&handle.job), self.services.checkpoint_keep);
        if job.progress().phase == Phase::Loading {
            return Ok(());
        }
        let deadline = std::time::Instant::now() + self.config.drain_deadline;
        let written = tokio::task::spawn_blocking(move || {
            let written = unasked::write(&store, &job, "drain", deadline)?;
            let sealed = unasked::seal(&store, &job, &written, keep)?;
            let (job, Written { name, version, servers }) = (&job.spec().name, written);
            tracing::info!(%job, %version, name, sealed, servers, "checkpoint written on drain");
            Ok(())
        });
        written.await.unwrap_or_else(|error| {
            Err(Fault::new(
                FaultKind::Internal,
                "task",
                error,
                "finished",
                "see the server's log; this is a defect",
            ))
        })
    }
}

/// Checks the checkpoint folder. One that cannot be used is an operator's mistake, best told at once; a full one may
/// be emptied while the server runs.
fn check_checkpoints(store: &Store) -> Result<(), Fault> {
    match store.check_folder() {
        Ok(free) => {
            tracing::info!(dir = %store.dir().display(), free, "checkpoint folder is ready");
            Ok(())
        }
        Err(fault) if fault.kind == FaultKind::Exhausted => {
            tracing::warn!(%fault, "the checkpoint folder takes no checkpoint now");
            Ok(())
        }
        Err(fault) => Err(fault),
    }
}

/// Waits for the step in hand. A job whose workers are gone is left as it is.
async fn finish(handle: &Arc<JobHandle>, deadline: Instant) {
    let last = handle.finish_step_in_hand();
    let done = || {
        let progress = handle.job.progress();
        Ok((progress.version >= last).then_some(()))
    };
    let late = || handle.late("drain", last);
    if let Err(fault) = handle.until(deadline, done, late).await {
        tracing::warn!(job = %handle.job.spec().name, %fault, "the step in hand was not finished");
    }
    let job = Arc::clone(&handle.job);
    let settled = tokio::task::spawn_blocking(move || job.settle(deadline.into_std())).await;
    if let Ok(Err(fault)) = settled {
        tracing::warn!(job = %handle.job.spec().name, %fault, "updates were not finished");
    }
    if let Err(fault) = handle.until_durable(handle.job.progress().version, deadline).await {
        tracing::warn!(job = %handle.job.spec().name, %fault, "the last version is not durable");
    }
}

async fn listen_http(address: SocketAddr) -> Result<(TcpListener, SocketAddr), ServerError> {
    let bind = |source| ServerError::BindHttp { address, source };
    let listener = TcpListener::bind(address).await.map_err(bind)?;
    let bound = listener.local_addr().map_err(bind)?;
    Ok((listener, bound))
}

/// Ends when serving is to stop.
fn stop_of(stopped: &watch::Receiver<bool>) -> impl Future<Output = ()> + use<> {
    let mut stopped = stopped.clone();
    async move {
        let _ = stopped.wait_for(|stop| *stop).await;
    }
}

/// Warns at start of limits that would otherwise be noticed only when they are hit.
fn warn_of_limits(config: &Config, descriptors: usize) {
    if let Some(total) = total_memory().filter(|&total| config.memory > total) {
        let memory = config.memory;
        tracing::warn!(memory, total, "--memory is more than this host or its cgroup has: lower it");
    }
    let (most, wanted) =
        (descriptors::for_connections(descriptors), config.max_connections.unwrap_or(SPARE_CONNECTIONS));
    if most < wanted {
        tracing::warn!(
            descriptors,
            most,
            wanted,
            "few descriptors: there cannot be as many connections as wanted. Raise the limit with ulimit -n or LimitNOFILE"
        );
    }
}

fn router(
    services: Services,
    bounds: &Arc<Bounds>,
    trust: &Trust,
) -> Result<tonic::transport::server::Router, ServerError> {
    let descriptors = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(wire::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let failed = |error: tonic_reflection::server::Error| ServerError::Serve(error.to_string());
    let reflection = descriptors().build_v1().map_err(failed)?;
    // Python's client asks for the older reflection service.
    let older_reflection = descriptors().build_v1alpha().map_err(failed)?;
    let mut builder = tonic::transport::Server::builder()
        .max_frame_size(Some(FRAME_BYTES))
        .initial_stream_window_size(Some(WINDOW_BYTES as u32))
        .initial_connection_window_size(Some(WINDOW_BYTES as u32))
        .max_concurrent_streams(Some(MAX_CONNECTION_CALLS))
        .http2_max_header_list_size(Some(MAX_HEADER_LIST_BYTES))
        .http2_max_local_error_reset_streams(Some(MAX_REFUSED_CALLS))
        .http2_keepalive_interval(Some(KEEPALIVE));
    let training = TrainingServer::new(services.clone())
        .max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
    let admin = AdminServer::new(services.clone()).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
    Ok(builder
        .add_service(Guard::new(Metered::new(training, bounds), trust))
        .add_service(Guard::new(Metered::new(DataPlane::new(services), bounds), trust))
        .add_service(Guard::new(Metered::new(admin, bounds), trust))
        .add_service(Guard::new(Metered::new(reflection, bounds), trust))
        .add_service(Guard::new(Metered::new(older_reflection, bounds), trust)))
}
