//! The cores that this process may use, their NUMA nodes, and the cores of a pool's threads.

use std::{fs, io, ops::Range, path::Path, thread};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Cores with memory of their own, in ascending order. A host without NUMA has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) cores: Vec<usize>,
}

/// Returns the number of threads that can run at once. The limits are the affinity mask, which a cpuset narrows, and a
/// cgroup's CPU quota, rounded down. The standard library looks at all three.
pub fn available_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The nodes of the cores that the calling thread may use.
pub(super) fn nodes() -> Vec<Node> {
    nodes_below(Path::new("/sys/devices/system/node"), &allowed_cores())
}

/// Returns the cores of the affinity mask. Returns none if the mask cannot be read, as on more than 1024
/// cores; then no thread is bound.
fn allowed_cores() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

fn nodes_below(root: &Path, allowed: &[usize]) -> Vec<Node> {
    let names = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut numbers: Vec<usize> =
        names.filter_map(|name| name.to_str()?.strip_prefix("node")?.parse().ok()).collect();
    numbers.sort_unstable();
    let mut nodes: Vec<Node> = numbers
        .into_iter()
        .filter_map(|number| {
            let list = fs::read_to_string(root.join(format!("node{number}/cpulist"))).ok()?;
            let mut cores = parse_list(&list)?;
            cores.retain(|core| allowed.contains(core));
            // A node is left out if it has memory alone, or only cores that this process may not use.
            (!cores.is_empty()).then_some(Node { cores })
        })
        .collect();
    let known: usize = nodes.iter().map(|node| node.cores.len()).sum();
    if known != allowed.len() {
        // Without /sys, as in some containers, all cores count as one node.
        nodes = vec![Node { cores: allowed.to_vec() }];
    }
    nodes
}

/// Parses `0-3,8,10-11`, the kernel's way to write sets of cores.
fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cores.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cores)
}

/// Keeps the calling thread on these cores, and returns the cores it had before.
pub(super) fn bind(cores: &[usize]) -> io::Result<CpuSet> {
    let before = sched_getaffinity(None)?;
    let mut set = CpuSet::new();
    for &core in cores.iter().filter(|&&core| core < CpuSet::MAX_CPU) {
        set.set(core);
    }
    sched_setaffinity(None, &set)?;
    Ok(before)
}

/// Seat of a pool's thread. Seat 0 is the caller's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    /// The cores to stay on. An empty list means any.
    pub(super) cores: Vec<usize>,
    /// The seats whose blocks this seat may take over.
    pub(super) reach: Range<usize>,
}

/// Returns the seats of a pool, node by node, so that neighbouring blocks share a node.
///
/// If there are as many threads as cores, each thread is bound to a core. Fewer threads are bound to nodes only, and
/// the scheduler chooses the cores. Otherwise two servers on a host would bind their threads to the same cores.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_affinity_mask_is_the_number_of_threads() {
        let (threads, nodes) = thread::spawn(|| {
            bind(&allowed_cores()[..1]).unwrap();
            (available_threads(), nodes())
        })
        .join()
        .unwrap();
        assert_eq!(threads, 1);
        assert_eq!(nodes, [Node { cores: allowed_cores()[..1].to_vec() }]);
    }

    #[test]
    fn nodes_are_read_as_the_kernel_writes_them() {
        let root = tempfile::tempdir().unwrap();
        // The nodes are out of order. Node 2 has no cores, and the process may use no core of node 3.
        for (node, list) in [(10, "4-5,12-13\n"), (0, "0-1,8-9\n"), (2, "\n"), (3, "6-7\n")] {
            let folder = root.path().join(format!("node{node}"));
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("cpulist"), list).unwrap();
        }
        fs::write(root.path().join("online"), "0,2-3,10\n").unwrap();
        let nodes = nodes_below(root.path(), &[0, 1, 4, 5, 8, 12]);
        assert_eq!(nodes, [Node { cores: vec![0, 1, 8] }, Node { cores: vec![4, 5, 12] }]);
    }

    #[test]
    fn without_sysfs_there_is_one_node() {
        let nodes = nodes_below(Path::new("/nonexistent"), &[2, 3]);
        assert_eq!(nodes, [Node { cores: vec![2, 3] }]);
    }
}
