//! Use of a server's memory and drives for the status page: in total, by drive and by owner.

use std::{
    path::Path,
    sync::{Mutex, TryLockError},
};

use rustix::fs::statvfs;
use serde::Serialize;

use super::seen::resident_bytes;
use crate::{
    quota::{Listed, Usage},
    service::Services,
};

#[derive(Serialize)]
pub(super) struct Room {
    memory: Memory,
    drives: Vec<Drive>,
    identities: Vec<Identity>,
}

#[derive(Serialize)]
struct Memory {
    budget: u64,
    reserved: u64,
    resident: Option<u64>,
}

/// A folder of `--state-dir`.
#[derive(Serialize)]
struct Drive {
    folder: String,
    /// Size of the file system, and its free space for unprivileged users. None if the kernel does not tell.
    bytes: Option<u64>,
    free_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Identity {
    name: String,
    jobs: Used,
    memory_bytes: Used,
    drive_bytes: Used,
    connections: Used,
}

/// Amount in use and its limit. No limit: bounded by the server alone.
#[derive(Serialize)]
struct Used {
    now: u64,
    limit: Option<u64>,
}

impl Room {
    pub(super) fn now(services: &Services) -> Room {
        let budget = services.jobs.budget();
        Room {
            memory: Memory {
                budget: budget.total(),
                reserved: budget.reserved(),
                resident: resident_bytes(),
            },
            drives: services.drives.counted().map(|(folder, _)| drive(folder)).collect(),
            identities: services.jobs.owners().into_iter().map(identity).collect(),
        }
    }
}

/// Held during `statvfs`. A network file system may hang: then one reader waits, and one thread is lost.
static ASKING: Mutex<()> = Mutex::new(());

/// Returns a folder's drive. Its sizes are None while another reader asks.
fn drive(folder: &Path) -> Drive {
    let asking = match ASKING.try_lock() {
        Ok(asking) => Some(asking),
        Err(TryLockError::Poisoned(asking)) => Some(asking.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    let found = asking.and_then(|_held| statvfs(folder).ok()).filter(|found| found.f_blocks > 0);
    Drive {
        folder: folder.display().to_string(),
        bytes: found.as_ref().map(|found| found.f_blocks.saturating_mul(found.f_frsize)),
        free_bytes: found.as_ref().map(|found| found.f_bavail.saturating_mul(found.f_frsize)),
    }
}

fn identity((listed, has): (Listed, Usage)) -> Identity {
    let Listed { name, quota, connections } = listed;
    let used = |now, limit| Used { now, limit };
    Identity {
        name,
        jobs: used(has.jobs, quota.jobs),
        memory_bytes: used(has.memory, quota.memory),
        drive_bytes: used(has.drives, quota.drives),
        connections: used(connections, quota.connections),
    }
}
