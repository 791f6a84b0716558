//! State of shards for the servers that own them next, and for new replicas.

use std::sync::Arc;

use longshore_proto::{
    Fault, ShardId, Version,
    checksum::crc32,
    limits::{CHUNK_BYTES, CHUNK_HEADROOM_BYTES},
};
use longshore_wire::{self as wire, v1};
use tokio::time::Instant;

use super::{
    Services, blocking, default_deadline, refuse,
    room::{Answers, Room, answers},
};

pub(super) fn stream(
    services: &Services,
    request: &v1::FetchRequest,
    room: Room,
) -> Result<Answers<v1::FetchResponse>, Fault> {
    let handle = services.jobs.get(&request.job)?;
    let deadline = Instant::now() + wire::deadline(request.deadline_ms)?;
    let (shard, version) = (ShardId(request.shard), Version(request.version));
    if request.arrived {
        handle.perform(handle.job.arrived(shard, version)?);
        return Ok(answers().1);
    }
    let (sender, answers) = answers();
    tokio::spawn(async move {
        let name = handle.job.spec().name.clone();
        let failed = |fault| refuse("Fetch", name.as_str(), fault);
        let ready = || handle.job.check_fetch(shard, version);
        let late = || handle.late("fetch", format!("{version} of {shard}"));
        let ready = tokio::select! {
            ready = handle.until(deadline, ready, late) => ready,
            () = sender.closed() => return,
        };
        let job = Arc::clone(&handle.job);
        let lengths = match ready {
            Ok(()) => blocking(move || job.sent_bytes(shard, version)).await,
            Err(fault) => Err(fault),
        };
        let lengths = match lengths {
            Ok(lengths) => lengths,
            Err(fault) => return drop(sender.send(Err(failed(fault))).await),
        };
        let mut left: usize = lengths.iter().sum();
        for (array, length) in (0..).zip(lengths) {
            for offset in (0..length).step_by(CHUNK_BYTES) {
                let bytes = offset..length.min(offset + CHUNK_BYTES);
                left -= bytes.len();
                let (job, is_last) = (Arc::clone(&handle.job), left == 0);
                let encoded = bytes.len() + CHUNK_HEADROOM_BYTES;
                let part = move || {
                    let payload = job.read_handed(shard, version, array, bytes)?;
                    if is_last {
                        job.check_handed(shard)?;
                    }
                    let (offset, crc32) = (offset as u64, crc32(&payload));
                    Ok(v1::FetchResponse { array, offset, crc32, payload: payload.into() })
                };
                let part = room.make_blocking(encoded, default_deadline(), part).await.map_err(failed);
                let has_failed = part.is_err();
                if sender.send(part).await.is_err() || has_failed {
                    return;
                }
            }
        }
    });
    Ok(answers)
}
