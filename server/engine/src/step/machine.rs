//! The state machine of one job on one server.
//!
//! Every method is an event; its return value says what the caller must do next. A refused event changes nothing.
//! A step on a shard passes through: chunks admitted, written and stored; a [`Work::Sum`] for each micro-step; then,
//! once all shards are complete and the step is committed, one [`Work::Update`] after the other in forward order.

use std::{collections::VecDeque, sync::Arc};

use longshore_proto::{
    Commit, ContributionChunk, Incarnation, JobSpec, Layout, MicroStep, Origin, Rank, Reads, ShardId, Step,
    Version,
};

use super::{
    refusal::Refusal,
    shard::{Place, ShardProgress},
};
use crate::tier::{Joined, Record, Standing};

/// How many commits are kept for ranks that ask late. A living rank is at most two steps behind, and one that joins
/// again needs only the last.
const COMMITS_KEPT: usize = 8;

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
    pub owned: usize,
    /// The step's gradient slot.
    pub slot: usize,
    pub chunk: ContributionChunk,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Admission {
    Write(Ticket),
    Duplicate,
    /// The chunk is held already and was not compared, because an earlier process sent it or because it was lent.
    Superseded,
    /// The chunk's step is decided, and the chunk was compared with nothing.
    Decided,
    /// The caller should ask again once the job has moved.
    Busy,
}

/// What the compute thread has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    Sum(Sum),
    /// Run the committed update. On a skipped step, carry the image over.
    Update {
        owned: usize,
        step: Step,
    },
}

/// Sum the ranks' buffers of one micro-step. After the last one, take the gradient statistics too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum {
    pub owned: usize,
    pub slot: usize,
    pub step: Step,
    pub micro_step: MicroStep,
}

/// A commit and Adam's t after it. The two are kept together, since a delayed job may decide a step before every
/// shard has the one before.
#[derive(Clone, Debug)]
pub(super) struct Decided {
    pub(super) commit: Commit,
    pub(super) applied: u64,
    /// The loss scale that an operator gave for the steps after this one, when a pause ended. It is kept beside the
    /// commit and not in it, so that a late repeat still equals the commit.
    pub(super) resumed_loss_scale: Option<f64>,
}

impl Decided {
    pub(super) fn new(commit: Commit, applied: u64) -> Decided {
        Decided { commit, applied, resumed_loss_scale: None }
    }

    /// The commit from which a worker that joins now should go on. `resumed` says that the pause which came with it
    /// has ended.
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
    /// The process has only fenced earlier ones, and has not joined yet.
    pub(super) fence_only: bool,
    pub(super) left: bool,
    /// The version at which it joined or fenced.
    pub(super) joined_at: Version,
    pub(super) last_step: Step,
}

pub struct Machine {
    pub(super) spec: Arc<JobSpec>,
    pub(super) layout: Arc<Layout>,
    pub(super) phase: Phase,
    pub(super) version: Version,
    pub(super) applied: u64,
    pub(super) commits: VecDeque<Decided>,
    pub(super) ranks: Vec<RankState>,
    pub(super) shards: Vec<ShardProgress>,
    /// By shard: its index among the owned shards, if it is one.
    pub(super) owned: Vec<Option<u32>>,
    /// What was last said on pausing since the version was decided.
    pub(super) standing: Option<Standing>,
    /// The loss scale of each undecided step to which this server holds any contribution. It is the same on every
    /// shard.
    pub(super) scales: Vec<(Step, f64)>,
    /// How many pauses and resumes there were, so that a watcher misses neither.
    pub(super) pauses: u64,
    pub(super) resumes: u64,
    /// The loss scale that an operator gave with the last resume; 0 when none was given.
    pub(super) resumed_loss_scale: f64,
}

impl Machine {
    pub fn new(spec: Arc<JobSpec>, layout: Arc<Layout>, owned_shards: &[ShardId]) -> Machine {
        let mut owned = vec![None; layout.shards() as usize];
        let mut shards = Vec::with_capacity(owned_shards.len());
        for (index, &shard) in owned_shards.iter().enumerate() {
            owned[shard.index()] = Some(index as u32);
            let chunks = layout.chunks(shard, spec.gradient_dtype);
            shards.push(ShardProgress::new(shard, chunks, spec.gradient_slots(), spec.world_size));
        }
        let ranks = vec![RankState::default(); spec.world_size as usize];
        Machine {
            spec,
            layout,
            phase: Phase::Loading,
            version: Version(0),
            applied: 0,
            commits: VecDeque::new(),
            ranks,
            shards,
            owned,
            standing: None,
            scales: Vec::new(),
            pauses: 0,
            resumes: 0,
            resumed_loss_scale: 0.0,
        }
    }

    // ---- life of the job --------------------------------------------------------------------------------------

    /// All weights are there. The job starts at version 0, or at a checkpoint's version.
    pub fn loaded(&mut self, version: Version, applied: u64, commit: Option<Commit>) -> Result<(), Refusal> {
        self.check_loading()?;
        self.begin(vec![Record::new(version, applied, commit)]);
        for shard in &mut self.shards {
            shard.version = version;
        }
        Ok(())
    }

    /// Starts the job, as [`Machine::loaded`] does, from what its tier has kept.
    pub fn recovered(&mut self, record: Record) -> Result<(), Refusal> {
        self.check_loading()?;
        let version = record.version;
        self.begin(vec![record]);
        self.shards.iter_mut().for_each(|shard| shard.version = version);
        Ok(())
    }

    /// Starts from the last of these records, paused if the job was.
    fn begin(&mut self, records: Vec<Record>) {
        self.phase = Phase::Training;
        for Record { version, applied, commit, standing } in records {
            (self.version, self.applied) = (version, applied);
            let resumed_loss_scale = standing.as_ref().and_then(|standing| standing.loss_scale);
            self.commits.extend(commit.map(|commit| Decided { commit, applied, resumed_loss_scale }));
            self.standing = standing;
        }
        if let Some(reason) = self.reason() {
            (self.phase, self.pauses) = (Phase::Paused { reason }, 1);
        }
    }

    /// Why the job is paused. What was said last counts.
    fn reason(&self) -> Option<String> {
        match &self.standing {
            Some(standing) => standing.paused.clone(),
            None => {
                let last = self.commits.back()?;
                Some(last.commit.pause_reason.clone()).filter(|reason| !reason.is_empty())
            }
        }
    }

    /// Goes on after a restart that lost neither state nor contributions. The arguments are the last decided steps,
    /// oldest first; the version that each shard has reached; and the last steps that are all summed there. Returns
    /// the updates that remain.
    pub fn resume_updates(
        &mut self,
        records: Vec<Record>,
        shards: &[(Version, [Step; 2])],
    ) -> Result<Vec<Work>, Refusal> {
        self.check_loading()?;
        self.begin(records);
        let oldest = shards.iter().map(|(version, _)| version.0).min().unwrap_or(self.version.0);
        let newest = self.version.0 + self.spec.gradient_slots() as u64;
        for (shard, (version, summed)) in self.shards.iter_mut().zip(shards) {
            shard.version = *version;
            let decided = (version.0 + 1..=self.version.0).map(Step);
            let summed = summed.iter().filter(|step| (self.version.0 + 1..=newest).contains(&step.0));
            for step in decided.chain(summed.copied()) {
                shard.slot_mut(step).take_over(step, self.spec.micro_steps);
            }
        }
        let first = |step: Step| self.shards.iter().position(|shard| shard.version < step.version());
        let steps = (oldest + 1..=self.version.0).map(Step);
        Ok(steps.filter_map(|step| first(step).map(|owned| Work::Update { owned, step })).collect())
    }

    /// Takes up who had joined before a restart: they take part as before, and who was replaced stays so.
    pub fn had_joined(&mut self, ranks: &[Option<Joined>]) {
        for (rank, joined) in self.ranks.iter_mut().zip(ranks) {
            if let Some(Joined { incarnation, at, fence_only }) = *joined {
                (rank.incarnation, rank.joined_at, rank.fence_only) = (Some(incarnation), at, fence_only);
            }
        }
    }

    pub fn check_loading(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Loading => Ok(()),
            _ => Err(Refusal::NotLoading { version: self.version }),
        }
    }

    pub fn check_not_loading(&self) -> Result<(), Refusal> {
        match self.phase {
            Phase::Loading => Err(Refusal::Loading { missing: self.shards.len() }),
            _ => Ok(()),
        }
    }

    /// Ends what earlier processes of a rank may do. What they sent stays, since a decision that another server knows
    /// already may need it here. Returns false when this
    /// process has fenced or joined before.
    pub fn fence(&mut self, rank: Rank, incarnation: Incarnation) -> Result<bool, Refusal> {
        if self.check_taking(rank, incarnation)? {
            return Ok(false);
        }
        let state = &mut self.ranks[rank.index()];
        (state.incarnation, state.fence_only, state.left) = (Some(incarnation), true, false);
        state.joined_at = self.version;
        Ok(true)
    }

    /// Binds a rank to a higher incarnation, or to the one that fenced it. The answer is Busy while the earlier
    /// process's last chunk is being written.
    pub fn join(&mut self, rank: Rank, incarnation: Incarnation) -> Result<Admission, Refusal> {
        if self.check_taking(rank, incarnation)? && !self.ranks[rank.index()].fence_only {
            return Ok(Admission::Duplicate);
        }
        let undecided = self.version.0 + 1..=self.version.0 + self.spec.gradient_slots() as u64;
        let in_use = |shard: &ShardProgress| shard.slots.iter().any(|slot| slot.in_use(rank));
        if self.shards.iter().any(in_use) {
            return Ok(Admission::Busy);
        }
        for shard in &mut self.shards {
            for slot in &mut shard.slots {
                // The slot of a decided step belongs to that step's update.
                if slot.step.is_some_and(|step| undecided.contains(&step.0)) {
                    slot.rejoined(rank);
                }
            }
        }
        let joined_at = self.version;
        self.unsettle();
        self.ranks[rank.index()] =
            RankState { incarnation: Some(incarnation), joined_at, ..RankState::default() };
        Ok(Admission::Duplicate)
    }

    /// Checks that a process may take a rank. Returns true when it has taken it already.
    fn check_taking(&self, rank: Rank, incarnation: Incarnation) -> Result<bool, Refusal> {
        let world_size = self.spec.world_size;
        let state = self.ranks.get(rank.index()).ok_or(Refusal::UnknownRank { rank, world_size })?;
        match state.incarnation {
            Some(current) if current == incarnation && !state.left => Ok(true),
            Some(current) if current >= incarnation => Err(Refusal::Fenced { rank, incarnation, current }),
            _ => Ok(false),
        }
    }

    /// Whether a rank's process may push.
    pub fn has_joined(&self, rank: Rank, incarnation: Incarnation) -> bool {
        let state = self.ranks.get(rank.index());
        state.is_some_and(|state| state.incarnation == Some(incarnation) && !state.fence_only && !state.left)
    }

    /// Whether a rank's buffer of a slot holds what a sum or an update still needs.
    pub fn holds(&self, owned: usize, slot: usize, rank: Rank) -> bool {
        self.shards[owned].slots[slot].holds(rank)
    }

    pub fn incarnation(&self, rank: Rank) -> Option<Incarnation> {
        self.ranks.get(rank.index()).and_then(|state| state.incarnation)
    }

    /// Checks that no newer process has taken the rank.
    pub fn check_newest(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Refusal> {
        match self.incarnation(rank) {
            Some(current) if current > incarnation => Err(Refusal::Fenced { rank, incarnation, current }),
            _ => Ok(()),
        }
    }

    pub fn leave(&mut self, rank: Rank, incarnation: Incarnation) -> Result<(), Refusal> {
        self.check_rank(rank, incarnation)?;
        self.ranks[rank.index()].left = true;
        Ok(())
    }

    /// Checks that the caller is the rank's current process.
    pub fn check_rank(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Refusal> {
        let world_size = self.spec.world_size;
        let state = self.ranks.get(rank.index()).ok_or(Refusal::UnknownRank { rank, world_size })?;
        match state.incarnation {
            None => Err(Refusal::NotJoined { rank }),
            Some(current) if incarnation > current => Err(Refusal::NotJoined { rank }),
            Some(current) if incarnation < current => Err(Refusal::Fenced { rank, incarnation, current }),
            Some(_) if state.left => Err(Refusal::Left { rank, incarnation }),
            Some(_) => Ok(()),
        }
    }

    /// Checks that the caller is rank 0's current process.
    pub fn check_rank_zero(&self, incarnation: Incarnation) -> Result<(), Refusal> {
        match self.check_rank(Rank(0), incarnation) {
            Err(Refusal::Fenced { current, .. }) => Err(Refusal::NotRankZero { incarnation, current }),
            other => other,
        }
    }

    // ---- contributions ----------------------------------------------------------------------------------------

    /// Decides on one chunk. After `Write` the caller stores the bytes and reports back.
    pub fn admit(&mut self, chunk: &ContributionChunk) -> Result<Admission, Refusal> {
        self.check_not_loading()?;
        let contribution = chunk.contribution;
        self.check_rank(contribution.rank, chunk.incarnation)?;
        if !self.has_joined(contribution.rank, chunk.incarnation) {
            return Err(Refusal::NotJoined { rank: contribution.rank });
        }
        let owned = self.check_chunk(chunk)?;
        let step = contribution.step;
        if step.0 <= self.version.0 {
            // The step is decided, so the chunk had come: the worker missed an acknowledgement.
            return Ok(Admission::Decided);
        }
        self.check_running()?;
        let newest = Step(self.version.0 + self.spec.gradient_slots() as u64);
        if step > newest {
            return Err(Refusal::StepTooEarly { step, newest });
        }
        if !self.check_reads(chunk.reads)? || !self.check_scale(chunk)? {
            return Ok(Admission::Busy);
        }
        let shard = &mut self.shards[owned];
        let (slot, chunks) = (shard.slot_of(step), shard.chunks);
        match shard.slot_mut(step).place(chunk, chunks)? {
            Place::Duplicate => Ok(Admission::Duplicate),
            Place::Superseded => Ok(Admission::Superseded),
            Place::Busy => Ok(Admission::Busy),
            Place::Write => {
                self.settle(step, chunk.loss_scale);
                Ok(Admission::Write(Ticket { owned, slot, chunk: *chunk }))
            }
        }
    }

    /// Refuses a gradient that was computed with a version which has since been taken back and decided anew. The answer
    /// is false while this server has not reached that version: a restarted server is told by rank 0 how the version was
    /// decided, and that may be another decision than the one the rank computed with. A version that the server does not
    /// remember passes.
    fn check_reads(&self, reads: Reads) -> Result<bool, Refusal> {
        let decided_by = self.decided_by(reads.version);
        let unknown = Incarnation::default();
        if reads.decided_by == unknown {
            return Ok(true);
        }
        if reads.version > self.version {
            return Ok(false);
        }
        if decided_by == unknown || reads.decided_by == decided_by {
            return Ok(true);
        }
        Err(Refusal::Withdrawn { reads, decided_by })
    }

    fn check_chunk(&self, chunk: &ContributionChunk) -> Result<usize, Refusal> {
        let contribution = chunk.contribution;
        let owned = self.owned_index(contribution.shard)?;
        if contribution.step.0 == 0 {
            return Err(Refusal::StepZero);
        }
        let (micro_step, micro_steps) = (contribution.micro_step, self.spec.micro_steps);
        if micro_step.0 >= micro_steps {
            return Err(Refusal::UnknownMicroStep { micro_step, micro_steps });
        }
        if chunk.dtype != self.spec.gradient_dtype {
            return Err(Refusal::WrongDtype { dtype: chunk.dtype, expected: self.spec.gradient_dtype });
        }
        let whole = self.layout.shard_len(contribution.shard) * chunk.dtype.bytes();
        let place = match chunk.lent {
            true => (chunk.chunk.0 == 0).then_some(0..whole),
            false => self.layout.chunk_bytes(contribution.shard, chunk.chunk, chunk.dtype),
        };
        let Some(range) = place else {
            let chunks = if chunk.lent { 1 } else { self.shards[owned].chunks };
            return Err(Refusal::UnknownChunk { shard: contribution.shard, chunk: chunk.chunk, chunks });
        };
        let expected = range.end - range.start;
        if chunk.bytes != expected {
            return Err(Refusal::WrongLength {
                contribution,
                chunk: chunk.chunk,
                bytes: chunk.bytes,
                expected,
            });
        }
        if !(chunk.loss_scale.is_finite() && chunk.loss_scale > 0.0) {
            return Err(Refusal::BadLossScale { loss_scale: chunk.loss_scale });
        }
        Ok(owned)
    }

    /// The ticket's bytes are stored.
    pub fn stored(&mut self, ticket: Ticket) -> Option<Work> {
        let Ticket { owned, slot, chunk } = ticket;
        let contribution = chunk.contribution;
        let rank = &mut self.ranks[contribution.rank.index()];
        rank.last_step = rank.last_step.max(contribution.step);
        let last = self.shards[owned].slots[slot].stored(&chunk);
        let (step, micro_step) = (contribution.step, contribution.micro_step);
        last.then_some(Work::Sum(Sum { owned, slot, step, micro_step }))
    }

    /// The ticket's bytes did not arrive.
    pub fn abandoned(&mut self, ticket: Ticket) {
        self.shards[ticket.owned].slots[ticket.slot].abandoned(&ticket.chunk);
        self.unsettle();
    }

    /// A [`Work::Sum`] is done. Returns true when that completes the shard's gradient of the step; `nonfinite` is
    /// then its first element that is inf or NaN.
    pub fn summed(&mut self, owned: usize, slot: usize, nonfinite: Option<u64>) -> bool {
        self.shards[owned].slots[slot].summed(self.spec.micro_steps, nonfinite)
    }

    /// Takes up a gradient that an earlier process had summed, as [`Machine::summed`] takes a new one.
    pub fn summed_before(&mut self, owned: usize, step: Step, nonfinite: Option<u64>) {
        self.shards[owned].slot_mut(step).nonfinite = nonfinite;
    }

    // ---- decision and update ----------------------------------------------------------------------------------

    /// Checks that a step's gradient statistics may be asked for.
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

    /// Decides the next step. The answer is `Ok(None)` when the same decision was made before. The caller has
    /// validated the commit against the spec; `origin` names the contributions that the commit was made from.
    pub fn commit(
        &mut self,
        incarnation: Incarnation,
        commit: Commit,
        origin: Origin,
    ) -> Result<Option<Work>, Refusal> {
        self.check_not_loading()?;
        self.check_rank_zero(incarnation)?;
        let next = self.version.next_step();
        let step = commit.step;
        if step < next {
            let too_old = Refusal::CommitTooOld { step, version: self.version };
            let (earlier, _) = self.decision(step).ok_or(too_old)?;
            return match first_difference(earlier, &commit) {
                Some(field) => Err(Refusal::OtherCommit { step, field }),
                None => Ok(None),
            };
        }
        if step > next {
            return Err(Refusal::CommitTooEarly { step, next });
        }
        self.check_running()?;
        if let Some(shard) = self.shards.iter().find(|shard| !shard.is_complete(step)) {
            let missing = self.waiting_for().unwrap_or_else(|| format!("the sum of {}", shard.shard));
            return Err(Refusal::CommitIncomplete { step, missing });
        }
        let found = self.shards.iter().map(|shard| shard.origin(step)).reduce(Origin::and);
        if let Some(found) = found.filter(|found| found.differs(origin)) {
            return Err(Refusal::OtherOrigin { step, origin, found });
        }
        self.check_gradient(&commit)?;
        self.version = step.version();
        self.applied += u64::from(!commit.skip);
        self.commits.push_back(Decided::new(commit, self.applied));
        if self.commits.len() > COMMITS_KEPT {
            self.commits.pop_front();
        }
        self.scales.retain(|(held, _)| *held > step);
        self.standing = None;
        if let Some(reason) = self.reason() {
            self.phase = Phase::Paused { reason };
            self.pauses += 1;
        }
        Ok(self.next_update(0, step))
    }

    /// Checks that a decision fits the gradient that it is about.
    fn check_gradient(&self, commit: &Commit) -> Result<(), Refusal> {
        self.check_gradient_scale(commit)?;
        let step = commit.step;
        let nonfinite = |shard: &ShardProgress| Some((shard.shard, shard.slot(step).nonfinite?));
        match self.shards.iter().find_map(nonfinite).filter(|_| !commit.skip) {
            Some((shard, element)) => Err(Refusal::NotFinite { step, shard, element }),
            None => Ok(()),
        }
    }

    /// The update that follows the one of `owned`. A shard that still lacks the step before has its turn when that
    /// update is done: updates of one job run one after the other.
    fn next_update(&self, owned: usize, step: Step) -> Option<Work> {
        (owned < self.shards.len()).then_some(Work::Update { owned, step })
    }

    /// A [`Work::Update`] is done: its image can be pulled and its gradient slot is free.
    pub fn updated(&mut self, owned: usize, step: Step) -> Option<Work> {
        let shard = &mut self.shards[owned];
        debug_assert_eq!(shard.version.next_step(), step, "updates of a shard run in order");
        shard.version = step.version();
        shard.slot_mut(step).free();
        self.next_update(owned + 1, step)
    }

    /// Checks that a version may be waited for on a shard; true when it is there.
    pub fn check_pull(&self, owned: usize, version: Version) -> Result<bool, Refusal> {
        self.check_not_loading()?;
        let newest = Version(self.version.0 + self.spec.gradient_slots() as u64);
        if version > newest {
            return Err(Refusal::VersionTooNew { version, newest });
        }
        Ok(self.shards[owned].version >= version)
    }
}

/// The first field in which two decisions on one step differ.
fn first_difference(earlier: &Commit, later: &Commit) -> Option<&'static str> {
    let bits = |value: f64| value.to_bits();
    if earlier.skip != later.skip {
        Some("skip")
    } else if bits(earlier.gradient_scale) != bits(later.gradient_scale) {
        Some("gradient_scale")
    } else if bits(earlier.clip_coefficient) != bits(later.clip_coefficient) {
        Some("clip_coefficient")
    } else if bits(earlier.compensation) != bits(later.compensation) {
        Some("compensation")
    } else if earlier.groups != later.groups {
        Some("groups")
    } else if bits(earlier.loss_scale) != bits(later.loss_scale) {
        Some("loss_scale")
    } else if earlier.trainer_state != later.trainer_state {
        Some("trainer_state")
    } else if earlier.decided_by != later.decided_by {
        Some("decided_by")
    } else if earlier.pause_reason != later.pause_reason {
        Some("pause_reason")
    } else {
        None
    }
}
