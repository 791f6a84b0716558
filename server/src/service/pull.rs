//! Images out, slice by slice, each as soon as its shard has the version asked for.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::Response;
use longshore_proto::{
    Dtype, Fault, ShardId, Slice, Version,
    checksum::Crc32,
    limits::{CHUNK_BYTES, MAX_PULL_SLICES},
    wire::{
        self,
        frame::{self, Event, Incoming, Piece, Pieces},
        v1,
    },
};
use tokio::{sync::mpsc, time::Instant};
use tonic::{Status, body::Body};

use super::{Services, recycle::Recycler, refuse};
use crate::jobs::JobHandle;

/// Messages made ahead of the network: one being sent, one ready. A slow reader holds 2 MiB here, no more.
const MESSAGES_AHEAD: usize = 2;

pub(super) async fn answer(services: &Services, body: Body) -> Result<Response<Body>, Status> {
    let request = request(body).await?;
    let job = request.job.clone();
    let pull = Pull::new(services, request).map_err(|fault| refuse("Pull", &job, fault))?;
    let (sender, pieces) = mpsc::channel(MESSAGES_AHEAD);
    tokio::spawn(pull.send(sender));
    Ok(frame::answer(pieces))
}

async fn request(body: Body) -> Result<v1::PullRequest, Status> {
    let mut incoming = Incoming::<v1::PullRequest>::request(body);
    match incoming.next().await? {
        Some(Event::Head(request, _)) => Ok(request),
        _ => Err(Status::invalid_argument("a pull must have one request")),
    }
}

/// One checked Pull call.
struct Pull {
    handle: Arc<JobHandle>,
    recycler: Arc<Recycler>,
    slices: Vec<Slice>,
    dtype: Dtype,
    version: Version,
    wait: Duration,
}

impl Pull {
    fn new(services: &Services, request: v1::PullRequest) -> Result<Pull, Fault> {
        let handle = services.jobs.get(&request.job)?;
        let dtype = Dtype::from_wire("pull.dtype", request.dtype)?;
        let wait = wire::deadline(request.deadline_ms)?;
        if request.slices.is_empty() || request.slices.len() > MAX_PULL_SLICES {
            let limit = format!("in 1..={MAX_PULL_SLICES}");
            return Err(Fault::invalid("pull.slices", request.slices.len(), limit, "pull in several calls"));
        }
        let slice = |slice: v1::Slice| Slice {
            shard: ShardId(slice.shard),
            offset: slice.offset,
            elements: slice.elements,
        };
        let slices: Vec<Slice> = request.slices.into_iter().map(slice).collect();
        // All are checked before the first byte leaves.
        slices.iter().try_for_each(|slice| handle.job.check_slice(slice, dtype))?;
        let recycler = Arc::clone(&services.recycler);
        Ok(Pull { handle, recycler, slices, dtype, version: Version(request.version), wait })
    }

    async fn send(self, sender: Pieces) {
        for slice in self.slices.iter().flat_map(|&slice| pieces(slice, self.dtype)) {
            let piece = tokio::select! {
                piece = self.read(slice) => piece,
                () = sender.closed() => return,
            };
            let job = self.handle.job.spec().name.as_str();
            let piece = piece.map_err(|fault| refuse("Pull", job, fault));
            let failed = piece.is_err();
            if sender.send(piece).await.is_err() || failed {
                return;
            }
        }
    }

    /// One message, once the shard has the version.
    async fn read(&self, slice: Slice) -> Result<Piece, Fault> {
        let bytes = (slice.elements * self.dtype.bytes()) as usize;
        let check = || {
            let mut read = None;
            self.handle.job.read_image(&slice, self.version, &mut |image| {
                let (mut lent, mut sum) = (self.recycler.take(bytes), Crc32::new());
                sum.copy(image, lent.as_mut());
                read = Some((Bytes::from_owner(lent), sum.value()));
            })?;
            Ok(read)
        };
        let late = || self.handle.late("pull", format!("{} of {}", self.version, slice.shard));
        let (payload, crc32) = self.handle.until(Instant::now() + self.wait, check, late).await?;
        let head =
            v1::PullResponse { shard: slice.shard.0, offset: slice.offset, crc32, payload: Bytes::new() };
        Ok(frame::encode_with(&head, payload))
    }
}

/// A slice in messages of at most one chunk.
fn pieces(slice: Slice, dtype: Dtype) -> impl Iterator<Item = Slice> {
    let most = CHUNK_BYTES as u64 / dtype.bytes();
    (0..slice.elements.div_ceil(most)).map(move |piece| {
        let offset = slice.offset + piece * most;
        Slice { shard: slice.shard, offset, elements: most.min(slice.offset + slice.elements - offset) }
    })
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
