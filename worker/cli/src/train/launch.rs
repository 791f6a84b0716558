//! Starts a run from its settings: an embedded server if none is named, and a process for each rank.

use std::{
    os::unix::process::ExitStatusExt,
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use anyhow::Context;
use longshore_engine::memory::float::Standard;
use longshore_server::{Config, Embedded, config::StorageConfig};
use rustix::process::{Pid, Signal, kill_process};

use super::{
    Settings,
    keep::cut_off,
    rank,
    stop::{LastWords, Part, SIGNALLED, Stop, Stopped},
};

/// The period of the checks of the ranks' processes.
const POLL: Duration = Duration::from_millis(100);

/// Trains to the end.
pub fn run(settings: &Settings) -> anyhow::Result<()> {
    // Rayon's threads start below, and inherit this floating-point mode.
    let _standard = Standard::enter();
    let embedded = settings.flags.servers.is_empty().then(|| embed(settings)).transpose()?;
    let servers = match &embedded {
        Some(embedded) => vec![embedded.address().to_string()],
        None => settings.flags.servers.clone(),
    };
    match settings.flags.rank {
        None if settings.flags.world_size > 1 => start_ranks(settings, &servers),
        _ => rank::run(
            settings,
            settings.flags.rank.unwrap_or(0),
            &servers,
            embedded.is_some() || settings.flags.embedded,
        ),
    }
}

/// Starts the server inside this process.
fn embed(settings: &Settings) -> anyhow::Result<Embedded> {
    let embedded = Embedded::start(|defaults| Config {
        storage: StorageConfig {
            state_dirs: settings.flags.state_dir.clone(),
            resident: settings.flags.resident.map_or(0, |size| size.0),
            shm_dir: settings.flags.shm_dir.clone(),
            ..defaults.storage
        },
        threads: settings.flags.threads.unwrap_or(defaults.threads),
        memory: settings.flags.memory.map(|size| size.0).unwrap_or(defaults.memory),
        checkpoint_dir: settings.flags.checkpoint_dir.clone(),
        ..defaults
    })?;
    Ok(embedded)
}

/// Starts a process for each rank, with this process's own arguments. The first failure ends the other ranks.
fn start_ranks(settings: &Settings, servers: &[String]) -> anyhow::Result<()> {
    let embedded = settings.flags.servers.is_empty();
    let (failed, at_once) = (if embedded { OWN_SERVER } else { OTHERS_SERVERS }, cut_off(settings, embedded));
    // From here on this process ends only with its ranks, or at a second signal. A rank's process ends at a second
    // signal, or at the first one if it does not catch signals yet.
    let stop = Stop::catch(Part::Starts, LastWords::default())?;
    let mut ranks = Ranks(Vec::new());
    for rank in 0..settings.flags.world_size {
        let program = std::env::current_exe().context("finding this program to start the ranks with")?;
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1)).args(["--launched", "--rank", &rank.to_string()]);
        if embedded {
            command.arg("--servers").arg(servers.join(",")).arg("--embedded");
        }
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let child = command.stdin(Stdio::null()).spawn();
        ranks.0.push(Some(child.with_context(|| format!("starting the process of rank {rank}"))?));
    }
    ranks.wait(&stop, &Left { failed, at_once: &at_once })
}

/// The message about the job after a rank's process has failed. An embedded server ends with this process.
const OWN_SERVER: &str = "The server ended with this run: run the same command again, which goes on from what its state \
                          folder or a checkpoint has, and begins anew without either";
const OTHERS_SERVERS: &str =
    "If the job was opened, its servers still have it: run the same command again to continue";

/// Messages about the job that a run leaves: after a rank's failure, and after a second signal.
struct Left<'a> {
    failed: &'a str,
    at_once: &'a str,
}

/// The ranks' processes. Dropping the value kills the processes, so that no rank outlives a failed run.
struct Ranks(Vec<Option<Child>>);

impl Ranks {
    fn wait(&mut self, stop: &Stop, left: &Left<'_>) -> anyhow::Result<()> {
        let mut told = false;
        while self.0.iter().any(Option::is_some) {
            if stop.is_urgent() {
                return Err(stopped(stop, left.at_once));
            }
            if stop.asked().is_some() && !std::mem::replace(&mut told, true) {
                self.tell_rank_zero();
            }
            for (rank, slot) in self.0.iter_mut().enumerate() {
                let Some(child) = slot else { continue };
                let Some(status) = child.try_wait()? else { continue };
                *slot = None;
                if stop.asked().is_some() && !status.success() {
                    match (rank, how_stopped(status)) {
                        // The other ranks wait for a decision that will not come, and are killed with this value.
                        (0, Some(said)) => return Err(stopped(stop, said)),
                        (0, None) => {}
                        // Rank 0 ends the run, and may be writing its results. Rank 0 reports a missing rank
                        // itself.
                        (1.., _) => continue,
                    }
                }
                anyhow::ensure!(
                    status.success(),
                    "rank {rank} ended with {status}: see its message above. {}",
                    left.failed
                );
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    fn tell_rank_zero(&self) {
        if let Some(Some(child)) = self.0.first() {
            // A process that has ended meanwhile is found by `try_wait`.
            let _ = kill_process(Pid::from_child(child), Signal::USR1);
        }
    }
}

/// Returns the message about a rank 0 that a signal stopped; None for any other end.
fn how_stopped(status: ExitStatus) -> Option<&'static str> {
    let is_one = |number: Option<i32>, of: &[Signal]| of.iter().any(|one| number == Some(one.as_raw()));
    if is_one(status.code().map(|code| code - SIGNALLED), &[Signal::INT, Signal::TERM]) {
        return Some("with rank 0, which says above where, and how to go on");
    }
    // Rank 0 catches these signals before any other work.
    let caught = is_one(status.signal(), &[Signal::INT, Signal::TERM, Signal::USR1]);
    caught.then_some("before training began: run the same command again")
}

fn stopped(stop: &Stop, said: &str) -> anyhow::Error {
    Stopped { signal: stop.asked().unwrap_or_default(), said: said.into() }.into()
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.0.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};

    use tokio::signal::unix::SignalKind;

    use super::*;

    /// Starts a process in a rank's place, and waits until it is ready.
    fn rank(script: &str) -> Option<Child> {
        let script = format!("{script}\necho ready\nwhile :; do sleep 0.02; done");
        let mut child = Command::new("sh").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Some(child)
    }

    /// Stops a run of these ranks by a signal, and returns the run's error.
    fn ended(ranks: Vec<Option<Child>>) -> anyhow::Error {
        let stop = Stop::default();
        stop.hear(Part::Starts, &LastWords::default(), SignalKind::terminate(), true);
        Ranks(ranks).wait(&stop, &Left { failed: "It has failed.", at_once: "at once" }).unwrap_err()
    }

    /// Rank 0 may be writing the last checkpoint.
    #[test]
    fn rank_zero_ends_a_stopped_run_whatever_others_do() {
        let mut gone = Command::new("sh").args(["-c", "exit 1"]).spawn().unwrap();
        gone.wait().unwrap();
        let error = ended(vec![rank("trap 'exit 143' USR1"), Some(gone)]);
        let stopped = error.downcast_ref::<Stopped>().unwrap_or_else(|| panic!("{error}"));
        assert_eq!(stopped.exit_code(), 143);
        assert!(stopped.said.contains("which says above where"), "{stopped}");
    }

    #[test]
    fn a_signal_may_come_before_rank_zero_catches_it() {
        let error = ended(vec![rank("")]);
        let stopped = error.downcast_ref::<Stopped>().unwrap_or_else(|| panic!("{error}"));
        assert!(stopped.said.contains("before training began"), "{stopped}");
    }
}
