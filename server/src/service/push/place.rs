//! Destination of a chunk's payload, and the fate of the chunk.

use std::{sync::Arc, time::Instant};

use longshore_engine::{
    job::{Writing, check_sum},
    step::Admission,
};
use longshore_proto::{
    ContributionChunk, Fault,
    checksum::{Crc32, TILE_BYTES},
};

use crate::{jobs::JobHandle, memfd::Payload};

/// Destination of a payload.
pub(super) enum Destination {
    Slot(Arc<JobHandle>, Writing),
    /// The payload is discarded. Only its checksum is compared.
    Nowhere(Fate, Crc32),
}

/// Fate of a chunk that was not refused.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Stored,
    Duplicate,
    Superseded,
    Decided,
}

impl Destination {
    /// Lends or copies a payload that lies in the worker's memory.
    pub(super) fn holding(mut self, payload: Option<Payload>, lent: bool) -> Result<Destination, Fault> {
        match (payload, &mut self) {
            (None, _) => {}
            (Some(payload), Destination::Slot(_, writing)) if lent => writing.lend(payload.into_lent())?,
            // The chunk is stored already. A lent payload moves no bytes, so there is no damage to check for.
            (Some(_), Destination::Nowhere(..)) if lent => {}
            (Some(payload), place) => place.fetch(&payload),
        }
        Ok(self)
    }

    /// Copies a payload that lies in the worker's memory.
    fn fetch(&mut self, payload: &Payload) {
        match self {
            Destination::Slot(_, writing) => writing.fetch(&mut |from, target| payload.copy(from, target)),
            Destination::Nowhere(_, sum) => {
                let mut tile = [0; TILE_BYTES];
                let bytes = payload.bytes() as usize;
                for from in (0..bytes).step_by(TILE_BYTES) {
                    let tile = &mut tile[..TILE_BYTES.min(bytes - from)];
                    payload.copy(from, tile);
                    sum.update(tile);
                }
            }
        }
    }
}

/// Returns the chunk's destination, or None while the slot is busy.
pub(super) fn place_now(
    handle: &Arc<JobHandle>,
    chunk: &ContributionChunk,
) -> Result<Option<Destination>, Fault> {
    Ok(match handle.job.admit(chunk)? {
        Admission::Busy => None,
        Admission::Duplicate => Some(Destination::Nowhere(Fate::Duplicate, Crc32::new())),
        Admission::Superseded => Some(Destination::Nowhere(Fate::Superseded, Crc32::new())),
        Admission::Decided => Some(Destination::Nowhere(Fate::Decided, Crc32::new())),
        Admission::New(writing) => Some(Destination::Slot(Arc::clone(handle), writing)),
    })
}

/// Completes a chunk and returns its fate. `crc32` is None for a lent payload.
pub(super) fn finish(place: Destination, crc32: Option<u32>, transport: &str) -> Result<Fate, Fault> {
    match place {
        Destination::Slot(handle, writing) => {
            let ContributionChunk { contribution, bytes, .. } = *writing.chunk();
            let work = writing.finish()?;
            handle.stages.stored(contribution.step, Instant::now());
            handle.perform(work);
            handle.traffic.pushed(contribution.rank, transport, bytes);
            Ok(Fate::Stored)
        }
        Destination::Nowhere(fate, sum) => {
            crc32.map_or(Ok(()), |claimed| check_sum(claimed, sum.value())).map(|()| fate)
        }
    }
}
