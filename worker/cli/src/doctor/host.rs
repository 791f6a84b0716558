//! Checks this host's resources for servers and workers.

use std::{fs, path::Path};

use longshore_engine::{
    io::{Engine, OpenDisk, OpenFile},
    kernels::Isa,
    threads::available_threads,
};
use longshore_server::Config;
use rustix::{
    fs::statfs,
    process::{Resource, getrlimit},
};

use super::{Finding, bad, drives::free_bytes, good, warning};
use crate::sizes::human;

/// Number of descriptors that is enough. A rank has 3 connections to each server by default, so a server serves some
/// hundreds of ranks.
const DESCRIPTORS: u64 = 4096;
const TMPFS: &str = "/dev/shm";
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGE_PAGES: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const NODES: &str = "sys/devices/system/node";

/// Returns the findings of every check of the host. `system` is the root of the kernel's files.
pub(super) fn all(system: &Path) -> Vec<Finding> {
    vec![
        cores(),
        memory(),
        huge_pages(system),
        numa(system),
        io_uring(),
        tmpfs(Path::new(TMPFS)),
        descriptors(),
    ]
}

fn cores() -> Finding {
    let threads = available_threads();
    match Isa::from_env() {
        Ok(Isa::Scalar) => warning(
            "cores",
            format!("{threads}, and no vector instructions that the update knows"),
            "run servers on hosts with AVX2, AVX-512 or NEON, and leave LONGSHORE_ISA unset",
        ),
        Ok(isa) => good("cores", format!("{threads} for this process, {isa}")),
        Err(error) => bad("cores", error.to_string(), "correct LONGSHORE_ISA"),
    }
}

fn memory() -> Finding {
    let default = Config::nowhere().memory;
    let said = format!("a server on this host takes up to {} unless --memory says otherwise", human(default));
    if default < 1 << 30 {
        return warning("memory", said, "free memory, or raise the container's limit");
    }
    good("memory", said)
}

fn huge_pages(system: &Path) -> Finding {
    match fs::read_to_string(system.join(HUGE_PAGES)) {
        Ok(modes) if modes.contains("[never]") => warning(
            "huge pages",
            format!("/{HUGE_PAGES} is set to never: updates are slower"),
            format!("echo madvise > /{HUGE_PAGES}"),
        ),
        Ok(_) => good("huge pages", "given to those who ask"),
        Err(_) => warning(
            "huge pages",
            "this kernel has none: updates are slower",
            "use a kernel with transparent huge pages",
        ),
    }
}

/// Update threads are bound to the cores of their node, and work best with that node's own memory.
fn numa(system: &Path) -> Finding {
    const WHAT: &str = "NUMA";
    let root = system.join(NODES);
    let read = |node: &str, file: &str| fs::read_to_string(root.join(node).join(file)).unwrap_or_default();
    let names = fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut nodes: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    nodes.retain(|name| name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok()));
    nodes.sort();
    let has_cores = |node: &String| !read(node, "cpulist").trim().is_empty();
    let memory = |node: &String| {
        // Line format: `Node 0 MemTotal:  16384 kB`.
        let total = read(node, "meminfo").lines().find(|line| line.contains("MemTotal:")).map(str::to_string);
        total?.split_whitespace().rev().nth(1)?.parse::<u64>().ok()
    };
    let bare: Vec<String> =
        nodes.iter().filter(|node| has_cores(node) && memory(node) == Some(0)).cloned().collect();
    match nodes.len() {
        _ if !bare.is_empty() => warning(
            WHAT,
            format!(
                "{} has cores and no memory of its own: its updates go through another node",
                bare.join(", ")
            ),
            "put memory into that node's slots, or keep the server off its cores with numactl --cpunodebind",
        ),
        0 | 1 => good(WHAT, "one node"),
        count => good(WHAT, format!("{count} nodes, and update threads stay on theirs")),
    }
}

/// Checks that the kernel gives this process a ring that reads a file.
fn io_uring() -> Finding {
    const WHAT: &str = "io_uring";
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        // No temporary folder can be written, as in a container with a read-only root.
        Err(error) => {
            return warning(
                WHAT,
                format!("not tried, since no file can be made: {error}"),
                "name a folder that may be written to in TMPDIR",
            );
        }
    };
    match (OpenFile { engine: Engine::Uring }).create(&folder.path().join("probe")) {
        Ok(_) => good(WHAT, "works"),
        Err(error) => warning(
            WHAT,
            format!("refused ({error}): tier nvme reads and writes with threads"),
            "allow it in the container's seccomp profile and in kernel.io_uring_disabled",
        ),
    }
}

fn tmpfs(dir: &Path) -> Finding {
    const WHAT: &str = "tmpfs";
    const REMEDY: &str = "mount a tmpfs of the size of the jobs' state, and name it with --shm-dir";
    match statfs(dir) {
        Ok(found) if found.f_type == TMPFS_MAGIC => {
            let free = free_bytes(dir).unwrap_or(0);
            let said = format!("{} free in {} for tier shm", human(free), dir.display());
            if free < 1 << 30 { warning(WHAT, said, REMEDY) } else { good(WHAT, said) }
        }
        Ok(_) => warning(WHAT, format!("{} is none: tier shm has no place", dir.display()), REMEDY),
        Err(error) => warning(WHAT, format!("{} ({error}): tier shm has no place", dir.display()), REMEDY),
    }
}

fn descriptors() -> Finding {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    let said = match (limit.current, limit.maximum) {
        (Some(now), Some(most)) => format!("{now} now, {most} at most"),
        (Some(now), None) => format!("{now} now, no limit at most"),
        (None, _) => "no limit".to_string(),
    };
    if most < DESCRIPTORS {
        return warning(
            "descriptors",
            said,
            "raise the limit (ulimit -n, LimitNOFILE): a rank takes 3 on each server",
        );
    }
    good("descriptors", said)
}
