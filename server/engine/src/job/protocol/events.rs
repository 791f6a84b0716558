//! A job's ranks and decisions. The step machine takes each event, and the tier keeps it before anyone is told.

use std::time::Instant;

use longshore_proto::{
    Commit, Fault, FaultKind, Incarnation, Origin, Rank, Step, Version, commit::check_pause_reason,
};

use super::super::Job;
use crate::{
    record::{Joined, Record},
    step::{Admission, Machine, Refusal, Work},
};

impl Job {
    /// Fences rank 0's earlier processes, and ends the job with the fault `ended`, so that it can be opened again at
    /// `version`. Returns true if the job is at that version already, and goes on. A refusal changes nothing.
    ///
    /// `decided_by` names the decision that is taken back; 0 is not compared.
    pub fn end_for_step_back(
        &self,
        incarnation: Incarnation,
        version: Version,
        decided_by: Incarnation,
        ended: &Fault,
    ) -> Result<bool, Fault> {
        let mut machine = self.protocol.machine();
        machine.check_newest(Rank(0), incarnation)?;
        let current = machine.version();
        let there = version == current;
        if !there && (version.0 + 1 != current.0 || self.tier.behind.is_none()) {
            let limit = format!("{current}, or the version before where the tier keeps it");
            let remedy = "start rank 0, which brings the servers to one version; where it cannot, restore a checkpoint";
            return Err(Fault::new(FaultKind::Precondition, "version", version.0, limit, remedy));
        }
        let found = machine.decided_by(current);
        if !there && decided_by != Incarnation::default() && found != decided_by {
            let limit = format!("{}, which decided {current}", found.0);
            let remedy = "read the servers' versions again: the step was decided anew";
            return Err(Fault::new(FaultKind::Conflict, "decided_by", decided_by.0, limit, remedy));
        }
        if machine.fence(Rank(0), incarnation)? {
            self.tell_joined(Rank(0), Joined { incarnation, at: current, fence_only: true }, false);
        }
        if !there {
            // The machine stays locked, so that no decision comes between.
            self.protocol.fail(ended);
        }
        drop(machine);
        self.notify();
        Ok(there)
    }

    /// The newest version that a crash cannot take back. None if no step has to wait for it.
    fn written(&self) -> Option<Version> {
        self.tier.behind.as_ref().map(|behind| behind.durable())
    }

    /// Returns the newest version that a crash of this server cannot take back; with the memory tier, the
    /// newest version. Rank 0 waits for it before it commits the next step, and workers before they free
    /// their gradients.
    pub fn durable(&self) -> Version {
        let version = self.protocol.machine().version();
        self.written().map_or(version, |durable| durable.min(version))
    }

    /// Revokes the right of a rank's earlier processes to push, before the new process acts on state that it
    /// has read from this server. Answer the rank only after [`Job::keep_joined`] has returned.
    pub fn fence(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Fault> {
        self.check_alive()?;
        let mut machine = self.protocol.machine();
        if machine.fence(rank, incarnation)? {
            let joined = Joined { incarnation, at: machine.version(), fence_only: true };
            self.tell_joined(rank, joined, false);
        }
        drop(machine);
        self.notify();
        Ok(())
    }

    /// Binds a rank to a process. Returns false while a chunk of the rank's earlier process is being received or
    /// summed: call again after a change. Answer the rank only after [`Job::keep_joined`] has returned.
    pub fn join(&self, rank: Rank, incarnation: Incarnation) -> Result<bool, Fault> {
        self.check_alive()?;
        let mut machine = self.protocol.machine();
        let before = machine.has_joined(rank, incarnation);
        let joined = machine.join(rank, incarnation)? != Admission::Busy;
        if joined && !before {
            // The machine stays locked, so that the new process cannot yet overwrite contributions that the
            // tier must first forget.
            let joined = Joined { incarnation, at: machine.version(), fence_only: false };
            self.tell_joined(rank, joined, self.spec.world_size == 1);
            self.gradients.give_back_unneeded(&machine, rank);
        }
        drop(machine);
        self.notify();
        Ok(joined)
    }

    /// Returns once no crash of this server can make it forget who has joined. Waits for a drive where the
    /// tier has one.
    pub fn keep_joined(&self) -> Result<(), Fault> {
        self.tier.durable.as_ref().map_or(Ok(()), |durable| durable.keep_joined())
    }

    fn tell_joined(&self, rank: Rank, joined: Joined, over: bool) {
        if let Some(durable) = &self.tier.durable {
            durable.joined(rank, joined, over);
        }
    }

    /// Checks that a caller is the rank's current process.
    pub fn check_rank(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Fault> {
        self.protocol.machine().check_rank(rank, incarnation).map_err(Fault::from)
    }

    /// Refuses a caller whose rank a newer process has taken.
    pub fn check_newest(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Fault> {
        self.protocol.machine().check_newest(rank, incarnation).map_err(Fault::from)
    }

    pub fn leave(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Fault> {
        self.protocol.machine().leave(rank, incarnation)?;
        self.notify();
        Ok(())
    }

    /// Pauses the job, and keeps the pause in its tier. Returns false while the version is not durable: ask
    /// again later.
    pub fn pause(&self, incarnation: Incarnation, reason: &str) -> Result<bool, Fault> {
        check_pause_reason("reason", reason)?;
        self.stand(|machine| machine.pause(incarnation, reason.to_string()))
    }

    /// Ends the pause that began at `version`, or the current one, and keeps that in the tier. Returns false
    /// while the version is not durable.
    pub fn resume(&self, version: Option<Version>, loss_scale: f64) -> Result<bool, Fault> {
        self.stand(|machine| machine.resume(version, loss_scale))
    }

    /// Changes the standing of the current version. This writes the version's record again, so the version
    /// must be durable.
    fn stand(&self, change: impl FnOnce(&mut Machine) -> Result<bool, Refusal>) -> Result<bool, Fault> {
        self.check_alive()?;
        let mut machine = self.protocol.machine();
        if self.written().is_some_and(|durable| durable < machine.version()) {
            return Ok(false);
        }
        if change(&mut machine)?
            && let Some(kept) = &self.tier.durable
        {
            // The machine stays locked: nobody may learn of the new standing before the tier has it. No
            // decision may come between.
            kept.stand(&machine.record()).inspect_err(|fault| {
                self.protocol.fail(fault);
            })?;
        }
        drop(machine);
        self.notify();
        Ok(true)
    }

    /// Decides a step, whatever contributions the decision was made from. The returned flag is true if the
    /// same decision was made before.
    pub fn commit(&self, incarnation: Incarnation, commit: Commit) -> Result<(bool, Option<Work>), Fault> {
        self.commit_from(incarnation, commit, Origin::UNKNOWN)
    }

    /// Decides a step, if the contributions here are those that the decision was made from.
    pub fn commit_from(
        &self,
        incarnation: Incarnation,
        commit: Commit,
        origin: Origin,
    ) -> Result<(bool, Option<Work>), Fault> {
        self.check_alive()?;
        commit.validate(&self.spec)?;
        let mut machine = self.protocol.machine();
        // A step back may have ended the job while this call waited for the lock.
        self.check_alive()?;
        let before = machine.version();
        if let Some(durable) = self.written().filter(|&durable| durable < before)
            && commit.step == before.next_step()
        {
            return Err(Refusal::NotDurable { step: commit.step, durable }.into());
        }
        self.check_left_out(&machine, incarnation, &commit, origin)?;
        let step = commit.step;
        // A decision that another server has already is not held up.
        if step == before.next_step()
            && commit.decided_by == incarnation
            && machine.check_rank_zero(incarnation).is_ok()
            && let Some(missing) = machine.owed(step)
        {
            return Err(Refusal::CommitOwed { step, missing }.into());
        }
        let work = machine.commit(incarnation, commit, origin)?;
        let duplicate = machine.version() == before;
        if !duplicate {
            self.snapshots.tell(&machine);
            // The machine stays locked: nobody may learn of the decision before the tier has it.
            if let Some(kept) = &self.tier.durable {
                self.record_of(&machine, step, |record| kept.decide(record))?;
            }
            if self.owned.is_empty() {
                self.finish(&machine, step)?;
            }
        }
        drop(machine);
        self.notify();
        Ok((duplicate, work))
    }

    /// Makes a step's version durable in the tier, now that all shards have it.
    pub(in crate::job) fn finish(&self, machine: &Machine, step: Step) -> Result<(), Fault> {
        let Some(behind) = &self.tier.behind else { return Ok(()) };
        self.record_of(machine, step, |record| behind.finish(record))
    }

    /// Hands a decided step's record to the tier. An error ends the job on this server.
    fn record_of(
        &self,
        machine: &Machine,
        step: Step,
        keep: impl FnOnce(&Record) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let (commit, applied) = machine.decision(step).expect("a commit is kept until its updates are done");
        let kept = keep(&Record::new(step.version(), applied, Some(commit.clone())));
        kept.inspect_err(|fault| {
            self.protocol.fail(fault);
        })
    }

    /// Waits until every decided update is done.
    pub fn settle(&self, deadline: Instant) -> Result<(), Fault> {
        let remedy = "the server is overloaded: raise the deadline or give it more threads";
        self.wait_until(deadline, "version", remedy, |machine| {
            let settled = machine.is_settled().then_some(());
            settled.ok_or_else(|| format!("being updated to {}", machine.version().0))
        })
    }

    /// Waits until `check` accepts the machine. Fails at the deadline with the last answer of `check`.
    pub(in crate::job) fn wait_until(
        &self,
        deadline: Instant,
        field: &str,
        remedy: &str,
        check: impl Fn(&Machine) -> Result<(), String>,
    ) -> Result<(), Fault> {
        let mut machine = self.protocol.machine();
        while let Err(found) = check(&machine) {
            self.check_alive()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fault::new(FaultKind::Deadline, field, found, "there in time", remedy));
            }
            machine = self.protocol.wait(machine, left);
        }
        Ok(())
    }
}
