//! Shards move between servers at any step, and servers are lost whose shards have replicas. The bits must be those of
//! a server that keeps all shards.

use std::{collections::BTreeMap, os::unix::fs::MetadataExt, path::Path};

use longshore_engine::{
    admission::Need,
    kernels::Isa,
    step::Awaited,
    tier::{Spill, Storage},
};
use longshore_proto::{
    Commit, Correction, Dtype, Epoch, FaultKind, Formats, JobSpec, MasterFormat, NO_SERVER, Partition,
    PlacementChange, ServerId, ShardId, Slice, StateFormat, Step, TierKind, Version,
};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::common::{
    BLOCK, Noise, cases,
    cluster::{Cluster, compute, soon},
    commit, gradient, spec, weights,
};

const STEPS: u64 = 24;
const TMPFS: &str = "/dev/shm";
/// Runs for each run on a real drive. A flush takes 4 ms there, so the other runs are on a tmpfs.
const ON_A_DRIVE: u64 = 8;
/// Bytes beyond the arrays: a server's header, and parts of pages that arrays do not fill.
const SLACK: u64 = 128 << 10;

/// Returns a job of some small shards. In some jobs one shard is frozen.
fn random_spec(noise: &mut Noise) -> JobSpec {
    let mut spec = spec(&[3 * BLOCK as u64, 2 * BLOCK as u64 - 100, BLOCK as u64], &[0, 0, 0]);
    spec.world_size = 1 + noise.below(2) as u32;
    spec.micro_steps = 1 + noise.below(2) as u32;
    spec.max_delay = noise.below(2) as u32;
    spec.gradient_dtype = noise.pick(&[Dtype::F32, Dtype::Bf16]);
    spec.formats = Formats {
        state: noise.pick(&[StateFormat::F32, StateFormat::Bf16, StateFormat::Block8]),
        master: noise.pick(&[MasterFormat::F32, MasterFormat::Bf16]),
        seed: 7,
    };
    if noise.one_in(3) {
        spec.partitions = vec![Partition::whole(spec.world_size), Partition::frozen(2)];
    }
    spec
}

/// Returns a server's storage: a folder of its own, or none in tier `memory`.
fn storage(noise: &mut Noise, homes: &BTreeMap<TierKind, TempDir>, tier: TierKind, server: usize) -> Storage {
    let Some(home) = homes.get(&tier) else { return Storage::default() };
    let dir = home.path().join(server.to_string());
    std::fs::create_dir_all(&dir).unwrap();
    if tier == TierKind::Shm {
        return Storage { shm_dir: Some(dir), ..Storage::default() };
    }
    let resident_bytes = noise.pick(&[0, 3 << 20, 1 << 30]);
    let spill = noise.pick(&[Spill::State, Spill::All]);
    Storage { dirs: vec![dir], resident_bytes, buffers: 1 + noise.below(3), spill, ..Storage::default() }
}

/// Returns the bytes that the files below a folder take.
fn taken(path: &Path) -> u64 {
    let found = std::fs::symlink_metadata(path).unwrap();
    if !found.is_dir() {
        return found.blocks() * 512;
    }
    std::fs::read_dir(path).unwrap().map(|entry| taken(&entry.unwrap().path())).sum()
}

/// A cluster whose shards move, and a single server that keeps all shards of the same job.
struct Moving {
    noise: Noise,
    /// The parent folder of each tier's state. Tier `memory` has none.
    homes: BTreeMap<TierKind, TempDir>,
    /// True if new servers may keep the job in another tier.
    mixes: bool,
    moved: Cluster,
    alone: Cluster,
    /// Shards with a flipped bit, each with the server that has it. An entry stays until that server gives the shard
    /// up.
    flipped: BTreeMap<ShardId, ServerId>,
    /// Gradients of the newest steps, which ranks send again to a restarted server.
    flats: BTreeMap<u64, Vec<Vec<u8>>>,
}

impl Moving {
    fn new(seed: u64) -> Moving {
        let mut noise = Noise(seed);
        let spec = random_spec(&mut noise);
        let first = weights(&spec, seed);
        let alone = Cluster::started(&spec, 1, &first);
        let tier = noise.pick(&TierKind::ALL);
        let drive = if seed.is_multiple_of(ON_A_DRIVE) { TempDir::new() } else { TempDir::new_in(TMPFS) };
        let homes = BTreeMap::from([
            (TierKind::Shm, TempDir::new_in(TMPFS).unwrap()),
            (TierKind::Nvme, drive.unwrap()),
        ]);
        let replicas = if tier == TierKind::Memory && noise.one_in(2) { 2 } else { 1 };
        let spec = JobSpec { tier, replicas, ..spec };
        let servers = replicas as usize + noise.below(2);
        let storage = storage(&mut noise, &homes, tier, 0);
        let mut moved = Cluster::try_open(&spec, servers, &compute(2, Isa::detect()), &storage).unwrap();
        (0..spec.world_size).for_each(|rank| moved.join(rank));
        moved.upload(&first);
        let mixes = replicas == 1 && !seed.is_multiple_of(2);
        let (flipped, flats) = (BTreeMap::new(), BTreeMap::new());
        Moving { noise, homes, mixes, moved, alone, flipped, flats }
    }

    /// Chooses a change of the placement for the decision on a step. Opens the server that the change adds.
    fn change(&mut self, step: u64) -> Option<PlacementChange> {
        let mut change =
            PlacementChange { epoch: Epoch(self.moved.placement.epoch.0 + 1), ..Default::default() };
        if self.heal(step, &mut change) {
            return (change.moves.len() + change.replicas.len() > 0).then_some(change);
        }
        if self.moved.spec.replicas > 1 && self.noise.one_in(5) && self.lose(step, &mut change) {
            return Some(change);
        }
        if self.moved.living().count() < 4 && self.noise.one_in(4) {
            self.settle();
            let tier = if self.mixes { self.noise.pick(&TierKind::ALL) } else { self.moved.spec.tier };
            let storage = storage(&mut self.noise, &self.homes, tier, self.moved.jobs.len());
            change.added.push(self.moved.add_server(tier, &storage));
        } else {
            // A shard with a flipped bit does not move, since during a move no other holder has all its versions.
            let flipped = self.flipped.clone();
            let is_whole = |shard: &ShardId| !flipped.contains_key(shard);
            for shard in (0..self.moved.layout.shards()).map(ShardId).filter(is_whole) {
                let to = ServerId(self.noise.below(self.moved.jobs.len()) as u32);
                let to_replica = if self.noise.one_in(4) { NO_SERVER } else { to };
                let moves = PlacementChange { moves: vec![(shard, to)], ..change.clone() };
                let replicates = PlacementChange { replicas: vec![(shard, to_replica)], ..change.clone() };
                let may = |of: &PlacementChange| self.moved.placement.check(of, Step(step)).is_ok();
                let (may_move, may_replicate) = (may(&moves), may(&replicates));
                if may_move && self.noise.one_in(3) {
                    change.moves.push((shard, to));
                } else if may_replicate && self.noise.one_in(2) {
                    change.replicas.push((shard, to_replica));
                }
            }
        }
        let mut target = self.moved.placement.clone();
        target.apply(&change, Step(step), 0);
        for server in self.moved.living() {
            self.moved.jobs[server].make_room(&target.held(ServerId(server as u32)), |_, _| Ok(())).unwrap();
        }
        let is_none = change.added.is_empty() && change.moves.is_empty() && change.replicas.is_empty();
        (!is_none).then_some(change)
    }

    /// Flips a bit of a shard that two servers have.
    fn flip(&mut self) {
        let shard = ShardId(self.noise.below(self.moved.layout.shards() as usize) as u32);
        let holders: Vec<ServerId> = self.moved.placement.holders_at(shard, Step(u64::MAX)).collect();
        let is_awaited =
            |of: usize| self.moved.jobs[of].awaited().iter().any(|awaited| awaited.shard == shard);
        if holders.len() < 2 || self.flipped.contains_key(&shard) || self.moved.living().any(is_awaited) {
            return;
        }
        // A frozen shard's bit flips at its owner, since only pulls find the bit, and pulls ask the owner.
        let of = if self.moved.layout.is_frozen(shard) { 0 } else { self.noise.below(2) };
        let holder = holders[of];
        self.moved.jobs[holder.0 as usize].flip_bit_for_tests(shard, self.noise.below(usize::MAX));
        self.flipped.insert(shard, holder);
    }

    /// Moves broken shards to their other holders, as rank 0 does. Returns false if no shard is broken.
    fn heal(&mut self, step: u64, change: &mut PlacementChange) -> bool {
        let placement = &self.moved.placement;
        self.flipped.retain(|&shard, &mut server| placement.holds(server, shard));
        let mut is_broken = false;
        for server in self.moved.living() {
            let number = ServerId(server as u32);
            for shard in self.moved.jobs[server].broken() {
                if !placement.holds(number, shard) {
                    continue;
                }
                assert_eq!(self.flipped.get(&shard), Some(&number), "{shard}");
                is_broken = true;
                let mut healed = PlacementChange { epoch: change.epoch, ..Default::default() };
                match placement.owner(shard) == number {
                    true => healed.moves.push((shard, placement.replica(shard).unwrap())),
                    false => healed.replicas.push((shard, NO_SERVER)),
                }
                if placement.check(&healed, Step(step)).is_ok() {
                    change.moves.extend(healed.moves);
                    change.replicas.extend(healed.replicas);
                }
            }
        }
        is_broken
    }

    /// Loses a server if other servers have all of its shards. Returns false if none was lost.
    fn lose(&mut self, step: u64, change: &mut PlacementChange) -> bool {
        let server = self.noise.below(self.moved.jobs.len());
        let number = ServerId(server as u32);
        let lost = PlacementChange { lost: vec![number], ..change.clone() };
        // A replica does not count as a holder while its state comes from the lost owner.
        let counts_on = |of: usize| {
            let is_last = |it: &Awaited| {
                let mut holders = self.moved.placement.holders_at(it.shard, Step(u64::MAX));
                it.source == number && holders.all(|holder| holder == number || holder.0 as usize == of)
            };
            self.moved.jobs[of].awaited().iter().any(is_last)
        };
        let may = self.moved.placement.check(&lost, Step(step)).is_ok()
            && self.flipped.is_empty()
            && !self.moved.living().filter(|&of| of != server).any(counts_on);
        if may {
            self.moved.lose(server);
            *change = lost;
            let is_broken = |of: usize| !self.moved.jobs[of].broken().is_empty();
            // A replica may have freed a shard that the next replica owns from this step on only.
            let is_on_its_way = self.moved.placement.handovers.iter().any(|of| of.from_step.0 >= step);
            if !is_on_its_way && !self.moved.living().any(is_broken) && self.noise.one_in(3) {
                // Even before the decision, other holders answer for the lost server's shards.
                self.finish();
                assert_eq!(self.moved.hash(), self.alone.hash(), "without {number}");
            }
        }
        may
    }

    /// Performs some pieces of work and some fetches, in any order.
    fn act(&mut self) {
        while !self.noise.one_in(20) {
            let server = self.noise.below(self.moved.jobs.len());
            if self.moved.lost.contains(&server) {
                continue;
            }
            match self.noise.below(4) {
                0 => _ = self.moved.fetch(server, usize::MAX),
                3 => _ = self.moved.fetch(server, 1),
                1 => self.moved.jobs[server].free_handed(),
                _ => _ = self.moved.work_once(server),
            };
        }
    }

    /// Performs all work and all fetches.
    fn finish(&mut self) {
        let mut acted = true;
        while acted {
            acted = false;
            for server in self.moved.living() {
                acted |= self.moved.fetch(server, usize::MAX) | self.moved.work_once(server);
            }
        }
    }

    /// Waits until all servers have made their versions durable.
    fn settle(&mut self) {
        if self.moved.has_durable_later() {
            self.moved.settle().unwrap();
        }
    }

    /// Either starts a server's process again, which may have lost the newest version. Or takes the last decision back
    /// on all servers, and makes it again.
    fn restart(&mut self, commit: &Commit, pushed: u64) {
        let before = Version(commit.step.0 - 1);
        let (server, count) = (self.noise.below(self.moved.jobs.len()), self.moved.jobs.len());
        let of = |server: usize| self.moved.jobs[server].spec().properties();
        if !of(server).survives_restart() {
            return;
        }
        let steps_back = (0..count).all(|server| of(server).durable_later) && self.noise.one_in(4);
        let servers = if steps_back { 0..count } else { server..server + 1 };
        for server in servers.clone() {
            self.moved.restart(server, before, steps_back);
        }
        let version = |of: &Self, server: usize| of.moved.jobs[server].progress().version;
        let behind: Vec<usize> = servers.filter(|&server| version(self, server) == before).collect();
        let first = if behind.is_empty() { commit.step.0 + 1 } else { commit.step.0 };
        for step in first..=pushed {
            self.moved.push(step, &self.flats[&step]);
        }
        for server in behind {
            let incarnation = self.moved.incarnations[0];
            let (_, work) = self.moved.jobs[server].commit(incarnation, commit.clone()).unwrap();
            self.moved.works[server].extend(work);
        }
    }

    fn push(&mut self, step: u64) {
        let spec = &self.moved.spec;
        let flats: Vec<Vec<u8>> = (0..spec.contributions(spec.world_size))
            .map(|part| gradient(spec, step * 100 + part, 1e-2))
            .collect();
        self.moved.push(step, &flats);
        self.alone.push(step, &flats);
        self.flats.insert(step, flats);
        self.flats.retain(|&kept, _| kept + 2 >= step);
    }

    fn check_images(&self, version: u64) -> Result<(), TestCaseError> {
        for shard in (0..self.moved.layout.shards()).map(ShardId) {
            let [moved, alone] = [&self.moved, &self.alone].map(|of| of.image(shard, version));
            prop_assert!(
                moved == alone,
                "{} at version {}: {:?}",
                shard,
                version,
                moved.map(|it| it.is_some())
            );
        }
        Ok(())
    }

    /// Checks that the files on a tmpfs take no more memory than servers count.
    fn check_pages(&self) -> Result<(), TestCaseError> {
        let (spec, storage) = (&self.moved.spec, Storage::default());
        let beside = Need::of(spec, &self.moved.layout, &[], &storage).transfers;
        let in_tmpfs = self.moved.jobs.iter().filter(|job| job.spec().tier == TierKind::Shm);
        let counted: u64 = in_tmpfs.map(|job| job.memory_bytes() - beside + SLACK).sum();
        let taken = taken(self.homes[&TierKind::Shm].path());
        prop_assert!(taken <= counted, "{} bytes of {}", taken, counted);
        Ok(())
    }

    fn run(mut self) -> Result<(), TestCaseError> {
        let delay = u64::from(self.moved.spec.max_delay);
        let (mut pushed, mut is_behind) = (0, false);
        let skips_often = self.noise.one_in(3);
        for step in 1..=STEPS {
            let ahead = if is_behind { 0 } else { delay.min(self.noise.below(2) as u64) };
            while pushed < step + ahead {
                pushed += 1;
                self.push(pushed);
            }
            let mut commit = commit(&self.moved.spec, step);
            // A flipped bit is found only by an update of its block, so the last steps are not skipped.
            let is_ending = step + 9 > STEPS;
            commit.skip = !is_ending && self.noise.one_in(if skips_often { 2 } else { 6 });
            if delay == 1 && self.noise.one_in(2) {
                commit.correction =
                    Correction::LookAhead(commit.groups.iter().map(|hyper| hyper.lr / 2.0).collect());
            }
            commit.placement = self.change(step);
            self.alone.commit(&Commit { placement: None, ..commit.clone() }).unwrap();
            self.moved.commit(&commit).unwrap();
            self.alone.work();
            self.act();
            if self.moved.spec.replicas > 1 && !is_ending && self.noise.one_in(2) {
                self.flip();
                self.act();
            }
            while self.moved.spec.replicas == 1 && self.noise.one_in(3) {
                self.restart(&commit, pushed);
                self.act();
            }
            // In a delayed job, a server may be one step behind. Ranks read version t of all shards before they push
            // step t + 1 + delay.
            is_behind = delay == 1
                && !self.moved.has_durable_later()
                && !is_behind
                && step < STEPS
                && self.noise.one_in(2);
            if is_behind {
                continue;
            }
            self.finish();
            self.settle();
            self.check_images(step)?;
            self.check_pages()?;
            if delay == 1 && step > 1 {
                // A rank of a delayed job that joins now also pulls the version before.
                self.check_images(step - 1)?;
            }
            // A broken shard stays its owner's until the decision that moves the shard counts.
            let is_broken = |of: usize| {
                let (job, owned) = (&self.moved.jobs[of], self.moved.jobs[of].owned_at(Step(step)));
                job.broken().iter().any(|shard| owned.contains(shard))
            };
            let is_whole = self.flipped.is_empty() && !self.moved.living().any(is_broken);
            if is_whole && self.noise.one_in(4) {
                prop_assert_eq!(self.moved.hash(), self.alone.hash(), "at version {}", step);
            }
        }
        self.heal(STEPS + 1, &mut PlacementChange::default());
        prop_assert!(self.flipped.is_empty(), "{:?}", self.flipped);
        prop_assert_eq!(self.moved.hash(), self.alone.hash());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(60), max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn shards_move_at_any_step_without_a_changed_bit(seed in any::<u64>()) {
        Moving::new(seed).run()?;
    }
}

/// A shard on drives is fetched, leaves before its first update, and returns. A record still names its slot then.
#[test]
fn a_shard_that_was_never_updated_returns() -> Result<(), TestCaseError> {
    Moving::new(16_585_907_149_695_730_220).run()
}

/// The owner of a shard is lost one step before the next owner's first step.
#[test]
fn a_hash_is_refused_while_no_server_answers_for_a_shard() {
    let block = BLOCK as u64;
    let spec = JobSpec { replicas: 2, shard_elements: block, ..spec(&[3 * block], &[0]) };
    let weights = weights(&spec, 7);
    let (mut cluster, mut alone) = (
        Cluster::started(&spec, 3, &weights),
        Cluster::started(&JobSpec { replicas: 1, ..spec.clone() }, 1, &weights),
    );
    let shard = ShardId(0);
    let [owner, replica] = [cluster.owner(shard), cluster.placement.replica(shard).unwrap().0 as usize];
    let next = ServerId((0..3).find(|&server| server != owner && server != replica).unwrap() as u32);
    cluster.jobs[next.0 as usize].make_room(&[shard], |_, _| Ok(())).unwrap();
    for step in 1..=5 {
        let mut change =
            PlacementChange { epoch: Epoch(cluster.placement.epoch.0 + 1), ..PlacementChange::default() };
        match step {
            1 => change.replicas.push((shard, NO_SERVER)),
            4 => change.moves.push((shard, next)),
            5 => {
                cluster.lose(owner);
                assert_eq!(cluster.try_hash().unwrap_err().kind, FaultKind::Unavailable);
                change.lost.push(ServerId(owner as u32));
            }
            _ => {}
        }
        let placement = Some(change).filter(|_| [1, 4, 5].contains(&step));
        for (of, placement) in [(&mut cluster, placement), (&mut alone, None)] {
            of.push(step, &[gradient(&spec, step, 1e-2)]);
            of.commit(&Commit { placement, ..commit(&spec, step) }).unwrap();
            of.work();
        }
        cluster.fetch(next.0 as usize, usize::MAX);
        cluster.work();
    }
    assert_eq!(cluster.hash(), alone.hash());
}

#[test]
fn a_flipped_bit_is_found_at_the_next_update_and_named() {
    let spec = JobSpec {
        replicas: 2,
        shard_elements: 2 * BLOCK as u64,
        ..spec(&[2 * BLOCK as u64, BLOCK as u64], &[0, 0])
    };
    let weights = weights(&spec, 7);
    let (mut cluster, mut alone) = (
        Cluster::started(&spec, 2, &weights),
        Cluster::started(&JobSpec { replicas: 1, ..spec.clone() }, 1, &weights),
    );
    let mut next = |cluster: &mut Cluster, step: u64| {
        for of in [cluster, &mut alone] {
            of.push(step, &[gradient(&spec, step, 1e-2)]);
            of.commit(&commit(&spec, step)).unwrap();
            of.work();
        }
    };
    next(&mut cluster, 1);
    let shard = ShardId(0);
    let owner = cluster.owner(shard);
    // The bit is in the first moment, in the shard's second block.
    cluster.jobs[owner].flip_bit_for_tests(shard, 1 + 3 * 8 * 4 * (BLOCK + 5));
    let fault = cluster.jobs[owner].state_hashes(soon()).unwrap_err();
    assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Corrupt, "state"), "{fault}");
    next(&mut cluster, 2);
    assert_eq!([owner, 1 - owner].map(|server| cluster.jobs[server].broken()), [vec![shard], vec![]]);
    assert_eq!(cluster.jobs[owner].broken_so_far(), 1);
    let slice = Slice { shard, offset: 0, elements: cluster.layout.shard_len(shard) };
    let [before, after] =
        [1, 2].map(|version| cluster.jobs[owner].copy_image(&slice, Version(version)).map(|it| it.is_some()));
    assert_eq!(before, Ok(true), "the image of the version before is whole");
    let fault = after.unwrap_err();
    assert_eq!(fault.kind, FaultKind::Corrupt);
    assert!(
        fault.to_string().contains("block 1 of shard 0") && fault.to_string().contains("element 65536"),
        "{fault}"
    );
    assert_eq!(cluster.image(shard, 2), alone.image(shard, 2));
    // Now the other holder owns the shard, and its state breaks too.
    let (last, epoch) = (ServerId(1 - owner as u32), Epoch(2));
    let moves = PlacementChange { moves: vec![(shard, last)], epoch, ..Default::default() };
    cluster.push(3, &[gradient(&spec, 3, 1e-2)]);
    cluster.commit(&Commit { placement: Some(moves), ..commit(&spec, 3) }).unwrap();
    cluster.work();
    let job = &cluster.jobs[1 - owner];
    job.flip_bit_for_tests(shard, 0);
    let fault = job.check_handed(shard).unwrap_err();
    assert!(fault.to_string().contains("restore the last checkpoint"), "{fault}");
    assert_eq!(job.protocol.check_alive(), Err(fault));
}
