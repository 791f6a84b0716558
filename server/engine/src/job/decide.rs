//! A step's decision and its inputs: joined ranks, gradient statistics, and parameters without a gradient. gRPC calls
//! run this on their own threads.

use longshore_proto::{
    Commit, Fault, FaultKind, Incarnation, Origin, Rank, ShardId, Step,
    left_out::{advance, now},
};

use super::Job;
use crate::{
    kernels::Statistics,
    step::{Machine, Refusal, Work},
};

const LEFT_OUT: &str = "commit.left_out";

impl Job {
    /// Binds a rank to a process. Returns false while a chunk of the rank's earlier process is being received or
    /// summed: call again after a change. Answer the rank only after `keep_joined` has returned.
    ///
    /// `world_size` is the number of ranks that take part, as this rank was started. Rank 0's number counts from now
    /// on; if it changes, undecided steps begin anew. Other ranks wait for rank 0. None keeps the number.
    pub fn join(&self, rank: Rank, incarnation: Incarnation, world_size: Option<u32>) -> Result<bool, Fault> {
        self.protocol.check_alive()?;
        let mut machine = self.protocol.machine();
        let before = (machine.has_joined(rank, incarnation), machine.world_size());
        let joined = machine.join(rank, incarnation, world_size)?;
        let is_resized = machine.world_size() != before.1;
        let is_bound = machine.has_joined(rank, incarnation) && !before.0;
        if is_bound || is_resized {
            // The machine stays locked, so the new process cannot overwrite contributions that the tier must first
            // forget.
            let over = is_resized || machine.world_size() == 1;
            let all = (0..self.share.spec.world_size).map(Rank);
            for rank in all.filter(|&of| of == rank || is_resized) {
                let joined = machine.joined(rank);
                joined.into_iter().for_each(|joined| self.protocol.tell_joined(rank, joined, over));
                self.gradients.give_back_unneeded(&machine, rank);
            }
        }
        drop(machine);
        // Waiting joins are tried again after each change, for example joins of other ranks that wait for rank 0.
        if is_bound || is_resized {
            self.protocol.notify();
        }
        Ok(joined)
    }

    /// Decides a step, whatever contributions the decision was made from. The returned flag is true if the
    /// same decision was made before.
    pub fn commit(&self, incarnation: Incarnation, commit: Commit) -> Result<(bool, Vec<Work>), Fault> {
        self.commit_from(incarnation, commit, Origin::UNKNOWN)
    }

    /// Decides a step, if the contributions here are those that the decision was made from.
    pub fn commit_from(
        &self,
        incarnation: Incarnation,
        commit: Commit,
        origin: Origin,
    ) -> Result<(bool, Vec<Work>), Fault> {
        self.protocol.check_alive()?;
        commit.validate(&self.share.spec)?;
        let mut machine = self.protocol.machine();
        // A step back may have ended the job while this call waited for the lock.
        self.protocol.check_alive()?;
        let before = machine.version();
        if let Some(durable) = self.protocol.written().filter(|&durable| durable < before)
            && commit.step == before.next_step()
        {
            return Err(Refusal::NotDurable { step: commit.step, durable }.into());
        }
        self.check_left_out(&machine, incarnation, &commit, origin)?;
        let step = commit.step;
        if let Some(change) = commit.placement.as_ref().filter(|_| step == before.next_step()) {
            machine.placement().check(change, step)?;
        }
        // Only rank 0's own decision waits for owed gradients. An earlier process's decision may be on other servers
        // already.
        if step == before.next_step()
            && commit.decided_by == incarnation
            && machine.check_rank_zero(incarnation).is_ok()
            && let Some(missing) = machine.owed(step)
        {
            return Err(Refusal::CommitOwed { step, missing }.into());
        }
        let works = machine.commit(incarnation, commit, origin)?;
        let duplicate = machine.version() == before;
        if !duplicate {
            self.snapshots.tell(&machine);
            // The machine stays locked: no caller may learn of the decision before the tier has it.
            self.protocol.decided(&machine, step)?;
            if works.is_empty() && machine.is_made(step) {
                self.protocol.finish(&machine, step)?;
            }
        }
        drop(machine);
        self.check_reparable()?;
        self.protocol.notify();
        Ok((duplicate, works))
    }

    /// Refuses a decision whose left-out parameters do not follow from the decision before. Also refuses a decision
    /// that leaves out a parameter with a gradient here, or keeps one without. Other checks cover origin and
    /// completeness.
    ///
    /// A decision of an earlier process of rank 0 is not compared with the gradient. Another server has applied that
    /// decision, and a refusal here would keep the servers apart for ever. A restarted rank may have computed another
    /// gradient here.
    fn check_left_out(
        &self,
        machine: &Machine,
        incarnation: Incarnation,
        commit: &Commit,
        origin: Origin,
    ) -> Result<(), Fault> {
        let next = machine.version().next_step();
        if commit.step != next {
            return Ok(());
        }
        let without: Vec<u32> = now(&commit.left_out).collect();
        let due = advance(machine.left_out(), &without, commit.skip);
        if due != commit.left_out {
            machine.check_rank_zero(incarnation)?;
            let value = format!("{} parameters", commit.left_out.len());
            let limit = format!("the {} that follow from the commit before", due.len());
            let remedy = "make the commit from the one before, which Describe has as last_commit";
            return Err(Fault::invalid(LEFT_OUT, value, limit, remedy));
        }
        let share = &self.share;
        let earlier = ![Incarnation(0), incarnation].contains(&commit.decided_by);
        if !share.spec.leave_out || commit.skip || earlier || machine.check_origin(next, origin).is_err() {
            return Ok(());
        }
        for owned in
            share.all().filter(|&owned| machine.owns(owned, next) && machine.is_complete(owned, next))
        {
            let params = share.layout.params_from(share.layout.shard_range(share.shard(owned)));
            let here = self.gradients.left_out(owned, share.slot(next));
            let differs = |param: &u32| here.contains(param) != without.binary_search(param).is_ok();
            if let Some(param) = (params.start as u32..params.end as u32).find(differs) {
                machine.check_rank_zero(incarnation)?;
                return Err(other_left_out(&share.spec.params[param as usize].name, here.contains(&param)));
            }
        }
        Ok(())
    }

    /// The statistics of each block of a shard. None until the step's gradient is complete, and each rank's present
    /// process has sent its part. A frozen shard has none.
    pub fn statistics(&self, shard: ShardId, step: Step) -> Result<Option<Vec<Statistics>>, Fault> {
        self.protocol.check_alive()?;
        let machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        machine.check_stats(step)?;
        let is_owed = machine.owing(owned, step).is_some() || machine.lagging(step).is_some();
        if !machine.is_complete(owned, step) || is_owed {
            return Ok(None);
        }
        Ok(Some(self.gradients.statistics(owned, self.share.slot(step))))
    }

    /// Returns the parameters that begin in a shard and got no gradient in a complete step.
    pub fn left_out(&self, shard: ShardId, step: Step) -> Result<Vec<u32>, Fault> {
        let machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        machine.check_stats(step)?;
        Ok(self.gradients.left_out(owned, self.share.slot(step)))
    }

    /// The origin of an owned shard's gradient of a step.
    pub fn origin(&self, shard: ShardId, step: Step) -> Result<Origin, Fault> {
        let machine = self.protocol.machine();
        let owned = machine.owned_index(shard)?;
        Ok(machine.origin(owned, step))
    }
}

fn other_left_out(name: &str, is_nothing: bool) -> Fault {
    let (value, limit) = match is_nothing {
        true => (format!("without {name:?}"), "with it: nobody gave it a gradient"),
        false => (format!("with {name:?}"), "without it: it got a gradient"),
    };
    let remedy = "leave out what ShardStats.left_out names, from all servers";
    Fault::new(FaultKind::Conflict, LEFT_OUT, value, limit, remedy)
}
