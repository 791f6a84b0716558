//! Pushes: contributions are received into their gradient slots, and count once they are whole. The connection's thread
//! runs this.

use std::{
    io,
    ops::Range,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use longshore_proto::{
    ContributionChunk, Fault, FaultKind,
    checksum::{Crc32, TILE_BYTES},
    limits::CHUNK_BYTES,
};

use tracing::{debug_span, span::EnteredSpan};

use super::{
    Job,
    compute::BLOCK,
    gradients::{LENT_ALIGNMENT, Lent, Staged, cast, statistics_within},
};
use crate::{
    lock,
    memory::Source,
    step::{Admission, Ticket, Work},
};

/// Largest number of bytes under one lock of a rank's buffer (20 us), or of one socket read (50 us). So few bytes still
/// lie in L2 when their checksum is taken.
const LOCKED_BYTES: usize = 256 * 1024;

/// Access to a chunk's part of its rank's buffer while the payload arrives. An unfinished value that is dropped stores
/// nothing.
pub struct Writing {
    job: Arc<Job>,
    ticket: Ticket,
    /// The bytes of the rank's gradient that have not arrived yet.
    left: Range<usize>,
    sum: Crc32,
    /// Buffer of the chunk, if gradients live on drives.
    staged: Option<Staged>,
    finished: bool,
}

impl Writing {
    pub fn chunk(&self) -> &ContributionChunk {
        &self.ticket.chunk
    }

    /// Appends a slice of the payload.
    ///
    /// # Errors
    /// `Invalid` if the slice exceeds the announced length; none of its bytes are written.
    pub fn write(&mut self, slice: &[u8]) -> Result<(), Fault> {
        let _stage = self.stage();
        if slice.len() > self.left.len() {
            let value = format!("{} bytes more than announced", slice.len() - self.left.len());
            return Err(Fault::invalid("payload", value, "as long as the chunk", "send whole chunks"));
        }
        for part in slice.chunks(LOCKED_BYTES) {
            self.fill(part.len(), |place, sum| {
                sum.copy(part, place);
                Ok(place.len())
            })
            .expect("copying does not fail");
        }
        Ok(())
    }

    /// Reads the next bytes of the payload, at most `most`, to their place with one call of `read`. Their checksum is
    /// taken while they are in cache.
    ///
    /// # Errors
    /// The error of `read`; no byte has arrived then.
    pub fn read_from(
        &mut self,
        most: usize,
        read: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let _stage = self.stage();
        self.fill(most, |place, sum| {
            let count = read(place)?;
            sum.update(&place[..count]);
            Ok(count)
        })
    }

    /// Copies the whole payload. `fetch(from, target)` fills `target` with the payload's bytes from byte `from` on. The
    /// checksum is of the copy, since the sender may change the original.
    pub fn fetch(&mut self, fetch: &mut dyn FnMut(usize, &mut [u8])) {
        let _stage = self.stage();
        let mut from = 0;
        while !self.left.is_empty() {
            self.fill(LOCKED_BYTES, |place, sum| {
                for tile in place.chunks_mut(TILE_BYTES) {
                    fetch(from, tile);
                    sum.update(tile);
                    from += tile.len();
                }
                Ok(place.len())
            })
            .expect("copying does not fail");
        }
    }

    /// Calls `fill` with the memory of the next bytes, at most `most`. `fill` writes some of them and returns their
    /// number. Then takes the statistics of the blocks that the written bytes complete. Contributions that are summed
    /// need none.
    fn fill(
        &mut self,
        most: usize,
        fill: impl FnOnce(&mut [u8], &mut Crc32) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let Ticket { owned, slot, contributor, .. } = self.ticket;
        let job = &*self.job;
        let start = self.left.start;
        let end = self.left.end.min(start + most.min(LOCKED_BYTES));
        let (dtype, isa) = (job.share.spec.gradient_dtype, job.compute.isa());
        let statistics = !job.share.accumulates(owned);
        let count = if let Some(Staged { region, start: first, statistics: taken }) = &mut self.staged {
            let count = fill(&mut region.bytes_mut()[start - *first..end - *first], &mut self.sum)?;
            if statistics {
                let copied = start - *first..start + count - *first;
                let before = *first / (BLOCK * dtype.bytes() as usize);
                let blocks = statistics_within(region.bytes(), copied, dtype, isa);
                taken.extend(blocks.map(|(block, statistics)| (before + block, statistics)));
            }
            count
        } else {
            // Two connections may bring chunks of one buffer, so each locks it for one part at a time.
            let mut contribution = lock(job.gradients.contribution(owned, slot, contributor));
            // Admission checked that the chunk lies inside the shard.
            let count = fill(&mut contribution.own()[start..end], &mut self.sum)?;
            if statistics {
                contribution.take_statistics(start..start + count, dtype, isa);
            }
            count
        };
        self.left.start += count;
        Ok(count)
    }

    fn stage(&self) -> EnteredSpan {
        let contribution = self.ticket.chunk.contribution;
        let (rank, shard, step) = (contribution.rank.0, contribution.shard.0, contribution.step.0);
        debug_span!(target: "stage", "receive", rank, shard, step).entered()
    }

    /// Uses a lent payload in place, or copies it if the tier must keep it.
    ///
    /// # Errors
    /// `Invalid` unless the payload is aligned and as long as announced, with padding of 0.
    pub fn lend(&mut self, lent: Arc<dyn Lent>) -> Result<(), Fault> {
        let Ticket { owned, slot, contributor, .. } = self.ticket;
        let bytes = lent.bytes();
        if bytes.len() != self.left.len() || !bytes.as_ptr().addr().is_multiple_of(LENT_ALIGNMENT) {
            let value = format!("{} bytes at {:p}", bytes.len(), bytes.as_ptr());
            let limit = format!("{} bytes, aligned to {LENT_ALIGNMENT}", self.left.len());
            return Err(Fault::invalid("push.place", value, limit, "lend a shard's whole gradient"));
        }
        self.check_padding(0, bytes)?;
        let mut contribution = lock(self.job.gradients.contribution(owned, slot, contributor));
        if self.job.tier.kept.is_some() {
            contribution.copy(&*lent);
        } else {
            contribution.lend(lent);
        }
        self.left = 0..0;
        Ok(())
    }

    /// Counts the chunk, if the payload is whole and matches its checksum. A chunk for the drives counts once it was
    /// written and [collected](Job::collect).
    ///
    /// # Errors
    /// `Invalid` for a short payload and for padding that is not 0, `Corrupt` for a damaged payload. No byte is stored
    /// then.
    pub fn finish(mut self) -> Result<Option<Work>, Fault> {
        self.job.protocol.check_alive()?;
        if !self.left.is_empty() {
            let value = format!("{} bytes short", self.left.len());
            return Err(Fault::invalid("payload", value, "as long as the chunk", "send whole chunks"));
        }
        if !self.ticket.chunk.lent {
            check_sum(self.ticket.chunk.crc32, self.sum.value())?;
            self.check_arrived_padding()?;
        }
        self.finished = true;
        self.job.gradients.pushed_bytes.fetch_add(self.ticket.chunk.bytes, Ordering::Relaxed);
        if let (Some(spilled), Some(staged)) = (&self.job.gradients.spilled, self.staged.take()) {
            let left_out = self.left_out(&staged);
            spilled.store(self.ticket, staged, self.sum.value(), left_out);
            return Ok(None);
        }
        let work = self.job.protocol.machine().stored(self.ticket);
        self.job.protocol.notify();
        Ok(work)
    }
}

impl Writing {
    /// Returns the parameters of a chunk in DRAM that have no gradient. Sums are scanned once they are whole.
    fn left_out(&self, staged: &Staged) -> Vec<u32> {
        let Ticket { owned, chunk, .. } = self.ticket;
        if self.job.share.accumulates(owned) {
            return Vec::new();
        }
        let bytes = &staged.region.bytes()[..chunk.bytes as usize];
        let first = staged.start / chunk.dtype.bytes() as usize;
        self.job.gradients.left_out_of(owned, first, cast(bytes.into(), chunk.dtype))
    }

    fn check_arrived_padding(&self) -> Result<(), Fault> {
        let Ticket { owned, slot, contributor, chunk } = self.ticket;
        let start = chunk.chunk.0 as usize * CHUNK_BYTES;
        let length = chunk.bytes as usize;
        if let Some(staged) = &self.staged {
            return self.check_padding(start, &staged.region.bytes()[..length]);
        }
        let mut contribution = lock(self.job.gradients.contribution(owned, slot, contributor));
        self.check_padding(start, &contribution.own()[start..start + length])
    }

    /// Checks that padding is 0 in these bytes, which begin at byte `start` of the shard's gradient.
    fn check_padding<'a>(&self, start: usize, bytes: impl Into<Source<'a, u8>>) -> Result<(), Fault> {
        let chunk = &self.ticket.chunk;
        let shard = self.job.share.layout.shard_range(chunk.contribution.shard);
        let first = shard.start + start as u64 / chunk.dtype.bytes();
        self.job.share.check_padding(first, bytes, chunk.dtype)
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if !self.finished {
            if let (Some(spilled), Some(staged)) = (&self.job.gradients.spilled, self.staged.take()) {
                spilled.unstage(staged);
            }
            self.job.protocol.machine().abandoned(self.ticket);
            self.job.protocol.notify();
        }
    }
}

/// Compares a chunk's stated checksum with the checksum of its payload.
pub fn check_sum(claimed: u32, found: u32) -> Result<(), Fault> {
    if claimed == found {
        return Ok(());
    }
    let limit = format!("{found:08x}, the CRC-32 of the payload received");
    let remedy = "send the chunk again; if it repeats, suspect the network or the worker's memory";
    Err(Fault::new(FaultKind::Corrupt, "push.crc32", format!("{claimed:08x}"), limit, remedy))
}

impl Job {
    /// Admits a chunk by its header, before its payload arrives.
    pub fn admit(self: &Arc<Self>, chunk: &ContributionChunk) -> Result<Admission<Writing>, Fault> {
        self.protocol.check_alive()?;
        let admission = self.protocol.machine().admit(chunk)?;
        if matches!(admission, Admission::Duplicate | Admission::Superseded) {
            // The statistics of a delayed step may wait for this process's last chunk.
            self.protocol.notify();
        }
        Ok(admission.and_then(|ticket| {
            // The machine has refused chunks outside the shard, and chunks of a wrong length.
            let start = if chunk.lent { 0 } else { chunk.chunk.0 as usize * CHUNK_BYTES };
            let mut staged = None;
            if let Some(spilled) = self.gradients.spilled.as_ref().filter(|_| !chunk.lent) {
                staged = spilled.stage(start);
                if staged.is_none() {
                    self.protocol.machine().abandoned(ticket);
                    return Admission::Busy;
                }
            }
            let (job, left) = (Arc::clone(self), start..start + chunk.bytes as usize);
            Admission::New(Writing { job, ticket, left, sum: Crc32::new(), staged, finished: false })
        }))
    }

    /// Fails the job if the drives of its gradients have owed answers for too long. Pushes may fill all buffers before
    /// any update waits for a gradient.
    ///
    /// # Errors
    /// `Deadline`, which ends the job on this server.
    pub fn check_drives(&self, now: Instant) -> Result<(), Fault> {
        let Some(spilled) = &self.gradients.spilled else { return Ok(()) };
        spilled.check(now).map_err(|fault| self.protocol.fail(fault))
    }

    /// Counts a chunk whose write to the drives has ended, if there is one. Called by the compute thread, as
    /// [`Job::perform`] is.
    ///
    /// # Errors
    /// The drives' error, which ends the job on this server.
    pub fn collect(&self) -> Result<Option<Work>, Fault> {
        let collected = self.gradients.collect().map_err(|fault| self.protocol.fail(fault))?;
        let Some(ticket) = collected else { return Ok(None) };
        let work = self.protocol.machine().stored(ticket);
        self.protocol.notify();
        Ok(work)
    }
}
