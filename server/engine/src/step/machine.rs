//! The state machine of one job on one server.
//!
//! Every method is an event, and its return value is the caller's next work. A refused event changes nothing. A step's
//! chunks are admitted, written and stored. A [`Work::Sum`] follows for each micro-step. Once all shards are complete
//! and the step is committed, [`Work::Update`]s follow in forward order.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
};

use longshore_proto::{
    Commit, ContributionChunk, Incarnation, JobSpec, Layout, LeftOut, MicroStep, Placement, Rank, ServerId,
    ShardId, Step, Version,
};

use super::{refusal::Refusal, shard::ShardProgress};
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    record::{Joined, KeptShard, Record, Standing},
};

/// Number of commits kept for ranks that ask late. A living rank is at most two steps behind, and a rank that
/// joins again needs only the last.
pub(super) const COMMITS_KEPT: usize = 8;

/// Span of a shard that this server has a place for, and owns at no step.
pub(super) const NOT_OWNED: Range<u64> = u64::MAX..u64::MAX;

#[derive(Clone, Debug, PartialEq)]
pub enum Phase {
    Loading,
    Training,
    Paused { reason: String },
}

/// Permission to write one chunk. The caller gives it back through [`Machine::stored`] or [`Machine::abandoned`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
pub struct Ticket {
    /// The shard's index among the owned shards.
    pub owned: OwnedShard,
    /// The step's gradient slot.
    pub slot: GradientSlot,
    /// The chunk's rank among the shard's contributors.
    pub contributor: Contributor,
    pub chunk: ContributionChunk,
}

/// Answer to a chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Admission<T> {
    /// The chunk is not held yet, and its bytes are to be written.
    New(T),
    /// The chunk is held already, with the same checksum.
    Duplicate,
    /// The chunk is held already, and was not compared: an earlier process sent it, or it was lent.
    Superseded,
    /// The chunk's step is decided. The chunk was not compared.
    Decided,
    /// The chunk's buffer is not free yet. The caller should ask again once the job has changed.
    Busy,
}

impl<T> Admission<T> {
    pub fn and_then<U>(self, new: impl FnOnce(T) -> Admission<U>) -> Admission<U> {
        match self {
            Admission::New(value) => new(value),
            Admission::Duplicate => Admission::Duplicate,
            Admission::Superseded => Admission::Superseded,
            Admission::Decided => Admission::Decided,
            Admission::Busy => Admission::Busy,
        }
    }
}

/// Work for [`Job::perform`](crate::job::Job::perform).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Sum(Sum),
    /// Run the committed update. On a skipped step, carry the image over.
    Update {
        owned: OwnedShard,
        step: Step,
    },
}

/// Sum the ranks' buffers of one micro-step. After the last one, take the gradient statistics too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum {
    pub owned: OwnedShard,
    /// Number of contributions to add.
    pub contributions: usize,
    pub slot: GradientSlot,
    pub step: Step,
    pub micro_step: MicroStep,
}

/// A commit and Adam's t after it. A delayed job may decide a step before every shard has the version before, so each
/// commit keeps its t.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) commit: Commit,
    pub(super) applied: u64,
    /// The loss scale that an operator gave with the resume after this step. Kept apart from the commit, so that a late
    /// repeat of the commit still equals it.
    pub(super) resumed_loss_scale: Option<f64>,
}

impl Decided {
    pub(super) fn new(commit: Commit, applied: u64) -> Decided {
        Decided { commit, applied, resumed_loss_scale: None }
    }

    /// Returns the commit for a joining worker. `resumed` means that the commit's pause has ended.
    pub(super) fn current(&self, resumed: bool) -> Commit {
        let mut commit = Commit { loss_scale: self.loss_scale(), ..self.commit.clone() };
        if resumed {
            commit.pause_reason.clear();
        }
        commit
    }

    /// The loss scale of steps that read this version.
    pub(super) fn loss_scale(&self) -> f64 {
        self.resumed_loss_scale.unwrap_or(self.commit.loss_scale)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct RankState {
    pub(super) incarnation: Option<Incarnation>,
    /// True if the process has fenced earlier ones, and has yet to join.
    pub(super) fence_only: bool,
    /// True if the placement has changed between two steps after this process joined. The rank must join again, with
    /// another incarnation.
    pub(super) is_outdated: bool,
    pub(super) left: bool,
    /// The version at which the process joined or fenced.
    pub(super) joined_at: Version,
    pub(super) last_step: Step,
}

pub struct Machine {
    pub(super) spec: Arc<JobSpec>,
    pub(super) layout: Arc<Layout>,
    pub(super) phase: Phase,
    pub(super) version: Version,
    pub(super) applied: u64,
    /// Parameters with fewer updates in the state that filled the job, until the first commit lists them.
    pub(super) left_out: Vec<LeftOut>,
    pub(super) commits: VecDeque<Decided>,
    /// State of each rank, up to the spec's world size.
    pub(super) ranks: Vec<RankState>,
    /// Number of ranks that take part in undecided steps, as rank 0 said when it joined.
    pub(super) world_size: u32,
    pub(super) shards: Vec<ShardProgress>,
    /// Index of each shard among the shards that this server has a place for.
    pub(super) owned: Vec<Option<OwnedShard>>,
    pub(super) server: ServerId,
    /// The placement as of the newest decision.
    pub(super) placement: Placement,
    /// True if the placement changed since this server was opened.
    pub(super) has_moved: bool,
    /// True if the placement changed after the version was decided, and rank 0 has not joined since. Other ranks wait
    /// for rank 0.
    pub(super) is_placed: bool,
    /// Servers that are gone for good, as an operator or rank 0 says.
    pub(super) lost: Vec<ServerId>,
    /// Updates that wait for their shard's state, or for the shard's update of the step before.
    pub(super) held: Vec<(OwnedShard, Step)>,
    /// The last pause or resume since the version was decided.
    pub(super) standing: Option<Standing>,
    /// The loss scale of each undecided step with a contribution here. All shards of a step have the same scale.
    pub(super) scales: Vec<(Step, f64)>,
    /// The version that each rank stated for the micro-steps of undecided steps.
    pub(super) reads: BTreeMap<(Step, MicroStep), Vec<(Rank, Version)>>,
    /// Number of pauses so far, so that a watcher misses none. The number of resumes follows.
    pub(super) pauses: u64,
    pub(super) resumes: u64,
    /// The loss scale that an operator gave with the last resume; 0 when none was given.
    pub(super) resumed_loss_scale: f64,
}

impl Machine {
    /// The server has a place for each of `places`. Shards that `placement` gives the server are owned from the start,
    /// unless the machine [begins without them](Machine::begin_without_shards).
    pub fn new(
        spec: Arc<JobSpec>,
        layout: Arc<Layout>,
        placement: Placement,
        server: ServerId,
        places: &[ShardId],
    ) -> Machine {
        let mut owned = vec![None; layout.shards() as usize];
        let mut shards = Vec::with_capacity(places.len());
        for (index, &shard) in OwnedShard::all(places.len()).zip(places) {
            owned[shard.index()] = Some(index);
            let chunks = layout.chunks(shard, spec.gradient_dtype);
            let contributors = layout.contributors(shard);
            let mut progress = ShardProgress::new(shard, chunks, spec.gradient_slots(), contributors);
            if !placement.holds(server, shard) {
                progress.span = NOT_OWNED;
            }
            shards.push(progress);
        }
        let ranks = vec![RankState::default(); spec.world_size as usize];
        Machine {
            world_size: spec.world_size,
            spec,
            layout,
            phase: Phase::Loading,
            version: Version(0),
            applied: 0,
            left_out: Vec::new(),
            commits: VecDeque::new(),
            ranks,
            shards,
            owned,
            server,
            placement,
            has_moved: false,
            is_placed: false,
            lost: Vec::new(),
            held: Vec::new(),
            standing: None,
            scales: Vec::new(),
            reads: BTreeMap::new(),
            pauses: 0,
            resumes: 0,
            resumed_loss_scale: 0.0,
        }
    }

    /// Starts the job once all weights are loaded, at version 0 or at a checkpoint's version.
    pub fn loaded(&mut self, record: Record) -> Result<(), Refusal> {
        self.recovered(Record { standing: None, placement: None, ..record })
    }

    /// Starts the job, as [`Machine::loaded`] does, from the record that its tier has kept.
    pub fn recovered(&mut self, record: Record) -> Result<(), Refusal> {
        self.check_loading()?;
        let version = record.version;
        let placement = record.placement.clone();
        self.begin(vec![record]);
        self.shards.iter_mut().for_each(|shard| shard.version = version);
        if let Some(placement) = placement {
            self.recover_placement(placement);
        }
        Ok(())
    }

    /// Starts from the last of these records, paused if the job was.
    pub(super) fn begin(&mut self, records: Vec<Record>) {
        self.phase = Phase::Training;
        for Record { version, applied, commit, left_out, standing, .. } in records {
            (self.version, self.applied, self.left_out) = (version, applied, left_out);
            let resumed_loss_scale = standing.as_ref().and_then(|standing| standing.loss_scale);
            self.commits.extend(commit.map(|commit| Decided { commit, applied, resumed_loss_scale }));
            self.standing = standing;
        }
        if let Some(reason) = self.reason() {
            (self.phase, self.pauses) = (Phase::Paused { reason }, 1);
        }
    }

    /// Returns why the job is paused. A later pause or resume overrides the commit's.
    pub(super) fn reason(&self) -> Option<String> {
        match &self.standing {
            Some(standing) => standing.paused.clone(),
            None => {
                let last = self.commits.back()?;
                Some(last.commit.pause_reason.clone()).filter(|reason| !reason.is_empty())
            }
        }
    }

    /// Goes on after a restart that lost neither state nor contributions. `records` are the last decided steps, oldest
    /// first. `kept` has the shards that are here or being fetched. Returns the remaining updates that can run.
    pub fn resume_updates(
        &mut self,
        records: Vec<Record>,
        kept: &[Option<KeptShard>],
    ) -> Result<Vec<Work>, Refusal> {
        self.check_loading()?;
        let placement = records.last().and_then(|record| record.placement.clone());
        self.begin(records);
        placement.into_iter().for_each(|placement| self.recover_placement(placement));
        let newest = self.version.0 + self.spec.gradient_slots() as u64;
        let mut oldest = self.version.0;
        for (shard, kept) in self.shards.iter_mut().zip(kept) {
            let Some(kept) = kept else {
                (shard.span, shard.awaited) = (NOT_OWNED, false);
                continue;
            };
            (shard.version, shard.awaited) = (kept.version, kept.awaited);
            oldest = oldest.min(kept.version.0);
            let last = self.version.0.min(shard.span.end.saturating_sub(1));
            let decided = (kept.version.0 + 1..=last).map(Step);
            let summed = kept.summed.iter().filter(|step| (self.version.0 + 1..=newest).contains(&step.0));
            for step in decided.chain(summed.copied()) {
                shard.slot_mut(step).take_over(step, self.spec.micro_steps);
            }
        }
        let steps = (oldest + 1..=self.version.0).map(Step);
        let next = |step: Step| {
            let is_behind = |shard: &ShardProgress| shard.span.contains(&step.0) && shard.version.0 < step.0;
            let behind = self.shards.iter().position(is_behind).map(OwnedShard)?;
            self.next_update(behind, step)
        };
        Ok(steps.filter_map(next).collect())
    }

    /// Takes up the processes that had joined before a restart. Members take part as before, and replaced
    /// processes stay replaced.
    pub fn had_joined(&mut self, ranks: &[Option<Joined>]) {
        for (rank, joined) in self.ranks.iter_mut().zip(ranks) {
            if let Some(Joined { incarnation, at, fence_only, .. }) = *joined {
                (rank.incarnation, rank.joined_at, rank.fence_only) = (Some(incarnation), at, fence_only);
            }
        }
        let fewer = ranks.first().copied().flatten().map(|zero| zero.world_size).filter(|&fewer| fewer != 0);
        self.set_contributors(fewer.unwrap_or(self.spec.world_size));
    }

    pub fn check_loading(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Loading => Ok(()),
            _ => Err(Refusal::NotLoading { version: self.version }),
        }
    }

    pub fn check_not_loading(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Loading => {
                let missing = self.shards.iter().filter(|shard| !shard.span.is_empty()).count();
                Err(Refusal::Loading { missing })
            }
            _ => Ok(()),
        }
    }
}
