//! Waits of gRPC calls for a change of their job, each with a deadline.

use std::{
    pin::pin,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use longshore_proto::{Fault, FaultKind, Version};
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout_at},
};

use super::JobHandle;

/// Interval between two checks of the job by a call that waits for a version. The check is needed because failures and
/// restores change a job without a decision.
const LOOK: Duration = Duration::from_millis(100);
/// Number of wait queues. A call for a version waits in the queue of the version modulo this number, so a decision
/// wakes few calls.
const PLACES: usize = 64;

/// Newest version whose step was decided, and the calls that wait for later versions.
pub(super) struct Decisions {
    newest: AtomicU64,
    waiting: [Notify; PLACES],
}

impl Decisions {
    pub(super) fn new(newest: Version) -> Decisions {
        Decisions { newest: AtomicU64::new(newest.0), waiting: std::array::from_fn(|_| Notify::new()) }
    }

    fn have(&self, version: Version) -> bool {
        self.newest.load(Ordering::Acquire) >= version.0
    }

    fn waiting_for(&self, version: Version) -> &Notify {
        &self.waiting[(version.0 % PLACES as u64) as usize]
    }

    fn decided(&self, version: Version) {
        let before = self.newest.fetch_max(version.0, Ordering::AcqRel);
        let new = before.saturating_add(1)..=version.0;
        new.take(PLACES).for_each(|version| self.waiting_for(Version(version)).notify_waiters());
    }
}

impl JobHandle {
    /// Records that a step was decided, and wakes the calls that wait for its version.
    pub(crate) fn decided(&self, version: Version) {
        self.decisions.decided(version);
    }

    /// Acts as [`JobHandle::until`], for a check that waits for a version. The call sleeps until the version's step is
    /// decided. Without this sleep, 900 open calls of readers woke ten times a step and took a tenth of a core.
    pub(crate) async fn until_version<T>(
        &self,
        version: Version,
        deadline: Instant,
        mut check: impl FnMut() -> Result<Option<T>, Fault>,
        late: impl FnOnce() -> Fault,
    ) -> Result<T, Fault> {
        let mut closing = self.closing();
        loop {
            let mut decided = pin!(self.decisions.waiting_for(version).notified());
            decided.as_mut().enable();
            if self.decisions.have(version) {
                break;
            }
            if let Some(value) = self.ask(&mut check)? {
                return Ok(value);
            }
            let soon = deadline.min(Instant::now() + LOOK);
            tokio::select! {
                () = decided => {}
                _ = closing.wait_for(Option::is_some) => {}
                () = sleep_until(soon) => {
                    if soon == deadline {
                        return Err(late());
                    }
                }
            }
        }
        self.until(deadline, check, late).await
    }

    fn ask<T>(&self, check: &mut impl FnMut() -> Result<Option<T>, Fault>) -> Result<Option<T>, Fault> {
        if let Some(fault) = self.closed.borrow().clone() {
            return Err(fault);
        }
        let value = check()?;
        if value.is_none() {
            // A job with a failed store changes no more, so a wait would not end.
            self.job.protocol.check_alive()?;
        }
        Ok(value)
    }

    /// Calls `check` now and after every change. Returns its first answer or error, or `late` at the deadline.
    pub(crate) async fn until<T>(
        &self,
        deadline: Instant,
        mut check: impl FnMut() -> Result<Option<T>, Fault>,
        late: impl FnOnce() -> Fault,
    ) -> Result<T, Fault> {
        let mut changed = self.changed.clone();
        loop {
            changed.borrow_and_update();
            if let Some(value) = self.ask(&mut check)? {
                return Ok(value);
            }
            match timeout_at(deadline, changed.changed()).await {
                Ok(Ok(())) => {}
                // The observer lives as long as the job, so only the deadline ends the wait.
                Ok(Err(_)) | Err(_) => return Err(late()),
            }
        }
    }

    /// Waits until no crash of this server can take the version back.
    pub(crate) async fn until_durable(&self, version: Version, deadline: Instant) -> Result<(), Fault> {
        let durable = || Ok((self.job.protocol.durable() >= version).then_some(()));
        let late = || {
            let value = format!("{version}; {} is the newest durable one", self.job.protocol.durable());
            let remedy = "the drives are slower than the deadline: raise it, or add drives or servers; where the version \
                          is not decided, see rank 0";
            Fault::new(FaultKind::Deadline, "version", value, "durable in time", remedy)
        };
        self.until(deadline, durable, late).await
    }

    /// Returns the fault of a wait that passed its deadline.
    pub(crate) fn late(&self, field: &str, value: impl std::fmt::Display) -> Fault {
        let waiting =
            self.job.protocol.waiting_for().unwrap_or_else(|| "the commit of the step in hand".to_string());
        let remedy = format!("the job waits for {waiting}: see that worker, or raise the deadline");
        Fault::new(FaultKind::Deadline, field, value, "there in time", remedy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_waits_for_a_decided_version_is_woken_alone() {
        let decisions = Decisions::new(Version(7));
        assert!(decisions.have(Version(7)) && !decisions.have(Version(8)));
        let mut next = pin!(decisions.waiting_for(Version(8)).notified());
        let mut later = pin!(decisions.waiting_for(Version(9)).notified());
        assert!(!next.as_mut().enable() && !later.as_mut().enable());
        decisions.decided(Version(8));
        assert!(next.as_mut().enable() && !later.as_mut().enable());
        decisions.decided(Version(8));
        assert!(!later.as_mut().enable(), "the same decision again");
        // A server that was unreachable learns of many versions at once.
        decisions.decided(Version(1000));
        assert!(later.as_mut().enable() && decisions.have(Version(1000)));
        decisions.decided(Version(9));
        assert!(decisions.have(Version(1000)), "an older decision takes nothing back");
    }
}
