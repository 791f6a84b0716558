//! How near the pipeline comes to the device: a bare loop of the same reads and writes, then a store doing steps.

use std::{
    path::Path,
    sync::{Arc, mpsc},
    time::Instant,
};

use longshore_proto::{Commit, Fault, JobSpec, Placement, ServerId, Step, Version};

use super::{
    super::{Record, Storage, Tier, Turn, fault::io},
    Inputs, NvmeTier,
};
use crate::{
    io::{Direction, Disk, OpenDisk, OpenFile, Part, Request},
    memory::{Region, Slab},
};

/// Bytes over seconds, and what they are of.
#[derive(Clone, Copy, Debug)]
pub struct StorageFigures {
    pub parameters: u64,
    /// Read and written in one step.
    pub bytes: u64,
    pub raw_seconds: f64,
    /// Of one step of the store, the flushes and the records included.
    pub step_seconds: f64,
}

impl StorageFigures {
    pub fn raw_gb_per_second(&self) -> f64 {
        self.bytes as f64 / self.raw_seconds / 1e9
    }

    pub fn step_gb_per_second(&self) -> f64 {
        self.bytes as f64 / self.step_seconds / 1e9
    }

    /// Of the device's own time in ours.
    pub fn fraction(&self) -> f64 {
        self.raw_seconds / self.step_seconds
    }
}

/// Makes a store for `spec` in the storage's directories, runs `rounds` of (bare loop, step), and removes it. The
/// update reads and writes every byte of the state once, as the cheapest rule would. Returns one figure a round.
pub fn bench(spec: &JobSpec, storage: &Storage, rounds: u64) -> Result<Vec<StorageFigures>, Fault> {
    let layout = spec.validate()?;
    let placement = Placement::striped(vec!["bench".into()], layout.shards());
    let owned = placement.owned(ServerId(0));
    let server = ServerId(0);
    let inputs = Inputs { spec, layout: &layout, owned: &owned, placement: &placement, server, storage };
    let (tier, _) = NvmeTier::open(&inputs, Box::new(|| ()))?;
    let figures = run(spec, &tier, storage, rounds);
    tier.discard()?;
    figures
}

fn run(
    spec: &JobSpec,
    tier: &NvmeTier,
    storage: &Storage,
    rounds: u64,
) -> Result<Vec<StorageFigures>, Fault> {
    let shards = tier.plan().shards.len();
    for owned in 0..shards {
        tier.load(owned, &mut |state| state.master.fill(1.0))?;
    }
    tier.start(&Record { version: Version(0), applied: 0, commit: None })?;
    let mut figures = Vec::new();
    // Two steps first: blocks that were reserved and never written cost the file system more.
    for version in 1..=rounds + 2 {
        let from = Instant::now();
        step(spec, tier, shards, Version(version))?;
        let step_seconds = from.elapsed().as_secs_f64();
        tier.pool.quiesce();
        if version <= 2 {
            continue;
        }
        let (raw_seconds, bytes) = raw(tier, storage)?;
        let parameters = tier.plan().shards.iter().map(|place| place.elements as u64).sum();
        figures.push(StorageFigures { parameters, bytes, raw_seconds, step_seconds });
    }
    Ok(figures)
}

fn step(spec: &JobSpec, tier: &NvmeTier, shards: usize, version: Version) -> Result<(), Fault> {
    for owned in 0..shards {
        tier.update(owned, version, &mut |mut state, guard| {
            let blocks = state.master.len() / super::plan::BLOCK;
            for block in 0..blocks {
                let mut part = state.slice(block * super::plan::BLOCK..(block + 1) * super::plan::BLOCK);
                if let Turn::Go(number) = guard.begin(block, (&part).into()) {
                    touch(&mut part);
                    guard.end(block, number, (&part).into(), &[]);
                }
            }
        })?;
    }
    let commit = Commit {
        step: Step(version.0),
        skip: false,
        gradient_scale: 1.0,
        clip_coefficient: 1.0,
        compensation: 0.0,
        groups: vec![Default::default(); spec.groups.len()],
        norm: 0.0,
        loss_scale: 1.0,
        trainer_state: Vec::new(),
    };
    tier.finish(&Record { version, applied: version.0, commit: Some(commit) })?;
    tier.pool.until("sealing", |state| state.durable >= Some(version))
}

fn touch(state: &mut crate::kernels::State<'_>) {
    for array in [&mut *state.master, &mut *state.first, &mut *state.second] {
        array.iter_mut().for_each(|x| *x += 1.0);
    }
}

/// Reads every spilled shard's one slot and writes all shards' other slot, as many at once as the store has buffers:
/// what a step moves, with nothing in between.
fn raw(tier: &NvmeTier, storage: &Storage) -> Result<(f64, u64), Fault> {
    let plan = tier.plan();
    let opener = OpenFile { engine: storage.engine };
    let size = plan.largest();
    let slab =
        Slab::allocate(storage.buffers.max(1) * size).map_err(|error| super::internal(error, "allocated"))?;
    let mut free = slab.carve_here(&vec![size; storage.buffers.max(1)]);
    let mapping = free[0].mapping();
    let path = |disk: &Arc<dyn Disk>| disk.path().to_path_buf();
    let open = |path: &Path| opener.open(path, Some(&mapping)).map_err(io("open", path));
    let disks = tier.pool.disks.iter().map(|disk| open(&path(disk))).collect::<Result<Vec<_>, Fault>>()?;
    let slot = tier.pool.lock().slots.state;
    let (sender, receiver) = mpsc::channel::<(usize, Region, std::io::Result<()>)>();
    let submit = |owned: usize, direction, part: Part, buffer| {
        let sender = sender.clone();
        let done = Box::new(move |buffer, result| {
            let _ = sender.send((owned, buffer, result));
        });
        disks[plan.shards[owned].file].submit(Request { direction, parts: vec![part], buffer, done });
    };
    let (mut bytes, mut next, mut busy) = (0, 0, 0);
    let mut read = vec![false; plan.shards.len()];
    let from = Instant::now();
    while next < plan.shards.len() || busy > 0 {
        if let Some(buffer) = (next < plan.shards.len()).then(|| free.pop()).flatten() {
            if tier.pool.is_resident(next) {
                submit(next, Direction::Write, plan.state_part(next, 1 - slot), buffer);
                read[next] = true;
            } else {
                submit(next, Direction::Read, plan.state_part(next, slot), buffer);
            }
            bytes += plan.shards[next].state_bytes as u64;
            (next, busy) = (next + 1, busy + 1);
            continue;
        }
        let Ok((owned, buffer, result)) = receiver.recv() else { break };
        result.map_err(io("move", disks[plan.shards[owned].file].path()))?;
        if read[owned] {
            free.push(buffer);
            busy -= 1;
        } else {
            read[owned] = true;
            bytes += plan.shards[owned].state_bytes as u64;
            submit(owned, Direction::Write, plan.state_part(owned, 1 - slot), buffer);
        }
    }
    disks.iter().try_for_each(|disk| disk.flush().map_err(io("flush", disk.path())))?;
    Ok((from.elapsed().as_secs_f64(), bytes))
}
