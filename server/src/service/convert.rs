//! Conversion of engine types to wire messages.

use longshore_engine::step::{Phase, Progress, RankProgress, Restoring};
use longshore_proto::{Epoch, ServerId};
use longshore_wire::{Wire, left_outs_to_wire, v1};

use crate::{
    jobs::{Decided, JobHandle},
    quota::{Listed, Usage},
};

pub(super) fn progress(progress: Progress) -> v1::JobProgress {
    let (phase, pause_reason) = match progress.phase {
        Phase::Loading => (v1::Phase::Loading, String::new()),
        Phase::Training => (v1::Phase::Training, String::new()),
        Phase::Paused { reason } => (v1::Phase::Paused, reason),
    };
    let loading = phase == v1::Phase::Loading;
    v1::JobProgress {
        phase: phase.into(),
        version: progress.version.0,
        applied: progress.applied,
        last_commit: progress.last_commit.map(|commit| commit.to_wire()),
        pause_reason,
        left_out: left_outs_to_wire(&progress.left_out),
        world_size: progress.world_size,
        missing_shards: progress.missing.into_iter().filter(|_| loading).map(|shard| shard.0).collect(),
        restore: progress.restoring.map(|Restoring { checkpoint, shards, held }| v1::RestoreProgress {
            name: checkpoint,
            shards,
            held,
        }),
    }
}

pub(super) fn rank(rank: RankProgress, transport: &str, watches: bool) -> v1::RankStatus {
    v1::RankStatus {
        rank: rank.rank.0,
        incarnation: rank.incarnation.map_or(0, |incarnation| incarnation.0),
        left: rank.left,
        last_step: rank.last_step.0,
        transport: transport.into(),
        joined_at: rank.joined_at.0,
        watches,
    }
}

pub(super) fn numbers(servers: &[ServerId]) -> Vec<u32> {
    servers.iter().map(|server| server.0).collect()
}

/// Returns None for a job whose servers never changed.
pub(crate) fn scaling(handle: &JobHandle) -> Option<v1::Scaling> {
    let (wanted, fetched, awaited) = (handle.wanted(), handle.fetching.fetched(), handle.job.lacking());
    let placement = handle.job.placement();
    if wanted.asked_micros == 0 && placement.epoch <= Epoch(1) {
        return None;
    }
    Some(v1::Scaling {
        wanted: wanted.servers,
        lost: numbers(&wanted.lost),
        unreplicated_shards: placement.unreplicated() as u32,
        asked_micros: wanted.asked_micros,
        epoch: placement.epoch.0,
        awaited_shards: awaited as u32,
        fetched_shards: fetched.shards,
        fetched_bytes: fetched.bytes,
        held_seconds: fetched.held.as_secs_f64(),
        reached_micros: fetched.reached_micros,
        failure: fetched.failure.map_or(fetched.obstacle, |fault| fault.to_string()),
    })
}

pub(super) fn decided(decided: Decided) -> v1::DecidedStep {
    v1::DecidedStep {
        step: decided.step,
        unix_ms: decided.at_ms,
        seconds: decided.seconds,
        skipped: decided.skipped,
        norm: decided.norm,
        loss_scale: decided.loss_scale,
        learning_rate: decided.learning_rate,
        loss: decided.loss,
        exposed_seconds: decided.exposed_seconds,
        pushed_bytes: decided.pushed_bytes,
        pulled_bytes: decided.pulled_bytes,
        update_seconds: decided.update_seconds,
    }
}

pub(super) fn identity(owner: Listed, has: Usage) -> v1::IdentityUsage {
    let Listed { name, quota, connections } = owner;
    v1::IdentityUsage {
        name,
        jobs: has.jobs,
        memory_bytes: has.memory,
        drive_bytes: has.drives,
        connections,
        most_jobs: quota.jobs,
        most_memory_bytes: quota.memory,
        most_drive_bytes: quota.drives,
        most_connections: quota.connections,
    }
}
