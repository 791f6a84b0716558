//! The history of a run: contents of each state, compared over servers, ranks and restarts. Also the list of faults
//! that a test plants to prove that the simulation finds them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
};

use bytes::{Bytes, BytesMut};
use longshore_proto::{
    Incarnation, JobName, JobSpec, Layout, Param, Placement, ShardId, Step, TierKind, Version,
    limits::BLOCK_ELEMENTS,
};
use longshore_worker::Schedule;

use crate::host::{lock, mix};

/// Makes the enum of planted faults, and `PLANTS`, the list of all of them.
macro_rules! plants {
    ($($(#[doc = $text:literal])* $name:ident,)*) => {
        /// A planted fault: at one place the simulated servers or hosts behave wrongly, and a seed must expose that.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Plant {
            $($(#[doc = $text])* $name,)*
        }

        pub(crate) const PLANTS: &[Plant] = &[$(Plant::$name),*];
    };
}

plants! {
    /// A chunk is acknowledged and not stored.
    AcknowledgedUnstored,
    /// A commit's origins are not compared.
    OriginIgnored,
    /// AwaitDurable is answered, and the next step decided, before the version is on the drive.
    DurableAtOnce,
    /// A restarted server has forgotten which processes have joined.
    FenceForgotten,
    /// A join is answered before the drive has it.
    FenceAnsweredEarly,
    /// An older process of a rank may push.
    FenceWithoutEffect,
    /// A step back takes back a decision other than the one it names.
    StepBackUnbound,
    /// A step back on a server that is one version ahead is answered, but the version stays.
    StepBackWithoutEffect,
    /// A join's answer names the version at the time of the answer, instead of the time of the join.
    JoinAnswersLate,
    /// Servers' clocks stand still, and incarnations have no random bits.
    EqualIncarnations,
    /// A pull of a version that is gone returns the newest state.
    PullOfAnyVersion,
    /// A pull of a decided version returns the version before, while the update still runs.
    PullTooEarly,
    /// Statistics are sent before the last contribution.
    StatsTooEarly,
    /// The record of a version is written before its state.
    RecordBeforeState,
    /// A server's watch stream leaves a commit out.
    WatchSkipsCommit,
    /// A recovered server forgets the last commit.
    CommitForgotten,
    /// A shard is handed over before its last version at the owner is made: the next owner gets an earlier one.
    FetchTooEarly,
    /// A shard's state is freed as soon as another server owns it.
    FreedAtOnce,
    /// A server ignores the new placement of one commit in 20.
    ChangeForgotten,
    /// A rank other than 0 joins although its world size differs from the job's.
    WorldSizeIgnored,
    /// A step is decided before replicas have its sums.
    ReplicaUnawaited,
    /// An owner makes its next update before the new replica has fetched the state.
    LentUnawaited,
    /// A replica counts as a holder before it has fetched the state.
    UnfetchedCounts,
    /// A server ignores the lost servers that a commit names.
    LossForgotten,
    /// A server keeps the note of a lost server after the commit that removes it. The same address may join again
    /// later.
    LossKept,
    /// A shard is handed over without its earlier image, which a delayed step reads.
    OlderUnsent,
    /// A placement that changes between two steps is answered before the drive has it.
    PlacementUnkept,
}

impl Plant {
    /// Returns true if only a job with replicas can expose the fault.
    pub(crate) fn is_of_replicas(self) -> bool {
        matches!(
            self,
            Plant::ReplicaUnawaited
                | Plant::LentUnawaited
                | Plant::UnfetchedCounts
                | Plant::LossForgotten
                | Plant::LossKept
        )
    }
}

/// A decided version: its number, and the incarnation that decided it.
pub(crate) type Decision = (Version, Incarnation);

/// A gradient of one shard, as a rank's process computed it.
struct Gradient {
    step: Step,
    micro_step: u32,
    rank: u32,
    shard: ShardId,
    /// The world size that the process was started with.
    world_size: u32,
    /// The decisions of which the process may have read the weights. Skipped steps leave a state as it is, so one state
    /// may have several.
    reads: BTreeSet<Decision>,
}

#[derive(Default)]
struct Known {
    gradients: BTreeMap<u64, Gradient>,
    /// The decisions that made each state of a shard.
    states: BTreeMap<(ShardId, u64), BTreeSet<Decision>>,
    /// The state that each decision made of a shard. Repeated updates and other servers must make the same bits.
    made: BTreeMap<(ShardId, Decision), u64>,
    /// The world size of the steps that each incarnation of rank 0 decides.
    worlds: BTreeMap<Incarnation, u32>,
    /// The decision before each decision.
    parents: BTreeMap<Decision, Decision>,
    /// Decisions whose weights rank 0 has read. Each of them was on all servers.
    acknowledged: BTreeSet<Decision>,
    violation: Option<String>,
}

pub(crate) struct Oracle {
    pub(crate) spec: Arc<JobSpec>,
    pub(crate) layout: Arc<Layout>,
    pub(crate) placement: Placement,
    pub(crate) schedule: Schedule,
    seed: u64,
    plant: Option<Plant>,
    known: Mutex<Known>,
}

/// The decision of the first weights.
const FIRST: Decision = (Version(0), Incarnation(0));

impl Oracle {
    pub(crate) fn new(
        seed: u64,
        (servers, shards, replicas): (usize, usize, u32),
        (ranks, micro_steps): (u32, u32),
        (tier, schedule): (TierKind, Schedule),
        plant: Option<Plant>,
    ) -> Arc<Oracle> {
        let param = |index: usize| Param { name: format!("p{index}"), shape: vec![BLOCK_ELEMENTS], group: 0 };
        let spec = JobSpec {
            shard_elements: BLOCK_ELEMENTS,
            world_size: ranks,
            micro_steps,
            max_delay: schedule.delay(),
            tier,
            replicas,
            ..JobSpec::new(
                JobName::parse("name", "simulated").expect("a good name"),
                (0..shards).map(param).collect(),
            )
        };
        let layout = spec.validate().expect("a good spec");
        let addresses = (0..servers).map(address).collect();
        let placement = spec.striped(addresses, layout.shards());
        let (spec, layout) = (Arc::new(spec), Arc::new(layout));
        let oracle = Oracle { spec, layout, placement, schedule, seed, plant, known: Mutex::default() };
        for shard in (0..oracle.layout.shards()).map(ShardId) {
            let state = oracle.first(shard);
            let mut known = lock(&oracle.known);
            known.states.insert((shard, state), BTreeSet::from([FIRST]));
            known.made.insert((shard, FIRST), state);
        }
        Arc::new(oracle)
    }

    pub(crate) fn has(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }

    pub(crate) fn fail(&self, text: String) {
        lock(&self.known).violation.get_or_insert(text);
    }

    pub(crate) fn violation(&self) -> Option<String> {
        lock(&self.known).violation.clone()
    }

    /// Returns the first state of a shard.
    pub(crate) fn first(&self, shard: ShardId) -> u64 {
        mix(self.seed ^ mix(u64::from(shard.0) + 1))
    }

    /// Returns the gradients that a process computes from the states `read`, taken as the weights of `version`. Each
    /// process computes other bits, so a mixture of two processes shows.
    pub(crate) fn compute(
        &self,
        (rank, world_size, process): (u32, u32, usize),
        (step, micro_step): (Step, u32),
        version: Version,
        read: &[u64],
    ) -> Vec<u64> {
        let shards = || (0..self.layout.shards()).map(ShardId);
        let mut known = lock(&self.known);
        let decisions = |(shard, &state): (ShardId, &u64)| {
            let of = known.states.get(&(shard, state)).into_iter().flatten();
            of.filter(|decision| decision.0 == version).copied().collect::<BTreeSet<Decision>>()
        };
        let common = shards().zip(read).map(decisions).reduce(|all, of| &all & &of).unwrap_or_default();
        if common.is_empty() {
            known
                .violation
                .get_or_insert(format!("rank {rank} read {read:x?}, which no decision of {version} made"));
        }
        if let (0, 1) = (rank, common.len()) {
            known.acknowledged.extend(&common);
        }
        let of =
            read.iter().fold(step.0 ^ mix(process as u64), |hash, &state| mix(hash.rotate_left(9) ^ state));
        shards()
            .map(|shard| {
                let place = u64::from(micro_step) << 40 | u64::from(rank) << 20 | u64::from(shard.0);
                let gradient = mix(of ^ mix(place));
                let reads = common.clone();
                let of = Gradient { step, micro_step, rank, shard, world_size, reads };
                known.gradients.insert(gradient, of);
                gradient
            })
            .collect()
    }

    /// Notes the world size of the steps that a process of rank 0 decides.
    pub(crate) fn leads(&self, incarnation: Incarnation, world_size: u32) {
        lock(&self.known).worlds.insert(incarnation, world_size);
    }

    pub(crate) fn update(&self, state: u64, gradients: &[u64]) -> u64 {
        gradients.iter().fold(state, |state, &gradient| mix(state.rotate_left(7) ^ gradient))
    }

    /// Returns true if the gradient of a shard overflows. A sixth of the steps overflows, always on the same shard.
    pub(crate) fn overflows(&self, step: Step, shard: ShardId) -> bool {
        shard == ShardId(1 % self.layout.shards()) && mix(self.seed ^ step.0).is_multiple_of(6)
    }

    /// Checks a server's update of a shard. `skip` says that the step was decided without an update.
    pub(crate) fn updated(
        &self,
        shard: ShardId,
        (decision, parent): (Decision, Decision),
        (state, gradients): (u64, &[u64]),
        skip: bool,
    ) {
        let mut known = lock(&self.known);
        let before = known.made.get(&(shard, parent)).copied();
        let made = before.map(|before| if skip { before } else { self.update(before, gradients) });
        let found = match made == Some(state) {
            true => self.check(&mut known, shard, (decision, parent), (state, gradients)),
            false => Err(format!("the state is {state:x}, but made of {before:x?} it is {made:x?}")),
        };
        if let Err(text) = found {
            let (version, decided_by) = decision;
            known.violation.get_or_insert(format!("{version} of {shard}, decided by {decided_by}: {text}"));
        }
    }

    fn check(
        &self,
        known: &mut Known,
        shard: ShardId,
        (decision, parent): (Decision, Decision),
        (state, gradients): (u64, &[u64]),
    ) -> Result<(), String> {
        let step = Step(decision.0.0);
        let earlier = *known.made.entry((shard, decision)).or_insert(state);
        if earlier != state {
            return Err(format!("the state is {state:x}, and was {earlier:x} before"));
        }
        known.states.entry((shard, state)).or_default().insert(decision);
        let earlier = *known.parents.entry(decision).or_insert(parent);
        if earlier != parent {
            return Err(format!("it follows {parent:?} here, and {earlier:?} elsewhere"));
        }
        let mut chain = parent;
        while chain.0 > self.schedule.reads(step) {
            chain = *known.parents.get(&chain).ok_or(format!("nothing is known of {chain:?}"))?;
        }
        let mut wanted: BTreeSet<(u32, u32)> = BTreeSet::new();
        let world_size =
            *known.worlds.get(&decision.1).ok_or("a process decided it that has not joined".to_string())?;
        for micro_step in 0..self.spec.micro_steps {
            wanted.extend((0..world_size).map(|rank| (micro_step, rank)));
        }
        for gradient in gradients {
            let of = known.gradients.get(gradient).ok_or(format!("no process computed {gradient:x}"))?;
            if (of.step, of.shard) != (step, shard) || !wanted.remove(&(of.micro_step, of.rank)) {
                return Err(format!("it has a gradient of {}, {}, rank {}", of.step, of.shard, of.rank));
            }
            if of.world_size != world_size {
                return Err(format!(
                    "rank {} is of {} ranks instead of {world_size}",
                    of.rank, of.world_size
                ));
            }
            if !of.reads.contains(&chain) {
                return Err(format!("rank {} computed with {:?} instead of {chain:?}", of.rank, of.reads));
            }
        }
        if !wanted.is_empty() {
            return Err(format!("without the gradients (micro-step, rank) of {wanted:?}"));
        }
        Ok(())
    }

    /// Checks that one decision has made the last version of all shards.
    pub(crate) fn check_end(&self, version: Version) -> Result<(), String> {
        let known = lock(&self.known);
        let of = |shard: ShardId| {
            let made = known.made.keys().filter(|(of, decision)| (*of, decision.0) == (shard, version));
            made.map(|(_, decision)| *decision).collect::<BTreeSet<Decision>>()
        };
        let common = (0..self.layout.shards()).map(ShardId).map(of).reduce(|all, of| &all & &of);
        let Some(last) = common.unwrap_or_default().into_iter().next() else {
            return Err(format!("no decision has made {version} of all shards"));
        };
        // With replicas no acknowledged decision may be lost. Drives may lose a version that is not durable yet, and
        // ranks make it again.
        let history: BTreeSet<Decision> =
            std::iter::successors(Some(last), |decision| known.parents.get(decision).copied()).collect();
        match known.acknowledged.difference(&history).next().filter(|_| self.spec.replicas > 1) {
            Some(lost) => Err(format!("{lost:?} was decided everywhere, and is not in the history")),
            None => Ok(()),
        }
    }

    /// Returns the payload of an image or a gradient: its number, then zeros.
    pub(crate) fn payload(&self, shard: ShardId, number: u64) -> Bytes {
        let mut bytes = BytesMut::zeroed(self.layout.shard_len(shard) as usize * 2);
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes.freeze()
    }
}

/// The address of a server.
pub(crate) fn address(server: usize) -> String {
    format!("server-{server}:7070")
}

/// Returns the number at the start of a payload.
pub(crate) fn number(payload: &[u8]) -> u64 {
    payload.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
