//! `/status.json`: the data of the status page.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Mutex, TryLockError},
    time::UNIX_EPOCH,
};

use longshore_engine::step::{Phase, RankProgress};
use longshore_proto::{Handover, Layout, Param, Placement, ServerId, Step, Version, remedies};
use longshore_wire::v1;
use rustix::fs::statvfs;
use serde::Serialize;
use serde_json::{Value, json};

use super::seen::{Seen, resident_bytes};
use crate::{
    jobs::Decided,
    quota::{Listed, Usage},
    service::{Services, scaling_of},
};

/// Largest number of ranks of a job in the report. Ranks with the oldest last step, which the job waits for, come
/// first.
const RANKS: usize = 256;

/// Address at which workers reach this server.
#[derive(Clone, Serialize)]
pub(crate) struct Listen {
    /// Address in the form of `--servers`. An IP address may be unspecified, such as 0.0.0.0.
    pub(crate) address: String,
    /// The connection is encrypted.
    pub(crate) tls: bool,
}

/// The whole report. Values that one place writes have no type of their own. Steps have one, since a tree of values for
/// each of many steps costs time.
#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    server: Value,
    jobs: Vec<Job>,
}

#[derive(Serialize)]
struct Job {
    #[serde(flatten)]
    head: Value,
    /// Decided steps after the requested one, oldest first, from the last 512.
    steps: Vec<Decided>,
}

pub(super) fn json(services: &Services, listen: Listen, wanted: &Wanted) -> String {
    let jobs = services.jobs.all().into_iter().map(|handle| Seen::now(services, handle));
    let jobs = jobs.map(|seen| {
        let steps = seen.handle.history.after(wanted.after(seen.name()));
        Job { head: job(services, &seen), steps }
    });
    let report = Report { jobs: jobs.collect(), server: server(services, listen) };
    // The report has only numbers and strings, so serialization does not fail.
    serde_json::to_string(&report).unwrap_or_default()
}

fn server(services: &Services, listen: Listen) -> Value {
    let budget = services.jobs.budget();
    // Jobs that this server stores and does not serve.
    let away = services.jobs.away().into_iter();
    let away = away.map(|(name, fault)| json!({ "name": name.as_str(), "reason": fault.to_string() }));
    let owners = services.jobs.owners().into_iter();
    json!({
        "release": env!("CARGO_PKG_VERSION"),
        "unix_ms": UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64),
        "listen": listen,
        "draining": services.draining.refuse().is_err(),
        "connections": services.bounds.connections(),
        "memory": {
            "budget": budget.total(),
            "reserved": budget.reserved(),
            "resident": resident_bytes(),
        },
        "drives": services.drives.counted().map(|(folder, _)| drive(folder)).collect::<Vec<_>>(),
        "identities": owners.map(identity).collect::<Vec<_>>(),
        "away": away.collect::<Vec<_>>(),
    })
}

fn job(services: &Services, seen: &Seen) -> Value {
    let (handle, progress) = (&seen.handle, &seen.progress);
    let (job, spec) = (&handle.job, handle.job.spec());
    let (pushed_bytes, pulled_bytes) = job.traffic();
    let placement = job.placement();
    json!({
        "name": seen.name(),
        // None without identities.
        "owner": handle.owner,
        "state": seen.state(),
        // Reason of a pause or failure; progress of a load.
        "reason": reason(seen),
        // Remedy for the state. While the job trains, the remedy for a stalled rank.
        "remedy": remedy(seen),
        "waiting_for": seen.waiting_for(),
        "version": progress.version.0,
        "durable_version": job.protocol.durable().0,
        "applied": progress.applied,
        "rule": spec.rule.name(),
        "parameters": spec.params.iter().filter_map(Param::elements).sum::<u64>(),
        "tensors": spec.params.len(),
        "world_size": progress.world_size,
        "micro_steps": spec.micro_steps,
        "server": job.server().0,
        "servers": placement.members().count(),
        "tier": spec.tier.name(),
        "isa": job.compute().isa().to_string(),
        "threads": job.compute().threads(),
        "memory_bytes": job.memory_bytes(),
        "drive_bytes": job.disk_bytes(),
        "pushed_bytes": pushed_bytes,
        "pulled_bytes": pulled_bytes,
        // Memory traffic of one update.
        "update_bytes": job.update_bytes(),
        "written_bytes": job.written_bytes(),
        "sum_seconds": handle.busy.sums().as_secs_f64(),
        "update_seconds": handle.busy.updates().as_secs_f64(),
        "ranks": ranks(services, seen),
        "members": members(&placement, job.layout(), progress.version),
        "scaling": scaling_of(handle).map(scaling),
        "checkpoint": handle.checkpoints.last().map(checkpoint),
    })
}

/// Returns the servers of a job, this one included.
fn members(placement: &Placement, layout: &Layout, version: Version) -> Vec<Value> {
    let member = |server: ServerId| {
        let owned = placement.owned(server);
        let holds = |of: &&Handover| match of.is_replica {
            true => placement.replica(of.shard) == Some(server),
            false => placement.owner(of.shard) == server,
        };
        let arrives = |of: &&Handover| holds(of) && of.from_step >= Step(version.0);
        json!({
            "address": placement.servers[server.0 as usize],
            "shards": owned.len(),
            "replicas": placement.replicas.iter().filter(|&&of| of == server).count(),
            "elements": owned.iter().map(|&shard| layout.shard_len(shard)).sum::<u64>(),
            // Shards that the last steps have moved to this member.
            "arriving": placement.handovers.iter().filter(arrives).count(),
        })
    };
    placement.members().map(member).collect()
}

/// Returns a change of the job's servers, as this server sees it.
fn scaling(of: v1::Scaling) -> Value {
    json!({
        "is_reached": of.reached_micros >= of.asked_micros,
        "wanted": of.wanted,
        "awaited_shards": of.awaited_shards,
        "unreplicated_shards": of.unreplicated_shards,
        "fetched_shards": of.fetched_shards,
        "fetched_bytes": of.fetched_bytes,
        "held_seconds": of.held_seconds,
        "failure": of.failure,
    })
}

fn checkpoint(status: v1::CheckpointStatus) -> Value {
    json!({
        "name": status.name,
        "version": status.version,
        "sealed_unix_ms": status.sealed_unix_ms,
        "remedy": if status.failure.is_empty() { "" } else { remedies::CHECKPOINT_FAILED },
        "failure": status.failure,
    })
}

fn reason(seen: &Seen) -> String {
    if let Err(fault) = seen.handle.job.protocol.check_alive() {
        return fault.to_string();
    }
    match &seen.progress.phase {
        Phase::Paused { reason } => reason.clone(),
        Phase::Loading => match &seen.progress.restoring {
            Some(restoring) => {
                format!("filled from checkpoint {}: {} shards so far", restoring.checkpoint, restoring.shards)
            }
            None => format!("{} shards wait for their weights", seen.progress.missing.len()),
        },
        Phase::Training => String::new(),
    }
}

fn remedy(seen: &Seen) -> &'static str {
    match (seen.state(), &seen.progress.phase) {
        ("failed", _) => remedies::FAILED,
        (_, Phase::Paused { reason }) => remedies::of_pause(reason),
        (_, Phase::Loading) => remedies::LOADING,
        (_, Phase::Training) => remedies::STALLED,
    }
}

fn ranks(services: &Services, seen: &Seen) -> Vec<Value> {
    let mut ranks: Vec<(&RankProgress, &'static str)> =
        seen.ranks.iter().zip(seen.standings.iter().copied()).collect();
    ranks.sort_by_key(|(rank, _)| (rank.last_step, rank.rank));
    ranks.truncate(RANKS);
    ranks.sort_by_key(|(rank, _)| rank.rank);
    let told = |(rank, state): (&RankProgress, &'static str)| {
        json!({
            "rank": rank.rank.0,
            "state": state,
            "transport": services.transport_of(&seen.handle, rank),
            "last_step": rank.last_step.0,
        })
    };
    ranks.into_iter().map(told).collect()
}

/// The last step that the reader has, for each job. `?after=STEP` sets the step for all jobs, and `?after=JOB:STEP` for
/// one job. A job without either is reported from its first kept step.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Wanted {
    all: u64,
    of: HashMap<String, u64>,
}

impl Wanted {
    /// Parses a query. Invalid values are ignored, so the reader gets more steps than asked for.
    pub(super) fn of(query: &str) -> Wanted {
        let mut wanted = Wanted::default();
        for value in query.split('&').filter_map(|pair| pair.strip_prefix("after=")) {
            // Browsers escape the colon as %3A. Characters of a job's name are never escaped.
            match value.split_once(':').or_else(|| value.split_once("%3A")) {
                Some((job, step)) => {
                    wanted.of.extend(step.parse().ok().map(|step| (job.to_string(), step)));
                }
                None => wanted.all = value.parse().unwrap_or(wanted.all),
            }
        }
        wanted
    }

    pub(super) fn after(&self, job: &str) -> u64 {
        self.of.get(job).copied().unwrap_or(self.all)
    }
}

/// Held during `statvfs`, so that a network file system that hangs stops only one reader and one thread.
static ASKING: Mutex<()> = Mutex::new(());

/// Returns a folder of `--state-dir`: the size of its file system, and the space that is free for unprivileged users. Both
/// are null while another reader asks, and if the kernel does not tell.
fn drive(folder: &Path) -> Value {
    let asking = match ASKING.try_lock() {
        Ok(asking) => Some(asking),
        Err(TryLockError::Poisoned(asking)) => Some(asking.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    let found = asking.and_then(|_held| statvfs(folder).ok()).filter(|found| found.f_blocks > 0);
    json!({
        "folder": folder.display().to_string(),
        "bytes": found.as_ref().map(|found| found.f_blocks.saturating_mul(found.f_frsize)),
        "free_bytes": found.as_ref().map(|found| found.f_bavail.saturating_mul(found.f_frsize)),
    })
}

/// Returns the amounts that an identity uses, and their limits. No limit: bounded by the server alone.
fn identity((listed, has): (Listed, Usage)) -> Value {
    let Listed { name, quota, connections } = listed;
    let used = |now: u64, limit: Option<u64>| json!({ "now": now, "limit": limit });
    json!({
        "name": name,
        "jobs": used(has.jobs, quota.jobs),
        "memory_bytes": used(has.memory, quota.memory),
        "drive_bytes": used(has.drives, quota.drives),
        "connections": used(connections, quota.connections),
    })
}
