//! Upload of initial weights and of optimizer state.

use longshore_engine::job::UploadChunk;
use longshore_proto::{ChunkId, Fault, FaultKind, ShardId, checksum::crc32};
use longshore_wire::{self as wire, v1};
use tonic::{Status, Streaming};

use super::{Services, blocking, permitted::permit, refuse};
use crate::trust::Caller;

/// Stores chunks until the stream ends, and returns their number.
pub(super) async fn receive(
    services: &Services,
    caller: &Caller,
    mut requests: Streaming<v1::UploadRequest>,
) -> Result<u64, Status> {
    let mut chunks = 0;
    while let Some(request) = requests.message().await? {
        let job = request.job.clone();
        let stored = async {
            permit(caller, &request)?;
            store(services, request).await
        };
        stored.await.map_err(|fault| refuse("Upload", &job, fault))?;
        chunks += 1;
    }
    Ok(chunks)
}

async fn store(services: &Services, request: v1::UploadRequest) -> Result<(), Fault> {
    let found = crc32(&request.payload);
    if found != request.crc32 {
        let value = format!("{:08x}", request.crc32);
        let limit = format!("{found:08x}, the CRC-32 of the payload received");
        return Err(Fault::new(FaultKind::Corrupt, "upload.crc32", value, limit, "send the chunk again"));
    }
    let incarnation = wire::incarnation_from_wire(request.incarnation)?;
    let part = UploadChunk {
        shard: ShardId(request.shard),
        array: wire::array_from_wire("array", request.array)?,
        chunk: ChunkId(request.chunk),
        applied: request.applied,
        left_out: wire::left_outs_from_wire(request.left_out),
        crc32: request.crc32,
    };
    let handle = services.jobs.get(&request.job)?;
    // The last chunk also builds the first image of every shard.
    blocking(move || handle.job.upload_chunk(incarnation, part, &request.payload)).await
}
