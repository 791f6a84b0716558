//! Decisions on steps, and the updates that follow from them.

use longshore_proto::{Commit, Incarnation, Origin, Step, Version};

use super::{
    machine::{COMMITS_KEPT, Decided, Machine, Phase, Work},
    refusal::Refusal,
    shard::ShardProgress,
};
use crate::ids::OwnedShard;

impl Machine {
    /// Checks that a step's gradient statistics may be requested.
    pub fn check_stats(&self, step: Step) -> Result<(), Refusal> {
        self.check_not_loading()?;
        if step.0 <= self.version.0 {
            return Err(Refusal::StepDecided { step, version: self.version });
        }
        let newest = Step(self.version.0 + self.spec.gradient_slots() as u64);
        if step > newest {
            return Err(Refusal::StepTooEarly { step, newest });
        }
        Ok(())
    }

    /// Decides the next step, and returns the updates that can run. A repeated decision changes nothing. The caller has
    /// validated the commit against the spec; `origin` names the contributions behind the commit.
    pub fn commit(
        &mut self,
        incarnation: Incarnation,
        commit: Commit,
        origin: Origin,
    ) -> Result<Vec<Work>, Refusal> {
        self.check_not_loading()?;
        self.check_rank_zero(incarnation)?;
        let next = self.version.next_step();
        let step = commit.step;
        if step < next {
            let too_old = Refusal::CommitTooOld { step, version: self.version };
            let (earlier, _) = self.decision(step).ok_or(too_old)?;
            return match first_difference(earlier, &commit) {
                Some(field) => Err(Refusal::OtherCommit { step, field }),
                None => Ok(Vec::new()),
            };
        }
        if step > next {
            return Err(Refusal::CommitTooEarly { step, next });
        }
        self.check_running()?;
        if let Some(shard) = self.owned_at(step).find(|shard| !shard.is_complete(step)) {
            let missing = self.missing_gradient().unwrap_or_else(|| format!("the sum of {}", shard.shard));
            return Err(Refusal::CommitIncomplete { step, missing });
        }
        if let Some(shard) = self.lagging(step) {
            return Err(Refusal::CommitIncomplete { step, missing: format!("the state of {shard}") });
        }
        self.check_origin(step, origin)?;
        self.check_gradient(&commit)?;
        let change = commit.placement.clone();
        change.iter().try_for_each(|change| self.check_change(change))?;
        self.version = step.version();
        self.applied += u64::from(!commit.skip);
        self.commits.push_back(Decided::new(commit, self.applied));
        if self.commits.len() > COMMITS_KEPT {
            self.commits.pop_front();
        }
        self.scales.retain(|(held, _)| *held > step);
        self.forget_reads_of_decided();
        self.standing = None;
        if let Some(change) = change {
            self.change(&change, step);
        }
        self.forsake();
        if let Some(reason) = self.reason() {
            self.phase = Phase::Paused { reason };
            self.pauses += 1;
        }
        let mut works = Vec::from_iter(self.next_update(OwnedShard(0), step));
        works.extend(self.release_held());
        Ok(works)
    }

    /// Checks by its origin that a decision was made from this server's contributions.
    pub fn check_origin(&self, step: Step, origin: Origin) -> Result<(), Refusal> {
        let trained = self.owned_at(step).filter(|shard| !shard.is_frozen());
        let found = trained.map(|shard| shard.origin(step)).reduce(Origin::and);
        match found.filter(|found| found.differs(origin)) {
            Some(found) => Err(Refusal::OtherOrigin { step, origin, found }),
            None => Ok(()),
        }
    }

    /// Checks the commit's scale, and that an applied gradient has no non-finite element, which would spoil the state.
    fn check_gradient(&self, commit: &Commit) -> Result<(), Refusal> {
        self.check_gradient_scale(commit)?;
        let step = commit.step;
        let nonfinite = |shard: &ShardProgress| Some((shard.shard, shard.slot(step).nonfinite?));
        match self.owned_at(step).find_map(nonfinite).filter(|_| !commit.skip) {
            Some((shard, element)) => Err(Refusal::NotFinite { step, shard, element }),
            None => Ok(()),
        }
    }

    /// Notes that updates of shards are done: their images can be pulled and their gradient slots are free. Returns the
    /// updates that can follow.
    pub fn updated(&mut self, run: &[OwnedShard], step: Step) -> Vec<Work> {
        for owned in run {
            let shard = &mut self.shards[owned.index()];
            assert_eq!(shard.version.next_step(), step, "updates of a shard run in order");
            shard.version = step.version();
            shard.slot_mut(step).free();
        }
        let last = run.last().copied();
        let mut works = Vec::from_iter(last.and_then(|last| self.next_update(last.next(), step)));
        works.extend(self.release_held());
        works
    }

    /// Checks that a caller may wait for a version of a shard. Returns true if the shard has it.
    pub fn check_pull(&self, owned: OwnedShard, version: Version) -> Result<bool, Refusal> {
        self.check_not_loading()?;
        let newest = Version(self.version.0 + self.spec.gradient_slots() as u64);
        if version > newest {
            return Err(Refusal::VersionTooNew { version, newest });
        }
        let (shard, step) = (&self.shards[owned.index()], Step(version.0));
        if let Some(broken) = shard.broken
            && (version > broken.image || shard.is_frozen())
        {
            return Err(self.broken_at(shard.shard, broken.block));
        }
        // A replica also has the version that it fetched, which it serves if the owner is lost.
        let is_fetched = self.spec.replicas > 1 && step.0 + 1 == shard.span.start && !shard.awaited;
        if !shard.span.contains(&step.0) && !is_fetched {
            // The decision that brings the shard here may not have come yet.
            return if self.knows_owner(step) { Err(self.elsewhere(shard.shard, step)) } else { Ok(false) };
        }
        if shard.awaited {
            return Ok(false);
        }
        // A frozen shard has the same weights in all versions.
        Ok(shard.is_frozen() || shard.version >= version)
    }
}

/// The first field in which two decisions on one step differ. Floats are compared by their bits.
fn first_difference(earlier: &Commit, later: &Commit) -> Option<&'static str> {
    let bits = |of: fn(&Commit) -> f64| of(earlier).to_bits() == of(later).to_bits();
    let fields = [
        ("skip", earlier.skip == later.skip),
        ("gradient_scale", bits(|commit| commit.gradient_scale)),
        ("clip_coefficient", bits(|commit| commit.clip_coefficient)),
        ("correction", earlier.correction == later.correction),
        ("left_out", earlier.left_out == later.left_out),
        ("groups", earlier.groups == later.groups),
        ("loss_scale", bits(|commit| commit.loss_scale)),
        ("trainer_state", earlier.trainer_state == later.trainer_state),
        ("decided_by", earlier.decided_by == later.decided_by),
        ("pause_reason", earlier.pause_reason == later.pause_reason),
        ("placement", earlier.placement == later.placement),
    ];
    fields.into_iter().find(|(_, same)| !same).map(|(field, _)| field)
}
