//! Seats: the cores on which each thread of a pool runs, and the seats that it may help.

use std::ops::Range;

use super::cpus::Node;

/// Seat of a pool's thread. Seat 0 is the caller's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// The cores to stay on. An empty list means any.
    pub(super) cores: Vec<usize>,
    /// The seats whose blocks this one may take over.
    pub(super) reach: Range<usize>,
}

/// The seats, node by node, so that neighbouring blocks share a node.
///
/// A pool as large as the process's cores has one thread on each. A smaller pool leaves the choice to the
/// scheduler, inside a node where there are several. Two servers on a host would otherwise choose the same
/// cores.
pub(super) fn seats(threads: usize, nodes: &[Node]) -> Vec<Seat> {
    let cores: usize = nodes.iter().map(|node| node.cores.len()).sum();
    let mut seats = Vec::with_capacity(threads);
    let mut before = 0;
    for node in nodes {
        let first = seats.len();
        before += node.cores.len();
        // Each node gets its part of the threads, so that no node's memory bandwidth is left out.
        let last = (threads * before).checked_div(cores).unwrap_or(threads);
        for index in 0..last - first {
            let cores = match (threads == cores, nodes.len()) {
                (true, _) => vec![node.cores[index]],
                (false, 1) => Vec::new(),
                (false, _) => node.cores.clone(),
            };
            let reach = if first + index == 0 { 0..threads } else { first..last };
            seats.push(Seat { cores, reach });
        }
    }
    seats
}
