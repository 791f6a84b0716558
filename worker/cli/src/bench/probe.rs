//! Speeds of this host, in the form that a plan asks for. Each speed is measured by the code of the corresponding
//! bench.

use std::{
    collections::BTreeMap,
    io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    time::Instant,
};

use anyhow::Context;
use longshore_engine::threads::available_threads;
use longshore_proto::Formats;
use longshore_server::{Config, Embedded};
use longshore_wire::v1;
use rustix::fs::statvfs;

pub(crate) use super::wire::JOB;
use super::{median, storage, update::Bare, wire};
use crate::{access::Access, servers::Servers};

/// Samples of each speed, of which the median counts.
const ROUNDS: usize = 5;
const CALLS: usize = 200;
/// Numbers of parameters. Arrays of either number fit in no cache.
const UPDATE_PARAMS: u64 = 50_000_000;
const STORAGE_PARAMS: u64 = 100_000_000;

#[derive(Clone, clap::Args)]
pub(crate) struct ProbeArgs {
    /// Measure this host instead, and print what was found as a file for --hardware
    #[arg(long, conflicts_with_all = ["params", "preset", "model", "hardware"])]
    pub(crate) probe: bool,
    /// With --probe: folders of the drives to measure, as a server's --state-dir names them. Takes 2.4 GB of them
    #[arg(long, value_delimiter = ',', value_name = "DIR,...", requires = "probe")]
    probe_dir: Vec<PathBuf>,
    /// With --probe: servers to measure the link to [default: one in this process, over loopback]
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...", requires = "probe")]
    probe_servers: Vec<String>,
    #[command(flatten)]
    access: Access,
}

impl ProbeArgs {
    pub(crate) fn elsewhere(&mut self) -> (&mut Vec<String>, &mut Access) {
        (&mut self.probe_servers, &mut self.access)
    }
}

pub(crate) struct Probed {
    pub(crate) threads: usize,
    /// Memory that `longshored` gives to jobs here by default.
    pub(crate) memory: u64,
    /// Free bytes of all drives. None without a folder to measure.
    pub(crate) nvme: Option<u64>,
    pub(crate) server_memory: f64,
    /// Speed of the drives, in GB/s. None without a folder to measure.
    pub(crate) drives: Option<f64>,
    /// Speed of the slower direction.
    pub(crate) link: f64,
    pub(crate) is_loopback: bool,
    pub(crate) round_trip_us: f64,
}

impl Probed {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "threads": self.threads, "memory": self.memory, "nvme": self.nvme, "server_memory": self.server_memory, "drives": self.drives, "link": self.link,
            "is_loopback": self.is_loopback, "round_trip": self.round_trip_us,
        })
    }

    pub(crate) fn file(&self, formats: Formats) -> String {
        let mut lines = vec![
            format!(
                "# Measured by `longshore plan --probe` with {} threads: updates of {} moments and {} master weights.",
                self.threads, formats.state, formats.master
            ),
            format!("memory = \"{}MiB\"", self.memory >> 20),
            match self.nvme {
                Some(free) => format!("nvme = \"{}MiB\"", free >> 20),
                None => "# nvme = \"2TB\"  # --probe-dir finds what is free".to_string(),
            },
            "# drive-endurance = \"600TB\"  # what its data sheet says may be written to each server's drives"
                .to_string(),
            "# gpu-memory = \"80GiB\"".to_string(),
            "# gpu-tflops = 300.0".to_string(),
            format!("server-memory = {:.2}", self.server_memory),
        ];
        match self.drives {
            Some(drives) => lines.push(format!("drives = {drives:.3}")),
            None => lines.push("# drives = 6.0  # --probe-dir measures it".to_string()),
        }
        if self.is_loopback {
            lines.push("# Over loopback; --probe-servers measures the link to other hosts.".to_string());
        }
        lines.push(format!("link = {:.3}", self.link));
        lines.push(format!("round-trip = {:.0}.0", self.round_trip_us));
        lines.join("\n")
    }
}

pub(crate) fn run(args: &ProbeArgs, formats: Formats) -> anyhow::Result<Probed> {
    let own = match args.probe_servers.is_empty() {
        true => {
            let listen = Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
            Some(Embedded::start(|config| Config { listen, ..config })?)
        }
        false => None,
    };
    let (servers, access) = match &own {
        Some(server) => (vec![server.address().to_string()], Access::default()),
        None => (args.probe_servers.clone(), args.access.clone()),
    };
    // Read before the probes allocate memory themselves.
    let memory = Config::nowhere().memory;
    let nvme = match args.probe_dir.as_slice() {
        [] => None,
        dirs => Some(free_of(dirs)?),
    };
    let drives = match args.probe_dir.as_slice() {
        [] => None,
        dirs => Some(storage::gb_per_s(dirs, STORAGE_PARAMS, ROUNDS as u64)?),
    };
    Ok(Probed {
        threads: available_threads(),
        memory,
        nvme,
        server_memory: updates(formats)?,
        drives,
        link: link(&servers, &access)?,
        is_loopback: own.is_some(),
        round_trip_us: round_trip(&servers, &access)?,
    })
}

/// Returns the free bytes of all folders `dirs`. Folders of one file system count once.
fn free_of(dirs: &[PathBuf]) -> anyhow::Result<u64> {
    let mut by_device = BTreeMap::new();
    for dir in dirs {
        let free = || -> io::Result<(u64, u64)> {
            let found = statvfs(dir)?;
            Ok((dir.metadata()?.dev(), found.f_bavail * found.f_frsize))
        };
        let (device, free) = free().with_context(|| format!("--probe-dir {}", dir.display()))?;
        by_device.insert(device, free);
    }
    Ok(by_device.values().sum())
}

fn updates(formats: Formats) -> anyhow::Result<f64> {
    let mut bare = Bare::new(UPDATE_PARAMS, available_threads(), formats)?;
    bare.adopt_caller();
    Ok(bare.bytes_per_s(ROUNDS) / 1e9)
}

/// Returns the GB a second to and from servers, for the slower direction.
pub(crate) fn link(servers: &[String], access: &Access) -> anyhow::Result<f64> {
    let mut rank = wire::BenchRank::to((servers.to_vec(), access), wire::default_connections())?;
    let mut slower = || anyhow::Ok(rank.push()?.gb_per_s().min(rank.pull()?.gb_per_s()));
    // The first round warms up.
    let measured = slower().and_then(|_| (0..ROUNDS).map(|_| slower()).collect::<anyhow::Result<Vec<_>>>());
    // The job is deleted in any case. The measurement's error is returned before the deletion's, since it is more
    // useful.
    let closed = rank.close();
    let speed = median(&measured?);
    closed.map(|()| speed)
}

/// Returns the time of a call without work, sent to all servers at once.
fn round_trip(servers: &[String], access: &Access) -> anyhow::Result<f64> {
    let servers = Servers::connect(servers, access)?;
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        servers.each_promptly(async |mut admin| admin.list_jobs(v1::ListJobsRequest::default()).await)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    Ok(median(&times))
}
