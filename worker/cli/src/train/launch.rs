//! Starts a run from its settings: an embedded server when none is named, and a process for each rank.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::Context;
use longshore_server::{Config, Embedded, config::StorageConfig};

use super::{Settings, rank};

/// How often the ranks' processes are checked.
const POLL: Duration = Duration::from_millis(100);

/// Trains to the end.
pub fn run(settings: &Settings) -> anyhow::Result<()> {
    let embedded = settings.servers.is_empty().then(|| embed(settings)).transpose()?;
    let servers = match &embedded {
        Some(embedded) => vec![embedded.address().to_string()],
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
    let mut ranks = Ranks(Vec::new());
    for rank in 0..settings.world_size {
        let program = std::env::current_exe().context("finding this program to start the ranks with")?;
        let mut command = Command::new(program);
        command.args(std::env::args_os().skip(1)).arg("--rank").arg(rank.to_string());
        if settings.servers.is_empty() {
            command.arg("--servers").arg(servers.join(",")).arg("--embedded");
        }
        if rank > 0 {
            command.stdout(Stdio::null());
        }
        let child = command.stdin(Stdio::null()).spawn();
        ranks.0.push(Some(child.with_context(|| format!("starting the process of rank {rank}"))?));
    }
    ranks.wait()
}

/// The ranks' processes. They are killed when this is dropped, so that no rank outlives a failed run.
struct Ranks(Vec<Option<Child>>);

impl Ranks {
    fn wait(&mut self) -> anyhow::Result<()> {
        while self.0.iter().any(Option::is_some) {
            for (rank, slot) in self.0.iter_mut().enumerate() {
                let Some(child) = slot else { continue };
                let Some(status) = child.try_wait()? else { continue };
                *slot = None;
                anyhow::ensure!(
                    status.success(),
                    "rank {rank} ended with {status}: see its message above. The job is still on its servers: \
                     run the same command again to continue"
                );
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in self.0.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
