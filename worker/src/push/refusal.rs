//! Judges refused chunks. Some refusals pass: a pause, a damaged packet, a server that lacks the last commit. All
//! others fail the session. Called by lanes.
//!
//! After a refusal that passes, all chunks of the stream go out again over a new stream, in order. A chunk sent alone
//! could overtake a chunk of an earlier micro-step. The server would hold the later chunk back, and with it the stream
//! that brings the earlier chunk.

use longshore_proto::{
    Contribution, Fault, FaultKind, ServerId,
    checksum::crc32,
    fault::{READS, READS_VERSION},
};
use longshore_wire::memfd::STALE;

use super::{ChunkKey, Gradients, retained::Chunk};
use crate::{
    cluster::{Backoff, Cluster, Impatience},
    error::{ChunkRefused, Error, Result},
    host::Instant,
    rank::version_when_running,
};

pub(super) enum Verdict {
    /// The step is committed: the chunk is not needed any more.
    Decided,
    /// The chunk must go out again over a new stream, with all chunks of this stream.
    SendAgain(Fault),
}

pub(super) async fn judge(
    gradients: &Gradients,
    server: ServerId,
    key: ChunkKey,
    fault: Fault,
) -> Result<Verdict> {
    let cluster = &*gradients.cluster;
    match fault.kind {
        // Unavailable means that the server drains. Deadline means that the server waited for another rank, which
        // the fault names, before it could take the chunk.
        FaultKind::Unavailable | FaultKind::Deadline => Ok(Verdict::SendAgain(fault)),
        FaultKind::Corrupt if is_sound(gradients, &key, server) => {
            tracing::warn!(server = cluster.address(server), ?key, %fault, "a chunk arrived damaged");
            Ok(Verdict::SendAgain(fault))
        }
        // The lane makes a new link before it sends again.
        FaultKind::Precondition if fault.field == STALE => {
            gradients.rank.forget_link(server);
            Ok(Verdict::SendAgain(fault))
        }
        // The server has restarted since this rank joined it.
        FaultKind::Precondition if fault.field == "rank" => Ok(Verdict::SendAgain(fault)),
        // The chunk has overtaken a chunk of an earlier micro-step. The new stream sends both in order.
        FaultKind::Precondition if fault.field == "micro_step" => Ok(Verdict::SendAgain(fault)),
        // Either the server lacks the decision that gave it the shard, or this rank lacks the decision that took the
        // shard.
        FaultKind::Precondition if fault.field == "shard" && is_held(cluster, &key, server) => {
            Ok(Verdict::SendAgain(fault))
        }
        // A decision has taken the shard from this holder.
        FaultKind::Precondition if fault.field == "shard" && cluster.spec().replicas > 1 => {
            Ok(Verdict::Decided)
        }
        FaultKind::Precondition => await_turn(cluster, server, key, fault).await,
        // Ranks computed with different versions, and some rank's process is gone. Its next process may name another
        // version, so the conflict may pass.
        FaultKind::Conflict if fault.field == READS_VERSION && !cluster.everybody_is_there().await => {
            Ok(Verdict::SendAgain(fault))
        }
        FaultKind::Conflict if fault.field == READS => {
            Err(cluster.explain(server, "Push", Some(key.step), fault))
        }
        FaultKind::NotFound | FaultKind::Fenced => {
            Err(cluster.explain(server, "Push", Some(key.step), fault))
        }
        _ => Err(refused(cluster, server, key, fault)),
    }
}

/// Returns true if the server holds the chunk's shard at its step, as far as this rank knows.
fn is_held(cluster: &Cluster, key: &ChunkKey, server: ServerId) -> bool {
    cluster.holders_at(key.shard, key.step).any(|holder| holder == server)
}

/// Returns true if the payload still has its own checksum. If not, this host's memory is at fault, not the network.
fn is_sound(gradients: &Gradients, key: &ChunkKey, server: ServerId) -> bool {
    let sound = |chunk: Chunk| chunk.is_lent() || crc32(&chunk.payload.bytes) == chunk.crc32;
    gradients.retained.send(key, server).is_some_and(sound)
}

/// Waits until the server can take a chunk that came too early. The server is paused, or lacks the last commit. Ranks
/// other than 0 hear of a commit from one server, a moment before others get it.
async fn await_turn(cluster: &Cluster, server: ServerId, key: ChunkKey, fault: Fault) -> Result<Verdict> {
    let pauses = cluster.waits.pauses();
    let slots = cluster.spec().gradient_slots() as u64;
    let ready = async {
        let mut backoff = Backoff::new();
        let first = version_when_running(cluster, server).await?;
        let mut version = first;
        while version.0 + slots < key.step.0 {
            backoff.pause(Instant::now() + cluster.options.deadline).await;
            version = version_when_running(cluster, server).await?;
        }
        // The server has caught up by now, or its pause has ended. Either may have happened before the first question
        // here. The fault then shows that the refusal passes.
        let paused = fault.field == "job.phase" && fault.value == "paused";
        Ok((version, version > first || paused || fault.field == "step"))
    };
    match cluster.patiently(ready).await {
        Ok(Ok((version, _))) if version >= key.step.version() => Ok(Verdict::Decided),
        Ok(Ok((_, caught_up))) if caught_up || cluster.waits.pauses() > pauses => {
            Ok(Verdict::SendAgain(fault))
        }
        Ok(Ok(_)) => Err(refused(cluster, server, key, fault)),
        Ok(Err(error)) | Err(Impatience::Failed(error)) => Err(error),
        Err(Impatience::Elapsed(_)) => Err(refused(cluster, server, key, fault)),
    }
}

fn refused(cluster: &Cluster, server: ServerId, key: ChunkKey, fault: Fault) -> Error {
    let contribution = Contribution {
        step: key.step,
        micro_step: key.micro_step,
        rank: cluster.options.rank,
        shard: key.shard,
    };
    let (server, job) = (cluster.address(server).to_string(), cluster.job().clone());
    ChunkRefused { server, job, contribution, chunk: key.chunk, fault }.into()
}
