//! Resources acquired before a server serves: memory, threads, descriptors, folders, stored jobs and addresses.

use std::{io, net::SocketAddr, sync::Arc};

use longshore_engine::{
    admission::Budget,
    checkpoint::Store,
    io::Drives,
    job::Compute,
    kernels::Isa,
    tier::{Storage, StoredJob},
};
use longshore_proto::{Fault, FaultKind, limits::SPARE_CONNECTIONS};
use longshore_wire::{direct::Bounds, memfd::Listener};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{net::TcpListener, sync::watch};

use super::ServerError;
use crate::{
    config::{Config, total_memory},
    directories::Directories,
    jobs::Jobs,
    members::Members,
    memfd::Links,
    quota::Owners,
    service::{Draining, Services},
    trust::Register,
    unix::{self, Local, SocketFile},
};

pub(super) struct Prepared {
    pub(super) services: Services,
    /// Stored jobs to recover.
    pub(super) stored: Vec<StoredJob>,
    pub(super) directories: Directories,
    pub(super) register: Option<Arc<Register>>,
    pub(super) linking: Option<Listener>,
}

impl Prepared {
    pub(super) fn new(config: &Config, isa: Isa) -> Result<Prepared, ServerError> {
        let threads = config.threads;
        let compute = Compute::new(threads, isa)
            .map_err(|error| ServerError::Threads { threads, reason: error.to_string() })?;
        let checkpoints = config.checkpoint_dir.as_ref().map(|dir| Arc::new(Store::new(dir)));
        checkpoints.as_deref().map(check_checkpoints).transpose()?;
        let directories = Directories::claim(&config.storage, config.listen.map(|listen| listen.port()))
            .map_err(ServerError::StateDir)?;
        let storage = config.storage.to_engine(directories.shm.clone(), !config.no_memfd);
        let drives = Arc::new(Drives::new(&storage.dirs));
        let storage = Storage { drives: Some(Arc::clone(&drives)), ..storage };
        let register = config.tls_dir.as_deref().map(Register::open).transpose().map_err(ServerError::Tls)?;
        let owners = register.clone().map(|register| register as Arc<dyn Owners>);
        let budget = Budget::new(config.memory);
        let (jobs, stored) = Jobs::new(budget, storage, Arc::new(compute), owners);
        let (links, linking) = Links::new(!config.no_memfd);
        let services = Services {
            bounds: Arc::<Bounds>::default(),
            jobs: Arc::new(jobs),
            drive_endurance: config.storage.drive_endurance,
            drives,
            draining: Draining::default(),
            checkpoints,
            folders: Arc::default(),
            checkpoint_keep: (config.checkpoint_keep > 0).then_some(config.checkpoint_keep),
            links,
            register: register.clone(),
            tls_dir: config.tls_dir.clone(),
            fences: watch::Sender::default(),
            is_witness: config.witness,
            transport: "tcp",
        };
        Ok(Prepared { services, stored, directories, register, linking })
    }
}

/// Checks the checkpoint folder. An unusable folder is an operator's mistake and fails the start. A full folder may be
/// emptied later, so the server only warns.
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

/// Warns at start of limits that would otherwise be noticed only when they are reached.
pub(super) fn warn_of_limits(config: &Config, descriptors: usize) {
    if let Some(total) = total_memory().filter(|&total| config.memory > total) {
        let memory = config.memory;
        tracing::warn!(memory, total, "--memory is more than this host or its cgroup has: lower it");
    }
    let (most, wanted) = (for_connections(descriptors), config.max_connections.unwrap_or(SPARE_CONNECTIONS));
    if most < wanted {
        tracing::warn!(
            most,
            wanted,
            "few descriptors: there cannot be as many connections as wanted. Raise the limit with ulimit -n or LimitNOFILE"
        );
    }
}

/// Raises the limit of descriptors as far as this process may, and returns it.
pub(super) fn raise_descriptors() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::debug!(%error, "the limit of descriptors stays as it is");
    }
    getrlimit(Resource::Nofile)
        .current
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns the number of connections that leaves enough descriptors for everything else. State files, checkpoints, and
/// memfd links with their memory need some.
pub(super) fn for_connections(limit: usize) -> usize {
    limit - (limit / 4).clamp(24, 1024).min(limit / 2)
}

/// The addresses that a server listens on.
pub(super) struct Listening {
    /// Listener of TCP, with its bound address.
    pub(super) tcp: Option<(TcpListener, SocketAddr)>,
    /// Listener of the status page and metrics, with its bound address.
    pub(super) page: Option<(TcpListener, SocketAddr)>,
    pub(super) unix: Option<Local>,
    /// Removed on drop.
    pub(super) socket_file: Option<SocketFile>,
}

impl Listening {
    pub(super) async fn bind(config: &Config) -> Result<Listening, ServerError> {
        let tcp = match config.listen {
            Some(address) => {
                Some(listen(address).await.map_err(|source| ServerError::Bind { address, source })?)
            }
            None => None,
        };
        let page = match config.http {
            Some(address) => {
                Some(listen(address).await.map_err(|source| ServerError::BindHttp { address, source })?)
            }
            None => None,
        };
        let local = config.listen_unix.as_deref().map(|path| {
            let members = Members::of(config.unix_group.as_deref()).map_err(ServerError::UnixGroup)?;
            unix::listen_on(path, members)
                .map_err(|source| ServerError::BindUnix { path: path.into(), source })
        });
        let (unix, socket_file) = local.transpose()?.unzip();
        Ok(Listening { tcp, page, unix, socket_file })
    }

    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().map(|(_, address)| *address)
    }

    pub(super) fn http(&self) -> Option<SocketAddr> {
        self.page.as_ref().map(|(_, address)| *address)
    }
}

async fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}
