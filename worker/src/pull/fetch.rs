//! Pulls one connection's part of a feed: checks and stores slices, and asks again for missing slices. `Feed::open`
//! starts a task for each connection.

use std::{
    io, mem,
    ops::Range,
    sync::{Arc, Weak},
};

use bytes::Bytes;
use longshore_proto::{
    Fault, FaultKind, ServerId, ShardId, Slice, Step, checksum::Crc32, limits::MAX_PULL_SLICES,
};
use longshore_wire::{
    direct::Mark,
    dtype_to_wire,
    frame::{self, PULL, SharedIntake},
    memfd::STALE,
    sink::{MessageSink, Mode, Read, Sink},
    v1::{self, PullRequest, PullResponse},
};

use super::{
    Pulls,
    pulls::FeedInner,
    store::{Cursor, View},
    turns::Turn,
};
use crate::{cluster::Backoff, error::Shortage, host::Instant, memfd::Link};

/// Number of damaged answers with which a fetch fails. Chance may damage a packet on its way, but hardly three of one
/// fetch.
const DAMAGED_TRIES: u32 = 3;

pub(super) struct Fetch {
    pub(super) shared: Arc<FeedInner>,
    pub(super) server: ServerId,
    pub(super) connection: usize,
    /// Slices with their flat ranges, in the requested order.
    pub(super) pieces: Vec<(Slice, Range<u64>)>,
    /// None if the weights are read in the server's memory, so that nothing is transferred.
    pub(super) turn: Option<Arc<Turn>>,
}

impl Fetch {
    /// Runs until all slices have arrived, or until a failure that another attempt would not mend. Failures of the
    /// transport and the server's deadlines are retried without end. Readers have a deadline, and dropping the feed
    /// ends the task.
    pub(super) async fn run(self) {
        let Pulls { cluster, rank, .. } = &*self.shared.pulls;
        let mut backoff = Backoff::new();
        let (mut damaged, mut failures) = (0, 0);
        if let Some(turn) = &self.turn {
            turn.come().await;
        }
        loop {
            let Some((server, slices)) = self.missing(failures) else { return };
            let mut progress = false;
            let streamed = tokio::select! {
                biased;
                () = cluster.left(server), if cluster.spec().replicas > 1 => {
                    let (limit, remedy) = ("a server of the job", "another holder of its shards is asked");
                    Err(Fault::new(FaultKind::Unavailable, "pull", cluster.address(server), limit, remedy))
                }
                streamed = self.stream(server, slices, failures, &mut progress) => streamed,
            };
            let Err(fault) = streamed else { continue };
            failures += 1;
            if progress {
                backoff.reset();
            }
            damaged += u32::from(fault.kind == FaultKind::Corrupt);
            let again = match fault.kind {
                FaultKind::Unavailable | FaultKind::Deadline => true,
                // The server's next process does not know the link.
                FaultKind::Precondition if fault.field == STALE => {
                    rank.forget_link(server);
                    true
                }
                // A decision has taken the shard from this holder.
                FaultKind::Precondition if fault.field == "shard" => cluster.spec().replicas > 1,
                // A server may lack the last commit: rank 0 sends commits to servers one by one.
                FaultKind::Precondition => fault.field == "version",
                FaultKind::Corrupt => damaged < DAMAGED_TRIES,
                _ => false,
            };
            if !again {
                return self.shared.fail(cluster.explain(server, "Pull", None, fault));
            }
            self.shared.noted(server, fault);
            backoff.pause(Instant::now() + cluster.options.deadline).await;
        }
    }

    /// Returns the missing ranges for the next request, and the server to ask. After a failure, replicated shards are
    /// asked of another holder.
    fn missing(&self, failures: usize) -> Option<(ServerId, Vec<v1::Slice>)> {
        let (store, cluster) = (&self.shared.store, &self.shared.pulls.cluster);
        let step = Step(self.shared.reading.version().0);
        let holder = |shard| match failures {
            0 => self.server,
            _ => cluster.source_at(shard, step, failures),
        };
        let (mut server, mut slices) = (None, Vec::new());
        for (slice, range) in &self.pieces {
            let segments = store.covering(range).unwrap_or_default();
            // Segments fill in order, so the missing part is one run from the first unfinished segment on.
            let Some(first) = segments.iter().find(|segment| !segment.is_whole()) else { continue };
            let of_shard = holder(slice.shard);
            if *server.get_or_insert(of_shard) != of_shard {
                continue;
            }
            let start = first.missing(store.dtype).start;
            let offset = slice.offset + (start - range.start);
            slices.push(v1::Slice { shard: slice.shard.0, offset, elements: range.end - start });
            if slices.len() == MAX_PULL_SLICES {
                break;
            }
        }
        server.map(|server| (server, slices))
    }

    async fn stream(
        &self,
        server: ServerId,
        slices: Vec<v1::Slice>,
        failures: usize,
        progress: &mut bool,
    ) -> Result<(), Fault> {
        let Pulls { cluster, rank, .. } = &*self.shared.pulls;
        let peer = cluster.peer(server);
        let link = rank.link(server).filter(|link| link.images.is_some());
        let request = PullRequest {
            job: cluster.job().to_string(),
            rank: cluster.options.rank.0,
            version: self.shared.reading.version().0,
            dtype: dtype_to_wire(self.shared.store.dtype),
            slices,
            deadline_ms: cluster.options.deadline.as_millis() as u64,
            link: link.as_ref().map_or(0, |link| link.id),
        };
        let (shared, turn) = (Arc::clone(&self.shared), self.turn.as_ref().map(Arc::downgrade));
        let landing = Landing { shared, turn, link, payload: None, progress: false };
        let intake = SharedIntake::new(landing);
        let mark = Mark::of_answer();
        let mut connection = peer.data(self.connection);
        // Dropping the claim with the call discards later payloads.
        let _claim = connection.taps.expect(mark, Box::new(intake.clone()));
        let request = mark.put(frame::encode(&request));
        let poured = async {
            let answers = frame::call_once(&mut connection.channel, PULL, request).await?;
            answers.pour(&intake).await
        };
        let poured = poured.await;
        let intake = intake.lock();
        *progress = intake.sink.progress;
        // A fault in the messages is returned first, since it says more than the status of the call.
        intake.fault().cloned().map_or(Ok(()), Err)?;
        poured.map_err(|status| cluster.fault(server, &status))?;
        intake.finish()?;
        drop(intake);
        if self.missing(failures).is_none_or(|(of, _)| of != server) {
            return Ok(());
        }
        let (field, remedy) = (format!("pull from {}", peer.address), "see the server's log");
        Err(Fault::new(FaultKind::Unavailable, field, "ended early", "complete", remedy))
    }
}

/// Sink that stores the messages of one call.
struct Landing {
    shared: Arc<FeedInner>,
    /// Weak: the turn ends with the fetch, even while this sink is held.
    turn: Option<Weak<Turn>>,
    link: Option<Arc<Link>>,
    payload: Option<Payload>,
    /// True once the call has brought valid data.
    progress: bool,
}

/// An arriving payload. Readers see it only after its checksum was verified.
struct Payload {
    place: Cursor,
    sum: Crc32,
    crc32: u32,
    bytes: u64,
}

impl Sink for Landing {
    fn mode(&mut self) -> Mode {
        if self.payload.is_some() { Mode::Direct(usize::MAX) } else { Mode::Payload }
    }

    fn put(&mut self, bytes: &mut Bytes) {
        let bytes = mem::take(bytes);
        if let Some(Payload { place, sum, .. }) = &mut self.payload {
            self.shared.store.put(place, &bytes, sum);
        }
    }

    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize> {
        match &mut self.payload {
            Some(Payload { place, sum, .. }) => self.shared.store.read_from(place, most, sum, read),
            None => Ok(0),
        }
    }
}

impl MessageSink<PullResponse> for Landing {
    fn begin(&mut self, head: PullResponse, bytes: usize) -> Result<bool, Fault> {
        self.shared.reading.found(head.decided_by)?;
        if head.place.is_some() {
            self.find(&head)?;
            self.progress = true;
        } else {
            self.payload = Some(self.place(&head, bytes as u64)?);
        }
        Ok(true)
    }

    fn end(&mut self) -> Result<bool, Fault> {
        self.progress = true;
        let Some(Payload { place, sum, crc32, bytes }) = self.payload.take() else { return Ok(false) };
        let found = sum.value();
        if found != crc32 {
            let limit = format!("{found:08x}, the CRC-32 of the payload received");
            return Err(damaged("crc32", format!("{crc32:08x}"), limit));
        }
        self.shared.store.commit(place);
        self.shared.arrived(bytes);
        if let Some(turn) = self.turn.as_ref().and_then(Weak::upgrade) {
            turn.arrived(bytes);
        }
        Ok(false)
    }
}

impl Landing {
    fn place(&self, head: &PullResponse, bytes: u64) -> Result<Payload, Fault> {
        let store = &self.shared.store;
        let at = self.flat(head).filter(|_| bytes.is_multiple_of(store.dtype.bytes()));
        let place = at.map_or(Ok(None), |at| store.place(at, bytes / store.dtype.bytes()));
        let short = |short: Shortage| {
            Fault::new(FaultKind::Exhausted, "memory", &short, "enough", "raise the host budget")
        };
        let place = place.map_err(short)?.ok_or_else(|| unasked(head, bytes))?;
        Ok(Payload { place, sum: Crc32::new(), crc32: head.crc32, bytes })
    }

    /// Returns the flat element at which a message's slice begins.
    fn flat(&self, head: &PullResponse) -> Option<u64> {
        let layout = &self.shared.pulls.cluster.layout;
        let known = head.shard < layout.shards();
        let start = known.then(|| layout.shard_range(ShardId(head.shard)).start)?;
        start.checked_add(head.offset)
    }

    /// Notes weights that lie ready in the server's memory.
    fn find(&self, head: &PullResponse) -> Result<(), Fault> {
        let store = &self.shared.store;
        let place = head.place.unwrap_or_default();
        let bytes = place.elements.saturating_mul(store.dtype.bytes());
        let images = self.link.as_deref().and_then(|link| link.images.clone());
        let view = images
            .filter(|images| {
                let aligned = place.at.is_multiple_of(store.dtype.bytes()) && place.stamp.is_multiple_of(8);
                aligned && images.holds(place.at, bytes) && images.holds(place.stamp, 8)
            })
            .map(|images| View {
                images,
                at: place.at,
                stamp: place.stamp,
                version: self.shared.reading.version(),
            });
        let found = self.flat(head).zip(view).is_some_and(|(at, view)| store.find(at, place.elements, &view));
        if !found {
            return Err(unasked(head, bytes));
        }
        self.shared.arrived(bytes);
        Ok(())
    }
}

fn unasked(head: &PullResponse, bytes: u64) -> Fault {
    let value = format!("shard {} offset {}, {bytes} bytes", head.shard, head.offset);
    damaged("slice", value, "what was asked for, in order".into())
}

fn damaged(field: &str, value: String, limit: String) -> Fault {
    let remedy = "if it repeats, suspect the network or the memory of one of the two machines";
    Fault::new(FaultKind::Corrupt, format!("pull.{field}"), value, limit, remedy)
}
