//! Images for workers, slice by slice, each as soon as its shard has the version asked for.
//!
//! They are sent from where the update wrote them: to copy them first, in the pass that takes their checksum, cost as
//! much as sending them through a Unix socket. The update never waits for a slow reader. Such a reader gets bytes
//! that do not match their checksum, asks again, and is told that the version is gone.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::Response;
use longshore_engine::job::ImageBytes;
use longshore_proto::{
    Dtype, Fault, ShardId, Slice, Version,
    limits::{CHUNK_BYTES, MAX_PULL_SLICES},
};
use longshore_wire::{
    self as wire, dtype_from_wire,
    frame::{self, Event, Incoming, Piece, Pieces},
    v1,
};
use tokio::{sync::mpsc, time::Instant};
use tonic::{Status, body::Body};

use super::{Services, refuse};
use crate::jobs::JobHandle;

/// How many messages are made ahead of the network: one being sent, one ready. The checksum's pass brings a message
/// into cache, and with more of them it would have left the cache before the socket reads it.
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
    slices: Vec<Slice>,
    dtype: Dtype,
    version: Version,
    wait: Duration,
    /// Only say where slices lie in the images' memory, which the reader has mapped.
    in_place: bool,
}

impl Pull {
    fn new(services: &Services, request: v1::PullRequest) -> Result<Pull, Fault> {
        let handle = services.jobs.get(&request.job)?;
        let dtype = dtype_from_wire("pull.dtype", request.dtype)?;
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
        // All slices are checked before the first byte leaves.
        slices.iter().try_for_each(|slice| handle.job.check_slice(slice, dtype))?;
        let in_place = request.link != 0 && {
            services.links.find(request.link, &handle)?;
            handle.job.shared_images().is_some()
        };
        Ok(Pull { in_place, handle, slices, dtype, version: Version(request.version), wait })
    }

    async fn send(self, sender: Pieces) {
        // The larger a slice, the later a reader of its start can go on. In shared memory a shard is ready as a
        // whole.
        let most = if self.in_place { u64::MAX } else { CHUNK_BYTES as u64 / self.dtype.bytes() };
        for slice in self.slices.iter().flat_map(|&slice| pieces(slice, most)) {
            let piece = tokio::select! {
                piece = self.message(slice) => piece,
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

    /// Makes one message, once the shard has the version.
    async fn message(&self, slice: Slice) -> Result<Piece, Fault> {
        if self.in_place { self.place(slice).await } else { self.read(slice).await }
    }

    async fn place(&self, slice: Slice) -> Result<Piece, Fault> {
        let check = || self.handle.job.place_image(&slice, self.version);
        let place = self.once_ready(slice, check).await?;
        let place = v1::ImagePlace { elements: slice.elements, at: place.at, word: place.word };
        let (shard, offset) = (slice.shard.0, slice.offset);
        let (place, decided_by) = (Some(place), self.decided_by());
        Ok(frame::encode(&v1::PullResponse { shard, offset, place, decided_by, ..Default::default() }))
    }

    /// Called once the version is there.
    fn decided_by(&self) -> u64 {
        self.handle.job.decided_by(self.version).0
    }

    async fn once_ready<T>(
        &self,
        slice: Slice,
        check: impl FnMut() -> Result<Option<T>, Fault>,
    ) -> Result<T, Fault> {
        let late = || self.handle.late("pull", format!("{} of {}", self.version, slice.shard));
        self.handle.until(Instant::now() + self.wait, check, late).await
    }

    async fn read(&self, slice: Slice) -> Result<Piece, Fault> {
        let lend = || self.handle.job.lend_image(&slice, self.version);
        // A drive takes longer than other calls of this thread may wait.
        let waits = self.handle.job.spills_images();
        let check = || if waits { tokio::task::block_in_place(lend) } else { lend() };
        let (bytes, crc32) = self.once_ready(slice, check).await?;
        let (shard, offset) = (slice.shard.0, slice.offset);
        let decided_by = self.decided_by();
        let head = v1::PullResponse { shard, offset, crc32, decided_by, ..Default::default() };
        let lent = Lent { bytes, _handle: Arc::clone(&self.handle) };
        Ok(frame::encode_with(&head, Bytes::from_owner(lent)))
    }
}

/// A part of an image on its way. Its job's memory counts as used for as long.
struct Lent {
    bytes: ImageBytes,
    _handle: Arc<JobHandle>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

/// Cuts a slice into pieces of at most so many elements.
fn pieces(slice: Slice, most: u64) -> impl Iterator<Item = Slice> {
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
        let cut: Vec<Slice> = pieces(slice, 524_288).collect();
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
