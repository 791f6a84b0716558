//! One connection's part of a feed: pulls its slices, checks and stores them, and asks again for what is missing.

use std::{ops::Range, sync::Arc};

use longshore_proto::{
    Fault, FaultKind, ShardId, Slice,
    checksum::Crc32,
    limits::MAX_PULL_SLICES,
    wire::{
        fault_from_status,
        frame::{self, Event},
        memfd::STALE,
        v1::{self, PullRequest, PullResponse},
    },
};

use super::{
    feed::Shared,
    store::{Place, View},
};
use crate::{error::Shortage, memfd::Link, session::Backoff};

/// A damaged chunk is asked for again this often before it is an error: packets rot, but not three times in a row.
const DAMAGED_TRIES: u32 = 3;

const PULL: &str = "/longshore.v1.Tensors/Pull";

pub(super) struct Fetch {
    pub(super) shared: Arc<Shared>,
    pub(super) server: usize,
    pub(super) connection: usize,
    /// In the order wanted.
    pub(super) pieces: Vec<(Slice, Range<u64>)>,
}

impl Fetch {
    /// Until everything is there, or a failure that trying again would not mend. Transport failures and the server's own
    /// deadline are tried for ever: whoever waits has a deadline, and dropping the feed ends the task.
    pub(super) async fn run(self) {
        let mut backoff = Backoff::new();
        let mut damaged = 0;
        loop {
            let slices = self.missing();
            if slices.is_empty() {
                return;
            }
            let mut progress = false;
            let Err(fault) = self.stream(slices, &mut progress).await else { continue };
            if progress {
                backoff.reset();
            }
            damaged += u32::from(fault.kind == FaultKind::Corrupt);
            let again = match fault.kind {
                FaultKind::Unavailable | FaultKind::Deadline => true,
                // Too new for a server that has not heard of the last commit yet: rank 0 tells them one by one.
                FaultKind::Precondition if fault.field == STALE => {
                    self.shared.core.links.forget(self.server);
                    true
                }
                FaultKind::Precondition => fault.field == "version",
                FaultKind::Corrupt => damaged < DAMAGED_TRIES,
                _ => false,
            };
            if !again {
                let error = self.shared.core.explain(self.server, "Pull", None, fault);
                return self.shared.fail(error);
            }
            self.shared.noted(self.server, fault);
            backoff.pause(std::time::Instant::now() + self.shared.core.options.deadline).await;
        }
    }

    /// What has not come yet, as slices of at most one request.
    fn missing(&self) -> Vec<v1::Slice> {
        let store = &self.shared.store;
        let mut slices = Vec::new();
        for (slice, range) in &self.pieces {
            let segments = store.covering(range).unwrap_or_default();
            // Segments fill in order, so one run from the first unfinished one is all that is missing.
            let Some(first) = segments.iter().find(|segment| !segment.is_whole()) else { continue };
            let start = first.missing(store.dtype).start;
            let offset = slice.offset + (start - range.start);
            slices.push(v1::Slice { shard: slice.shard.0, offset, elements: range.end - start });
            if slices.len() == MAX_PULL_SLICES {
                break;
            }
        }
        slices
    }

    async fn stream(&self, slices: Vec<v1::Slice>, progress: &mut bool) -> Result<(), Fault> {
        let core = &self.shared.core;
        let peer = &core.peers[self.server];
        let link = core.link(self.server).filter(|link| link.images.is_some());
        let request = PullRequest {
            job: core.job().to_string(),
            rank: core.options.rank.0,
            version: self.shared.version.0,
            dtype: self.shared.store.dtype.to_wire(),
            slices,
            deadline_ms: core.options.deadline.as_millis() as u64,
            link: link.as_ref().map_or(0, |link| link.id),
        };
        let fault = |status: tonic::Status| fault_from_status(&status, &peer.address);
        let mut channel = peer.data(self.connection);
        let call = frame::call_once::<PullResponse>(&mut channel, PULL, frame::encode(&request));
        let mut answers = call.await.map_err(fault)?;
        let mut landing = None;
        while let Some(event) = answers.next().await.map_err(fault)? {
            match event {
                Event::Head(head, _) if head.place.is_some() => {
                    self.find(&head, link.as_deref())?;
                    *progress = true;
                }
                Event::Head(head, bytes) => landing = Some(self.begin(&head, bytes as u64)?),
                Event::Payload(slice) => landing.iter_mut().for_each(|landing| landing.put(&slice)),
                Event::End => {
                    landing.take().map_or(Ok(()), |landing| self.commit(landing))?;
                    *progress = true;
                }
            }
        }
        if self.missing().is_empty() {
            return Ok(());
        }
        let (field, remedy) = (format!("pull from {}", peer.address), "see the server's log");
        Err(Fault::new(FaultKind::Unavailable, field, "ended early", "complete", remedy))
    }

    /// Finds the place of what is about to come. Readers see none of it before its checksum was found right.
    fn begin(&self, head: &PullResponse, bytes: u64) -> Result<Landing<'_>, Fault> {
        let store = &self.shared.store;
        let at = self.flat(head).filter(|_| bytes.is_multiple_of(store.dtype.bytes()));
        let place = at.map_or(Ok(None), |at| store.place(at, bytes / store.dtype.bytes()));
        let short = |short: Shortage| {
            Fault::new(FaultKind::Exhausted, "memory", &short, "enough", "raise the host budget")
        };
        let place = place.map_err(short)?.ok_or_else(|| unasked(head, bytes))?;
        Ok(Landing { place, sum: Crc32::new(), crc32: head.crc32, bytes })
    }

    /// The flat element at which a message's slice begins.
    fn flat(&self, head: &PullResponse) -> Option<u64> {
        let layout = &self.shared.core.layout;
        let known = head.shard < layout.shards();
        let start = known.then(|| layout.shard_range(ShardId(head.shard)).start)?;
        start.checked_add(head.offset)
    }

    /// Weights lie ready in the server's memory.
    fn find(&self, head: &PullResponse, link: Option<&Link>) -> Result<(), Fault> {
        let store = &self.shared.store;
        let place = head.place.unwrap_or_default();
        let bytes = place.elements.saturating_mul(store.dtype.bytes());
        let images = link.and_then(|link| link.images.clone());
        let view = images
            .filter(|images| {
                let aligned = place.at.is_multiple_of(store.dtype.bytes()) && place.word.is_multiple_of(8);
                aligned && images.holds(place.at, bytes) && images.holds(place.word, 8)
            })
            .map(|images| View { images, at: place.at, word: place.word, version: self.shared.version });
        let found = self.flat(head).zip(view).is_some_and(|(at, view)| store.find(at, place.elements, &view));
        if !found {
            return Err(unasked(head, bytes));
        }
        self.shared.arrived(bytes);
        Ok(())
    }

    fn commit(&self, landing: Landing<'_>) -> Result<(), Fault> {
        let found = landing.sum.value();
        if found != landing.crc32 {
            let limit = format!("{found:08x}, the CRC-32 of the payload received");
            return Err(damaged("crc32", format!("{:08x}", landing.crc32), limit));
        }
        landing.place.commit();
        self.shared.arrived(landing.bytes);
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

/// A message whose payload is arriving.
struct Landing<'a> {
    place: Place<'a>,
    sum: Crc32,
    crc32: u32,
    bytes: u64,
}

impl Landing<'_> {
    fn put(&mut self, slice: &[u8]) {
        self.place.put(slice, &mut self.sum);
    }
}
