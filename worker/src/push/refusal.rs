//! What a refused chunk means: some refusals pass (a pause, a damaged packet, a step decided meanwhile), the others
//! are the session's failure.

use longshore_proto::{Contribution, Fault, FaultKind, wire::v1::PushResult};
use longshore_proto::{ChunkId, MicroStep, ShardId, Step};

use super::ChunkKey;
use crate::{
    error::{ChunkRefused, Error, Result, TimedOut},
    session::{Impatience, SharedCore},
};

pub(super) enum Verdict {
    /// The step is committed: the chunk is not needed any more.
    Decided,
    SendAgain,
    Reconnect(Fault),
}

impl From<&PushResult> for ChunkKey {
    fn from(result: &PushResult) -> ChunkKey {
        ChunkKey {
            step: Step(result.step),
            micro_step: MicroStep(result.micro_step),
            shard: ShardId(result.shard),
            chunk: ChunkId(result.chunk),
        }
    }
}

pub(super) async fn judge(core: &SharedCore, server: usize, key: ChunkKey, fault: Fault) -> Result<Verdict> {
    match fault.kind {
        FaultKind::Unavailable => Ok(Verdict::Reconnect(fault)),
        FaultKind::Corrupt => {
            // The payload is checked against its own checksum here before it is blamed on the network.
            tracing::warn!(server = core.peers[server].address, ?key, %fault, "a chunk arrived damaged");
            let sound = core.retained.send(&key).is_some_and(|chunk| {
                longshore_proto::checksum::crc32(&chunk.payload) == chunk.crc32
            });
            if sound { Ok(Verdict::SendAgain) } else { Err(refused(core, server, key, fault)) }
        }
        FaultKind::Precondition => after_a_pause(core, server, key, fault).await,
        FaultKind::NotFound | FaultKind::Fenced => Err(core.explain(server, "Push", Some(key.step), fault)),
        _ => Err(refused(core, server, key, fault)),
    }
}

/// "Not in this state": the server is paused, or the step is decided, or it is this worker's defect.
async fn after_a_pause(core: &SharedCore, server: usize, key: ChunkKey, fault: Fault) -> Result<Verdict> {
    let pauses = core.pause.borrow().count;
    let version = match core.patiently(core.options.deadline, core.version_when_running(server)).await {
        Ok(version) => version?,
        Err(Impatience::Failed(error)) => return Err(error),
        Err(Impatience::Elapsed(waited)) => {
            return Err(TimedOut {
                what: "the server to say where it stands",
                server: Some(core.peers[server].address.clone()),
                job: core.job().clone(),
                step: Some(key.step),
                shard: Some(key.shard),
                version: None,
                waited,
                last: Some(fault),
            }
            .into());
        }
    };
    let pause = core.pause.borrow().clone();
    if version >= key.step.version() {
        Ok(Verdict::Decided)
    } else if pause.now.is_some() || pause.count > pauses || fault.value.contains("paused") {
        Ok(Verdict::SendAgain)
    } else {
        Err(refused(core, server, key, fault))
    }
}

fn refused(core: &SharedCore, server: usize, key: ChunkKey, fault: Fault) -> Error {
    let contribution = Contribution {
        step: key.step,
        micro_step: key.micro_step,
        rank: core.options.rank,
        shard: key.shard,
    };
    let (server, job) = (core.peers[server].address.clone(), core.job().clone());
    ChunkRefused { server, job, contribution, chunk: key.chunk, fault }.into()
}
