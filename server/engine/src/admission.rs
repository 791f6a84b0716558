//! The server's memory as a budget. A job reserves its share before anything is allocated. The server owns the budget,
//! and any thread may reserve.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use longshore_proto::{Fault, FaultKind};

use crate::memory::AllocationError;

/// Returns the fault of an allocation that failed within the budget: the host has less memory than the budget promised.
pub(crate) fn exhausted(error: AllocationError) -> Fault {
    Fault::new(FaultKind::Exhausted, "memory", error.bytes, "available on the host", error.to_string())
}

/// Bytes that a job's shards take on one server, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Master weights and optimizer state in DRAM. An `nvme` job counts only its resident part.
    pub state: u64,
    /// Buffers between DRAM and drives. With tier `shm`, copies of blocks that are being updated.
    pub buffers: u64,
    /// Two 16-bit (or fp32) images of each shard, by version parity. Where images live on drives, only the images in
    /// DRAM count.
    pub images: u64,
    /// Buffers in wire format, one for each rank and step in flight. Where gradients live on drives, buffers for chunks
    /// and for whole gradients.
    pub contributions: u64,
    /// fp32 sums over ranks and micro-steps.
    pub accumulators: u64,
    /// Buffers of the ranks' connections for bytes in flight.
    pub transfers: u64,
    /// Space in the state directories, which is not DRAM. The file system reserves it.
    pub disk: u64,
    /// Bytes that one step writes to the state directories. Checksum tables and records add less than a ten-thousandth,
    /// and do not count.
    pub written: u64,
}

impl Need {
    /// Returns the bytes of DRAM.
    pub fn total(&self) -> u64 {
        self.state + self.buffers + self.images + self.contributions + self.accumulators + self.transfers
    }
}

/// The server's memory, in bytes. Cheap to clone.
#[derive(Clone)]
pub struct Budget {
    inner: Arc<Inner>,
}

struct Inner {
    total: u64,
    reserved: Mutex<u64>,
}

/// Bytes reserved for a job, and given back on drop.
pub struct Reservation {
    budget: Budget,
    bytes: AtomicU64,
}

impl Budget {
    pub fn new(total: u64) -> Budget {
        Budget { inner: Arc::new(Inner { total, reserved: Mutex::new(0) }) }
    }

    /// Returns the bytes of DRAM.
    pub fn total(&self) -> u64 {
        self.inner.total
    }

    pub fn reserved(&self) -> u64 {
        *crate::lock(&self.inner.reserved)
    }

    pub fn free(&self) -> u64 {
        self.inner.total - self.reserved()
    }

    /// Reserves as many whole `unit`s as are free, at most `bytes`, until the result is dropped.
    pub fn lease(&self, bytes: u64, unit: u64) -> Reservation {
        let mut reserved = crate::lock(&self.inner.reserved);
        let free = self.inner.total - *reserved;
        let bytes = bytes.min(free) / unit * unit;
        *reserved += bytes;
        Reservation { budget: self.clone(), bytes: AtomicU64::new(bytes) }
    }

    /// Reserves `need`, or returns a fault that says how much is short.
    pub fn reserve(&self, need: &Need) -> Result<Reservation, Fault> {
        let mut reserved = crate::lock(&self.inner.reserved);
        let free = self.inner.total - *reserved;
        let bytes = need.total();
        if bytes > free {
            return Err(Fault::new(
                FaultKind::Exhausted,
                "memory",
                format!(
                    "{bytes} bytes (state {}, buffers {}, images {}, contributions {}, accumulators {}, transfers {})",
                    need.state,
                    need.buffers,
                    need.images,
                    need.contributions,
                    need.accumulators,
                    need.transfers
                ),
                format!("at most {free}: the budget is {}, other jobs hold {}", self.inner.total, *reserved),
                format!(
                    "it is short of {} bytes: raise --memory, add servers, or delete another job",
                    bytes - free
                ),
            ));
        }
        *reserved += bytes;
        Ok(Reservation { budget: self.clone(), bytes: AtomicU64::new(bytes) })
    }
}

impl Reservation {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes another reservation's bytes into this one.
    pub fn add(&self, other: Reservation) {
        self.bytes.fetch_add(other.bytes.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Gives some of the bytes back.
    pub fn give_back(&self, bytes: u64) {
        let kept = |held: u64| Some(held.saturating_sub(bytes));
        let before = self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, kept).unwrap_or_default();
        *crate::lock(&self.budget.inner.reserved) -= before.min(bytes);
    }

    pub fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        *crate::lock(&self.budget.inner.reserved) -= self.bytes();
    }
}
