//! Staging: bounded memory for copies of blocks between a job's state and a snapshot's reader.
//!
//! Every snapshot has a few slots. An update's further copies take memory of the server's budget, at most one copy of
//! the version, until the reader is done with them. Without budget, the update waits for the reader as long as the
//! purpose allows, and then ends the snapshot.

use std::{
    collections::VecDeque,
    iter, mem,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use longshore_proto::{Fault, FaultKind, ShardId, limits::SNAPSHOT_BYTES};

use super::{super::compute::Compute, Purpose};
use crate::{
    admission::{Budget, Reservation, exhausted},
    ids::OwnedShard,
    lock,
    memory::{AllocationError, Region, Slab},
};

/// The size of a slot, unless the copies of the largest shard take less.
const SLOT_BYTES: usize = 4 * 1024 * 1024;
/// The longest wait before one side checks that the other has not ended.
const LOOK: Duration = Duration::from_millis(200);

/// Some blocks of one shard as they were at the snapshot's version.
pub struct Piece {
    /// The shard's index among the owned ones.
    pub owned: OwnedShard,
    pub shard: ShardId,
    /// The piece's first block, counted from the shard's start. A shard's pieces come in order.
    pub first: usize,
    /// True if the image of the version before was there to be copied.
    pub older_image: bool,
    blocks: usize,
    block_bytes: usize,
    slot: Slot,
}

impl Piece {
    /// The copies, block after block.
    pub fn bytes(&self) -> &[u8] {
        &self.slot.region.bytes()[..self.blocks * self.block_bytes]
    }

    /// The copies, by block.
    pub fn blocks(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes().chunks_exact(self.block_bytes)
    }
}

/// Memory for a few blocks.
pub(super) struct Slot {
    region: Region,
    /// Budget of all slots that were made together. Dropping the last of these slots gives the budget back.
    _lease: Option<Arc<Reservation>>,
}

pub(super) struct Staging {
    purpose: Purpose,
    block_bytes: usize,
    /// Number of blocks that a slot holds.
    blocks: usize,
    /// Largest number of slots that may be made outside the budget.
    own: usize,
    budget: Budget,
    compute: Arc<Compute>,
    state: Mutex<StagingState>,
    changed: Condvar,
}

#[derive(Default)]
struct StagingState {
    free: Vec<Slot>,
    queue: VecDeque<Piece>,
    /// Number of slots made outside the budget.
    own: usize,
    /// True once all blocks are copied, so that no slot is needed again.
    complete: bool,
    ended: Option<Fault>,
    /// Time at which the first piece was ready.
    begun: Option<Instant>,
    /// Bytes that the reader took.
    taken: u64,
    /// Time that updates have waited for the reader.
    held: Duration,
    /// Bytes that the reader took while updates waited for it.
    taken_meanwhile: u64,
}

impl StagingState {
    fn check(&self) -> Result<(), Fault> {
        self.ended.clone().map_or(Ok(()), Err)
    }
}

impl Staging {
    /// `largest` is the number of blocks of the largest shard.
    pub(super) fn new(
        purpose: Purpose,
        block_bytes: usize,
        largest: usize,
        budget: Budget,
        compute: Arc<Compute>,
    ) -> Staging {
        let blocks = (SLOT_BYTES / block_bytes).clamp(1, largest.max(1));
        let own = (SNAPSHOT_BYTES / (blocks * block_bytes)).max(2);
        let (state, changed) = (Mutex::default(), Condvar::new());
        Staging { purpose, block_bytes, blocks, own, budget, compute, state, changed }
    }

    /// Returns the number of slots that hold `blocks`.
    pub(super) fn slots(&self, blocks: usize) -> usize {
        blocks.div_ceil(self.blocks)
    }

    fn slot_bytes(&self) -> usize {
        self.blocks * self.block_bytes
    }

    /// Returns up to `wanted` slots, as many as are free or can be made now.
    pub(super) fn take(&self, wanted: usize) -> Result<Vec<Slot>, Fault> {
        let mut state = lock(&self.state);
        state.check()?;
        let keep = state.free.len().saturating_sub(wanted);
        let mut slots = state.free.split_off(keep);
        let missing = wanted - slots.len();
        let own = missing.min(self.own - state.own);
        state.own += own;
        drop(state);
        let unit = self.slot_bytes() as u64;
        let lease = self.budget.lease((missing - own) as u64 * unit, unit);
        let leased = (lease.bytes() / unit) as usize;
        let made = self.make(own, None).and_then(|mut made| {
            made.extend(self.make(leased, Some(Arc::new(lease)))?);
            Ok(made)
        });
        slots.extend(made.map_err(|error| self.end(exhausted(error)))?);
        Ok(slots)
    }

    /// Returns slots for the blocks that an update will change. Waits for at least one slot, unless the snapshot has
    /// ended.
    pub(super) fn take_for_update(&self, wanted: usize) -> Vec<Slot> {
        let Ok(slots) = self.take(wanted) else { return Vec::new() };
        if !slots.is_empty() {
            return slots;
        }
        let (begun, before) = (Instant::now(), lock(&self.state).taken);
        loop {
            let mut state = lock(&self.state);
            let held = state.held + begun.elapsed();
            let taken = state.taken_meanwhile + (state.taken - before);
            let left = self.purpose.patience(taken).saturating_sub(held);
            if left.is_zero() {
                let fault = self.too_slow(&state, wanted);
                drop(state);
                self.end(fault);
                return Vec::new();
            }
            if state.free.is_empty() && state.ended.is_none() {
                drop(
                    self.changed.wait_timeout(state, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner),
                );
            } else {
                (state.held, state.taken_meanwhile) = (held, taken);
                drop(state);
                return self.take(wanted).unwrap_or_default();
            }
        }
    }

    fn make(&self, count: usize, lease: Option<Arc<Reservation>>) -> Result<Vec<Slot>, AllocationError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let sizes: Vec<usize> = iter::repeat_n(self.slot_bytes(), count).collect();
        let slab = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?;
        let regions = slab.carve(&sizes, self.compute.pool())?;
        Ok(regions.into_iter().map(|region| Slot { region, _lease: lease.clone() }).collect())
    }

    /// Returns the memory of these slots, cut into blocks, at most `blocks` of them.
    pub(super) fn places<'a>(&self, slots: &'a mut [Slot], blocks: usize) -> Vec<&'a mut [u8]> {
        let (slot_bytes, block_bytes) = (self.slot_bytes(), self.block_bytes);
        let places = slots
            .iter_mut()
            .flat_map(move |slot| slot.region.bytes_mut()[..slot_bytes].chunks_exact_mut(block_bytes));
        places.take(blocks).collect()
    }

    /// Hands filled slots to the reader. The slots hold `blocks` of a shard, from block `first` on. Slots
    /// that were not needed are kept.
    pub(super) fn put(
        &self,
        (owned, shard): (OwnedShard, ShardId),
        first: usize,
        blocks: usize,
        older_image: bool,
        slots: Vec<Slot>,
    ) {
        let mut state = lock(&self.state);
        if state.ended.is_some() {
            return;
        }
        state.begun.get_or_insert_with(Instant::now);
        let block_bytes = self.block_bytes;
        for (index, slot) in slots.into_iter().enumerate() {
            let before = index * self.blocks;
            if before >= blocks {
                state.free.push(slot);
                continue;
            }
            let (first, blocks) = (first + before, self.blocks.min(blocks - before));
            state.queue.push_back(Piece { owned, shard, first, older_image, blocks, block_bytes, slot });
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the reader's next piece, or None while no piece is ready.
    pub(super) fn next(&self) -> Result<Option<Piece>, Fault> {
        let mut state = lock(&self.state);
        state.check()?;
        Ok(state.queue.pop_front())
    }

    /// Notes that the reader has taken a piece.
    pub(super) fn taken(&self, piece: Piece) {
        let mut state = lock(&self.state);
        state.taken += piece.bytes().len() as u64;
        if !state.complete && state.ended.is_none() {
            state.free.push(piece.slot);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits a moment for a slot or for a piece.
    pub(super) fn wait(&self) {
        let state = lock(&self.state);
        if state.free.is_empty() && state.queue.is_empty() && state.ended.is_none() {
            drop(self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Notes that all blocks are copied. From here on, memory is given back as the reader takes the pieces.
    pub(super) fn complete(&self) {
        let mut state = lock(&self.state);
        state.complete = true;
        let free = mem::take(&mut state.free);
        drop(state);
        drop(free);
    }

    pub(super) fn ended(&self) -> Option<Fault> {
        lock(&self.state).ended.clone()
    }

    /// Ends the snapshot: copies end and are freed. The first fault stays.
    pub(super) fn end(&self, fault: Fault) -> Fault {
        let mut state = lock(&self.state);
        let first = state.ended.get_or_insert(fault).clone();
        let gone = (mem::take(&mut state.free), mem::take(&mut state.queue));
        drop(state);
        self.changed.notify_all();
        drop(gone);
        first
    }

    fn too_slow(&self, state: &StagingState, wanted: usize) -> Fault {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let waiting: usize = state.queue.iter().map(|piece| piece.bytes().len()).sum();
        let time = state.begun.map_or(0.0, |begun| begun.elapsed().as_secs_f64());
        let rate = if time > 0.0 { mib(state.taken as f64) / time } else { 0.0 };
        let value = format!("taking {rate:.1} MiB/s, with {:.1} MiB copied for it", mib(waiting as f64));
        let limit = format!(
            "as fast as training goes on, or given {:.1} MiB more of the server's memory ({:.1} MiB are free)",
            mib((wanted * self.slot_bytes()) as f64),
            mib(self.budget.free() as f64),
        );
        Fault::new(FaultKind::Exhausted, self.purpose.reader(), value, limit, self.purpose.remedy())
    }
}
