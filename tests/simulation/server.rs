//! A simulated server: the engine's step machine behind the calls of `Training`, `Tensors` and `Admin`, and a drive
//! that outlives its process. State is one number a shard, so that wrong bits show as another number. `moves` has the
//! calls for a change of servers, and `replicas` those for lost servers.

mod moves;
mod replicas;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use http::{Request, Response};
use longshore_engine::{
    ids::{Contributor, OwnedShard},
    record::{Joined, Record},
    step::{Admission, Machine, Phase, Refusal, Sum, Wanted, Work},
};
use longshore_proto::{
    Commit, Epoch, Fault, FaultKind, Incarnation, JobSpec, Layout, Origin, Placement, Rank, ServerId,
    ShardId, Step, TierKind, Version, checksum::crc32,
};
use longshore_wire::{self as wire, Wire, v1};
use prost::Message;
use tokio::sync::watch;
use tonic::body::Body;

use crate::{
    grpc::{Incoming, Outgoing, answer},
    host::{ProcessId, Sim, lock},
    oracle::{Oracle, Plant, number},
};

/// Longest wait of a call whose request names no deadline.
const PATIENCE: Duration = Duration::from_secs(60);

/// A durable version: its record, and the states from which each owned shard continues.
#[derive(Clone)]
struct Saved {
    record: Record,
    /// For each shard, the version's state and the one before. A delayed step reads the image of the earlier one.
    state: Vec<BTreeMap<Version, u64>>,
}

/// Contents of a server's drive: versions and joins, which outlive the process.
#[derive(Default)]
pub(crate) struct Disk {
    server: ServerId,
    /// The tier that the server was opened with. None for the job's first tier.
    tier: Option<TierKind>,
    /// The placement that the server was opened with.
    opened: Placement,
    /// The last two versions, oldest first. An empty list means that the server does not have the job.
    saved: Vec<Saved>,
    joined: Vec<Option<Joined>>,
    /// For each rank, the newest incarnation that an answer has named. Older processes must have no effect any more.
    promised: BTreeMap<Rank, Incarnation>,
}

/// The job in a server's memory.
struct Instance {
    /// Number of this opening of the job. Tasks compare the number, and end once the job is opened again.
    life: u64,
    machine: Machine,
    /// The shard of each entry of `state`.
    owned: Vec<ShardId>,
    /// The state of the last two versions of each shard that this server owns or has room for.
    state: Vec<BTreeMap<Version, u64>>,
    /// Contributions that are not summed yet, by shard, step, micro-step and contributor.
    held: BTreeMap<(usize, Step, u32, usize), u64>,
    /// The gradients in each sum, by shard and step.
    sums: BTreeMap<(usize, Step), Vec<u64>>,
    durable: Version,
    works: VecDeque<Work>,
    /// Number of open watches, by rank and incarnation.
    watches: BTreeMap<(Rank, u64), usize>,
    /// The newest wish of an operator, with the lost servers that are known.
    wanted: Wanted,
    is_fetching: bool,
}

pub(crate) struct Server {
    sim: Arc<Sim>,
    oracle: Arc<Oracle>,
    pub(crate) process: ProcessId,
    skew: Duration,
    is_witness: bool,
    disk: Arc<Mutex<Disk>>,
    /// None while the server recovers the job.
    instance: Mutex<Option<Instance>>,
    changed: watch::Sender<u64>,
}

impl Disk {
    /// The drive of a server whose job has its first weights.
    pub(crate) fn filled(oracle: &Oracle, server: ServerId) -> Disk {
        let record = Record::filled(0, Vec::new());
        let placement = &oracle.placement;
        let state = |shard: ShardId| {
            placement.holds(server, shard).then(|| (Version(0), oracle.first(shard))).into_iter().collect()
        };
        let state = (0..oracle.layout.shards()).map(ShardId).map(state).collect();
        let joined = vec![None; oracle.spec.world_size as usize];
        let (opened, saved) = (oracle.placement.clone(), vec![Saved { record, state }]);
        Disk { server, tier: None, opened, saved, joined, promised: BTreeMap::new() }
    }

    pub(crate) fn newest(&self) -> Version {
        self.saved.last().map_or(Version(0), |saved| saved.record.version)
    }
}

impl Instance {
    /// `state` has one entry for each shard that `machine` has room for.
    fn new(life: u64, machine: Machine, state: Vec<BTreeMap<Version, u64>>, durable: Version) -> Instance {
        let shards = (0..machine.placement().owners.len() as u32).map(ShardId);
        let owned = shards.filter(|&shard| machine.owned_index(shard).is_ok()).collect();
        let (held, sums, works, watches, wanted, is_fetching) = Default::default();
        Instance { life, machine, owned, state, held, sums, durable, works, watches, wanted, is_fetching }
    }
}

fn internal(text: impl ToString) -> Fault {
    Fault::new(FaultKind::Internal, "simulation", text.to_string(), "simulated", "extend the simulation")
}

fn broken(status: tonic::Status) -> Fault {
    Fault::new(FaultKind::Unavailable, "connection", status.message(), "whole", "call again")
}

fn recovering() -> Fault {
    Fault::new(FaultKind::Unavailable, "job", "being recovered", "recovered", "wait")
}

impl Server {
    /// Starts a process of the server, which reads its drive first.
    pub(crate) fn start(
        sim: &Arc<Sim>,
        oracle: &Arc<Oracle>,
        address: &str,
        disk: &Arc<Mutex<Disk>>,
        (skew, is_witness): (Duration, bool),
    ) -> Arc<Server> {
        let process = sim.process(address, skew);
        let server = Arc::new(Server {
            sim: Arc::clone(sim),
            oracle: Arc::clone(oracle),
            process,
            skew,
            is_witness,
            disk: Arc::clone(disk),
            instance: Mutex::default(),
            changed: watch::Sender::default(),
        });
        if !lock(disk).saved.is_empty() {
            let recovers = Arc::clone(&server);
            sim.spawn(process, async move { recovers.recover(None).await });
        }
        sim.network.listen(address, &server);
        server
    }

    fn spec(&self) -> &Arc<JobSpec> {
        &self.oracle.spec
    }

    fn layout(&self) -> &Arc<Layout> {
        &self.oracle.layout
    }

    fn note(&self, text: impl FnOnce() -> String) {
        self.sim.note(self.process, text);
    }

    /// Returns a receiver that counts the changes of this process's state.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    fn moved(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn instance(&self) -> MutexGuard<'_, Option<Instance>> {
        lock(&self.instance)
    }

    fn with<T>(&self, act: impl FnOnce(&mut Instance) -> Result<T, Fault>) -> Result<T, Fault> {
        act(self.instance().as_mut().ok_or_else(|| self.absent())?)
    }

    /// Returns the job, unless it was opened again after `life`.
    fn living<'a>(&self, instance: &'a mut Option<Instance>, life: u64) -> Option<&'a mut Instance> {
        instance.as_mut().filter(|instance| instance.life == life)
    }

    /// Calls `check` again after each change, until it returns Some.
    async fn until<T>(
        &self,
        patience: Duration,
        mut check: impl FnMut(&mut Instance) -> Result<Option<T>, Fault>,
    ) -> Result<T, Fault> {
        let end = self.sim.now() + patience;
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if let Some(found) = self.with(&mut check)? {
                return Ok(found);
            }
            let now = self.sim.now();
            if now >= end {
                return Err(Fault::new(FaultKind::Deadline, "deadline_ms", "passed", "in time", "ask again"));
            }
            tokio::select! {
                biased;
                _ = changed.changed() => {}
                () = self.sim.sleep(end - now) => {}
            }
        }
    }

    fn absent(&self) -> Fault {
        if lock(&self.disk).saved.is_empty() {
            return Fault::new(FaultKind::NotFound, "job", self.spec().name.as_str(), "open here", "open it");
        }
        recovering()
    }

    /// Opens the job from the drive, at its newest version or at `at_most`.
    async fn recover(self: Arc<Self>, at_most: Option<Version>) {
        let time = Duration::from_millis(5) + self.sim.part_of(Duration::from_millis(300));
        self.sim.sleep(time).await;
        let (opened, server, saved, joined) = {
            let mut disk = lock(&self.disk);
            if let Some(most) = at_most {
                disk.saved.retain(|saved| saved.record.version <= most);
            }
            (disk.opened.clone(), disk.server, disk.saved.clone(), disk.joined.clone())
        };
        let mut machine = self.machine(opened, server);
        let mut newest = saved.last().expect("a filled drive").record.clone();
        if self.oracle.has(Plant::CommitForgotten) {
            newest.commit = None;
        }
        let durable = newest.version;
        machine.recovered(newest).expect("a new machine is loading");
        if !self.oracle.has(Plant::FenceForgotten) {
            machine.had_joined(&joined);
        }
        let state = saved.last().expect("a filled drive").state.clone();
        self.note(|| format!("recovered at {durable}"));
        let mut instance = Instance::new(self.sim.random(), machine, state, durable);
        let life = instance.life;
        self.fetch_awaited(&mut instance);
        *self.instance() = Some(instance);
        self.moved();
        self.compute(life, durable).await;
    }

    fn machine(&self, placement: Placement, server: ServerId) -> Machine {
        let places: Vec<ShardId> = (0..self.layout().shards()).map(ShardId).collect();
        Machine::new(Arc::clone(self.spec()), Arc::clone(self.layout()), placement, server, &places)
    }

    /// Does the work of the compute thread, in order, until the job is opened again.
    async fn compute(self: &Arc<Self>, life: u64, opened: Version) {
        let mut changed = self.changed.subscribe();
        let mut finished = opened;
        loop {
            changed.borrow_and_update();
            let work = match self.living(&mut self.instance(), life) {
                Some(instance) => {
                    self.finish(instance, &mut finished);
                    instance.works.pop_front()
                }
                None => return,
            };
            let Some(work) = work else {
                _ = changed.changed().await;
                continue;
            };
            let time = self.sim.part_of(Duration::from_millis(2));
            self.sim.sleep(time).await;
            let mut instance = self.instance();
            let Some(instance) = self.living(&mut instance, life) else { return };
            match work {
                Work::Sum(sum) => self.sum(instance, sum),
                // After the loss of a server, another one may have become the shard's owner.
                Work::Update { owned, step } => match instance.machine.updatable(owned, |_, _| 1, step)[..] {
                    [owned] => self.update(instance, owned, step),
                    _ => instance.works.extend(instance.machine.instead_of(owned, step)),
                },
            }
            self.free_handed(instance);
            self.moved();
        }
    }

    /// Begins to write the newest version to the drive, once all shards have it. A server without shards writes at
    /// once.
    fn finish(self: &Arc<Self>, instance: &mut Instance, finished: &mut Version) {
        let version = instance.machine.version();
        *finished = (*finished).max(instance.durable);
        if instance.machine.is_made(Step(version.0)) && version > *finished {
            *finished = version;
            let saved = Saved { record: instance.machine.record(), state: instance.state.clone() };
            let (flushes, life) = (Arc::clone(self), instance.life);
            self.sim.spawn(self.process, async move { flushes.flush(life, saved).await });
        }
    }

    fn sum(&self, instance: &mut Instance, sum: Sum) {
        let Sum { owned, contributions: count, slot, step, micro_step } = sum;
        let shard = owned.index();
        if micro_step.0 == 0 {
            // A lone rank's new process sends the step again from its first micro-step.
            instance.sums.remove(&(shard, step));
        }
        for contributor in Contributor::all(count) {
            let key = (shard, step, micro_step.0, contributor.index());
            let gradient = instance.held.remove(&key).expect("a sum is made of all contributions");
            instance.sums.entry((shard, step)).or_default().push(gradient);
        }
        let overflows = self.oracle.overflows(step, instance.owned[shard]).then_some(0);
        if instance.machine.summed(owned, slot, overflows) {
            self.note(|| format!("{step}: {} is summed", instance.owned[shard]));
        }
    }

    fn update(&self, instance: &mut Instance, owned: OwnedShard, step: Step) {
        let (shard, version, before) = (owned.index(), step.version(), Version(step.0 - 1));
        let (commit, _) = instance.machine.decision(step).expect("an update has its decision");
        let (skip, decided_by) = (commit.skip, commit.decided_by);
        let gradients = instance.sums.remove(&(shard, step)).unwrap_or_default();
        let Some(&old) = instance.state[shard].get(&before) else {
            return self.oracle.fail(format!("{before} of {} is not there", instance.owned[shard]));
        };
        let state = if skip { old } else { self.oracle.update(old, &gradients) };
        instance.state[shard].insert(version, state);
        instance.state[shard].retain(|version, _| version.0 + 1 >= step.0);
        self.note(|| format!("{version} of {} is {state:x}, by {decided_by}", instance.owned[shard]));
        let parent = (before, instance.machine.decided_by(before));
        self.oracle.updated(
            instance.owned[shard],
            ((version, decided_by), parent),
            (state, &gradients),
            skip,
        );
        instance.works.extend(instance.machine.updated(&[owned], step));
    }

    /// Writes a version to the drive. Writes do not overlap, because the next version is decided only after this one is
    /// durable.
    async fn flush(&self, life: u64, saved: Saved) {
        let version = saved.record.version;
        if self.oracle.has(Plant::RecordBeforeState) {
            let mut disk = lock(&self.disk);
            let state = disk.saved.last().map(|before| before.state.clone()).unwrap_or_default();
            let renumbered = |of: BTreeMap<Version, u64>| {
                let last = of.into_values().next_back();
                last.map(|state| (version, state)).into_iter().collect()
            };
            let state = state.into_iter().map(renumbered).collect();
            disk.saved.push(Saved { record: saved.record.clone(), state });
        }
        self.sim.write(Duration::from_millis(10)).await;
        let mut instance = self.instance();
        let Some(instance) = self.living(&mut instance, life) else { return };
        let mut disk = lock(&self.disk);
        disk.saved.retain(|earlier| earlier.record.version < version);
        disk.saved.push(saved);
        let surplus = disk.saved.len().saturating_sub(2);
        disk.saved.drain(..surplus);
        instance.durable = version;
        drop(disk);
        self.note(|| format!("{version} is durable"));
        self.moved();
    }

    fn tier(&self) -> TierKind {
        lock(&self.disk).tier.unwrap_or(self.spec().tier)
    }

    pub(crate) fn is_durable_later(&self) -> bool {
        self.tier() == TierKind::Nvme
    }

    /// Writes the ranks' joins to the drive.
    async fn keep_joined(self: &Arc<Self>) -> Result<(), Fault> {
        let keeps = Arc::clone(self);
        let kept = async move {
            keeps.sim.write(Duration::from_millis(5)).await;
            let ranks = keeps.spec().world_size;
            let joined = keeps.with(|instance| Ok(joined(&instance.machine, ranks)))?;
            lock(&keeps.disk).joined = joined;
            Ok(())
        };
        if self.oracle.has(Plant::FenceAnsweredEarly) {
            self.sim.spawn(self.process, async move { _ = kept.await });
            return Ok(());
        }
        kept.await
    }

    /// Notes that an answer is about to name a rank's process. From then on an older process must have no effect here.
    fn promise(&self, rank: Rank, incarnation: Incarnation) {
        let mut disk = lock(&self.disk);
        let newest = disk.promised.entry(rank).or_default();
        *newest = incarnation.max(*newest);
    }

    /// Reports a fault if a call has an effect after an answer has named a newer process of its rank.
    fn acts(&self, rank: Rank, incarnation: Incarnation) {
        let newest = lock(&self.disk).promised.get(&rank).copied().unwrap_or_default();
        if newest > incarnation {
            self.note(|| format!("{rank}: {incarnation} acts after {newest}"));
            self.oracle
                .fail(format!("a call of {rank}'s {incarnation} has an effect after {newest} has fenced it"));
        }
    }

    /// Answers one call.
    pub(crate) async fn answer(self: Arc<Self>, request: Request<Body>) -> Response<Body> {
        let name = request.uri().path().rsplit('/').next().unwrap_or_default().to_string();
        let mut incoming = Incoming::new(request.into_body());
        let (outgoing, response) = answer();
        let server = Arc::clone(&self);
        self.sim.spawn(self.process, async move {
            let ended = server.serve(&name, &mut incoming, &outgoing).await;
            if let Err(fault) = &ended {
                server.note(|| format!("{name} refused: {fault}"));
            }
            outgoing.end(ended).await;
        });
        response
    }

    async fn serve(
        self: &Arc<Self>,
        name: &str,
        incoming: &mut Incoming,
        outgoing: &Outgoing,
    ) -> Result<(), Fault> {
        match name {
            "Push" => self.push(incoming, outgoing).await,
            "Pull" => self.pull(one(incoming).await?, outgoing).await,
            "Stats" => self.stats(one(incoming).await?, outgoing).await,
            "Watch" => self.watch(one(incoming).await?, outgoing).await,
            "ListJobs" => {
                let now = if self.oracle.has(Plant::EqualIncarnations) {
                    PATIENCE
                } else {
                    self.sim.now() + self.skew
                };
                let unix_micros = now.as_micros() as u64;
                tell(
                    outgoing,
                    &v1::ListJobsResponse { unix_micros, is_witness: self.is_witness, ..Default::default() },
                )
                .await
            }
            "Describe" | "DescribeInParts" => tell(outgoing, &self.describe()?).await,
            "OpenJob" => tell(outgoing, &self.open(one(incoming).await?)?).await,
            "Begin" => tell(outgoing, &self.begin(one(incoming).await?).await?).await,
            "Retire" => tell(outgoing, &self.retire(&one(incoming).await?)?).await,
            "Fetch" => self.send_handed(one(incoming).await?, outgoing).await,
            "Join" => tell(outgoing, &self.join(one(incoming).await?).await?).await,
            "Commit" => tell(outgoing, &self.commit(one(incoming).await?).await?).await,
            "AwaitDurable" => {
                let v1::AwaitDurableRequest { version, deadline_ms, .. } = one(incoming).await?;
                self.until_durable(Version(version), wire::deadline(deadline_ms)?).await?;
                tell(outgoing, &v1::AwaitDurableResponse {}).await
            }
            "Scale" => tell(outgoing, &self.scale(one(incoming).await?)?).await,
            "StepBack" => tell(outgoing, &self.step_back(one(incoming).await?).await?).await,
            "Leave" => {
                let v1::LeaveRequest { rank, incarnation, .. } = one(incoming).await?;
                let incarnation = wire::incarnation_from_wire(incarnation)?;
                self.with(|instance| Ok(instance.machine.leave(Rank(rank), incarnation)?))?;
                self.moved();
                tell(outgoing, &v1::LeaveResponse {}).await
            }
            other => Err(internal(other)),
        }
    }

    fn describe(&self) -> Result<v1::DescribeResponse, Fault> {
        self.with(|instance| {
            let rank = |of: longshore_engine::step::RankProgress| v1::RankStatus {
                rank: of.rank.0,
                incarnation: of.incarnation.map_or(0, |incarnation| incarnation.0),
                left: of.left,
                last_step: of.last_step.0,
                transport: if of.incarnation.is_some() { "tcp".into() } else { String::new() },
                joined_at: of.joined_at.0,
                watches: of
                    .incarnation
                    .is_some_and(|process| instance.watches.contains_key(&(of.rank, process.0))),
            };
            let placement = instance.machine.placement();
            let is_changed = placement.epoch > Epoch(1) || instance.wanted.asked_micros > 0;
            let scaling = v1::Scaling {
                wanted: instance.wanted.servers.clone(),
                lost: instance.wanted.lost.iter().map(|server| server.0).collect(),
                asked_micros: instance.wanted.asked_micros,
                epoch: placement.epoch.0,
                awaited_shards: instance.machine.lacking() as u32,
                ..Default::default()
            };
            let tier = self.tier().number();
            Ok(v1::DescribeResponse {
                server: lock(&self.disk).server.0,
                tier,
                placement: Some(placement.to_wire()),
                scaling: is_changed.then_some(scaling),
                progress: Some(progress(&instance.machine)),
                ranks: instance.machine.ranks().into_iter().map(rank).collect(),
                waiting_for: instance.machine.waiting_for().unwrap_or_default(),
                ..Default::default()
            })
        })
    }

    async fn join(self: &Arc<Self>, request: v1::JoinRequest) -> Result<v1::JoinResponse, Fault> {
        let (rank, incarnation) = (Rank(request.rank), wire::incarnation_from_wire(request.incarnation)?);
        if !self.oracle.has(Plant::FenceWithoutEffect) {
            self.with(|instance| Ok(instance.machine.fence(rank, incarnation)?))?;
        }
        self.acts(rank, incarnation);
        self.moved();
        if request.fence_only {
            self.keep_joined().await?;
            self.promise(rank, incarnation);
            let progress = self.with(|instance| Ok(progress(&instance.machine)))?;
            self.note(|| format!("{rank} fenced by {incarnation} at {}", progress.version));
            let tier = self.tier().number();
            return Ok(v1::JoinResponse { progress: Some(progress), tier, ..Default::default() });
        }
        let is_ignored = rank != Rank(0) && self.oracle.has(Plant::WorldSizeIgnored);
        let world_size = Some(request.world_size).filter(|&world_size| world_size != 0 && !is_ignored);
        let check = |instance: &mut Instance| {
            let progress = progress(&instance.machine);
            let ranks = instance.machine.world_size();
            let joined = instance.machine.join(rank, incarnation, world_size)?;
            let world_size = instance.machine.world_size();
            if world_size != ranks {
                let decided = instance.machine.version();
                instance.held.retain(|&(_, step, ..), _| step.version() <= decided);
                instance.sums.retain(|&(_, step), _| step.version() <= decided);
            }
            Ok(joined.then_some(v1::JobProgress { world_size, ..progress }))
        };
        let mut progress = self.until(PATIENCE, check).await?;
        self.moved();
        self.keep_joined().await?;
        self.promise(rank, incarnation);
        if self.oracle.has(Plant::JoinAnswersLate) {
            progress = self.with(|instance| Ok(self::progress(&instance.machine)))?;
        }
        self.note(|| format!("{rank} joined as {incarnation} at {}", progress.version));
        let is_late = self.oracle.has(Plant::JoinAnswersLate);
        let said = |joined: Joined| if is_late { progress.version } else { joined.at.0 };
        let joined_at = self.with(|instance| Ok(instance.machine.joined(rank).map(said)))?;
        Ok(v1::JoinResponse { progress: Some(progress), memfd: None, joined_at, tier: self.tier().number() })
    }

    async fn until_durable(&self, version: Version, patience: Duration) -> Result<(), Fault> {
        if !self.is_durable_later() || self.oracle.has(Plant::DurableAtOnce) {
            return self.with(|_| Ok(()));
        }
        self.until(patience, |instance| Ok((instance.durable >= version).then_some(()))).await
    }

    async fn commit(self: &Arc<Self>, request: v1::CommitRequest) -> Result<v1::CommitResponse, Fault> {
        let mut commit = Commit::from_wire(request.commit)?;
        if self.oracle.has(Plant::ChangeForgotten) && self.sim.one_in(20) {
            commit.placement = None;
        }
        if let Some(change) = commit.placement.as_mut().filter(|_| self.oracle.has(Plant::LossForgotten)) {
            change.lost.clear();
        }
        let has_lost = commit.placement.as_ref().is_some_and(|change| !change.lost.is_empty());
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let step = commit.step;
        if let Some(report) = request.report.as_ref().filter(|report| !report.scaling.is_empty()) {
            self.note(|| format!("{step}: in the way is {}", report.scaling));
        }
        let current = self.with(|instance| Ok(instance.machine.version()))?;
        self.until_durable(Version(step.0.saturating_sub(1)).min(current), PATIENCE).await?;
        let origin =
            if self.oracle.has(Plant::OriginIgnored) { Origin::UNKNOWN } else { Origin(request.origin) };
        let duplicate = self.with(|instance| {
            let before = instance.machine.version();
            let durable = instance.durable;
            let lags = self.is_durable_later() && durable < before && !self.oracle.has(Plant::DurableAtOnce);
            if lags && step == before.next_step() {
                return Err(Refusal::NotDurable { step, durable }.into());
            }
            if step == before.next_step()
                && commit.decided_by == incarnation
                && instance.machine.check_rank_zero(incarnation).is_ok()
                && let Some(missing) = instance.machine.owed(step)
            {
                return Err(Refusal::CommitOwed { step, missing }.into());
            }
            let decided_by = commit.decided_by;
            let change = commit.placement.clone();
            if let Some(change) = change.as_ref().filter(|_| step == before.next_step()) {
                instance.machine.placement().check(change, step)?;
            }
            let work = match instance.machine.commit(incarnation, commit, origin) {
                Err(Refusal::CommitIncomplete { .. }) if self.oracle.has(Plant::ReplicaUnawaited) => {
                    return Ok(true);
                }
                work => work?,
            };
            instance.works.extend(work);
            if has_lost && !self.oracle.has(Plant::LossKept) {
                let Instance { wanted, machine, .. } = &mut *instance;
                wanted.forget_losses(machine.placement());
                let works = machine.lose(wanted.lost.clone());
                instance.works.extend(works);
            }
            self.lend(instance);
            self.fetch_awaited(instance);
            let duplicate = instance.machine.version() == before;
            if !duplicate {
                self.note(|| format!("{step} is decided by {decided_by}"));
                if let Some(change) = change {
                    self.note(|| format!("{step} changes the placement: {change:?}"));
                }
                self.acts(Rank(0), incarnation);
            }
            Ok(duplicate)
        })?;
        self.moved();
        Ok(v1::CommitResponse { duplicate })
    }

    async fn step_back(
        self: &Arc<Self>,
        request: v1::StepBackRequest,
    ) -> Result<v1::StepBackResponse, Fault> {
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let (version, decided_by) = (Version(request.version), Incarnation(request.decided_by));
        let there = self.with(|instance| {
            let machine = &mut instance.machine;
            let newest = machine.incarnation(Rank(0));
            let leads = |current: Incarnation| instance.watches.contains_key(&(Rank(0), current.0));
            if newest.is_some_and(|current| current < incarnation && leads(current)) {
                return Err(Fault::new(FaultKind::Precondition, "job.phase", "trained", "without", "stop"));
            }
            machine.check_newest(Rank(0), incarnation)?;
            let current = machine.version();
            let there = version == current;
            if !there && (version.0 + 1 != current.0 || !self.is_durable_later()) {
                return Err(Fault::new(FaultKind::Precondition, "version", version.0, current, "read again"));
            }
            let found = machine.decided_by(current);
            let is_bound = !self.oracle.has(Plant::StepBackUnbound);
            if !there && is_bound && decided_by != Incarnation::default() && found != decided_by {
                return Err(Fault::new(
                    FaultKind::Conflict,
                    "decided_by",
                    decided_by.0,
                    found.0,
                    "read again",
                ));
            }
            if !there && found >= incarnation {
                self.oracle.fail(format!("{incarnation} takes {current} back, which {found} has decided"));
            }
            machine.fence(Rank(0), incarnation)?;
            Ok(there)
        })?;
        if !there && !self.oracle.has(Plant::StepBackWithoutEffect) {
            self.keep_joined().await?;
            let saved = lock(&self.disk).saved.iter().any(|saved| saved.record.version == version);
            if !saved {
                return Err(Fault::new(FaultKind::Precondition, "version", version.0, "kept", "restore"));
            }
            self.note(|| format!("steps back to {version}"));
            *self.instance() = None;
            self.moved();
            let recovers = Arc::clone(self);
            self.sim.spawn(self.process, async move { recovers.recover(Some(version)).await });
            let mut changed = self.changed.subscribe();
            while self.instance().is_none() {
                _ = changed.changed().await;
            }
        }
        let progress = self.with(|instance| Ok(progress(&instance.machine)))?;
        Ok(v1::StepBackResponse { progress: Some(progress) })
    }

    async fn push(&self, incoming: &mut Incoming, outgoing: &Outgoing) -> Result<(), Fault> {
        let life = self.with(|instance| Ok(instance.life))?;
        let mut changed = self.changed.subscribe();
        let mut sender = None;
        loop {
            let is_cut = |instance: &Instance| {
                let of = sender.is_some_and(|(rank, process)| instance.machine.must_rejoin(rank, process));
                instance.life != life || of
            };
            let request = tokio::select! {
                biased;
                request = incoming.next::<v1::PushRequest>() => request.map_err(broken)?,
                // An idle worker must learn that the server may need its gradients again, so the stream ends.
                _ = changed.wait_for(|_| self.instance().as_ref().is_none_or(is_cut)) => {
                    return Err(recovering());
                }
            };
            let Some(request) = request else { return Ok(()) };
            sender = Some((Rank(request.rank), Incarnation(request.incarnation)));
            let outcome = self.receive(&request).await;
            let fate = outcome.as_ref().ok().copied();
            let result = v1::PushResult {
                step: request.step,
                micro_step: request.micro_step,
                shard: request.shard,
                chunk: request.chunk,
                duplicate: fate == Some(Admission::Duplicate),
                superseded: fate == Some(Admission::Superseded),
                decided: fate == Some(Admission::Decided),
                refusal: outcome.err().map(|fault| {
                    self.note(|| format!("a chunk of rank {} refused: {fault}", request.rank));
                    wire::fault_to_wire(&fault)
                }),
            };
            if !outgoing.send(&v1::PushResponse { results: vec![result] }).await {
                return Ok(());
            }
        }
    }

    async fn receive(&self, request: &v1::PushRequest) -> Result<Admission<()>, Fault> {
        let chunk = wire::chunk_from_wire(request, request.payload.len() as u64)?;
        let shard = chunk.contribution.shard;
        let check = |instance: &mut Instance| {
            let admitted = instance.machine.admit(&chunk)?;
            Ok(Some(admitted).filter(|admitted| !matches!(admitted, Admission::Busy)))
        };
        let admitted = self.until(PATIENCE, check).await?;
        let Admission::New(ticket) = admitted else { return Ok(admitted.and_then(|_| Admission::New(()))) };
        if self.oracle.has(Plant::AcknowledgedUnstored) && self.sim.one_in(40) {
            self.with(|instance| {
                instance.machine.abandoned(ticket);
                Ok(())
            })?;
            return Ok(Admission::New(()));
        }
        // Other calls are served while the payload arrives.
        let time = self.sim.part_of(Duration::from_micros(500));
        self.sim.sleep(time).await;
        let is_whole = crc32(&request.payload) == chunk.crc32;
        let gradient = number(&request.payload);
        self.with(|instance| {
            if instance.machine.check_rank(chunk.contribution.rank, chunk.incarnation).is_err() || !is_whole {
                instance.machine.abandoned(ticket);
                instance.machine.check_rank(chunk.contribution.rank, chunk.incarnation)?;
                return Err(Fault::new(FaultKind::Corrupt, "push.crc32", "other", "equal", "send again"));
            }
            let contribution = chunk.contribution;
            let (owned, contributor) = (ticket.owned.index(), ticket.contributor.index());
            let key = (owned, contribution.step, contribution.micro_step.0, contributor);
            instance.held.insert(key, gradient);
            let work = instance.machine.stored(ticket);
            instance.works.extend(work);
            Ok(())
        })
        .inspect_err(|_| self.moved())?;
        self.acts(chunk.contribution.rank, chunk.incarnation);
        self.note(|| format!("has {} of {} ({gradient:x})", chunk.contribution, shard));
        self.moved();
        Ok(Admission::New(()))
    }

    async fn pull(&self, request: v1::PullRequest, outgoing: &Outgoing) -> Result<(), Fault> {
        let (version, patience) = (Version(request.version), wire::deadline(request.deadline_ms)?);
        for slice in &request.slices {
            let shard = ShardId(slice.shard);
            let check = |instance: &mut Instance| {
                let is_early = self.oracle.has(Plant::PullTooEarly) && instance.machine.version() >= version;
                let owned = instance.machine.owned_index(shard)?;
                if !instance.machine.check_pull(owned, version)? && !is_early {
                    return Ok(None);
                }
                let state = instance.state[owned.index()].get(&version);
                let any = self.oracle.has(Plant::PullOfAnyVersion) || is_early;
                match state.or(instance.state[owned.index()].values().next_back().filter(|_| any)) {
                    Some(&state) => Ok(Some((state, instance.machine.decided_by(version)))),
                    None => Err(Fault::new(FaultKind::NotFound, "version", version.0, "kept", "join again")),
                }
            };
            let (state, decided_by) = self.until(patience, check).await?;
            let payload = self.oracle.payload(shard, state);
            let payload =
                payload.slice(slice.offset as usize * 2..(slice.offset + slice.elements) as usize * 2);
            let answer = v1::PullResponse {
                shard: slice.shard,
                offset: slice.offset,
                crc32: crc32(&payload),
                decided_by: decided_by.0,
                payload,
                ..Default::default()
            };
            if !outgoing.send(&answer).await {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn stats(&self, request: v1::StatsRequest, outgoing: &Outgoing) -> Result<(), Fault> {
        let (step, patience) = (Step(request.step), wire::deadline(request.deadline_ms)?);
        let asked = |instance: &mut Instance| {
            instance.machine.check_stats(step)?;
            let indexed = (0..).map(OwnedShard).zip(instance.owned.iter().copied());
            Ok(indexed.filter(|(owned, _)| instance.machine.owns(*owned, step)).collect::<Vec<_>>())
        };
        for (owned, shard) in self.with(asked)?.into_iter().rev() {
            let check = |instance: &mut Instance| {
                instance.machine.check_stats(step)?;
                // After a decision on a move or a loss, this server may no longer own the shard.
                if !instance.machine.owns(owned, step) {
                    return Ok(Some(None));
                }
                let is_early = self.oracle.has(Plant::StatsTooEarly)
                    || self.oracle.has(Plant::ReplicaUnawaited) && !instance.machine.answers_for(owned, step);
                let is_there = is_early || instance.machine.is_complete(owned, step);
                Ok(is_there.then(|| Some(instance.machine.origin(owned, step))))
            };
            let Some(origin) = self.until(patience, check).await? else { continue };
            let first_nonfinite = self.oracle.overflows(step, shard).then_some(0);
            let block = v1::BlockStats { sum_squares: 1.0, first_nonfinite };
            let blocks = self.layout().shard_blocks(shard).map(|_| block).collect();
            let stats = v1::ShardStats {
                shard: shard.0,
                blocks,
                origin: origin.0,
                left_out: Vec::new(),
                broken: Vec::new(),
            };
            if !outgoing.send(&stats).await {
                return Ok(());
            }
        }
        Ok(())
    }

    async fn watch(&self, request: v1::WatchRequest, outgoing: &Outgoing) -> Result<(), Fault> {
        let process = (Rank(request.rank), request.incarnation);
        self.with(|instance| {
            *instance.watches.entry(process).or_default() += 1;
            Ok(())
        })?;
        let ended = tokio::select! {
            biased;
            ended = self.tell_commits(Step(request.after_step), outgoing) => ended,
            () = outgoing.closed() => Ok(()),
        };
        _ = self.with(|instance| {
            if let Some(count) = instance.watches.get_mut(&process) {
                *count -= 1;
                if *count == 0 {
                    instance.watches.remove(&process);
                }
            }
            Ok(())
        });
        ended
    }

    async fn tell_commits(&self, mut after: Step, outgoing: &Outgoing) -> Result<(), Fault> {
        let mut told = 0;
        loop {
            let check = |instance: &mut Instance| {
                let news = instance.machine.commits_after(after);
                let forgotten =
                    || Fault::new(FaultKind::NotFound, "after_step", after.0, "kept", "join again");
                let wanted = Some(&instance.wanted).filter(|wanted| wanted.words > told).cloned();
                let news = (news.ok_or_else(forgotten)?, wanted);
                Ok(Some(news).filter(|(commits, wanted)| !commits.is_empty() || wanted.is_some()))
            };
            let (commits, wanted) = self.until(Duration::from_secs(100_000), check).await?;
            if let Some(wanted) = wanted {
                told = wanted.words;
                let Wanted { servers, asked_micros, max_exposed, tier, lost, .. } = wanted;
                let tier = tier.map_or(0, TierKind::number);
                let lost = lost.into_iter().map(|server| server.0).collect();
                let wanted = v1::Wanted { servers, asked_micros, lost, max_exposed, tier };
                let event = Some(v1::event::Event::Wanted(wanted));
                if !outgoing.send(&v1::Event { event }).await {
                    return Ok(());
                }
            }
            for commit in commits {
                after = commit.step;
                if self.oracle.has(Plant::WatchSkipsCommit) && self.sim.one_in(20) {
                    continue;
                }
                let event = Some(v1::event::Event::Commit(commit.to_wire()));
                if !outgoing.send(&v1::Event { event }).await {
                    return Ok(());
                }
            }
        }
    }
}

async fn one<M: Message + Default>(incoming: &mut Incoming) -> Result<M, Fault> {
    incoming.next().await.map_err(broken)?.ok_or_else(|| internal("a call without a message"))
}

async fn tell(outgoing: &Outgoing, message: &impl Message) -> Result<(), Fault> {
    outgoing.send(message).await;
    Ok(())
}

fn joined(machine: &Machine, ranks: u32) -> Vec<Option<Joined>> {
    (0..ranks).map(|rank| machine.joined(Rank(rank))).collect()
}

fn progress(machine: &Machine) -> v1::JobProgress {
    let progress = machine.progress();
    let phase = match progress.phase {
        Phase::Loading => v1::Phase::Loading,
        Phase::Training => v1::Phase::Training,
        Phase::Paused { .. } => v1::Phase::Paused,
    };
    v1::JobProgress {
        phase: phase.into(),
        version: progress.version.0,
        applied: progress.applied,
        last_commit: progress.last_commit.map(|commit| commit.to_wire()),
        world_size: progress.world_size,
        ..Default::default()
    }
}
