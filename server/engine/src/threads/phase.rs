//! The blocks of one call, shared among seats. Each seat has its own run of blocks, and helps another seat
//! when its run is done.

use std::ops::Range;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

use super::cpus::Seat;

/// Remaining blocks of each seat.
pub(super) struct Phase {
    runs: Vec<Run>,
    /// The seats whose blocks a seat may take over: the seats of its node, and for the caller all.
    reach: Vec<Range<usize>>,
}

/// A run of blocks: its front in the low half of the number, and its end in the high half. The owner takes from the
/// front, and helpers from the end. Each run has its own cache line, which its owner writes at every block.
#[repr(align(128))]
struct Run(AtomicU64);

impl Phase {
    /// Gives each seat its run of blocks.
    pub(super) fn new(runs: Vec<Range<usize>>, seats: &[Seat]) -> Phase {
        let runs = runs.into_iter().map(|run| {
            assert!(u32::try_from(run.end).is_ok(), "{} blocks in one call", run.end);
            Run(AtomicU64::new(run.start as u64 | (run.end as u64) << 32))
        });
        Phase { runs: runs.collect(), reach: seats.iter().map(|seat| seat.reach.clone()).collect() }
    }

    /// The next block for a seat: from its own run first, then from another's.
    pub(super) fn take(&self, seat: usize) -> Option<usize> {
        self.runs[seat].front().or_else(|| {
            let reach = self.reach[seat].clone();
            // Helpers begin with the run after their own, so that they spread over the runs.
            let others = (seat + 1..reach.end).chain(reach.start..seat);
            others.into_iter().find_map(|other| self.runs[other].end())
        })
    }

    pub(super) fn has_blocks_for(&self, seat: usize) -> bool {
        self.runs[self.reach[seat].clone()].iter().any(|run| !run.is_empty())
    }

    /// Gives up the blocks that no seat has taken.
    pub(super) fn abandon(&self) {
        // With a swap, another thread takes a block before this moment or not at all. In loom's models a store does not
        // ensure that.
        self.runs.iter().for_each(|run| _ = run.0.swap(0, Ordering::Relaxed));
    }
}

/// A seat's part of a group. Neighbouring blocks go to one seat, and a group of the same size is always shared out
/// the same way.
pub(super) fn share(count: usize, seat: usize, seats: usize) -> Range<usize> {
    count * seat / seats..count * (seat + 1) / seats
}

impl Run {
    fn front(&self) -> Option<usize> {
        self.take(|front, end| (front, front + 1, end))
    }

    fn end(&self) -> Option<usize> {
        self.take(|front, end| (end - 1, front, end - 1))
    }

    /// Relaxed is enough: a block's data is handed over under the lock of its item.
    fn take(&self, part: impl Fn(u32, u32) -> (u32, u32, u32)) -> Option<usize> {
        let mut taken = 0;
        let update = |run: u64| {
            let (front, end) = (run as u32, (run >> 32) as u32);
            (front < end).then(|| {
                let (block, front, end) = part(front, end);
                taken = block as usize;
                u64::from(front) | u64::from(end) << 32
            })
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).ok().map(|_| taken)
    }

    fn is_empty(&self) -> bool {
        let run = self.0.load(Ordering::Relaxed);
        run as u32 >= (run >> 32) as u32
    }
}

/// The models go through every order in which seats may take blocks. CONTRIBUTING.md says how to run them.
#[cfg(all(test, loom))]
mod models {
    use std::sync::Arc;

    use loom::{model, thread};

    use super::*;

    fn phase(runs: [Range<usize>; 2]) -> Arc<Phase> {
        let seat = || Seat { cores: Vec::new(), reach: 0..2 };
        Arc::new(Phase::new(runs.into(), &[seat(), seat()]))
    }

    fn take_all(phase: &Phase, seat: usize) -> Vec<usize> {
        std::iter::from_fn(|| phase.take(seat)).collect()
    }

    #[test]
    fn loom_each_block_is_taken_once_whoever_takes_it() {
        for runs in [[0..2, 2..3], [0..3, 3..3], [0..1, 1..2]] {
            let last = runs[1].end;
            model(move || {
                let phase = phase(runs.clone());
                let other = Arc::clone(&phase);
                let other = thread::spawn(move || take_all(&other, 1));
                let mut taken = take_all(&phase, 0);
                taken.extend(other.join().unwrap());
                taken.sort_unstable();
                assert_eq!(taken, (0..last).collect::<Vec<_>>());
                assert!(!phase.has_blocks_for(0) && !phase.has_blocks_for(1));
            });
        }
    }

    #[test]
    fn loom_what_is_given_up_is_taken_by_nobody_after() {
        model(|| {
            let phase = phase([0..2, 2..3]);
            let other = Arc::clone(&phase);
            let other = thread::spawn(move || take_all(&other, 1));
            phase.abandon();
            assert_eq!(phase.take(0), None);
            let mut taken = other.join().unwrap();
            taken.sort_unstable();
            taken.dedup();
            assert!(taken.len() <= 3 && !phase.has_blocks_for(1));
        });
    }
}
