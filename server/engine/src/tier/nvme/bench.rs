//! Comparison of the pipeline with the device, for `longshore bench`: a bare loop of reads and writes, and steps of a
//! store.

use std::{
    path::Path,
    sync::{Arc, mpsc},
    time::Instant,
};

use longshore_proto::{Commit, Correction, Fault, JobSpec, Placement, ServerId, Step, TierKind, Version};
use rustix::time::{ClockId, clock_gettime};

use super::{
    super::{
        contract::{Durable, Tier, WriteBehind},
        fault::io,
        state::Turn,
        storage::{Inputs, Storage},
    },
    NvmeTier,
};
use crate::{
    ids::{OwnedShard, OwnedShards},
    io::{Direction, Disk, OpenDisk, OpenFile, Part, Request},
    kernels::State,
    memory::{Region, Slab},
    record::Record,
    threads::ThreadPool,
};

/// Bytes and seconds of a store's step, and of raw transfers of the same bytes.
#[derive(Clone, Copy, Debug)]
pub struct StorageMeasurement {
    pub parameters: u64,
    /// The bytes read and written in one step.
    pub bytes: u64,
    pub raw_seconds: f64,
    /// The CPU time of all threads together.
    pub raw_cpu_seconds: f64,
    /// The time of one step of the store, its flushes and records included.
    pub step_seconds: f64,
    pub step_cpu_seconds: f64,
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

impl StorageMeasurement {
    pub fn raw_gb_per_second(&self) -> f64 {
        self.bytes as f64 / self.raw_seconds / 1e9
    }

    pub fn step_gb_per_second(&self) -> f64 {
        self.bytes as f64 / self.step_seconds / 1e9
    }

    /// The device's own time as a fraction of the store's.
    pub fn fraction(&self) -> f64 {
        self.raw_seconds / self.step_seconds
    }
}

/// A measured store. An update, on the pool's threads, reads and writes every byte of the state once, as the cheapest
/// rule would.
struct BenchStore {
    spec: JobSpec,
    storage: Storage,
    tier: NvmeTier,
    version: Version,
}

impl BenchStore {
    /// Makes a store for `spec` in the storage's directories, with its state at version 0.
    fn make(spec: &JobSpec, storage: &Storage) -> Result<BenchStore, Fault> {
        let spec = JobSpec { tier: TierKind::Nvme, ..spec.clone() };
        let layout = spec.validate()?;
        let placement = Placement::striped(vec!["bench".into()], layout.shards());
        let owned = placement.owned(ServerId(0));
        let server = ServerId(0);
        let inputs =
            Inputs { spec: &spec, layout: &layout, owned: &owned, placement: &placement, server, storage };
        let (tier, _) = NvmeTier::open(&inputs, Box::new(|| ()))?;
        let store = BenchStore { spec, storage: storage.clone(), tier, version: Version(0) };
        for owned in store.shards() {
            store.tier.load(owned, &mut |mut state| state.f32().master.fill(1.0))?;
        }
        store.tier.start(&Record::new(Version(0), 0, None))?;
        Ok(store)
    }

    fn shards(&self) -> OwnedShards {
        OwnedShard::all(self.tier.plan().shards.len())
    }

    /// Runs a step of the store, its flushes and records included.
    fn step(&mut self, pool: &ThreadPool) -> Result<(), Fault> {
        self.version = Version(self.version.0 + 1);
        let version = self.version;
        for owned in self.shards() {
            self.tier.update(&[owned], version, &mut |states| {
                for (state, guard) in states {
                    let blocks = state.blocks().enumerate();
                    pool.blocks(blocks.collect(), |(block, mut part)| {
                        if let Turn::Go(number) = guard.begin(block, part.as_ref()) {
                            touch(&mut part.f32());
                            guard.end(block, number, part.as_ref(), &[]);
                        }
                    });
                }
            })?;
        }
        self.tier.finish(&Record::new(version, version.0, Some(self.commit())))?;
        self.tier.pager.until(|state| state.durable >= Some(version))?;
        Ok(())
    }

    fn commit(&self) -> Commit {
        Commit {
            step: Step(self.version.0),
            skip: false,
            gradient_scale: 1.0,
            clip_coefficient: 1.0,
            correction: Correction::None,
            left_out: Vec::new(),
            groups: vec![Default::default(); self.spec.groups.len()],
            norm: 0.0,
            loss_scale: 1.0,
            trainer_state: Vec::new(),
            decided_by: Default::default(),
            pause_reason: String::new(),
            placement: None,
        }
    }
}

/// Unmeasured first steps: blocks that were reserved and never written cost the file system more.
const FIRST_STEPS: u64 = 2;

/// Makes a store, runs `rounds` of (step, bare loop), and removes it. Returns one measurement a round.
pub fn bench(
    spec: &JobSpec,
    storage: &Storage,
    pool: &ThreadPool,
    rounds: u64,
) -> Result<Vec<StorageMeasurement>, Fault> {
    let mut store = BenchStore::make(spec, storage)?;
    let measurements = run(&mut store, pool, rounds);
    store.tier.discard()?;
    measurements
}

fn run(store: &mut BenchStore, pool: &ThreadPool, rounds: u64) -> Result<Vec<StorageMeasurement>, Fault> {
    for _ in 0..FIRST_STEPS {
        store.step(pool)?;
    }
    let round = |_| {
        let (from, cpu) = (Instant::now(), cpu_seconds());
        store.step(pool)?;
        let step_seconds = from.elapsed().as_secs_f64();
        let step_cpu_seconds = cpu_seconds() - cpu;
        let cpu = cpu_seconds();
        let (raw_seconds, bytes) = raw(&store.tier, &store.storage)?;
        let raw_cpu_seconds = cpu_seconds() - cpu;
        let parameters = store.tier.plan().shards.iter().map(|place| place.elements as u64).sum();
        Ok(StorageMeasurement {
            parameters,
            bytes,
            raw_seconds,
            raw_cpu_seconds,
            step_seconds,
            step_cpu_seconds,
        })
    };
    (0..rounds).map(round).collect()
}

fn touch(state: &mut State<'_>) {
    for array in [&mut *state.master, &mut *state.first, &mut *state.second] {
        array.iter_mut().for_each(|x| *x += 1.0);
    }
}

/// Reads a slot of every spilled shard, and writes the other slot of all shards, with as many transfers at once as the
/// store has buffers. A step moves the same bytes, with updates in between.
fn raw(tier: &NvmeTier, storage: &Storage) -> Result<(f64, u64), Fault> {
    let plan = tier.plan();
    let opener = OpenFile { engine: storage.engine };
    let size = plan.largest();
    let slab =
        Slab::allocate(storage.buffers.max(1) * size).map_err(|error| super::internal(error, "allocated"))?;
    let mut free = slab.carve_here(&vec![size; storage.buffers.max(1)]);
    let path = |disk: &Arc<dyn Disk>| disk.path().to_path_buf();
    let open = |path: &Path| opener.open(path).map_err(io("open", path));
    let disks = tier.pager.disks.iter().map(|disk| open(&path(disk))).collect::<Result<Vec<_>, Fault>>()?;
    let slot = tier.pager.lock().slots.state;
    let (source, target) = (slot, 1 - slot);
    let shards: Vec<OwnedShard> = OwnedShard::all(plan.shards.len()).collect();
    let (sender, receiver) = mpsc::channel::<(OwnedShard, Region, std::io::Result<()>)>();
    let submit = |owned: OwnedShard, direction, part: Part, buffer| {
        let sender = sender.clone();
        let done = Box::new(move |buffer, result| {
            let _ = sender.send((owned, buffer, result));
        });
        disks[plan.shards[owned.index()].file].submit(Request { direction, parts: vec![part], buffer, done });
    };
    let (mut bytes, mut next, mut busy) = (0, 0, 0);
    let mut read = vec![false; plan.shards.len()];
    let from = Instant::now();
    while next < shards.len() || busy > 0 {
        if let Some(buffer) = (next < shards.len()).then(|| free.pop()).flatten() {
            let owned = shards[next];
            read[owned.index()] = tier.pager.is_resident(owned);
            let (direction, slot) =
                if read[owned.index()] { (Direction::Write, target) } else { (Direction::Read, source) };
            submit(owned, direction, plan.state_part(owned, slot), buffer);
            bytes += plan.shards[owned.index()].state_bytes as u64;
            (next, busy) = (next + 1, busy + 1);
            continue;
        }
        let Ok((owned, buffer, result)) = receiver.recv() else { break };
        result.map_err(io("move", disks[plan.shards[owned.index()].file].path()))?;
        if read[owned.index()] {
            free.push(buffer);
            busy -= 1;
        } else {
            read[owned.index()] = true;
            bytes += plan.shards[owned.index()].state_bytes as u64;
            submit(owned, Direction::Write, plan.state_part(owned, target), buffer);
        }
    }
    disks.iter().try_for_each(|disk| disk.flush().map_err(io("flush", disk.path())))?;
    Ok((from.elapsed().as_secs_f64(), bytes))
}
