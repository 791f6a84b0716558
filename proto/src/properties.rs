//! The properties that follow from a job's tier for those who do not hold its state. Code that waits, retries or restores
//! asks for these and never for the tier, so that workers describe a new tier here and nowhere else.

use crate::job::{JobSpec, TierKind};

/// The lifetime of a job's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lifetime {
    /// It ends with the server's process.
    Process,
    /// It outlives the process, in memory of the host.
    Host,
    /// It outlives the host's power, on drives.
    Drive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobProperties {
    pub lifetime: Lifetime,
    /// A commit is answered before its version is durable. So rank 0 waits for that before the next one; a server may come
    /// back a version behind the others; and the version before can be taken up again.
    pub durable_later: bool,
}

impl JobProperties {
    /// Whether a server that was started again has the state.
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
