//! A naive model of the step protocol. Its sets and maps are searched from the start each time.

use std::collections::{BTreeMap, BTreeSet};

use longshore_proto::{
    ChunkId, Commit, Contribution, ContributionChunk, Dtype, Incarnation, JobSpec, Layout, MicroStep, Rank,
    ShardId, Step,
};

/// The expected answer to an event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer {
    Write,
    Duplicate,
    /// The chunk is stored, but was not compared: it is lent, or another process sent it.
    Superseded,
    /// The chunk belongs to a decided step.
    Stale,
    Busy,
    Decided,
    Done,
    /// The name of the refusal's variant.
    Refused(String),
}

fn refused(name: &str) -> Answer {
    Answer::Refused(name.to_string())
}

/// Micro-step, rank and chunk.
type Key = (u32, u32, u32);

/// The gradient of one owned shard for one step.
#[derive(Default)]
struct Gradient {
    writing: BTreeSet<Key>,
    /// Checksum and sender's incarnation of each stored chunk. A lent chunk has no checksum.
    stored: BTreeMap<Key, (Option<u32>, u64)>,
    summed: u32,
    summing: bool,
    loss_scale: Option<f64>,
    /// True if an element of the sum is not finite.
    nonfinite: bool,
}

/// The cause of a pause: a decision, or a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pause {
    Decision,
    Word,
}

pub(crate) struct Model {
    spec: JobSpec,
    owned: Vec<ShardId>,
    /// The length in bytes of each chunk of each owned shard.
    chunks: Vec<Vec<u64>>,
    pub(crate) loading: bool,
    pub(crate) paused: Option<Pause>,
    /// True if a pause or a resume was requested since the last decision.
    stood: bool,
    pub(crate) version: u64,
    pub(crate) applied: u64,
    /// Decisions, the newest last. The machine keeps eight of them.
    pub(crate) commits: Vec<Commit>,
    /// For each version from 1 on, the loss scale of the steps that read it.
    scales: Vec<f64>,
    /// The present world size.
    pub(crate) world_size: u32,
    /// Each rank's newest incarnation, and whether that process has left.
    pub(crate) ranks: Vec<Option<(u64, bool)>>,
    /// Ranks whose newest process has fenced its predecessor, but has not joined yet.
    pub(crate) fence_only: Vec<bool>,
    shard_versions: Vec<u64>,
    gradients: BTreeMap<(usize, u64), Gradient>,
}

impl Model {
    pub(crate) fn new(spec: &JobSpec, layout: &Layout, owned: &[ShardId]) -> Model {
        let chunks = |&shard: &ShardId| {
            let bytes = layout.shard_len(shard) * spec.gradient_dtype.bytes();
            (0..bytes.div_ceil(1 << 20)).map(|chunk| (bytes - (chunk << 20)).min(1 << 20)).collect()
        };
        Model {
            chunks: owned.iter().map(chunks).collect(),
            owned: owned.to_vec(),
            loading: true,
            paused: None,
            stood: false,
            version: 0,
            applied: 0,
            commits: Vec::new(),
            scales: Vec::new(),
            world_size: spec.world_size,
            ranks: vec![None; spec.world_size as usize],
            fence_only: vec![false; spec.world_size as usize],
            shard_versions: vec![0; owned.len()],
            gradients: BTreeMap::new(),
            spec: spec.clone(),
        }
    }

    fn ahead(&self) -> u64 {
        self.version + 1 + u64::from(self.spec.max_delay)
    }

    /// Returns the keys of all chunks of one micro-step of a shard.
    fn keys(&self, owned: usize, micro_step: u32) -> Vec<Key> {
        let chunks = self.chunks[owned].len() as u32;
        let ranks = 0..self.world_size;
        ranks.flat_map(|rank| (0..chunks).map(move |chunk| (micro_step, rank, chunk))).collect()
    }

    fn complete(&self, owned: usize, step: u64) -> bool {
        self.gradients.get(&(owned, step)).is_some_and(|gradient| gradient.summed == self.spec.micro_steps)
    }

    /// Returns a shard's version, and whether the gradient of the next step is complete.
    pub(crate) fn shard(&self, owned: usize) -> (u64, bool) {
        (self.shard_versions[owned], self.complete(owned, self.version + 1))
    }

    /// Returns the first shard that waits for ranks, with the micro-step and these ranks.
    pub(crate) fn missing(&self) -> Option<(usize, u32, Vec<u32>)> {
        let step = self.version + 1;
        for owned in 0..self.owned.len() {
            let none = Gradient::default();
            let gradient = self.gradients.get(&(owned, step)).unwrap_or(&none);
            if gradient.summing || self.complete(owned, step) {
                continue;
            }
            let absent = self
                .keys(owned, gradient.summed)
                .into_iter()
                .filter(|key| !gradient.stored.contains_key(key));
            let ranks: BTreeSet<u32> = absent.map(|(_, rank, _)| rank).collect();
            return Some((owned, gradient.summed, ranks.into_iter().collect()));
        }
        None
    }

    /// Returns the chunk as a worker computes it, with the same bits each time. Only a lone rank's next process may
    /// compute other bits.
    pub(crate) fn chunk(
        &self,
        contribution: Contribution,
        incarnation: Incarnation,
        chunk: ChunkId,
    ) -> ContributionChunk {
        let salt = if self.world_size == 1 { incarnation.0 as u32 } else { 0 };
        let Contribution { step, micro_step, rank, shard } = contribution;
        let mixed = [step.0 as u32, micro_step.0, rank.0, shard.0, chunk.0, salt];
        let crc32 = mixed.iter().fold(17u32, |hash, &x| hash.wrapping_mul(31).wrapping_add(x)) << 1;
        let owned = self.owned.iter().position(|&owned| owned == shard);
        let bytes = owned.and_then(|owned| self.chunks[owned].get(chunk.0 as usize)).copied().unwrap_or(4);
        ContributionChunk {
            contribution,
            incarnation,
            chunk,
            loss_scale: self.scale_for(step.0),
            dtype: Dtype::F32,
            bytes,
            crc32,
            reads: Default::default(),
            lent: false,
        }
    }

    /// Returns a lent chunk with the whole gradient of the given chunk's shard.
    pub(crate) fn lent(&self, chunk: &ContributionChunk) -> ContributionChunk {
        let owned = self.owned.iter().position(|&owned| owned == chunk.contribution.shard);
        let bytes = owned.map_or(4, |owned| self.chunks[owned].iter().sum());
        ContributionChunk { chunk: ChunkId(0), bytes, crc32: 0, lent: true, ..*chunk }
    }

    pub(crate) fn honest_step(&self, step: u64) -> Vec<ContributionChunk> {
        let mut chunks = Vec::new();
        for micro_step in 0..self.spec.micro_steps {
            for owned in 0..self.owned.len() {
                for (_, rank, chunk) in self.keys(owned, micro_step) {
                    let (step, micro_step, shard) = (Step(step), MicroStep(micro_step), self.owned[owned]);
                    let contribution = Contribution { step, micro_step, rank: Rank(rank), shard };
                    let incarnation = Incarnation(self.ranks[rank as usize].unwrap().0);
                    chunks.push(self.chunk(contribution, incarnation, ChunkId(chunk)));
                }
            }
        }
        chunks
    }

    /// Returns the chunks that a step's present micro-step still lacks. None are wanted until all ranks have joined.
    pub(crate) fn wanted(&self, step: u64) -> Vec<ContributionChunk> {
        if self.ranks.iter().take(self.world_size as usize).any(Option::is_none) {
            return Vec::new();
        }
        let absent = |chunk: &ContributionChunk| {
            let owned = self.owned.iter().position(|&owned| owned == chunk.contribution.shard).unwrap();
            let gradient = self.gradients.get(&(owned, step));
            chunk.contribution.micro_step.0 == gradient.map_or(0, |gradient| gradient.summed)
                && gradient.is_none_or(|gradient| {
                    self.brought(chunk).iter().any(|key| !gradient.stored.contains_key(key))
                })
        };
        self.honest_step(step).into_iter().filter(absent).collect()
    }

    fn check_rank(&self, rank: u32, incarnation: u64) -> Option<Answer> {
        match self.ranks.get(rank as usize) {
            None => Some(refused("UnknownRank")),
            Some(None) => Some(refused("NotJoined")),
            Some(Some((current, _))) if *current < incarnation => Some(refused("NotJoined")),
            Some(Some((current, _))) if *current > incarnation => Some(refused("Fenced")),
            Some(Some((_, true))) => Some(refused("Left")),
            _ => None,
        }
    }

    fn check_zero(&self, incarnation: u64) -> Option<Answer> {
        let answer = self.check_rank(0, incarnation)?;
        Some(if answer == refused("Fenced") { refused("NotRankZero") } else { answer })
    }

    /// Returns the refusal of a chunk whose fields are wrong in every state.
    fn check_fields(&self, chunk: &ContributionChunk) -> Result<usize, Answer> {
        let contribution = chunk.contribution;
        let owned =
            self.owned.iter().position(|&owned| owned == contribution.shard).ok_or(refused("NotOwned"))?;
        let whole = self.chunks[owned].iter().sum();
        let bytes = match chunk.lent {
            true => Some(&whole).filter(|_| chunk.chunk.0 == 0),
            false => self.chunks[owned].get(chunk.chunk.0 as usize),
        };
        let wrong = [
            (contribution.step.0 == 0, "StepZero"),
            (contribution.micro_step.0 >= self.spec.micro_steps, "UnknownMicroStep"),
            (chunk.dtype != self.spec.gradient_dtype, "WrongDtype"),
            (bytes.is_none(), "UnknownChunk"),
            (bytes != Some(&chunk.bytes), "WrongLength"),
            (!chunk.loss_scale.is_finite() || chunk.loss_scale <= 0.0, "BadLossScale"),
        ];
        let first = wrong.into_iter().find(|(wrong, _)| *wrong);
        first.map_or(Ok(owned), |(_, name)| Err(refused(name)))
    }

    pub(crate) fn admit(&mut self, chunk: &ContributionChunk) -> Answer {
        let Contribution { step, micro_step, rank, .. } = chunk.contribution;
        if self.loading {
            return refused("Loading");
        }
        if let Some(answer) = self.check_rank(rank.0, chunk.incarnation.0) {
            return answer;
        }
        if self.fence_only[rank.index()] {
            return refused("NotJoined");
        }
        let owned = match self.check_fields(chunk) {
            Ok(owned) => owned,
            Err(answer) => return answer,
        };
        if step.0 <= self.version {
            return Answer::Stale;
        }
        if self.paused.is_some() {
            return refused("Paused");
        }
        if step.0 > self.ahead() {
            return refused("StepTooEarly");
        }
        if let Some(answer) = self.check_scale(step.0, chunk.loss_scale) {
            return answer;
        }
        // A shard has 1 + `max_delay` gradient slots. An earlier step keeps its slot until the shard's update.
        if self.shard_versions[owned] + 1 + u64::from(self.spec.max_delay) < step.0 {
            return Answer::Busy;
        }
        let keys = self.brought(chunk);
        let gradient = self.gradients.entry((owned, step.0)).or_default();
        if keys.iter().all(|key| gradient.stored.contains_key(key)) {
            let conflict = |key| {
                let (crc32, sender) = gradient.stored[key];
                sender == chunk.incarnation.0 && crc32.is_some_and(|crc32| crc32 != chunk.crc32)
            };
            let other = !chunk.lent && keys.iter().any(conflict);
            let compared = |key| {
                let (crc32, sender) = gradient.stored[key];
                sender == chunk.incarnation.0 && crc32.is_some()
            };
            let compared = !chunk.lent && keys.iter().all(compared);
            return match (other, compared) {
                (true, _) => refused("OtherChecksum"),
                (false, true) => Answer::Duplicate,
                (false, false) => Answer::Superseded,
            };
        }
        let here = |&(micro, rank, chunk): &Key| {
            let before = (micro.wrapping_sub(1), rank, chunk);
            gradient.stored.contains_key(&before) || gradient.writing.contains(&before)
        };
        if micro_step.0 > gradient.summed && !keys.iter().all(here) {
            return refused("MicroStepTooEarly");
        }
        let writing = keys.iter().any(|key| gradient.writing.contains(key));
        if gradient.summing || micro_step.0 != gradient.summed || writing {
            return Answer::Busy;
        }
        gradient.loss_scale = Some(chunk.loss_scale);
        gradient.writing.extend(keys);
        Answer::Write
    }

    fn gradient(&mut self, owned: usize, step: u64) -> &mut Gradient {
        self.gradients.get_mut(&(owned, step)).expect("a ticket is for a gradient being received")
    }

    /// Returns the keys of the chunks that `chunk` stands for: all of its shard if it is lent, otherwise itself.
    fn brought(&self, chunk: &ContributionChunk) -> Vec<Key> {
        let Contribution { micro_step, rank, shard, .. } = chunk.contribution;
        let owned = self.owned.iter().position(|&owned| owned == shard).unwrap();
        let all = 0..self.chunks[owned].len() as u32;
        let chunks = if chunk.lent { all } else { chunk.chunk.0..chunk.chunk.0 + 1 };
        chunks.map(|chunk| (micro_step.0, rank.0, chunk)).collect()
    }

    /// Stores a chunk that was admitted. Returns true if its micro-step is complete now.
    pub(crate) fn stored(&mut self, owned: usize, chunk: &ContributionChunk) -> bool {
        let brought = self.brought(chunk);
        let gradient = self.gradient(owned, chunk.contribution.step.0);
        let receipt = ((!chunk.lent).then_some(chunk.crc32), chunk.incarnation.0);
        for key in brought {
            assert!(gradient.writing.remove(&key));
            let before = gradient.stored.insert(key, receipt);
            assert!(before.is_none() || chunk.lent, "written twice: {chunk:?}");
        }
        let summed = gradient.summed;
        let keys = self.keys(owned, summed);
        let gradient = self.gradient(owned, chunk.contribution.step.0);
        gradient.summing = keys.iter().all(|key| gradient.stored.contains_key(key));
        gradient.summing
    }

    pub(crate) fn abandoned(&mut self, owned: usize, chunk: &ContributionChunk) {
        let brought = self.brought(chunk);
        let gradient = self.gradient(owned, chunk.contribution.step.0);
        assert!(brought.iter().all(|key| gradient.writing.remove(key)));
        if gradient.writing.is_empty() && gradient.stored.is_empty() {
            gradient.loss_scale = None;
        }
    }

    pub(crate) fn summed(&mut self, owned: usize, step: u64, nonfinite: bool) -> bool {
        let micro_steps = self.spec.micro_steps;
        let gradient = self.gradient(owned, step);
        assert!(gradient.summing);
        gradient.summing = false;
        gradient.summed += 1;
        gradient.nonfinite = nonfinite && gradient.summed == micro_steps;
        gradient.summed == micro_steps
    }

    pub(crate) fn commit(&mut self, incarnation: u64, commit: &Commit) -> Answer {
        if self.loading {
            return refused("Loading");
        }
        if let Some(answer) = self.check_zero(incarnation) {
            return answer;
        }
        let step = commit.step.0;
        if step <= self.version {
            let kept = self.commits.iter().rev().take(8).find(|earlier| earlier.step.0 == step);
            return match kept {
                None => refused("CommitTooOld"),
                Some(earlier) if Commit { norm: commit.norm, ..earlier.clone() } == *commit => {
                    Answer::Duplicate
                }
                Some(_) => refused("OtherCommit"),
            };
        }
        if step > self.version + 1 {
            return refused("CommitTooEarly");
        }
        if self.paused.is_some() {
            return refused("Paused");
        }
        if !(0..self.owned.len()).all(|owned| self.complete(owned, step)) {
            return refused("CommitIncomplete");
        }
        let contributions = f64::from(self.world_size * self.spec.micro_steps);
        let allowed = self.settled(step).map_or_else(|| self.known(step).0, |scale| Some(vec![scale]));
        let fits = |scale: &f64| scale * contributions == commit.gradient_scale;
        if allowed.is_some_and(|allowed| !allowed.iter().any(fits)) {
            return refused("WrongGradientScale");
        }
        if self.is_nonfinite(step) && !commit.skip {
            return refused("NotFinite");
        }
        self.version = step;
        self.applied += u64::from(!commit.skip);
        self.commits.push(commit.clone());
        self.scales.push(commit.loss_scale);
        self.stood = false;
        self.paused = (!commit.pause_reason.is_empty()).then_some(Pause::Decision);
        Answer::Decided
    }

    /// Applies an update. The step must be decided and complete, and the shard must have the step before.
    pub(crate) fn updated(&mut self, owned: usize, step: u64) {
        assert!(self.complete(owned, step) && step <= self.version);
        assert_eq!(self.shard_versions[owned] + 1, step);
        self.shard_versions[owned] = step;
        self.gradients.remove(&(owned, step));
    }

    /// Returns the updates that can run. For each decided step, the first shard that lacks it is next, if that shard
    /// has the step before.
    pub(crate) fn updates(&self) -> Vec<(usize, u64)> {
        let behind = |step: u64| self.shard_versions.iter().position(|&version| version < step);
        let firsts = (1..=self.version).filter_map(|step| Some((behind(step)?, step)));
        firsts.filter(|&(owned, step)| self.shard_versions[owned] + 1 == step).collect()
    }

    pub(crate) fn join(&mut self, rank: u32, incarnation: u64, world_size: Option<u32>) -> Answer {
        let world_size = world_size.unwrap_or(self.world_size);
        if rank >= world_size || world_size > self.spec.world_size {
            return refused("WorldSize");
        }
        let is_bound = match self.take(rank, incarnation) {
            Err(answer) => return answer,
            Ok(taken) => taken && !self.fence_only[rank as usize],
        };
        let is_other = world_size != self.world_size;
        if rank != 0 && is_other {
            return Answer::Busy;
        }
        if !is_bound && self.bind(rank, incarnation) == Answer::Busy {
            return Answer::Busy;
        }
        let uses = |gradient: &Gradient| gradient.summing || !gradient.writing.is_empty();
        if is_other && self.gradients.values().any(uses) {
            return Answer::Busy;
        }
        if is_other {
            let version = self.version;
            self.gradients.retain(|(_, step), _| *step <= version);
            self.fence_only[1..].fill(true);
            self.world_size = world_size;
        }
        Answer::Duplicate
    }

    fn bind(&mut self, rank: u32, incarnation: u64) -> Answer {
        let uses = |gradient: &Gradient| gradient.summing || gradient.writing.iter().any(|key| key.1 == rank);
        if self.gradients.values().any(uses) {
            return Answer::Busy;
        }
        let (version, lone) = (self.version, self.world_size == 1);
        for (_, gradient) in self.gradients.iter_mut().filter(|((_, step), _)| *step > version) {
            if lone {
                *gradient = Gradient::default();
            }
            let summed = gradient.summed;
            gradient.stored.retain(|key, _| key.1 != rank || key.0 < summed);
            if gradient.stored.is_empty() && gradient.writing.is_empty() {
                gradient.loss_scale = None;
            }
        }
        self.ranks[rank as usize] = Some((incarnation, false));
        self.fence_only[rank as usize] = false;
        Answer::Duplicate
    }

    pub(crate) fn fence(&mut self, rank: u32, incarnation: u64) -> Answer {
        match self.take(rank, incarnation) {
            Err(answer) => answer,
            Ok(true) => Answer::Duplicate,
            Ok(false) => {
                self.ranks[rank as usize] = Some((incarnation, false));
                self.fence_only[rank as usize] = true;
                Answer::Done
            }
        }
    }

    /// Returns true if the process has the rank already, and false if it may take the rank.
    fn take(&self, rank: u32, incarnation: u64) -> Result<bool, Answer> {
        match self.ranks.get(rank as usize) {
            None => Err(refused("UnknownRank")),
            Some(Some((current, false))) if *current == incarnation => Ok(true),
            Some(Some((current, _))) if *current >= incarnation => Err(refused("Fenced")),
            _ => Ok(false),
        }
    }

    /// A process may send Leave again, since the first answer may be lost.
    pub(crate) fn leave(&mut self, rank: u32, incarnation: u64) -> Answer {
        let answer = self.check_rank(rank, incarnation).filter(|answer| *answer != refused("Left"));
        answer.unwrap_or_else(|| {
            self.ranks[rank as usize] = Some((incarnation, true));
            Answer::Done
        })
    }

    pub(crate) fn pause(&mut self, incarnation: u64) -> Answer {
        if self.loading {
            return refused("Loading");
        }
        let answer = self.check_zero(incarnation);
        answer.unwrap_or_else(|| {
            self.stood |= self.paused.is_none();
            self.paused = self.paused.or(Some(Pause::Word));
            Answer::Done
        })
    }

    pub(crate) fn resume(&mut self, version: Option<u64>, loss_scale: f64) -> Answer {
        if loss_scale != 0.0 && !(1e-20..1e20).contains(&loss_scale) {
            return refused("UnusableLossScale");
        }
        let version = version.unwrap_or(self.version);
        if version > self.version {
            return refused("PauseTooNew");
        }
        if version < self.version {
            return Answer::Done;
        }
        let chosen = loss_scale != 0.0;
        match self.paused {
            None if !self.stood => refused("NotPaused"),
            None if chosen && self.scales.last().is_some_and(|scale| *scale != loss_scale) => {
                refused("OtherResume")
            }
            None => Answer::Done,
            Some(Pause::Word) if chosen => refused("LossScaleInUse"),
            Some(_) => {
                if chosen {
                    *self.scales.last_mut().unwrap() = loss_scale;
                }
                (self.paused, self.stood) = (None, true);
                Answer::Done
            }
        }
    }

    pub(crate) fn last_commit(&self) -> Option<Commit> {
        let mut commit = self.commits.last()?.clone();
        commit.loss_scale = *self.scales.last()?;
        if self.stood {
            commit.pause_reason.clear();
        }
        Some(commit)
    }

    /// Returns the loss scale of an undecided step, if a contribution has set one.
    fn settled(&self, step: u64) -> Option<f64> {
        self.gradients.iter().find_map(|((_, of), gradient)| gradient.loss_scale.filter(|_| *of == step))
    }

    /// Returns the loss scales of the decided versions that a step may read. None if a scale is unknown. The flag says
    /// whether the step may also read an undecided version.
    fn known(&self, step: u64) -> (Option<Vec<f64>>, bool) {
        let reads = step.saturating_sub(1 + u64::from(self.spec.max_delay))..step;
        let decided = reads.clone().filter(|version| *version <= self.version);
        let scales = decided.map(|version| Some(self.scales[version.checked_sub(1)? as usize])).collect();
        (scales, reads.end > self.version + 1)
    }

    fn check_scale(&self, step: u64, scale: f64) -> Option<Answer> {
        match (self.settled(step), self.known(step)) {
            (Some(settled), _) => (settled != scale).then(|| refused("OtherLossScale")),
            (None, (None, _)) => None,
            (None, (Some(known), _)) if known.contains(&scale) => None,
            (None, (_, true)) => Some(Answer::Busy),
            (None, _) => Some(refused("WrongLossScale")),
        }
    }

    /// Returns the loss scale that a worker uses which keeps to the protocol.
    pub(crate) fn scale_for(&self, step: u64) -> f64 {
        let known = self.known(step).0.and_then(|known| known.first().copied());
        self.settled(step).or(known).unwrap_or(8.0)
    }

    pub(crate) fn is_nonfinite(&self, step: u64) -> bool {
        self.gradients.iter().any(|((_, of), gradient)| *of == step && gradient.nonfinite)
    }

    pub(crate) fn loaded(&mut self) -> Answer {
        if std::mem::take(&mut self.loading) { Answer::Done } else { refused("NotLoading") }
    }
}
