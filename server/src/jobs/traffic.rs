//! Bytes that each rank has pushed and pulled, by transport.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use longshore_proto::Rank;

/// Transports of payloads.
pub(crate) const TRANSPORTS: [&str; 4] = ["tcp", "tls", "unix", "memfd"];
/// Ranks counted separately.
pub(crate) const RANKS: usize = 64;

type Counts = [AtomicU64; TRANSPORTS.len()];

/// Payload bytes of a job's first ranks since the job was opened here. Each chunk or slice, mostly 1 MiB, costs one
/// addition.
#[derive(Default)]
pub(crate) struct Traffic {
    pushed: Vec<Counts>,
    pulled: Vec<Counts>,
}

impl Traffic {
    pub(super) fn new(world_size: u32) -> Traffic {
        let counts = || (0..RANKS.min(world_size as usize)).map(|_| Counts::default()).collect();
        Traffic { pushed: counts(), pulled: counts() }
    }

    pub(crate) fn pushed(&self, rank: Rank, transport: &str, bytes: u64) {
        add(&self.pushed, rank, transport, bytes);
    }

    pub(crate) fn pulled(&self, rank: Rank, transport: &str, bytes: u64) {
        add(&self.pulled, rank, transport, bytes);
    }

    /// Yields rank, transport and bytes, for nonzero counts.
    pub(crate) fn all_pushed(&self) -> impl Iterator<Item = (usize, &'static str, u64)> {
        counted(&self.pushed)
    }

    pub(crate) fn all_pulled(&self) -> impl Iterator<Item = (usize, &'static str, u64)> {
        counted(&self.pulled)
    }
}

fn add(ranks: &[Counts], rank: Rank, transport: &str, bytes: u64) {
    let counts = ranks.get(rank.index());
    let at = TRANSPORTS.iter().position(|known| *known == transport);
    if let Some(count) = counts.zip(at).map(|(counts, at)| &counts[at]) {
        count.fetch_add(bytes, Relaxed);
    }
}

fn counted(ranks: &[Counts]) -> impl Iterator<Item = (usize, &'static str, u64)> {
    ranks.iter().enumerate().flat_map(|(rank, counts)| {
        let counts =
            TRANSPORTS.iter().zip(counts).map(|(transport, count)| (*transport, count.load(Relaxed)));
        counts.filter(|(_, bytes)| *bytes > 0).map(move |(transport, bytes)| (rank, transport, bytes))
    })
}
