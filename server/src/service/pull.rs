//! Pull: images for workers, slice by slice, each sent once its shard has the requested version.
//!
//! Marked calls send images from the update's own output, without a copy. A copy, made together with the checksum, cost
//! as much as a send through a Unix socket. The update never waits for a slow reader. A slow reader gets bytes that
//! fail their checksum, asks again, and learns that the version is gone. Other clients get copies, since HTTP/2 reads
//! its payloads in this process, where an update may overwrite them.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use http::Response;
use longshore_engine::{
    job::{ImageBytes, ImagePlace, Pulled},
    memory::SharedBytes,
};
use longshore_proto::{
    Dtype, Fault, Rank, ShardId, Slice, Version,
    limits::{CHUNK_BYTES, MAX_PULL_SLICES},
};
use longshore_wire::{
    self as wire,
    direct::{Connection, Held, Mark, Payloads, blank},
    dtype_from_wire,
    frame::{self, Event, Incoming, Piece, Pieces},
    v1,
};
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};
use tonic::{Status, body::Body};

use super::{Services, permitted::permit, refuse, room::Room};
use crate::{jobs::JobHandle, trust::Caller};

/// Messages built ahead of the network: one in flight, one ready. The checksum brings a message into cache. With more
/// messages ahead, some would be evicted before the socket reads them. A stranger's second message is built once the
/// first was taken.
const MESSAGES_AHEAD: usize = 2;

/// Number of messages whose weights are read from drives ahead of the current message. A drive is near its best with
/// four requests of a MiB.
const READS_AHEAD: usize = 4;

/// Memory of one slice of a pull. The call holds each slice twice: in the request's message, and in its own list.
const SLICE_BYTES: usize = 2 * size_of::<Slice>();

/// Answers a Pull call, whose connection has this `room`.
pub(super) async fn answer(
    services: &Services,
    caller: &Caller,
    connection: Option<&Connection>,
    room: Room,
    body: Body,
) -> Result<Response<Body>, Status> {
    let (request, mark) = request(body).await?;
    let taps = connection.map(|of| &of.taps);
    let job = request.job.clone();
    let pull = || {
        permit(caller, &request)?;
        let slices = room.hold_now("pull.slices", SLICE_BYTES * request.slices.len())?;
        Pull::new(services, request, room, slices)
    };
    let pull = pull().map_err(|fault| refuse("Pull", &job, fault))?;
    // A rank may pull on a connection before it pushes there, and must not wait for readers that stall. TLS alone
    // identifies a rank. Without TLS a rank's weights are lent, and need no room.
    if caller.trains(&job) {
        connection.iter().for_each(|connection| pull.handle.seats.take(connection));
    }
    let (sender, pieces) = mpsc::channel(MESSAGES_AHEAD);
    let payloads = taps.zip(mark).and_then(|(taps, mark)| Payloads::claim(taps, mark));
    tokio::spawn(pull.send(sender, payloads));
    Ok(frame::answer(pieces))
}

async fn request(body: Body) -> Result<(v1::PullRequest, Option<Mark>), Status> {
    let mut incoming = Incoming::<v1::PullRequest>::request(body);
    match incoming.next().await? {
        Some(Event::Head(request, _)) => Ok((request, incoming.mark())),
        _ => Err(Status::invalid_argument("a pull must have one request")),
    }
}

/// A checked Pull call.
struct Pull {
    handle: Arc<JobHandle>,
    rank: Rank,
    /// Transport of the payloads.
    transport: &'static str,
    slices: Vec<Slice>,
    dtype: Dtype,
    version: Version,
    wait: Duration,
    /// Answers name each slice's place in the images' memory, which the reader has mapped, and carry no weights.
    in_place: bool,
    /// Room for copied payloads.
    room: Room,
    _slices: Held,
}

impl Pull {
    fn new(services: &Services, request: v1::PullRequest, room: Room, _slices: Held) -> Result<Pull, Fault> {
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
        // All slices are checked before the first byte is sent.
        slices.iter().try_for_each(|slice| handle.job.check_slice(slice, dtype))?;
        let in_place = request.link != 0 && {
            services.links.find(request.link, &handle)?;
            handle.job.images.shared().is_some()
        };
        let (version, rank, transport) = (Version(request.version), Rank(request.rank), services.transport);
        Ok(Pull { in_place, handle, rank, transport, slices, dtype, version, wait, room, _slices })
    }

    /// Sends all slices. With `payloads`, bytes of images bypass HTTP/2 if possible.
    async fn send(self, sender: Pieces, mut payloads: Option<Payloads>) {
        // A larger piece delays a reader that waits for the start of its slice. In shared memory a shard is ready as a
        // whole. Frozen weights are sent, since they are stored with the state.
        let job = &self.handle.job;
        let most = |slice: &Slice| match self.in_place && !job.layout().is_frozen(slice.shard) {
            true => u64::MAX,
            false => CHUNK_BYTES as u64 / self.dtype.bytes(),
        };
        let mut pieces = self.slices.iter().flat_map(|&slice| pieces(slice, most(&slice)));
        let mut next: VecDeque<Slice> = pieces.by_ref().take(1 + READS_AHEAD).collect();
        let mut is_first = true;
        while !next.is_empty() {
            let message = tokio::select! {
                message = self.message(next.make_contiguous(), payloads.is_some()) => message,
                () = sender.closed() => return,
            };
            let job = self.handle.job.spec().name.as_str();
            let message = message.map_err(|fault| refuse("Pull", job, fault));
            let mut taken = None;
            let piece = message.map(|outgoing| {
                if let Some(payloads) = &mut payloads {
                    payloads.follow(&outgoing.piece, outgoing.payload);
                }
                taken = outgoing.taken;
                outgoing.piece
            });
            let failed = piece.is_err();
            if sender.send(piece).await.is_err() || failed {
                return;
            }
            // The second message waits until the first is taken. With four messages ahead, 50 strangers a second that
            // read none made the server copy 1.3 GB/s.
            if let Some(taken) = taken.filter(|_| is_first) {
                tokio::select! {
                    _ = taken => (),
                    () = sender.closed() => return,
                }
            }
            is_first = false;
            next.pop_front();
            next.extend(pieces.next());
        }
    }

    /// Builds a message of the first slice, once its shard has the version. The other slices are only read ahead.
    /// `past` permits the payload to bypass HTTP/2.
    async fn message(&self, slices: &[Slice], past: bool) -> Result<Outgoing, Fault> {
        match (self.in_place, past) {
            (true, _) => match self.place(slices[0]).await? {
                Some(piece) => Ok(Outgoing::whole(piece)),
                None => self.copy(slices).await,
            },
            (false, true) => self.lend(slices).await,
            (false, false) => self.copy(slices).await,
        }
    }

    /// Returns a message with the slice's place. None if its bytes must be sent instead.
    async fn place(&self, slice: Slice) -> Result<Option<Piece>, Fault> {
        let check = || self.handle.job.place_image(&slice, self.version);
        let ImagePlace::At { at, stamp } = self.once_ready(slice, check).await? else {
            return Ok(None);
        };
        self.count(slice, "memfd");
        let place = Some(v1::ImagePlace { elements: slice.elements, at, stamp });
        Ok(Some(frame::encode(&v1::PullResponse { place, ..self.head(slice) })))
    }

    fn count(&self, slice: Slice, transport: &str) {
        self.handle.traffic.pulled(self.rank, transport, slice.elements * self.dtype.bytes());
        self.handle.stages.pulled(self.version, std::time::Instant::now());
    }

    /// Returns an answer with all fields except the weights.
    fn head(&self, slice: Slice) -> v1::PullResponse {
        let (shard, offset, decided_by) = (slice.shard.0, slice.offset, self.decided_by());
        v1::PullResponse { shard, offset, decided_by, ..Default::default() }
    }

    /// Returns the version's `decided_by`. The version must exist.
    fn decided_by(&self) -> u64 {
        self.handle.job.protocol.decided_by(self.version).0
    }

    async fn once_ready<T>(
        &self,
        slice: Slice,
        check: impl FnMut() -> Result<Option<T>, Fault>,
    ) -> Result<T, Fault> {
        let late = || self.handle.late("pull", format!("{} of {}", self.version, slice.shard));
        self.handle.until_version(self.version, Instant::now() + self.wait, check, late).await
    }

    async fn lend(&self, slices: &[Slice]) -> Result<Outgoing, Fault> {
        let slice = slices[0];
        let room = if self.reads_drives(slice) { Some(self.room_for(slice).await?) } else { None };
        let lend = || self.handle.job.lend_image(&slice, self.version);
        let Pulled { bytes, crc32 } = self.read(slices, lend).await?;
        self.count(slice, self.transport);
        let head = v1::PullResponse { crc32, ..self.head(slice) };
        match bytes {
            ImageBytes::Read(bytes) => Ok(self.owned(&head, bytes, room)),
            ImageBytes::Here(bytes) => {
                let piece = frame::encode_with(&head, blank(&bytes));
                // The payload holds the job, so its memory counts as used until the bytes are sent.
                let payload = Some(bytes.holding(Arc::clone(&self.handle) as _));
                Ok(Outgoing { payload, ..Outgoing::whole(piece) })
            }
        }
    }

    async fn copy(&self, slices: &[Slice]) -> Result<Outgoing, Fault> {
        let slice = slices[0];
        let room = Some(self.room_for(slice).await?);
        let copy = || self.handle.job.copy_image(&slice, self.version);
        let Pulled { bytes, crc32 } = self.read(slices, copy).await?;
        self.count(slice, self.transport);
        let head = v1::PullResponse { crc32, ..self.head(slice) };
        Ok(self.owned(&head, bytes, room))
    }

    /// Returns whether reading the weights may need a drive, and memory for the copy. Frozen weights are stored with
    /// the state, which a tier may keep on drives.
    fn reads_drives(&self, slice: Slice) -> bool {
        self.handle.job.reads_state(slice.shard)
    }

    /// Reads the first slice, and starts to read the other slices from drives.
    async fn read<T>(
        &self,
        slices: &[Slice],
        read: impl Fn() -> Result<Option<T>, Fault>,
    ) -> Result<T, Fault> {
        let slice = slices[0];
        // A read from a drive takes longer than other calls of this thread may wait.
        let waits = self.reads_drives(slice);
        let read = || {
            slices.iter().for_each(|slice| self.handle.job.read_ahead(slice, self.version));
            read()
        };
        self.once_ready(slice, || if waits { tokio::task::block_in_place(read) } else { read() }).await
    }

    /// Reserves room for a copied payload once the payload can be read. The wait for a version may take a day, and must
    /// hold no room.
    async fn room_for(&self, slice: Slice) -> Result<Held, Fault> {
        self.once_ready(slice, || self.handle.job.has_image(&slice, self.version)).await?;
        let bytes = slice.elements * self.dtype.bytes();
        Ok(self.room.hold(bytes as usize, Instant::now() + self.wait).await?.as_answer())
    }

    fn owned(&self, head: &v1::PullResponse, bytes: Vec<u8>, room: Option<Held>) -> Outgoing {
        let (taking, taken) = (!self.room.is_ranks()).then(oneshot::channel).unzip();
        let copied = Copied { bytes, _handle: Arc::clone(&self.handle), _room: room, _taking: taking };
        Outgoing { taken, ..Outgoing::whole(frame::encode_with(head, Bytes::from_owner(copied))) }
    }
}

/// A message, and the bytes that replace its payload, if any.
struct Outgoing {
    piece: Piece,
    payload: Option<SharedBytes>,
    /// Resolves once a stranger's message has been sent or dropped. Until then the message occupies room.
    taken: Option<oneshot::Receiver<()>>,
}

impl Outgoing {
    fn whole(piece: Piece) -> Outgoing {
        Outgoing { piece, payload: None, taken: None }
    }
}

/// A copied part of an image. Its job's memory counts as used until the copy is dropped.
struct Copied {
    bytes: Vec<u8>,
    _handle: Arc<JobHandle>,
    _room: Option<Held>,
    /// Dropped with the message, which resolves [`Outgoing::taken`].
    _taking: Option<oneshot::Sender<()>>,
}

impl AsRef<[u8]> for Copied {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Cuts a slice into pieces of at most `most` elements.
fn pieces(slice: Slice, most: u64) -> impl Iterator<Item = Slice> {
    (0..slice.elements.div_ceil(most)).map(move |piece| {
        let offset = slice.offset + piece * most;
        Slice { shard: slice.shard, offset, elements: most.min(slice.offset + slice.elements - offset) }
    })
}
