//! Gradients that live on drives. A chunk is received into a buffer, and written to the drives once it is whole. The
//! compute thread forms sums a shard at a time. While a shard is updated, the next shard's gradient is read.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, OnceLock},
    time::Instant,
};

use longshore_proto::{
    Fault, FaultKind, JobSpec, Layout, ShardId, Step,
    checksum::crc32,
    limits::{CHUNK_BYTES, DATA_CONNECTIONS},
};

use super::{
    super::{compute::BLOCK, protocol::Signal, share::Share},
    Gradients,
    contribution::{add, cast},
};
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    io::Direction,
    kernels::{Gradient, Statistics},
    lock,
    memory::{AllocationError, Region, Slab},
    step::{Sum, Ticket},
    tier::{GradientId, GradientStore, Kind, Transfer},
};

/// Largest number of chunks that are being written to the drives. Each connection may be receiving one chunk more. Four
/// chunks for each drive bring four drives near their full speed.
const ON_THEIR_WAY: usize = 16;

/// Number of whole gradients in DRAM for updates: one in use and one prefetched.
const AHEAD: usize = 2;

pub(in crate::job) struct SpilledGradients {
    files: Arc<dyn GradientStore>,
    desk: Arc<Desk>,
    /// Used by the compute thread alone.
    scratch: Mutex<Scratch>,
}

/// Queues and buffers that calls, the drives and the compute thread exchange.
struct Desk {
    free: Mutex<Vec<Region>>,
    arrived: Mutex<VecDeque<Arrived>>,
    /// Called when a chunk waits to be collected.
    arrival: OnceLock<Box<dyn Fn() + Send + Sync>>,
    signal: Arc<Signal>,
}

/// A received chunk in DRAM, before it is written to the drives.
pub(in crate::job) struct Staged {
    pub(in crate::job) region: Region,
    /// Byte of the shard's gradient at which the chunk starts.
    pub(in crate::job) start: usize,
    pub(in crate::job) statistics: Vec<(usize, Statistics)>,
}

/// A chunk whose write has ended.
struct Arrived {
    ticket: Ticket,
    crc32: u32,
    statistics: Vec<(usize, Statistics)>,
    left_out: Vec<u32>,
    result: Result<(), Fault>,
}

struct Scratch {
    /// Buffers for whole gradients as an update uses them.
    gradients: Vec<Region>,
    ahead: Option<Ahead>,
    /// Buffers for whole contributions that are being added, and for the sum.
    parts: Vec<Region>,
    sum: Option<Region>,
    /// Checksums of the sum's chunks, by owned shard and gradient slot.
    sums: Vec<Vec<Vec<u32>>>,
}

/// A gradient that is being read before its update.
struct Ahead {
    owned: OwnedShard,
    step: Step,
    transfer: Transfer,
}

/// The sizes of all buffers, in bytes.
struct Sizes {
    staged: usize,
    /// The largest shard's gradient as updates use it, its contribution as it comes, and its sum.
    gradient: usize,
    part: usize,
    sum: usize,
}

impl Sizes {
    fn of(spec: &JobSpec, layout: &Layout) -> Sizes {
        // Any trained shard of the job may move to this server, so the largest decides.
        let trained = (0..layout.shards()).map(ShardId).filter(|&shard| !layout.is_frozen(shard));
        let largest = trained.clone().map(|shard| layout.shard_len(shard)).max().unwrap_or(0) as usize;
        let wire = largest * spec.gradient_dtype.bytes() as usize;
        let accumulates = trained.clone().any(|shard| spec.accumulates(layout.contributors(shard)));
        let sum = if accumulates { largest * 4 } else { 0 };
        Sizes {
            staged: spec.world_size as usize * DATA_CONNECTIONS + ON_THEIR_WAY,
            gradient: wire.max(sum),
            part: if accumulates { wire } else { 0 },
            sum,
        }
    }
}

/// Returns the bytes of DRAM for contributions and for sums.
pub(crate) fn need(spec: &JobSpec, layout: &Layout) -> (u64, u64) {
    let Sizes { staged, gradient, part, sum } = Sizes::of(spec, layout);
    ((staged * CHUNK_BYTES + AHEAD * gradient + 2 * part) as u64, sum as u64)
}

impl SpilledGradients {
    pub(in crate::job) fn new(
        share: &Share,
        files: Arc<dyn GradientStore>,
        signal: Arc<Signal>,
    ) -> Result<SpilledGradients, AllocationError> {
        let Share { spec, layout, owned, .. } = share;
        let Sizes { staged, gradient, part, sum } = Sizes::of(spec, layout);
        let mut sizes = vec![CHUNK_BYTES; staged];
        sizes.extend([gradient; AHEAD]);
        sizes.extend([part, part, sum]);
        let mut free = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?.carve_here(&sizes);
        let sum = free.pop();
        let parts = free.split_off(staged + AHEAD);
        let gradients = free.split_off(staged);
        let sums = owned.iter().map(|_| vec![Vec::new(); spec.gradient_slots()]).collect();
        Ok(SpilledGradients {
            files,
            desk: Arc::new(Desk {
                free: Mutex::new(free),
                arrived: Mutex::default(),
                arrival: OnceLock::new(),
                signal,
            }),
            scratch: Mutex::new(Scratch { gradients, ahead: None, parts, sum, sums }),
        })
    }

    pub(super) fn files(&self) -> &dyn GradientStore {
        &*self.files
    }

    pub(in crate::job) fn check(&self, now: Instant) -> Result<(), Fault> {
        self.files.check(now)
    }

    pub(super) fn written_bytes(&self) -> u64 {
        self.files.written_bytes()
    }

    pub(super) fn on_arrival(&self, arrival: Box<dyn Fn() + Send + Sync>) {
        let _ = self.desk.arrival.set(arrival);
    }

    /// Returns a buffer for a chunk, or None while all are in use: ask again after a change.
    pub(in crate::job) fn stage(&self, start: usize) -> Option<Staged> {
        let region = lock(&self.desk.free).pop()?;
        Some(Staged { region, start, statistics: Vec::new() })
    }

    /// Takes back the buffer of a chunk that did not arrive whole.
    pub(in crate::job) fn unstage(&self, staged: Staged) {
        lock(&self.desk.free).push(staged.region);
    }

    /// Sends a whole chunk to the drives. The chunk counts once it is collected. `left_out` are the
    /// parameters without a gradient that begin in the chunk.
    pub(in crate::job) fn store(&self, ticket: Ticket, staged: Staged, crc32: u32, left_out: Vec<u32>) {
        let Staged { region, start, statistics } = staged;
        let bytes = ticket.chunk.bytes as usize;
        let kind = Kind::Contribution(ticket.contributor);
        let place = GradientId { owned: ticket.owned, slot: ticket.slot, kind };
        let desk = Arc::clone(&self.desk);
        let moved = move |region, result| {
            lock(&desk.free).push(region);
            lock(&desk.arrived).push_back(Arrived { ticket, crc32, statistics, left_out, result });
            if let Some(arrival) = desk.arrival.get() {
                arrival();
            }
            // The signal wakes callers that found no buffer free.
            desk.signal.send();
        };
        self.files.start(Direction::Write, place, start..start + bytes, region, Box::new(moved));
    }
}

impl Gradients {
    /// Takes up a chunk that has reached the drives, if there is one, and returns its ticket.
    ///
    /// # Errors
    /// The drives' error.
    pub(in crate::job) fn collect(&self) -> Result<Option<Ticket>, Fault> {
        let Some(spilled) = &self.spilled else { return Ok(None) };
        let Some(arrived) = lock(&spilled.desk.arrived).pop_front() else { return Ok(None) };
        let Arrived { ticket, crc32, statistics, left_out, result } = arrived;
        result?;
        let contribution = self.contribution(ticket.owned, ticket.slot, ticket.contributor);
        lock(contribution).arrived(ticket.chunk.chunk.0 as usize, crc32, &statistics, left_out);
        Ok(Some(ticket))
    }

    /// Returns the bytes of a shard's contribution.
    fn contribution_len(&self, owned: OwnedShard) -> usize {
        self.share.elements(owned) * self.share.spec.gradient_dtype.bytes() as usize
    }

    /// Forms the sum as [`Gradients::accumulate`] does, for contributions that are on drives or lent.
    pub(super) fn accumulate_spilled(
        &self,
        spilled: &SpilledGradients,
        &Sum { owned, contributions: count, slot, micro_step, .. }: &Sum,
        checked: bool,
    ) -> Result<Vec<Statistics>, Fault> {
        let scratch = &mut *lock(&spilled.scratch);
        let elements = self.share.elements(owned);
        let place = GradientId { owned, slot, kind: Kind::Sum };
        let mut region = scratch.sum.take().ok_or_else(lost)?;
        if micro_step.0 > 0 {
            region = Transfer::start(&*spilled.files, Direction::Read, place, elements * 4, region).wait()?;
            let bytes = &region.bytes()[..elements * 4];
            self.verify(spilled, place, bytes, &scratch.sums[owned.index()][slot.index()])?;
        }
        let mut statistics = Vec::new();
        let read =
            |contributor, parts: &mut Vec<Region>| self.read_part(spilled, owned, slot, contributor, parts);
        let mut coming = read(Contributor(0), &mut scratch.parts)?;
        for contributor in Contributor::all(count) {
            let (kind, arrived) = (Kind::Contribution(contributor), coming.map(Transfer::wait).transpose()?);
            let next = Contributor(contributor.index() + 1);
            let is_last = next.index() == count;
            coming = if is_last { None } else { read(next, &mut scratch.parts)? };
            let mut contribution = lock(self.contribution(owned, slot, contributor));
            let whole = match &arrived {
                Some(region) => {
                    let bytes = &region.bytes()[..self.contribution_len(owned)];
                    self.verify(spilled, GradientId { owned, slot, kind }, bytes, contribution.sums())?;
                    cast(bytes.into(), self.share.spec.gradient_dtype)
                }
                None => contribution.gradient(self.share.spec.gradient_dtype),
            };
            let first = micro_step.0 == 0 && contributor == Contributor(0);
            let taken = self.add(whole, &mut region.f32_mut()[..elements], first, checked && is_last);
            if is_last {
                statistics = taken;
            }
            contribution.give_back();
            scratch.parts.extend(arrived);
        }
        if self.is_last(micro_step) {
            let found = self.left_out_of(owned, 0, Gradient::f32(&region.f32()[..elements]));
            self.set_left_out(owned, slot, found);
        }
        scratch.sums[owned.index()][slot.index()] =
            region.bytes()[..elements * 4].chunks(CHUNK_BYTES).map(crc32).collect();
        scratch.sum =
            Some(Transfer::start(&*spilled.files, Direction::Write, place, elements * 4, region).wait()?);
        Ok(statistics)
    }

    /// Adds one contribution to the sum, block by block.
    fn add(&self, whole: Gradient<'_>, sum: &mut [f32], first: bool, checked: bool) -> Vec<Statistics> {
        let isa = self.compute.isa();
        let blocks = sum.chunks_mut(BLOCK).enumerate().collect();
        self.compute.blocks(blocks, |(block, sum): (usize, &mut [f32])| {
            add(isa, whole.slice(block * BLOCK..block * BLOCK + sum.len()), sum, first, checked)
        })
    }

    /// Starts reading a contribution. Returns None for a lent contribution.
    fn read_part(
        &self,
        spilled: &SpilledGradients,
        owned: OwnedShard,
        slot: GradientSlot,
        contributor: Contributor,
        parts: &mut Vec<Region>,
    ) -> Result<Option<Transfer>, Fault> {
        if lock(self.contribution(owned, slot, contributor)).is_lent() {
            return Ok(None);
        }
        let buffer = parts.pop().ok_or_else(lost)?;
        let place = GradientId { owned, slot, kind: Kind::Contribution(contributor) };
        Ok(Some(Transfer::start(
            &*spilled.files,
            Direction::Read,
            place,
            self.contribution_len(owned),
            buffer,
        )))
    }

    /// Reads the gradient of a shard's update, if it is on the drives. Then starts to read the `next` update's
    /// gradient.
    pub(in crate::job) fn fetch_gradient(
        &self,
        owned: OwnedShard,
        next: Option<OwnedShard>,
        step: Step,
    ) -> Result<Option<Region>, Fault> {
        let Some(spilled) = &self.spilled else { return Ok(None) };
        let scratch = &mut *lock(&spilled.scratch);
        let slot = self.share.slot(step);
        let ahead = match scratch.ahead.take() {
            Some(ahead) if (ahead.owned, ahead.step) == (owned, step) => Some(ahead.transfer),
            Some(other) => {
                scratch.gradients.push(other.transfer.wait()?);
                self.read_ahead(spilled, owned, slot, scratch)?
            }
            None => self.read_ahead(spilled, owned, slot, scratch)?,
        };
        if let Some(next) = next
            && let Some(transfer) = self.read_ahead(spilled, next, slot, scratch)?
        {
            scratch.ahead = Some(Ahead { owned: next, step, transfer });
        }
        let Some(transfer) = ahead else { return Ok(None) };
        let region = transfer.wait()?;
        let (kind, bytes) = self.gradient_kind(owned);
        let bytes = &region.bytes()[..bytes];
        let place = GradientId { owned, slot, kind };
        match kind {
            Kind::Sum => self.verify(spilled, place, bytes, &scratch.sums[owned.index()][slot.index()])?,
            Kind::Contribution(_) => {
                let lone = lock(self.contribution(owned, slot, Contributor::LONE));
                self.verify(spilled, place, bytes, lone.sums())?;
            }
        }
        Ok(Some(region))
    }

    /// Returns the kind of gradient that an update uses, and its length in bytes.
    fn gradient_kind(&self, owned: OwnedShard) -> (Kind, usize) {
        if self.share.accumulates(owned) {
            (Kind::Sum, self.share.elements(owned) * 4)
        } else {
            (Kind::Contribution(Contributor::LONE), self.contribution_len(owned))
        }
    }

    fn read_ahead(
        &self,
        spilled: &SpilledGradients,
        owned: OwnedShard,
        slot: GradientSlot,
        scratch: &mut Scratch,
    ) -> Result<Option<Transfer>, Fault> {
        let (kind, bytes) = self.gradient_kind(owned);
        if kind != Kind::Sum && lock(self.contribution(owned, slot, Contributor::LONE)).is_lent() {
            return Ok(None);
        }
        let buffer = scratch.gradients.pop().ok_or_else(lost)?;
        let place = GradientId { owned, slot, kind };
        Ok(Some(Transfer::start(&*spilled.files, Direction::Read, place, bytes, buffer)))
    }

    /// Gives back the region that [`Gradients::fetch_gradient`] returned.
    pub(in crate::job) fn give_gradient_back(&self, gradient: Option<Region>) {
        if let Some(spilled) = &self.spilled {
            lock(&spilled.scratch).gradients.extend(gradient);
        }
    }

    /// Compares the read bytes with the checksums of the written ones.
    fn verify(
        &self,
        spilled: &SpilledGradients,
        place: GradientId,
        bytes: &[u8],
        sums: &[u32],
    ) -> Result<(), Fault> {
        let chunks = bytes.chunks(CHUNK_BYTES).collect();
        let found = self.compute.blocks(chunks, crc32);
        let Some(chunk) = found.iter().zip(sums).position(|(found, sum)| found != sum) else { return Ok(()) };
        let value = format!("{}, MiB {chunk} of it: {:08x}", spilled.files.describe(place), found[chunk]);
        let remedy = "restart the server: it goes on from its last durable version, and workers send the step's gradients \
                      again; if it repeats, replace the drive";
        Err(Fault::new(
            FaultKind::Corrupt,
            "state_dir",
            value,
            format!("{:08x}, as written", sums[chunk]),
            remedy,
        ))
    }
}

fn lost() -> Fault {
    let remedy = "report this as a defect of Longshore";
    Fault::new(FaultKind::Internal, "buffer", "in use", "free, on the one compute thread", remedy)
}
