//! A simulated server's part in a change of servers. The server takes over a running job, fetches shards from their
//! previous owners, and frees shards that others own now.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use longshore_engine::{
    ids::OwnedShard,
    record::{Joined, Record},
    step::{Awaited, Phase},
};
use longshore_proto::{
    Commit, Epoch, Fault, FaultKind, Incarnation, Placement, Rank, ServerId, ShardId, TierKind, Version,
    checksum::crc32,
};
use longshore_wire::{
    self as wire, Wire, fault_from_status,
    v1::{self, tensors_client::TensorsClient},
};

use super::{Instance, PATIENCE, Saved, Server, joined, progress, recovering, tell};
use crate::{
    grpc::Outgoing,
    host::lock,
    network::connect,
    oracle::{Plant, number},
};

/// Pause before a failed fetch is repeated.
const PAUSE: Duration = Duration::from_millis(100);
/// Longest wait for an answer to a fetch.
const SILENCE: Duration = Duration::from_secs(20);

impl Server {
    /// Returns version and placement, from memory or else from the drive. None where the server is not in the job.
    pub(crate) fn placement(&self) -> Option<(Version, Placement)> {
        let instance = self.instance();
        if self.sim.is_dead(self.process) && !self.is_durable_later() {
            return None;
        }
        if instance.is_none() || self.sim.is_dead(self.process) {
            let disk = lock(&self.disk);
            let Record { version, placement, .. } = disk.saved.last()?.record.clone();
            return Some((version, placement.unwrap_or_else(|| disk.opened.clone())));
        }
        let machine = &instance.as_ref()?.machine;
        machine.check_not_loading().is_ok().then(|| (machine.version(), machine.placement().clone()))
    }

    /// Returns the newest process of a rank that has joined or fenced here.
    pub(crate) fn incarnation(&self, rank: usize) -> Option<Incarnation> {
        self.instance().as_ref()?.machine.incarnation(Rank(rank as u32))
    }

    /// Returns the version at which a process has joined here.
    pub(crate) fn joined_at(&self, rank: Rank, incarnation: Incarnation) -> Option<Version> {
        let of = self.instance().as_ref()?.machine.joined(rank)?;
        (of.incarnation == incarnation && !of.fence_only).then_some(of.at)
    }

    pub(super) fn open(self: &Arc<Self>, request: v1::OpenJobRequest) -> Result<v1::OpenJobResponse, Fault> {
        let (placement, server) = (Placement::from_wire(request.placement)?, ServerId(request.server));
        let tier = request.spec.and_then(|spec| TierKind::from_number(spec.tier));
        let wants = placement.owned(server);
        if self.is_witness && !placement.held(server).is_empty() {
            self.oracle.fail(format!("a witness gets {} shards", placement.held(server).len()));
        }
        let is_open = match &*self.instance() {
            None if request.is_there || !lock(&self.disk).saved.is_empty() => return Err(self.absent()),
            None if !request.is_new => {
                return Err(Fault::new(
                    FaultKind::Precondition,
                    "job",
                    "moved",
                    "on its servers",
                    "name those",
                ));
            }
            None => false,
            Some(of) => {
                let is_spare = lock(&self.disk).opened.epoch > Epoch(1) && of.machine.is_without_shards();
                let is_other = {
                    let disk = lock(&self.disk);
                    disk.server != server || disk.tier != tier || disk.opened.owned(server) != wants
                };
                if request.is_new && is_spare {
                    of.machine.check_newest(Rank(0), Incarnation(request.incarnation))?;
                }
                !(request.is_new && is_spare && is_other)
            }
        };
        if !is_open {
            self.begin_anew(placement, server, tier);
        }
        self.with(|instance| {
            if request.is_new {
                instance.machine.fence(Rank(0), Incarnation(request.incarnation))?;
            }
            let (progress, world_size) = (Some(progress(&instance.machine)), self.spec().world_size);
            Ok(v1::OpenJobResponse { created: !is_open, progress, world_size })
        })
    }

    /// Makes room for a running job that this server is not in yet.
    fn begin_anew(self: &Arc<Self>, placement: Placement, server: ServerId, tier: Option<TierKind>) {
        let state = vec![BTreeMap::new(); self.layout().shards() as usize];
        {
            let mut disk = lock(&self.disk);
            let joined = vec![None; self.spec().world_size as usize];
            (disk.server, disk.tier, disk.opened, disk.joined) = (server, tier, placement.clone(), joined);
            disk.saved.clear();
            disk.promised.clear();
        }
        self.note(|| format!("is opened as {server}, in tier {}", self.tier()));
        let machine = self.machine(placement, server);
        let instance = Instance::new(self.sim.random(), machine, state, Version(0));
        let life = instance.life;
        *self.instance() = Some(instance);
        self.moved();
        let computes = Arc::clone(self);
        self.sim.spawn(self.process, async move { computes.compute(life, Version(0)).await });
    }

    /// Takes another placement of the current version. Writes it to the drive, with all fetched states.
    async fn place(self: &Arc<Self>, request: v1::BeginRequest) -> Result<v1::BeginResponse, Fault> {
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let placement = Placement::from_wire(request.placement)?;
        let version = Version(request.progress.map_or(0, |progress| progress.version));
        let epoch = placement.epoch;
        if self.is_durable_later() {
            self.sim.write(Duration::from_millis(10)).await;
        }
        let check = |instance: &mut Instance| {
            let is_late = self.is_durable_later() && instance.durable < instance.machine.version();
            if *instance.machine.placement() == placement {
                return Ok(Some(instance.machine.check_rank_zero(incarnation)?));
            }
            if is_late || !instance.machine.place(incarnation, version, placement.clone())? {
                return Ok(None);
            }
            instance.held.retain(|&(_, step, ..), _| step.version() <= version);
            instance.sums.retain(|&(_, step), _| step.version() <= version);
            let saved = Saved { record: instance.machine.record(), state: instance.state.clone() };
            let mut disk = lock(&self.disk);
            disk.joined = joined(&instance.machine, self.spec().world_size);
            if !self.oracle.has(Plant::PlacementUnkept) {
                disk.saved.pop();
                disk.saved.push(saved);
            }
            self.fetch_awaited(instance);
            Ok(Some(()))
        };
        self.until(PATIENCE, check).await?;
        self.acts(Rank(0), incarnation);
        self.note(|| format!("takes the placement of {epoch} at {version}"));
        self.moved();
        Ok(v1::BeginResponse {})
    }

    pub(super) async fn begin(
        self: &Arc<Self>,
        request: v1::BeginRequest,
    ) -> Result<v1::BeginResponse, Fault> {
        if request.takes_part {
            return self.place(request).await;
        }
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let placement = Placement::from_wire(request.placement)?;
        let progress = request.progress.ok_or_else(|| wire::missing("progress"))?;
        let commit = progress.last_commit.map(|commit| Commit::from_wire(Some(commit))).transpose()?;
        let record = Record::new(Version(progress.version), progress.applied, commit);
        let most = self.spec().world_size;
        let world_size = if progress.world_size < most { progress.world_size } else { 0 };
        let mut ranks = vec![None; most as usize];
        for member in request.ranks {
            let incarnation = wire::incarnation_from_wire(member.incarnation)?;
            let (at, fence_only) = (Version(member.joined_at), member.rank != 0);
            ranks[member.rank as usize] = Some(Joined { incarnation, at, fence_only, world_size });
        }
        let life = self.with(|instance| {
            instance.machine.begin_without_shards(incarnation, placement, record, &ranks)?;
            Ok(instance.life)
        })?;
        let time = self.sim.part_of(Duration::from_millis(20));
        self.sim.sleep(time).await;
        {
            let mut instance = self.instance();
            let instance = self.living(&mut instance, life).ok_or_else(|| self.absent())?;
            let record = instance.machine.record();
            instance.durable = record.version;
            let mut disk = lock(&self.disk);
            disk.joined = joined(&instance.machine, self.spec().world_size);
            disk.saved = vec![Saved { record, state: instance.state.clone() }];
        }
        self.note(|| format!("takes part from {} on", progress.version));
        self.moved();
        Ok(v1::BeginResponse {})
    }

    pub(super) fn retire(&self, request: &v1::RetireRequest) -> Result<v1::RetireResponse, Fault> {
        let incarnation = wire::incarnation_from_wire(request.incarnation)?;
        let server = lock(&self.disk).server;
        self.with(|instance| {
            if *instance.machine.phase() == Phase::Loading {
                instance.machine.fence(Rank(0), incarnation)?;
                return Ok(());
            }
            let ours = instance.machine.placement().clone();
            let newest = request.placement.clone().map(|of| Placement::from_wire(Some(of))).transpose()?;
            let is_out = |of: &Placement| of.servers.get(server.0 as usize).is_some_and(String::is_empty);
            let newest = newest.filter(|newest| newest.epoch > ours.epoch && is_out(newest));
            let is_lost = newest.is_some();
            if newest.unwrap_or(ours).members().any(|member| member == server) {
                return Err(Fault::new(FaultKind::Precondition, "server", server, "left", "scale"));
            }
            match is_lost {
                true => _ = instance.machine.fence(Rank(0), incarnation)?,
                false => instance.machine.check_rank(Rank(0), incarnation)?,
            }
            Ok(())
        })?;
        lock(&self.disk).saved.clear();
        *self.instance() = None;
        self.note(|| "gives the job up".into());
        self.moved();
        Ok(v1::RetireResponse {})
    }

    pub(super) async fn send_handed(
        &self,
        request: v1::FetchRequest,
        outgoing: &Outgoing,
    ) -> Result<(), Fault> {
        let (shard, version) = (ShardId(request.shard), Version(request.version));
        if request.arrived {
            self.arrived(shard, version)?;
            return Ok(());
        }
        let older = version.0.checked_sub(1).map(Version);
        let check = |instance: &mut Instance| {
            let owned = instance.machine.owned_index(shard)?;
            let state = &instance.state[owned.index()];
            let before = older.and_then(|older| state.get(&older).copied());
            if self.oracle.has(Plant::FetchTooEarly) || self.oracle.has(Plant::LentUnawaited) {
                return Ok(state.values().next_back().map(|&state| (state, before)));
            }
            if !instance.machine.check_fetch(owned, version)? {
                return Ok(None);
            }
            let lost =
                || Fault::new(FaultKind::NotFound, "version", version, "kept for its next owner", "restore");
            state.get(&version).map(|&state| Some((state, before))).ok_or_else(lost)
        };
        let (state, before) = self.until(PATIENCE, check).await?;
        let before = before.filter(|_| !self.oracle.has(Plant::OlderUnsent)).map(u64::to_le_bytes);
        let payload: Vec<u8> = state.to_le_bytes().into_iter().chain(before.into_iter().flatten()).collect();
        let crc32 = crc32(&payload);
        tell(outgoing, &v1::FetchResponse { array: 0, offset: 0, crc32, payload: payload.into() }).await
    }

    /// Starts a task that fetches the shards that the machine awaits, unless one runs already.
    pub(super) fn fetch_awaited(self: &Arc<Self>, instance: &mut Instance) {
        if instance.machine.awaited().is_empty() || instance.is_fetching {
            return;
        }
        instance.is_fetching = true;
        let (fetches, life) = (Arc::clone(self), instance.life);
        self.sim.spawn(self.process, async move { fetches.fetch_all(life).await });
    }

    async fn fetch_all(&self, life: u64) {
        loop {
            let first = match self.living(&mut self.instance(), life) {
                Some(instance) => {
                    let first = instance.machine.awaited().into_iter().next();
                    instance.is_fetching = first.is_some();
                    first
                }
                None => return,
            };
            let Some(awaited) = first else { return };
            match self.fetch(&awaited).await {
                Ok(state) => {
                    if !self.has_fetched(life, &awaited, state) {
                        return;
                    }
                    if awaited.is_replica {
                        self.say_arrived(&awaited).await;
                    }
                }
                Err(fault) => {
                    self.note(|| format!("cannot fetch {}: {fault}", awaited.shard));
                    self.sim.sleep(PAUSE).await;
                }
            }
        }
    }

    /// Takes the state of an awaited shard. Returns false if the job was opened again since.
    fn has_fetched(&self, life: u64, awaited: &Awaited, (state, before): (u64, Option<u64>)) -> bool {
        let mut instance = self.instance();
        let Some(instance) = self.living(&mut instance, life) else { return false };
        let Ok(owned) = instance.machine.owned_index(awaited.shard) else { return false };
        if !instance.machine.awaits(owned, awaited.version) {
            return true;
        }
        let older = before.map(|before| (Version(awaited.version.0 - 1), before));
        instance.state[owned.index()] = older.into_iter().chain([(awaited.version, state)]).collect();
        let works = instance.machine.fetched(owned, awaited.version);
        instance.works.extend(works);
        let Awaited { shard, version, source, .. } = awaited;
        self.note(|| format!("has {version} of {shard} from {source} ({state:x})"));
        self.moved();
        true
    }

    /// Returns the state of an awaited shard, and the state of the version before.
    async fn fetch(&self, awaited: &Awaited) -> Result<(u64, Option<u64>), Fault> {
        let fetch = self.ask(awaited, false);
        let silent = || Fault::new(FaultKind::Deadline, "fetch", awaited.shard, "sent in time", "ask again");
        tokio::pin!(fetch);
        tokio::select! {
            biased;
            part = &mut fetch => {
                let part = part?.ok_or_else(silent)?.payload;
                Ok((number(&part[..8]), (part.len() > 8).then(|| number(&part[8..]))))
            }
            () = self.sim.sleep(SILENCE) => Err(silent()),
        }
    }

    /// Calls the previous owner of an awaited shard. With `arrived` the call says that the state is here.
    async fn ask(&self, awaited: &Awaited, arrived: bool) -> Result<Option<v1::FetchResponse>, Fault> {
        let request = v1::FetchRequest {
            job: self.spec().name.to_string(),
            shard: awaited.shard.0,
            version: awaited.version.0,
            deadline_ms: PATIENCE.as_millis() as u64,
            arrived,
        };
        let mut client = TensorsClient::new(connect(&self.sim, self.process, &awaited.address));
        let asked = async { client.fetch(request).await?.into_inner().message().await };
        asked.await.map_err(|status| fault_from_status(&status, &awaited.address))
    }

    /// Tells the owner that its new replica has the state. Repeats that until the owner answers or has left the job.
    async fn say_arrived(&self, awaited: &Awaited) {
        loop {
            let fault = tokio::select! {
                biased;
                told = self.ask(awaited, true) => told.err(),
                () = self.sim.sleep(SILENCE) => Some(recovering()),
            };
            let passes = |fault: &Fault| matches!(fault.kind, FaultKind::Unavailable | FaultKind::Deadline);
            let is_member = self.with(|instance| {
                Ok(instance.machine.placement().members().any(|server| server == awaited.source))
            });
            if !fault.as_ref().is_some_and(passes) || !is_member.unwrap_or(false) {
                return;
            }
            self.sim.sleep(PAUSE).await;
        }
    }

    /// Frees the state of shards that other servers own now.
    pub(super) fn free_handed(&self, instance: &mut Instance) {
        if self.oracle.has(Plant::FreedAtOnce) {
            let placement = instance.machine.placement().clone();
            let server = lock(&self.disk).server;
            let next = instance.machine.version().next_step();
            for owned in 0..instance.owned.len() {
                let is_made = !instance.machine.owns(OwnedShard(owned), next);
                if is_made && placement.owner(instance.owned[owned]) != server {
                    instance.state[owned].clear();
                }
            }
        }
        for owned in instance.machine.handed() {
            if instance.machine.forget(owned) {
                instance.state[owned.index()].clear();
            }
        }
    }
}
