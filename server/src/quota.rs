//! Quotas of job owners on this server, independent of the source of the owners' list.

use longshore_proto::{Fault, FaultKind};

/// Limits of an owner. None: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) jobs: Option<u64>,
    /// Bytes, like `drives`.
    pub(crate) memory: Option<u64>,
    pub(crate) drives: Option<u64>,
    pub(crate) connections: Option<u64>,
}

/// Resources that jobs take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) jobs: u64,
    pub(crate) memory: u64,
    pub(crate) drives: u64,
}

/// An owner as listed in status and metrics.
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) quota: Quota,
    pub(crate) connections: u64,
}

/// The current list of owners.
pub(crate) trait Owners: Send + Sync {
    /// Returns an owner's quota. An unlisted owner has no limit.
    fn quota(&self, owner: &str) -> Quota;

    fn list(&self) -> Vec<Listed>;
}

impl Quota {
    /// Checks that an owner with usage `has` may also take `wants`.
    ///
    /// # Errors
    /// For the first limit that would be exceeded.
    pub(crate) fn admit(&self, owner: &str, has: Usage, wants: Usage) -> Result<(), Fault> {
        for (field, most, has, wants) in [
            ("jobs", self.jobs, has.jobs, wants.jobs),
            ("memory", self.memory, has.memory, wants.memory),
            ("drives", self.drives, has.drives, wants.drives),
        ] {
            let Some(most) = most else { continue };
            // A request for no more of a resource passes, even if its limit was lowered below current usage.
            if wants == 0 || has.checked_add(wants).is_some_and(|both| both <= most) {
                continue;
            }
            let (unit, more) = if field == "jobs" { ("", "") } else { (" bytes", ", use more servers") };
            let show = |count| format!("{count}{unit}");
            let remedy = format!("delete another job of this identity{more}");
            let value = format!("{} more for {owner}, which has {}", show(wants), show(has));
            return Err(over(field, value, format!("at most {} together", show(most)), &remedy));
        }
        Ok(())
    }

    /// Checks that an owner with `has` connections may open one more.
    pub(crate) fn admit_connection(&self, owner: &str, has: u64) -> Result<(), Fault> {
        match self.connections {
            Some(most) if has >= most => {
                let value = format!("1 more for {owner}, which has {has}");
                Err(over(
                    "connections",
                    value,
                    format!("at most {most} together"),
                    "end another worker or command of this identity",
                ))
            }
            _ => Ok(()),
        }
    }
}

fn over(field: &str, value: String, limit: String, remedy: &str) -> Fault {
    let remedy = format!("{remedy}, or ask an operator of the server to raise the quota in identities.toml");
    Fault::new(FaultKind::Exhausted, format!("quota.{field}"), value, limit, remedy)
}

impl Usage {
    /// Returns how much of each resource this usage has beyond another usage.
    pub(crate) fn beyond(self, other: Usage) -> Usage {
        Usage {
            jobs: self.jobs.saturating_sub(other.jobs),
            memory: self.memory.saturating_sub(other.memory),
            drives: self.drives.saturating_sub(other.drives),
        }
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Usage) {
        self.jobs += other.jobs;
        self.memory += other.memory;
        self.drives += other.drives;
    }
}
