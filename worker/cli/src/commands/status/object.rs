//! The JSON form of a job's status.

use longshore_wire::v1;

use super::{
    gather::{Answers, Wear, combined_hash, formats, last_commit, phase},
    steps::steps,
};
use crate::servers::{Silent, standing};

pub(super) fn object(job: &str, answers: &Answers, without: &Silent, last_steps: usize) -> serde_json::Value {
    let servers = answers.iter().map(|(address, answer)| {
        let progress = answer.progress.clone().unwrap_or_default();
        serde_json::json!({
            "address": address,
            "phase": phase(answer),
            "version": progress.version,
            "applied": progress.applied,
            "pause_reason": progress.pause_reason,
            "memory_bytes": answer.memory_bytes,
            "pushed_bytes": answer.pushed_bytes,
            "pulled_bytes": answer.pulled_bytes,
            "waiting_for": answer.waiting_for,
            "disk_bytes": answer.disk_bytes,
            "disk_written_bytes": answer.disk_written_bytes,
            "disk_written_bytes_per_step": Wear::of(answer).map(|wear| wear.step_bytes),
            "disk_written_bytes_per_day": Wear::of(answer).map(|wear| wear.day_bytes),
            "drive_endurance_days": Wear::of(answer).and_then(|wear| wear.days),
            "threads": answer.threads,
            "isa": answer.isa,
            "spill": (!answer.spill.is_empty()).then_some(&answer.spill),
            "missing_shards": progress.missing_shards.len(),
            "checkpoints": answer.checkpoints.as_ref().map(checkpoints),
            "owner": (!answer.owner.is_empty()).then_some(&answer.owner),
            "idle_seconds": answer.idle_ms as f64 / 1e3,
            "scaling": answer.scaling.as_ref().map(scaling),
            "ranks": answer.ranks.iter().map(rank).collect::<Vec<_>>(),
            "steps": (last_steps > 0).then(|| steps(answer, last_steps)),
        })
    });
    let hash = combined_hash(answers);
    let formats = answers.first().and_then(|(_, answer)| formats(answer));
    let commit = last_commit(answers);
    let first = answers.first().map(|(_, first)| first);
    serde_json::json!({
        "job": job,
        "parameters": first.map(|first| first.parameters),
        "tensors": first.map(|first| first.tensors),
        "last_step": commit.map(|commit| commit.step),
        "skipped": commit.map(|commit| commit.skip),
        // A skipped step has no norm.
        "norm": commit.filter(|commit| !commit.skip).map(|commit| commit.norm),
        "clip_coefficient": commit.map(|commit| commit.clip_coefficient),
        "loss_scale": commit.map(|commit| commit.loss_scale),
        "learning_rates": commit.map(|commit| commit.groups.iter().map(|hyper| hyper.lr).collect::<Vec<_>>()),
        "state_format": formats.map(|formats| formats.state.name()),
        "master_format": formats.map(|formats| formats.master.name()),
        "servers": servers.collect::<Vec<_>>(),
        "servers_without": without.iter().map(|(address, _)| address).collect::<Vec<_>>(),
        "reasons_without": without.iter().map(|(_, reason)| reason).collect::<Vec<_>>(),
        "state_version": hash.as_ref().map(|(version, _)| version),
        "state_hash": hash.map(|(_, hash)| hash),
    })
}

fn scaling(scaling: &v1::Scaling) -> serde_json::Value {
    serde_json::json!({
        "wanted": scaling.wanted,
        "is_reached": scaling.reached_micros >= scaling.asked_micros,
        "awaited_shards": scaling.awaited_shards,
        "unreplicated_shards": scaling.unreplicated_shards,
        "fetched_shards": scaling.fetched_shards,
        "fetched_bytes": scaling.fetched_bytes,
        "held_seconds": scaling.held_seconds,
        "failure": (!scaling.failure.is_empty()).then_some(&scaling.failure),
    })
}

fn checkpoints(status: &v1::CheckpointStatus) -> serde_json::Value {
    let some = |text: &String| (!text.is_empty()).then(|| text.clone());
    serde_json::json!({
        "name": some(&status.name),
        "version": status.version,
        "sealed_unix_ms": status.sealed_unix_ms,
        "failure": some(&status.failure),
        "failed_unix_ms": status.failed_unix_ms,
    })
}

fn rank(rank: &v1::RankStatus) -> serde_json::Value {
    serde_json::json!({
        "rank": rank.rank,
        "joined": rank.incarnation != 0 && !rank.left,
        "state": standing(rank),
        "transport": rank.transport,
        "last_step": rank.last_step,
    })
}
