//! Queries of the machine, which change nothing.

use longshore_proto::{
    Commit, DECISION_AWAITED, Incarnation, LeftOut, MicroStep, Origin, Rank, ShardId, Step, Version,
};

use super::{
    machine::{Decided, Machine, Phase},
    refusal::Refusal,
};
use crate::ids::{Contributor, OwnedShard};

#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    pub phase: Phase,
    /// The number of decided steps.
    pub version: Version,
    /// The number of decided steps that updated: Adam's t.
    pub applied: u64,
    pub last_commit: Option<Commit>,
    /// At version 0: the parameters whose state has had fewer updates than `applied`.
    pub left_out: Vec<LeftOut>,
    /// The shards that still lack weights, while the job is loading.
    pub missing: Vec<ShardId>,
    /// The checkpoint that the job is filled from, while it is loading.
    pub restoring: Option<Restoring>,
    /// The number of ranks that take part.
    pub world_size: u32,
}

/// A restore that has begun and not started the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restoring {
    pub checkpoint: String,
    /// The number of shards loaded so far.
    pub shards: u32,
    /// True if all shards are loaded, and the job waits to be started.
    pub held: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RankProgress {
    pub rank: Rank,
    /// None if the rank never joined this server.
    pub incarnation: Option<Incarnation>,
    pub left: bool,
    /// The version at which this incarnation joined.
    pub joined_at: Version,
    /// The newest step to which this rank has contributed.
    pub last_step: Step,
}

impl Machine {
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    pub fn version(&self) -> Version {
        self.version
    }

    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// Returns the shard's index among the owned shards, or the refusal of a request for a foreign shard.
    pub fn owned_index(&self, shard: ShardId) -> Result<OwnedShard, Refusal> {
        let shards = self.owned.len() as u32;
        let owned = self.owned.get(shard.index()).copied().flatten();
        owned.ok_or(Refusal::NotOwned { shard, shards })
    }

    /// The version of a shard's state. The image of that version is there too.
    pub fn shard_version(&self, owned: OwnedShard) -> Version {
        self.shards[owned.index()].version
    }

    /// Returns true if every decided update is done on every shard.
    pub fn is_settled(&self) -> bool {
        self.shards.iter().all(|shard| {
            let last = shard.span.end.saturating_sub(1).min(self.version.0);
            last < shard.span.start || !shard.awaited && shard.version.0 >= last
        })
    }

    pub fn is_complete(&self, owned: OwnedShard, step: Step) -> bool {
        self.shards[owned.index()].is_complete(step)
    }

    /// Returns a contributor of a delayed job whose present process has not sent its own gradient of a shard. That
    /// process may still read the version that the update overwrites, though an earlier process has completed the step.
    pub fn owing(&self, owned: OwnedShard, step: Step) -> Option<Rank> {
        let shard = &self.shards[owned.index()];
        let owes = |contributor: Contributor, rank: Rank| {
            let state = &self.ranks[rank.index()];
            let takes_part = self.spec.max_delay > 0 && !state.fence_only && !state.left;
            let process = state.incarnation.filter(|_| takes_part);
            process.is_some_and(|process| !shard.slot(step).has_sent(contributor, process))
        };
        let mut ranks = Contributor::all(shard.contributors.len()).zip(&shard.contributors);
        ranks.find(|&(contributor, &rank)| owes(contributor, rank)).map(|(_, &rank)| rank)
    }

    /// Names the first shard and rank for which [`Machine::owing`] holds. None before the step is complete on all
    /// shards.
    pub fn owed(&self, step: Step) -> Option<String> {
        let mut shards = OwnedShard::all(self.shards.len()).filter(|&owned| self.owns(owned, step));
        if !self.owned_at(step).all(|shard| shard.is_complete(step)) {
            return None;
        }
        shards.find_map(|owned| {
            let rank = self.owing(owned, step)?;
            Some(format!("{} from {}", self.shards[owned.index()].shard, self.describe(rank)))
        })
    }

    /// The origin of a shard's gradient of a step.
    pub fn origin(&self, owned: OwnedShard, step: Step) -> Origin {
        self.shards[owned.index()].origin(step)
    }

    /// Returns the incarnation of the rank 0 that decided a version's step; 0 if unknown here.
    pub fn decided_by(&self, version: Version) -> Incarnation {
        let commit = self.commits.iter().find(|decided| decided.commit.step.version() == version);
        commit.map_or(Incarnation::default(), |decided| decided.commit.decided_by)
    }

    /// Returns true if this server has received any contribution to the next undecided step.
    pub fn is_step_begun(&self) -> bool {
        let step = self.version.next_step();
        // During a pause the server would not accept the rest of a step.
        self.phase == Phase::Training && self.shards.iter().any(|shard| shard.slot(step).step == Some(step))
    }

    pub fn progress(&self) -> Progress {
        Progress {
            phase: self.phase.clone(),
            version: self.version,
            applied: self.applied,
            last_commit: self.commits.back().map(|decided| decided.current(self.is_resumed())),
            left_out: self.filled_without().to_vec(),
            missing: Vec::new(),
            restoring: None,
            world_size: self.world_size,
        }
    }

    /// At version 0: the parameters whose filled state has had fewer updates than `applied`. In later
    /// versions the last commit lists them.
    pub fn filled_without(&self) -> &[LeftOut] {
        if self.version == Version(0) { &self.left_out } else { &[] }
    }

    /// Returns the last commit's left-out parameters. The next commit's list continues their counts.
    pub fn left_out(&self) -> &[LeftOut] {
        match self.decision(Step(self.version.0)) {
            Some((last, _)) => &last.left_out,
            None => self.filled_without(),
        }
    }

    pub fn ranks(&self) -> Vec<RankProgress> {
        let ranks = self.ranks.iter().take(self.world_size as usize).enumerate();
        ranks
            .map(|(index, rank)| RankProgress {
                rank: Rank(index as u32),
                incarnation: rank.incarnation,
                left: rank.left,
                joined_at: rank.joined_at,
                last_step: rank.last_step,
            })
            .collect()
    }

    /// Returns the commits after a step, oldest first, with ended pauses removed. None if some of the commits are no
    /// longer kept.
    pub fn commits_after(&self, step: Step) -> Option<Vec<Commit>> {
        let kept = self.commits.iter().filter(|decided| decided.commit.step > step);
        let current = |decided: &Decided| {
            // A pause that came with an earlier commit has ended, or there would be no later commit.
            decided.current(decided.commit.step.version() < self.version || self.is_resumed())
        };
        let kept = kept.map(current).collect::<Vec<_>>();
        (kept.len() as u64 == self.version.0.saturating_sub(step.0)).then_some(kept)
    }

    /// Returns this server's shards from `first` on that have the version before this step, at most `most(n, m)` of
    /// them. There are `n` shards before `first` and `m` after it. All have as many contributors as the first, so that
    /// one gradient multiplier serves all.
    pub fn updatable(
        &self,
        first: OwnedShard,
        most: impl Fn(usize, usize) -> usize,
        step: Step,
    ) -> Vec<OwnedShard> {
        let contributors = self.shards[first.index()].contributors.len();
        let fits = |&owned: &OwnedShard| {
            let shard = &self.shards[owned.index()];
            shard.can_update(step) && shard.contributors.len() == contributors
        };
        let owned = || OwnedShard::all(self.shards.len()).filter(|&owned| self.owns(owned, step));
        let before = owned().take_while(|&owned| owned < first).count();
        let rest = owned().skip(before + 1).count();
        owned().skip(before).take(most(before, rest)).take_while(fits).collect()
    }

    /// The decision on a step and Adam's t after it, while it is kept.
    pub fn decision(&self, step: Step) -> Option<(&Commit, u64)> {
        let decided = self.commits.iter().find(|decided| decided.commit.step == step)?;
        Some((&decided.commit, decided.applied))
    }

    /// The numbers of pauses and resumes, and the loss scale given with the last resume (0 when none was).
    pub fn pauses(&self) -> (u64, u64, f64) {
        (self.pauses, self.resumes, self.resumed_loss_scale)
    }

    /// Names the awaited state's server, the ranks and shard that the next step waits for, or rank 0's decision. None
    /// while this server itself has work to do, and for a paused job with the whole gradient.
    pub fn waiting_for(&self) -> Option<String> {
        if self.phase == Phase::Loading {
            return Some("the initial weights (Tensors.Upload) or a checkpoint (Admin.Restore)".to_string());
        }
        self.awaited_state().or_else(|| self.missing_gradient()).or_else(|| {
            let step = self.version.next_step();
            let decidable =
                self.phase == Phase::Training && self.owned_at(step).all(|shard| shard.is_complete(step));
            decidable
                .then(|| format!("{DECISION_AWAITED}{step} (its commit) from {}", self.describe(Rank(0))))
        })
    }

    /// Names the ranks and the shard that the next step waits for.
    pub(super) fn missing_gradient(&self) -> Option<String> {
        let step = self.version.next_step();
        for shard in self.owned_at(step) {
            let slot = shard.slot(step);
            if shard.is_complete(step) || slot.summing {
                continue;
            }
            let micro_step = MicroStep(if slot.step == Some(step) { slot.summed } else { 0 });
            let ranks: Vec<Rank> = match slot.step {
                Some(held) if held == step => slot
                    .missing()
                    .into_iter()
                    .map(|contributor| shard.contributors[contributor.index()])
                    .collect(),
                _ => shard.contributors.clone(),
            };
            let mut named =
                ranks.iter().take(8).map(|rank| self.describe(*rank)).collect::<Vec<_>>().join(", ");
            if ranks.len() > 8 {
                named += &format!(" and {} more", ranks.len() - 8);
            }
            return Some(format!("{step}, {micro_step}, {} from {named}", shard.shard));
        }
        None
    }

    fn describe(&self, rank: Rank) -> String {
        let state = &self.ranks[rank.index()];
        match (state.incarnation, state.left) {
            (None, _) => format!("{rank} (never joined)"),
            (_, true) => format!("{rank} (left)"),
            _ => rank.to_string(),
        }
    }
}
