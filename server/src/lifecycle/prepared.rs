//! Resources acquired before a server listens: memory, threads, folders and stored jobs.

use std::sync::Arc;

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
use tokio::sync::watch;

use super::error::ServerError;
use crate::{
    config::{Config, total_memory},
    descriptors,
    directories::Directories,
    draining::Draining,
    jobs::Jobs,
    memfd::Links,
    quota::Owners,
    service::Services,
    trust::Register,
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
            draining: Draining::new(),
            checkpoints,
            folders: Arc::default(),
            checkpoint_keep: (config.checkpoint_keep > 0).then_some(config.checkpoint_keep),
            links,
            register: register.clone(),
            fences: watch::Sender::default(),
            transport: "tcp",
        };
        Ok(Prepared { services, stored, directories, register, linking })
    }
}

/// Checks the checkpoint folder. An unusable folder is an operator's mistake and fails the start. A full folder may
/// be emptied later, so it only warns.
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

/// Warns at start of limits that would otherwise surface only when hit.
pub(super) fn warn_of_limits(config: &Config, descriptors: usize) {
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
