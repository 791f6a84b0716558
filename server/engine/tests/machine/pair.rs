//! The state machine and its model, which get the same random events.

use std::{collections::BTreeMap, sync::Arc};

use longshore_engine::{
    ids::OwnedShard,
    record::Record,
    step::{Admission, Machine, Progress, RankProgress, Refusal, Sum, Ticket, Work},
};
use longshore_proto::{
    ChunkId, Contribution, ContributionChunk, Dtype, Incarnation, JobSpec, MicroStep, Origin, Placement,
    Rank, ServerId, ShardId, Step, Version,
};

use super::model::{Answer, Model};
use crate::common::{BLOCK, Noise, commit, spec};

const OWNED: [ShardId; 2] = [ShardId(0), ShardId(2)];

/// Returns a job of three shards of five blocks. This server owns two of them. Each shard has two chunks of fp32, of
/// which the second is shorter.
fn random_spec(noise: &mut Noise) -> JobSpec {
    let mut spec = spec(&[15 * BLOCK as u64], &[0]);
    spec.shard_elements = 5 * BLOCK as u64;
    spec.gradient_dtype = Dtype::F32;
    spec.world_size = 1 + noise.below(3) as u32;
    spec.micro_steps = 1 + noise.below(3) as u32;
    spec.max_delay = noise.below(2) as u32;
    spec
}

/// All that a machine shows of its state.
type View = (Progress, Vec<RankProgress>, Option<String>, (u64, u64, f64), Vec<(Version, bool)>);

pub(crate) struct Pair {
    noise: Noise,
    spec: Arc<JobSpec>,
    pub(crate) machine: Machine,
    model: Model,
    tickets: Vec<Ticket>,
    works: Vec<Work>,
    /// Number of times that each answer was given.
    pub(crate) answers: BTreeMap<String, usize>,
}

impl Pair {
    pub(crate) fn new(seed: u64) -> Pair {
        let mut noise = Noise(seed);
        let spec = Arc::new(random_spec(&mut noise));
        let layout = Arc::new(spec.validate().unwrap());
        let mut placement = Placement::striped(vec!["here".into(), "there".into()], layout.shards());
        for (shard, owner) in placement.owners.iter_mut().enumerate() {
            *owner = ServerId(u32::from(!OWNED.contains(&ShardId(shard as u32))));
        }
        let machine = Machine::new(Arc::clone(&spec), Arc::clone(&layout), placement, ServerId(0), &OWNED);
        let model = Model::new(&spec, &layout, &OWNED);
        let (tickets, works, answers) = (Vec::new(), Vec::new(), BTreeMap::new());
        let mut pair = Pair { noise, spec, machine, model, tickets, works, answers };
        if !pair.noise.one_in(4) {
            pair.life_loaded();
            (0..pair.spec.world_size).for_each(|rank| pair.join_as(rank, 1));
        }
        pair
    }

    fn view(&self) -> View {
        let step = self.machine.version().next_step();
        let shard = |owned| (self.machine.shard_version(owned), self.machine.is_complete(owned, step));
        let shards = OwnedShard::all(OWNED.len()).map(shard).collect();
        let machine = &self.machine;
        (machine.progress(), machine.ranks(), machine.waiting_for(), machine.pauses(), shards)
    }

    pub(crate) fn event(&mut self) {
        // In a pause most events are refused, so resumes come more often.
        if self.model.paused.is_some() && self.noise.one_in(10) {
            self.resume();
        }
        match self.noise.below(80) {
            0..36 => self.admit(),
            36..56 => self.finish_ticket(),
            56..66 => self.perform(),
            66..74 => self.commit(),
            74..77 => self.join(),
            77 => self.leave(),
            78 if self.noise.one_in(2) => self.finish_honestly(),
            _ => self.life(),
        }
        self.compare();
    }

    /// Compares the machine's reported state with the model.
    fn compare(&self) {
        let (progress, ranks, waiting, _, shards) = self.view();
        assert_eq!(progress.version.0, self.model.version);
        assert_eq!(progress.applied, self.model.applied);
        assert_eq!(progress.last_commit, self.model.last_commit());
        let found: Vec<_> = ranks.iter().map(|rank| rank.incarnation.map(|now| (now.0, rank.left))).collect();
        assert_eq!(progress.world_size, self.model.world_size);
        assert_eq!(found, self.model.ranks[..found.len()]);
        assert_eq!(found.len(), self.model.world_size as usize);
        let expected: Vec<_> =
            (0..OWNED.len()).map(|owned| self.model.shard(owned)).map(|(v, c)| (Version(v), c)).collect();
        assert_eq!(shards, expected);
        if self.model.loading {
            assert!(waiting.is_some_and(|text| text.contains("initial weights")));
            return;
        }
        let missing = self.model.missing();
        let for_decision = waiting.as_ref().is_some_and(|text| text.starts_with("the decision on step "));
        assert_eq!(waiting.is_some() && !for_decision, missing.is_some(), "{waiting:?} {missing:?}");
        if for_decision {
            let step = self.model.version + 1;
            let words = format!("the decision on step {step} (its commit) from rank 0");
            assert!(waiting.as_ref().is_some_and(|text| text.starts_with(&words)), "{waiting:?}");
            assert_eq!(progress.phase, longshore_engine::step::Phase::Training);
        }
        if let (Some(text), Some((owned, micro_step, ranks))) = (&waiting, missing) {
            let step = self.model.version + 1;
            assert!(
                text.starts_with(&format!("step {step}, micro-step {micro_step}, {} from", OWNED[owned])),
                "{text}"
            );
            for rank in 0..self.spec.world_size {
                assert_eq!(text.contains(&format!("rank {rank}")), ranks.contains(&rank), "{text}");
            }
        }
    }

    /// Runs an event on the machine, and compares its answer with the model's. A refused event must change nothing.
    fn check<T>(
        &mut self,
        expected: &Answer,
        event: impl FnOnce(&mut Machine) -> Result<T, Refusal>,
        answer: impl FnOnce(&T) -> Answer,
    ) -> Option<T> {
        let before = self.view();
        let result = event(&mut self.machine);
        let found = match &result {
            Ok(value) => answer(value),
            Err(refusal) => Answer::Refused(name(refusal)),
        };
        assert_eq!(&found, expected, "{:?}", result.as_ref().err());
        *self.answers.entry(format!("{found:?}")).or_default() += 1;
        if result.is_err() {
            assert_eq!(self.view(), before);
        }
        result.ok()
    }

    /// Returns a chunk that may be wanted next. Some chunks have one wrong field.
    fn random_chunk(&mut self) -> ContributionChunk {
        let noise = &mut self.noise;
        let step = self.model.version + noise.pick(&[1, 1, 1, 1, 1, 2, 2, 3, 0]);
        let micro_step = MicroStep(noise.below(self.spec.micro_steps as usize) as u32);
        let rank = Rank(noise.below(self.spec.world_size as usize) as u32);
        let contribution = Contribution { step: Step(step), micro_step, rank, shard: noise.pick(&OWNED) };
        let incarnation =
            Incarnation(self.model.ranks[rank.index()].map_or(1, |(incarnation, _)| incarnation));
        let mut chunk = self.model.chunk(contribution, incarnation, ChunkId(noise.below(2) as u32));
        let wanted = self.model.wanted(step);
        if !wanted.is_empty() && self.noise.one_in(2) {
            chunk = wanted[self.noise.below(wanted.len())];
        }
        if self.noise.one_in(5) {
            chunk = self.model.lent(&chunk);
        }
        match self.noise.below(40) {
            0 => chunk.bytes -= 4,
            1 => chunk.dtype = Dtype::Bf16,
            2 => chunk.chunk = ChunkId(2),
            3 => chunk.contribution.shard = self.noise.pick(&[ShardId(1), ShardId(3), ShardId(u32::MAX)]),
            4 => chunk.contribution.rank = Rank(self.spec.world_size),
            5 => chunk.contribution.micro_step = MicroStep(self.spec.micro_steps),
            6 => chunk.incarnation.0 = self.noise.pick(&[0, 1, u64::MAX]),
            7 => chunk.loss_scale = self.noise.pick(&[f64::NAN, 0.0, -1.0, f64::INFINITY]),
            8 => chunk.loss_scale = 16.0,
            9 | 10 => chunk.crc32 ^= 1,
            _ => {}
        }
        chunk
    }

    fn admit(&mut self) {
        let chunk = self.random_chunk();
        let expected = self.model.admit(&chunk);
        let sent = self.model.chunk(chunk.contribution, chunk.incarnation, chunk.chunk);
        let honest = chunk == sent || chunk == self.model.lent(&sent);
        let ticket = self.admit_expecting(&chunk, &expected);
        if let Some(ticket) = ticket {
            if honest {
                self.tickets.push(ticket);
            } else {
                // No process sends a chunk with a wrong field again, so the bytes for this ticket never arrive.
                self.abandon(ticket);
            }
        }
    }

    fn admit_expecting(&mut self, chunk: &ContributionChunk, expected: &Answer) -> Option<Ticket> {
        let admission = self.check(
            expected,
            |machine| machine.admit(chunk),
            |admission| match admission {
                Admission::New(_) => Answer::Write,
                Admission::Duplicate => Answer::Duplicate,
                Admission::Superseded => Answer::Superseded,
                Admission::Decided => Answer::Stale,
                Admission::Busy => Answer::Busy,
            },
        );
        let Some(Admission::New(ticket)) = admission else { return None };
        assert_eq!((OWNED[ticket.owned.index()], ticket.chunk), (chunk.contribution.shard, *chunk));
        Some(ticket)
    }

    fn abandon(&mut self, ticket: Ticket) {
        self.model.abandoned(ticket.owned.index(), &ticket.chunk);
        self.machine.abandoned(ticket);
    }

    fn finish_ticket(&mut self) {
        if self.tickets.is_empty() {
            return;
        }
        let index = self.noise.below(self.tickets.len());
        let ticket = self.tickets.swap_remove(index);
        if self.noise.one_in(4) {
            self.abandon(ticket);
        } else {
            self.store(ticket);
        }
    }

    fn store(&mut self, ticket: Ticket) {
        let last = self.model.stored(ticket.owned.index(), &ticket.chunk);
        let work = self.machine.stored(ticket);
        let Contribution { step, micro_step, .. } = ticket.chunk.contribution;
        let contributions = self.model.world_size as usize;
        let sum = Work::Sum(Sum { owned: ticket.owned, contributions, slot: ticket.slot, step, micro_step });
        assert_eq!(work, last.then_some(sum));
        self.works.extend(work);
    }

    /// Does a piece of the waiting work: any sum, or the first update. The compute thread keeps updates in order too.
    fn perform(&mut self) {
        if self.works.is_empty() {
            return;
        }
        let mut index = self.noise.below(self.works.len());
        if matches!(self.works[index], Work::Update { .. }) {
            index = self.works.iter().position(|work| matches!(work, Work::Update { .. })).unwrap();
        }
        match self.works.remove(index) {
            Work::Sum(Sum { owned, slot, step, .. }) => {
                let nonfinite = self.noise.one_in(6).then_some(77);
                let complete = self.machine.summed(owned, slot, nonfinite);
                assert_eq!(complete, self.model.summed(owned.index(), step.0, nonfinite.is_some()));
            }
            Work::Update { owned, step } => {
                self.works.extend(self.machine.updated(&[owned], step));
                self.model.updated(owned.index(), step.0);
                self.check_updates();
            }
        }
    }

    fn commit(&mut self) {
        let mut decision = self.decision(self.model.version + 1);
        if self.noise.one_in(6) {
            decision.pause_reason = "the floor".into();
        }
        match self.noise.below(12) {
            0..=2 => decision.skip = false,
            3 => decision.gradient_scale += 1.0,
            _ => {}
        }
        match self.noise.below(6) {
            0 => decision.step.0 += 1,
            3 if self.noise.one_in(2) => decision.step.0 = 0,
            1 | 2 if !self.model.commits.is_empty() => {
                let index = self.noise.below(self.model.commits.len());
                decision = self.model.commits[index].clone();
                decision.loss_scale += f64::from(u32::from(self.noise.one_in(2)));
                decision.norm = 7.0;
            }
            _ => {}
        }
        let mut incarnation = self.model.ranks[0].map_or(1, |(incarnation, _)| incarnation);
        if self.noise.one_in(8) {
            incarnation = if self.noise.one_in(2) { incarnation + 1 } else { incarnation.saturating_sub(1) };
        }
        self.decide(incarnation, decision);
    }

    /// Returns a valid decision, with one of the possible next loss scales.
    fn decision(&mut self, step: u64) -> longshore_proto::Commit {
        let mut decision = commit(&self.spec.of_ranks(self.model.world_size), step);
        decision.skip = self.model.is_nonfinite(step) || self.noise.one_in(6);
        decision.gradient_scale *= self.model.scale_for(step);
        decision.loss_scale = self.noise.pick(&[8.0, 8.0, 4.0]);
        decision
    }

    fn decide(&mut self, incarnation: u64, decision: longshore_proto::Commit) {
        let expected = self.model.commit(incarnation, &decision);
        let step = decision.step;
        let before = self.machine.version();
        let decided = self.check(
            &expected,
            |machine| {
                let work = machine.commit(Incarnation(incarnation), decision, Origin::UNKNOWN)?;
                Ok((work, machine.version() > before))
            },
            |&(_, new)| if new { Answer::Decided } else { Answer::Duplicate },
        );
        if let Some((work, new)) = decided {
            assert!(!new || self.machine.version() == step.version());
            self.works.extend(work);
            self.check_updates();
        }
    }

    fn check_updates(&self) {
        let mut updates: Vec<_> = self.works.iter().filter_map(update).collect();
        updates.sort_unstable_by_key(|&(_, step)| step);
        assert_eq!(updates, self.model.updates());
    }

    fn join(&mut self) {
        let away = self.model.ranks.iter().position(|rank| rank.is_none_or(|(_, left)| left));
        let any = self.noise.below(self.spec.world_size as usize + 1);
        let rank = away.filter(|_| !self.noise.one_in(4)).unwrap_or(any) as u32;
        let now =
            self.model.ranks.get(rank as usize).copied().flatten().map_or(0, |(incarnation, _)| incarnation);
        let incarnation = (now + self.noise.below(3) as u64).saturating_sub(1);
        if self.noise.one_in(3) {
            return self.fence_as(rank, incarnation);
        }
        let world_size =
            self.noise.one_in(20).then(|| self.noise.below(self.spec.world_size as usize + 2) as u32);
        self.join_of(rank, incarnation, world_size);
    }

    fn fence_as(&mut self, rank: u32, incarnation: u64) {
        let expected = self.model.fence(rank, incarnation);
        self.check(
            &expected,
            |machine| machine.fence(Rank(rank), Incarnation(incarnation)),
            |new| if *new { Answer::Done } else { Answer::Duplicate },
        );
    }

    fn join_as(&mut self, rank: u32, incarnation: u64) {
        self.join_of(rank, incarnation, None);
    }

    fn join_of(&mut self, rank: u32, incarnation: u64, world_size: Option<u32>) {
        let expected = self.model.join(rank, incarnation, world_size);
        self.check(
            &expected,
            |machine| machine.join(Rank(rank), Incarnation(incarnation), world_size),
            |joined| if *joined { Answer::Duplicate } else { Answer::Busy },
        );
    }

    fn leave(&mut self) {
        let rank = self.noise.below(self.spec.world_size as usize + 1) as u32;
        let now =
            self.model.ranks.get(rank as usize).copied().flatten().map_or(0, |(incarnation, _)| incarnation);
        let incarnation = now + u64::from(self.noise.one_in(3));
        let expected = self.model.leave(rank, incarnation);
        self.check(
            &expected,
            |machine| machine.leave(Rank(rank), Incarnation(incarnation)),
            |()| Answer::Done,
        );
    }

    fn life(&mut self) {
        let zero = self.model.ranks[0].map_or(0, |(incarnation, _)| incarnation);
        match self.noise.below(6) {
            0..2 => {
                let incarnation = (zero + self.noise.below(3) as u64).saturating_sub(1);
                let expected = self.model.pause(incarnation);
                let event =
                    |machine: &mut Machine| machine.pause(Incarnation(incarnation), "overflow".into());
                self.check(&expected, event, |_| Answer::Done);
            }
            2..4 => self.resume(),
            _ => self.life_loaded(),
        }
    }

    fn resume(&mut self) {
        let scale = self.noise.pick(&[0.0, 8.0, 8.0, 4.0, 4.0, f64::NAN, -1.0, 1e-40, 1e60]);
        let near = [self.model.version, self.model.version + 1, self.model.version.saturating_sub(1)];
        let version = self.noise.one_in(2).then(|| self.noise.pick(&near));
        let expected = self.model.resume(version, scale);
        let event = |machine: &mut Machine| machine.resume(version.map(Version), scale);
        self.check(&expected, event, |_| Answer::Done);
    }

    fn life_loaded(&mut self) {
        let expected = self.model.loaded();
        self.check(&expected, |machine| machine.loaded(Record::new(Version(0), 0, None)), |()| Answer::Done);
    }

    /// Finishes the next step as workers would that keep to the protocol. Pending tickets end, every rank is replaced,
    /// and missing chunks are sent again.
    pub(crate) fn finish_honestly(&mut self) {
        if self.model.loading {
            self.life_loaded();
        }
        self.drain();
        if self.model.paused.is_some() {
            let expected = self.model.resume(None, 0.0);
            self.check(&expected, |machine| machine.resume(None, 0.0), |_| Answer::Done);
        }
        for rank in 0..self.spec.world_size {
            let now = self.model.ranks[rank as usize].map_or(0, |(incarnation, _)| incarnation);
            if now == 0 || self.model.ranks[rank as usize].unwrap().1 || self.noise.one_in(2) {
                self.join_as(rank, now + 1);
            } else if self.model.fence_only[rank as usize] {
                self.join_as(rank, now);
            }
        }
        let step = self.model.version + 1;
        for chunk in self.model.honest_step(step) {
            let expected = self.model.admit(&chunk);
            let held = matches!(expected, Answer::Duplicate | Answer::Superseded);
            assert!(held || expected == Answer::Write, "{expected:?} {chunk:?}");
            if let Some(ticket) = self.admit_expecting(&chunk, &expected) {
                self.store(ticket);
                self.drain();
            }
            self.compare();
        }
        let waits = self.machine.waiting_for();
        assert_eq!(waits, Some(format!("the decision on step {step} (its commit) from rank 0")));
        let decision = self.decision(step);
        self.decide(self.model.ranks[0].unwrap().0, decision);
        self.drain();
        assert_eq!(self.machine.version(), Version(step));
        assert!(self.machine.is_settled());
    }

    fn drain(&mut self) {
        while let Some(ticket) = self.tickets.pop() {
            self.store(ticket);
        }
        while !self.works.is_empty() {
            self.perform();
        }
    }
}

/// Returns the name of a refusal's variant, without its fields.
fn name(refusal: &Refusal) -> String {
    let text = format!("{refusal:?}");
    text.split([' ', '(']).next().unwrap().to_string()
}

fn update(work: &Work) -> Option<(usize, u64)> {
    match work {
        Work::Update { owned, step } => Some((owned.index(), step.0)),
        Work::Sum(_) => None,
    }
}
