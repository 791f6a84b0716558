//! Starts a run from its settings: an embedded server when none is named, and a process for each rank.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::Context;
use longshore_server::{Config, Embedded, config::StorageConfig};
use rustix::process::{Pid, Signal, kill_process};

use super::{
    Settings, rank,
    stop::{Part, Stop, Stopped},
};

/// How often the ranks' processes are checked.
const POLL: Duration = Duration::from_millis(100);
use crate::wrong_use::wrong_use;

/// Trains to the end.
pub fn run(settings: &Settings) -> anyhow::Result<()> {
    let embedded = settings.servers.is_empty().then(|| embed(settings)).transpose()?;
    let servers = match &embedded {
        Some(embedded) => vec![embedded.address().to_string()],
    settings.check().map_err(wrong_use)?;
        None => settings.servers.clone(),
    };
    match settings.rank {
        None if settings.world_size > 1 => start_ranks(settings, &servers),
        _ => {
            rank::run(settings, settings.rank.unwrap_or(0), &servers, embedded.is_some() || settings.embedded)
        }
    }
}

/// Starts the server that runs inside this process.
fn embed(settings: &Settings) -> anyhow::Result<Embedded> {
    let embedded = Embedded::start(|defaults| Config {
        storage: StorageConfig {
            state_dirs: settings.state_dirs.clone(),
            resident: settings.resident,
            shm_dir: settings.shm_dir.clone(),
            ..defaults.storage
        },
        threads: settings.threads.unwrap_or(defaults.threads),
        memory: settings.memory.unwrap_or(defaults.memory),
        checkpoint_dir: settings.checkpoint_dir.clone(),
        ..defaults
    })?;
    Ok(embedded)
}

/// Starts one process for each rank, with this process's own arguments. The first one that fails ends the others.
fn start_ranks(settings: &Settings, servers: &[String]) -> anyhow::Result<()> {
    // From here on a signal ends no rank but through rank 0.
    let stop = Stop::catch(Part::Starts)?;
    let mut ranks = Ranks(Vec::new());
    for rank in 0..settings.world_size {
        let program = std::env::current_exe().context("finding this program to start the ranks with")?;
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1)).args(["--launched", "--rank", &rank.to_string()]);
        if settings.servers.is_empty() {
            command.arg("--servers").arg(servers.join(",")).arg("--embedded");
        }
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let child = command.stdin(Stdio::null()).spawn();
        ranks.0.push(Some(child.with_context(|| format!("starting the process of rank {rank}"))?));
    }
    ranks.wait(&stop, if settings.servers.is_empty() { OWN_SERVER } else { OTHERS_SERVERS })
}

/// What a user is told of the job when a rank's process has failed. The server that runs inside this process ends with it.
const OWN_SERVER: &str = "The server ended with this run: run the same command again, which goes on from what its state \
                          folder or a checkpoint has, and begins anew without either";
const OTHERS_SERVERS: &str = "The job is still on its servers: run the same command again to continue";

/// The ranks' processes. They are killed when this is dropped, so that no rank outlives a failed run.
struct Ranks(Vec<Option<Child>>);

impl Ranks {
    /// Waits for all of them. `left` says where the job is after one has failed.
    fn wait(&mut self, stop: &Stop, left: &str) -> anyhow::Result<()> {
        let mut told = false;
        while self.0.iter().any(Option::is_some) {
            if stop.is_urgent() {
                return Err(stopped(stop, "at once: the job is at its last decided step"));
            }
            if stop.asked().is_some() && !std::mem::replace(&mut told, true) {
                self.tell_rank_zero();
            }
            for (rank, slot) in self.0.iter_mut().enumerate() {
                let Some(child) = slot else { continue };
                let Some(status) = child.try_wait()? else { continue };
                *slot = None;
                if stop.asked().is_some() && rank == 0 && !status.success() {
                    // The others wait for a decision that will not come, and end with this.
                    return Err(stopped(stop, "with rank 0, which says above where, and how to go on"));
                }
                anyhow::ensure!(
                    status.success(),
                    "rank {rank} ended with {status}: see its message above. {left}"
                );
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Lets rank 0 end the run after the step in hand.
    fn tell_rank_zero(&self) {
        if let Some(Some(child)) = self.0.first() {
            // One that has ended meanwhile is found so.
            let _ = kill_process(Pid::from_child(child), Signal::USR1);
        }
    }
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
