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

use super::seen::{Seen, resident_bytes};
use crate::{
    jobs::Decided,
    quota::{Listed, Usage},
    service::{Services, scaling_of},
};

/// Ranks of a job in the report. Ranks with the oldest last step, which the job waits for, come
/// first.
const RANKS: usize = 256;

/// Address at which workers reach this server.
#[derive(Clone, Serialize)]
pub(crate) struct Listen {
    /// As for `--servers`. An IP address may be unspecified, such as 0.0.0.0.
    pub(crate) address: String,
    /// The connection is encrypted.
    pub(crate) tls: bool,
}

#[derive(Serialize)]
struct Report {
    release: &'static str,
    unix_ms: u64,
    listen: Listen,
    draining: bool,
    connections: usize,
    #[serde(flatten)]
    room: Room,
    jobs: Vec<Job>,
    /// Jobs that this server stores and does not serve.
    away: Vec<Away>,
}

#[derive(Serialize)]
struct Away {
    name: String,
    reason: String,
}

#[derive(Serialize)]
struct Job {
    name: String,
    /// Owner of the job. None without identities.
    owner: Option<String>,
    state: &'static str,
    /// Reason of a pause or failure; progress of a load.
    reason: String,
    /// Remedy for the state. While the job trains, the remedy for a stalled rank.
    remedy: &'static str,
    waiting_for: String,
    version: u64,
    durable_version: u64,
    applied: u64,
    rule: &'static str,
    parameters: u64,
    tensors: usize,
    world_size: u32,
    micro_steps: u32,
    server: u32,
    servers: usize,
    tier: String,
    isa: String,
    threads: usize,
    memory_bytes: u64,
    drive_bytes: u64,
    pushed_bytes: u64,
    pulled_bytes: u64,
    /// Memory traffic of one update.
    update_bytes: u64,
    written_bytes: u64,
    sum_seconds: f64,
    update_seconds: f64,
    ranks: Vec<Rank>,
    /// The servers of the job, this one included.
    members: Vec<Member>,
    /// A change of the job's servers, as this server sees it. None in a job whose servers never changed.
    scaling: Option<Scaling>,
    checkpoint: Option<Checkpoint>,
    /// Decided steps after the requested one, oldest first, from the last 512.
    steps: Vec<Decided>,
}

#[derive(Serialize)]
struct Member {
    address: String,
    shards: usize,
    replicas: usize,
    elements: u64,
    /// Shards that moved there with the last steps.
    arriving: usize,
}

#[derive(Serialize)]
struct Scaling {
    wanted: Vec<String>,
    is_reached: bool,
    awaited_shards: u32,
    unreplicated_shards: u32,
    fetched_shards: u64,
    fetched_bytes: u64,
    held_seconds: f64,
    failure: String,
}

#[derive(Serialize)]
struct Rank {
    rank: u32,
    state: &'static str,
    transport: &'static str,
    last_step: u64,
}

#[derive(Serialize)]
struct Checkpoint {
    name: String,
    version: u64,
    sealed_unix_ms: u64,
    failure: String,
    /// Remedy for a failure.
    remedy: &'static str,
}

pub(super) fn json(services: &Services, listen: Listen, wanted: &Wanted) -> String {
    let jobs = services.jobs.all().into_iter().map(|handle| Seen::now(services, handle));
    let away = services.jobs.away();
    let report = Report {
        release: env!("CARGO_PKG_VERSION"),
        unix_ms: UNIX_EPOCH.elapsed().map_or(0, |since| since.as_millis() as u64),
        listen,
        draining: services.draining.refuse().is_err(),
        connections: services.bounds.connections(),
        room: Room::now(services),
        jobs: jobs.map(|seen| job(services, &seen, wanted.after(seen.name()))).collect(),
        away: away
            .into_iter()
            .map(|(name, fault)| Away { name: name.to_string(), reason: fault.to_string() })
            .collect(),
    };
    // The report has only numbers and strings, so serialization does not fail.
    serde_json::to_string(&report).unwrap_or_default()
}

fn job(services: &Services, seen: &Seen, after: u64) -> Job {
    let (handle, progress) = (&seen.handle, &seen.progress);
    let (job, spec) = (&handle.job, handle.job.spec());
    let (pushed_bytes, pulled_bytes) = job.traffic();
    let placement = job.placement();
    Job {
        name: seen.name().to_string(),
        owner: handle.owner.clone(),
        state: seen.state(),
        remedy: remedy(seen),
        reason: reason(seen),
        waiting_for: seen.waiting_for(),
        version: progress.version.0,
        durable_version: job.protocol.durable().0,
        applied: progress.applied,
        rule: spec.rule.name(),
        parameters: spec.params.iter().filter_map(Param::elements).sum(),
        tensors: spec.params.len(),
        world_size: progress.world_size,
        micro_steps: spec.micro_steps,
        server: job.server().0,
        servers: placement.members().count(),
        tier: spec.tier.to_string(),
        isa: job.compute().isa().to_string(),
        threads: job.compute().threads(),
        memory_bytes: job.memory_bytes(),
        drive_bytes: job.disk_bytes(),
        pushed_bytes,
        pulled_bytes,
        update_bytes: job.update_bytes(),
        written_bytes: job.written_bytes(),
        sum_seconds: handle.busy.sums().as_secs_f64(),
        update_seconds: handle.busy.updates().as_secs_f64(),
        ranks: ranks(services, seen),
        members: members(&placement, job.layout(), progress.version),
        scaling: scaling_of(handle).map(scaling),
        checkpoint: handle.checkpoints.last().map(|status| Checkpoint {
            name: status.name,
            version: status.version,
            sealed_unix_ms: status.sealed_unix_ms,
            remedy: if status.failure.is_empty() { "" } else { remedies::CHECKPOINT_FAILED },
            failure: status.failure,
        }),
        steps: handle.history.after(after),
    }
}

fn members(placement: &Placement, layout: &Layout, version: Version) -> Vec<Member> {
    let member = |server: ServerId| {
        let owned = placement.owned(server);
        let holds = |of: &&Handover| match of.is_replica {
            true => placement.replica(of.shard) == Some(server),
            false => placement.owner(of.shard) == server,
        };
        let arrives = |of: &&Handover| holds(of) && of.from_step >= Step(version.0);
        Member {
            address: placement.servers[server.0 as usize].clone(),
            shards: owned.len(),
            replicas: placement.replicas.iter().filter(|&&of| of == server).count(),
            elements: owned.iter().map(|&shard| layout.shard_len(shard)).sum(),
            arriving: placement.handovers.iter().filter(arrives).count(),
        }
    };
    placement.members().map(member).collect()
}

fn scaling(of: v1::Scaling) -> Scaling {
    Scaling {
        is_reached: of.reached_micros >= of.asked_micros,
        wanted: of.wanted,
        awaited_shards: of.awaited_shards,
        unreplicated_shards: of.unreplicated_shards,
        fetched_shards: of.fetched_shards,
        fetched_bytes: of.fetched_bytes,
        held_seconds: of.held_seconds,
        failure: of.failure,
    }
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

fn ranks(services: &Services, seen: &Seen) -> Vec<Rank> {
    let mut ranks: Vec<(&RankProgress, &'static str)> =
        seen.ranks.iter().zip(seen.standings.iter().copied()).collect();
    ranks.sort_by_key(|(rank, _)| (rank.last_step, rank.rank));
    ranks.truncate(RANKS);
    ranks.sort_by_key(|(rank, _)| rank.rank);
    let told = |(rank, state): (&RankProgress, &'static str)| Rank {
        rank: rank.rank.0,
        state,
        transport: services.transport_of(&seen.handle, rank),
        last_step: rank.last_step.0,
    };
    ranks.into_iter().map(told).collect()
}

/// The last step that the reader has, for each job. `?after=STEP` sets it for all jobs, `?after=JOB:STEP` for one. A
/// job without either is reported from its first kept step.
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

/// Use of a server's memory and drives: in total, by drive and by owner.
#[derive(Serialize)]
struct Room {
    memory: Memory,
    drives: Vec<Drive>,
    identities: Vec<Identity>,
}

#[derive(Serialize)]
struct Memory {
    budget: u64,
    reserved: u64,
    resident: Option<u64>,
}

/// A folder of `--state-dir`.
#[derive(Serialize)]
struct Drive {
    folder: String,
    /// Size of the file system, and its free space for unprivileged users. None if the kernel does not tell.
    bytes: Option<u64>,
    free_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Identity {
    name: String,
    jobs: Used,
    memory_bytes: Used,
    drive_bytes: Used,
    connections: Used,
}

/// Amount in use and its limit. No limit: bounded by the server alone.
#[derive(Serialize)]
struct Used {
    now: u64,
    limit: Option<u64>,
}

impl Room {
    fn now(services: &Services) -> Room {
        let budget = services.jobs.budget();
        Room {
            memory: Memory {
                budget: budget.total(),
                reserved: budget.reserved(),
                resident: resident_bytes(),
            },
            drives: services.drives.counted().map(|(folder, _)| drive(folder)).collect(),
            identities: services.jobs.owners().into_iter().map(identity).collect(),
        }
    }
}

/// Held during `statvfs`. A network file system may hang: then one reader waits, and one thread is lost.
static ASKING: Mutex<()> = Mutex::new(());

/// Returns a folder's drive. Its sizes are None while another reader asks.
fn drive(folder: &Path) -> Drive {
    let asking = match ASKING.try_lock() {
        Ok(asking) => Some(asking),
        Err(TryLockError::Poisoned(asking)) => Some(asking.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    };
    let found = asking.and_then(|_held| statvfs(folder).ok()).filter(|found| found.f_blocks > 0);
    Drive {
        folder: folder.display().to_string(),
        bytes: found.as_ref().map(|found| found.f_blocks.saturating_mul(found.f_frsize)),
        free_bytes: found.as_ref().map(|found| found.f_bavail.saturating_mul(found.f_frsize)),
    }
}

fn identity((listed, has): (Listed, Usage)) -> Identity {
    let Listed { name, quota, connections } = listed;
    let used = |now, limit| Used { now, limit };
    Identity {
        name,
        jobs: used(has.jobs, quota.jobs),
        memory_bytes: used(has.memory, quota.memory),
        drive_bytes: used(has.drives, quota.drives),
        connections: used(connections, quota.connections),
    }
}
