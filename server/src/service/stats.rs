//! Gradient statistics of a step's shards, sent as they become complete.

use std::sync::Arc;

use longshore_proto::{Fault, ShardId, Step};
use longshore_wire::{self as wire, v1};
use tokio::time::Instant;

use super::{
    Services, refuse,
    room::{Answers, Kept, Room, answers},
};
use crate::jobs::JobHandle;

pub(super) fn stream(
    services: &Services,
    request: &v1::StatsRequest,
    room: Room,
) -> Result<Answers<v1::ShardStats>, Fault> {
    let handle = services.jobs.get(&request.job)?;
    let deadline = Instant::now() + wire::deadline(request.deadline_ms)?;
    let step = Step(request.step);
    let (sender, answers) = answers();
    tokio::spawn(async move {
        // Backward computes the last shards first. Frozen shards have no gradient.
        let trained = |shard: &&longshore_proto::ShardId| !handle.job.layout().is_frozen(**shard);
        let owned = handle.job.held_at(step);
        for &shard in owned.iter().rev().filter(trained) {
            let stats = tokio::select! {
                stats = shard_stats(&handle, shard, step, deadline, &room) => stats,
                // Without this branch, a wait for a step that never comes would keep a gone rank's connection.
                () = sender.closed() => return,
            };
            // None: a decision has taken the shard from this server since the call began.
            let Some(stats) = stats.transpose() else { continue };
            let stats = stats.map_err(|fault| refuse("Stats", handle.job.spec().name.as_str(), fault));
            let failed = stats.is_err();
            if sender.send(stats).await.is_err() || failed {
                return;
            }
        }
    });
    Ok(answers)
}

async fn shard_stats(
    handle: &Arc<JobHandle>,
    shard: ShardId,
    step: Step,
    deadline: Instant,
    room: &Room,
) -> Result<Option<Kept<v1::ShardStats>>, Fault> {
    let check = || handle.job.statistics(shard, step);
    let late = || handle.late("stats", format!("{step}, {shard}"));
    let is_held = || handle.job.holds_at(shard, step);
    handle.until(deadline, || Ok(if is_held() { check()?.map(drop) } else { Some(()) }), late).await?;
    if !is_held() {
        return Ok(None);
    }
    let stats = || {
        let statistics = check()?.ok_or_else(late)?;
        let blocks = statistics.into_iter().map(|statistics| v1::BlockStats {
            sum_squares: statistics.sum_squares,
            first_nonfinite: statistics.first_nonfinite,
        });
        let origin = handle.job.origin(shard, step)?.0;
        let left_out = handle.job.left_out(shard, step)?;
        let broken = handle.job.broken().into_iter().map(|shard| shard.0).collect();
        Ok(v1::ShardStats { shard: shard.0, blocks: blocks.collect(), origin, left_out, broken })
    };
    room.make(deadline, stats).await.map(Some)
}
