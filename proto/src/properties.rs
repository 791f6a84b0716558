//! Properties that follow from a job's tier, for code that does not hold its state. Workers ask for these properties
//! instead of the tier, to wait, retry or restore. A new tier is described to workers here alone.

use crate::job::{JobSpec, TierKind};

/// Lifetime of a job's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lifetime {
    /// The state ends with the server's process.
    Process,
    /// The state survives the process, in memory of the host.
    Host,
    /// The state survives a power loss, on drives.
    Drive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobProperties {
    pub lifetime: Lifetime,
    /// A commit is acknowledged before its version is durable. So rank 0 waits for durability before the next commit. A
    /// server may restart one version behind the others, and the job may step back one version.
    pub durable_later: bool,
}

impl JobProperties {
    /// Returns whether a restarted server still has the state.
    pub fn survives_restart(&self) -> bool {
        self.lifetime > Lifetime::Process
    }
}

impl TierKind {
    pub fn properties(self) -> JobProperties {
        let (lifetime, durable_later) = match self {
            TierKind::Memory => (Lifetime::Process, false),
            TierKind::Shm => (Lifetime::Host, false),
            TierKind::Nvme => (Lifetime::Drive, true),
        };
        JobProperties { lifetime, durable_later }
    }
}

impl JobSpec {
    pub fn properties(&self) -> JobProperties {
        self.tier.properties()
    }
}
