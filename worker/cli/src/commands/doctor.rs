//! `longshore doctor`: what Longshore needs of a host and of its servers, and what is missing.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::ensure;
use longshore_engine::{
    io::{Engine, OpenDisk, OpenFile},
    kernels::Isa,
    threads::available_threads,
};
use longshore_server::Config;
use longshore_wire::v1::ListJobsRequest;
use rustix::{
    fs::{Mode, OFlags, open, statfs, statvfs},
    process::{Resource, getrlimit},
};
use serde_json::json;
use tonic::Response;

use super::admin::TlsArgs;
use crate::{
    servers::{PROMPTLY, Servers},
    sizes::human,
};

/// How many descriptors are enough. A rank has 3 connections to each server unless its options say otherwise, so this
/// does for some hundreds.
const DESCRIPTORS: u64 = 4096;
const TMPFS: &str = "/dev/shm";
const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGE_PAGES: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
/// How many bytes a file is probed with.
const PROBE_BYTES: u64 = 1024 * 1024;
/// How far clocks may be apart, since logs of several hosts are read side by side.
const CLOCKS_APART: Duration = Duration::from_secs(5);

#[derive(clap::Args)]
pub(super) struct Args {
    /// Servers to ask as well
    #[arg(long, env = "LONGSHORE_SERVERS", value_delimiter = ',', value_name = "HOST:PORT,...")]
    servers: Vec<String>,
    #[command(flatten)]
    tls: TlsArgs,
    /// Folders that a server's --state-dir will name
    #[arg(long, value_delimiter = ',', value_name = "DIR,...")]
    state_dir: Vec<PathBuf>,
    /// One JSON object a check
    #[arg(long)]
    json: bool,
}

/// One check, and what it found.
struct Finding {
    what: String,
    state: Grade,
    said: String,
    remedy: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Grade {
    Good,
    /// It works, but slower or for less.
    Warning,
    /// It does not work.
    Bad,
}

impl Grade {
    fn name(self) -> &'static str {
        match self {
            Grade::Good => "ok",
            Grade::Warning => "warning",
            Grade::Bad => "bad",
        }
    }
}

fn good(what: impl Into<String>, said: impl Into<String>) -> Finding {
    Finding { what: what.into(), state: Grade::Good, said: said.into(), remedy: "" }
}

fn warning(what: impl Into<String>, said: impl Into<String>, remedy: &'static str) -> Finding {
    Finding { what: what.into(), state: Grade::Warning, said: said.into(), remedy }
}

fn bad(what: impl Into<String>, said: impl Into<String>, remedy: &'static str) -> Finding {
    Finding { what: what.into(), state: Grade::Bad, said: said.into(), remedy }
}

/// Prints what was found. The result is an error when something does not work, and not when something is only slow.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mut findings =
        vec![cores(), memory(), huge_pages(), io_uring(), tmpfs(Path::new(TMPFS)), descriptors()];
    findings.extend(args.state_dir.iter().map(|dir| state_dir(dir)));
    findings.extend(servers(&args.servers, args.tls.tls_dir.as_deref())?);
    for Finding { what, state, said, remedy } in &findings {
        if args.json {
            say!("{}", json!({"check": what, "state": state.name(), "said": said, "remedy": remedy}));
        } else {
            let remedy = if remedy.is_empty() { String::new() } else { format!(". Remedy: {remedy}") };
            say!("{:<8} {what}: {said}{remedy}", state.name());
        }
    }
    let bad: Vec<&str> =
        findings.iter().filter(|found| found.state == Grade::Bad).map(|found| found.what.as_str()).collect();
    ensure!(bad.is_empty(), "not in order: {}", bad.join(", "));
    Ok(())
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
    let default = Config::default_on(([127, 0, 0, 1], 0).into()).memory;
    let said = format!("a server on this host takes up to {} unless --memory says otherwise", human(default));
    if default < 1 << 30 {
        return warning("memory", said, "free memory, or raise the container's limit");
    }
    good("memory", said)
}

fn huge_pages() -> Finding {
    match fs::read_to_string(HUGE_PAGES) {
        Ok(modes) if modes.contains("[never]") => warning(
            "huge pages",
            format!("{HUGE_PAGES} is set to never: updates are slower"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Ok(_) => good("huge pages", "given to those who ask"),
        Err(_) => warning(
            "huge pages",
            "this kernel has none: updates are slower",
            "use a kernel with transparent huge pages",
        ),
    }
}

/// Whether the kernel gives this process a ring that reads a file.
fn io_uring() -> Finding {
    let probe = || {
        let folder = tempfile::tempdir()?;
        OpenFile { engine: Engine::Uring }.create(&folder.path().join("probe"), PROBE_BYTES, None)
    };
    match probe() {
        Ok(_) => good("io_uring", "works"),
        Err(error) => warning(
            "io_uring",
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

fn free_bytes(dir: &Path) -> rustix::io::Result<u64> {
    let found = statvfs(dir)?;
    Ok(found.f_bavail * found.f_frsize)
}

/// Whether a server could keep jobs of tier nvme there, and how fast.
fn state_dir(dir: &Path) -> Finding {
    let what = format!("state directory {}", dir.display());
    let free = match free_bytes(dir) {
        Ok(free) => free,
        Err(error) => return bad(what, error.to_string(), "mount its drive, or correct the path"),
    };
    let direct = tempfile::NamedTempFile::new_in(dir)
        .map(|file| open(file.path(), OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()));
    match direct {
        Err(error) => bad(what, error.to_string(), "give the server's user the right to write there"),
        Ok(Err(error)) => warning(
            what,
            format!("{} free, no direct I/O ({error}): every block is copied once more", human(free)),
            "choose a file system with O_DIRECT, such as ext4 or XFS",
        ),
        Ok(Ok(_)) => good(what, format!("{} free, direct I/O", human(free))),
    }
}

fn servers(addresses: &[String], tls_dir: Option<&Path>) -> anyhow::Result<Vec<Finding>> {
    const SILENT: &str =
        "check that longshored runs there and is not stopped, and that address, port and firewall are right";
    if addresses.is_empty() {
        return Ok(Vec::new());
    }
    let (mut reached, silent) = Servers::reach(addresses, tls_dir)?;
    let asked = Instant::now();
    let answers = reached.answers_within(PROMPTLY, |mut admin| async move {
        let list = admin.list_jobs(ListJobsRequest {}).await?;
        let apart = clocks_apart(list.get_ref().unix_micros, asked.elapsed());
        Ok(Response::new((list.into_inner(), apart)))
    });
    let mut findings: Vec<Finding> =
        silent.into_iter().map(|(address, why)| bad(format!("server {address}"), why, SILENT)).collect();
    for (address, answer) in answers {
        let what = format!("server {address}");
        findings.push(match answer {
            Err(fault) => bad(what, fault.to_string(), SILENT),
            Ok((list, apart)) => {
                let said = format!(
                    "version {}, {} jobs, {} of {} reserved",
                    if list.release.is_empty() { "older than this program's" } else { &list.release },
                    list.jobs.len(),
                    human(list.memory_reserved),
                    human(list.memory_budget)
                );
                if list.release != env!("CARGO_PKG_VERSION") {
                    warning(what, said, "run one version of Longshore everywhere")
                } else if apart > CLOCKS_APART {
                    let said = format!("{said}; its clock is {:.0} s from this host's", apart.as_secs_f64());
                    warning(what, said, "set the hosts' clocks by NTP: their logs are read side by side")
                } else {
                    good(what, said)
                }
            }
        });
    }
    Ok(findings)
}

/// How far a server's clock is from this one's, at least: the server read it at some time of a call that `took` so
/// long. An older server does not say.
fn clocks_apart(theirs: u64, took: Duration) -> Duration {
    let here = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
    match theirs {
        0 => Duration::ZERO,
        theirs => Duration::from_micros(here.abs_diff(theirs)).saturating_sub(took),
    }
}
