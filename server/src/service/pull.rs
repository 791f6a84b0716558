//! Images out, slice by slice, each as soon as its shard has the version asked for.

use std::sync::Arc;

use bytes::Bytes;
use longshore_engine::job::ImageRead;
use longshore_proto::{
    Dtype, Fault, ShardId, Slice, Version,
    checksum::crc32,
    limits::{CHUNK_BYTES, MAX_PULL_SLICES},
    wire::{self, v1},
};
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Services, refuse};
use crate::jobs::JobHandle;

/// Messages made ahead of the network: one being sent, one ready. A slow reader holds 2 MiB here, no more.
const MESSAGES_AHEAD: usize = 2;

pub(super) fn stream(
    services: &Services,
    request: v1::PullRequest,
) -> Result<ReceiverStream<Result<v1::PullResponse, Status>>, Fault> {
    let handle = services.jobs.get(&request.job)?;
    let dtype = Dtype::from_wire("pull.dtype", request.dtype)?;
    let wait = wire::deadline(request.deadline_ms)?;
    if request.slices.is_empty() || request.slices.len() > MAX_PULL_SLICES {
        let limit = format!("in 1..={MAX_PULL_SLICES}");
        return Err(Fault::invalid("pull.slices", request.slices.len(), limit, "pull in several calls"));
    }
    let slices: Vec<Slice> = request
        .slices
        .iter()
        .map(|slice| Slice { shard: ShardId(slice.shard), offset: slice.offset, elements: slice.elements })
        .collect();
    // All are checked before the first byte leaves.
    slices.iter().try_for_each(|slice| handle.job.check_slice(slice, dtype))?;
    let version = Version(request.version);
    let (sender, receiver) = mpsc::channel(MESSAGES_AHEAD);
    tokio::spawn(async move {
        for piece in slices.iter().flat_map(|&slice| pieces(slice, dtype)) {
            let message = tokio::select! {
                message = read(&handle, piece, version, Instant::now() + wait) => message,
                () = sender.closed() => return,
            };
            let message = message.map_err(|fault| refuse("Pull", handle.job.spec().name.as_str(), fault));
            let failed = message.is_err();
            if sender.send(message).await.is_err() || failed {
                return;
            }
        }
    });
    Ok(ReceiverStream::new(receiver))
}

/// A slice in messages of at most one chunk.
fn pieces(slice: Slice, dtype: Dtype) -> impl Iterator<Item = Slice> {
    let most = CHUNK_BYTES as u64 / dtype.bytes();
    (0..slice.elements.div_ceil(most)).map(move |piece| {
        let offset = slice.offset + piece * most;
        Slice { shard: slice.shard, offset, elements: most.min(slice.offset + slice.elements - offset) }
    })
}

async fn read(
    handle: &Arc<JobHandle>,
    slice: Slice,
    version: Version,
    deadline: Instant,
) -> Result<v1::PullResponse, Fault> {
    let check = || {
        let mut payload = Bytes::new();
        let read =
            handle.job.read_image(&slice, version, &mut |bytes| payload = Bytes::copy_from_slice(bytes))?;
        Ok((read == ImageRead::Done).then_some(payload))
    };
    let late = || handle.late("pull", format!("{version} of {}", slice.shard));
    let payload = handle.until(deadline, check, late).await?;
    Ok(v1::PullResponse { shard: slice.shard.0, offset: slice.offset, crc32: crc32(&payload), payload })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_slice_in_order() {
        let slice = Slice { shard: ShardId(3), offset: 64, elements: 2 * 524_288 + 1 };
        let cut: Vec<Slice> = pieces(slice, Dtype::Bf16).collect();
        assert_eq!(cut.len(), 3);
        let mut at = slice.offset;
        for piece in cut {
            assert_eq!(piece.offset, at);
            assert!(piece.elements * 2 <= CHUNK_BYTES as u64);
            at += piece.elements;
        }
        assert_eq!(at, slice.offset + slice.elements);
    }
}
