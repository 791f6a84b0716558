//! Receipt of chunks into their slots, and their results. Runs on the connection's task for marked calls, else on the
//! call's task.

use std::{
    io, mem,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use longshore_proto::{ContributionChunk, Fault, FaultKind, Incarnation, Rank, limits::STRANGER_RESULTS};
use longshore_wire::{
    self as wire,
    direct::Connection,
    sink::{MessageSink, Mode, Read, Sink},
    v1::{PushRequest, PushResult},
};
use tokio::sync::watch;

use super::place::{Destination, Fate, finish, place_now};
use crate::{
    jobs::JobHandle,
    memfd::Payload,
    refusals,
    service::{Services, permitted::permit},
    trust::{Caller, note_refused_message},
};

/// Largest number of acknowledgements in one message. HTTP/2 peers take many small messages for abuse. Each message
/// costs a write of 5 to 10 microseconds at both ends, against 200 for a chunk.
pub(super) const RESULTS_BATCHED: usize = 16;
/// Number of results that may wait on one stream of a rank. Each takes 300 bytes, so the 128 streams of a connection
/// hold 2.5 MB.
const RESULTS_MOST: usize = 64;
/// Sink that puts a stream's chunks into their slots.
pub(super) struct Receiving {
    services: Services,
    /// Checked for each chunk, since a stream lasts as long as the job.
    caller: Caller,
    /// The call's connection, which becomes a rank's with its first admitted chunk.
    connection: Option<Connection>,
    /// Job of the previous chunk, and usually of the next chunk too. The reference is weak, so an idle stream keeps no
    /// job alive.
    held: Weak<JobHandle>,
    /// Receives the fault when the job in `held` closes. The stream then ends even while idle, since its worker may
    /// have to send gradients again.
    pub(super) closing: Option<watch::Receiver<Option<Fault>>>,
    pub(super) chunk: Option<(PushRequest, Result<Destination, Fault>)>,
    /// A chunk whose slot is busy.
    pub(super) waiting: Option<(PushRequest, Waiting)>,
    /// A chunk that arrived while too many results waited, and the length of its payload.
    pub(super) held_back: Option<(PushRequest, usize)>,
    /// The process that sends the stream's chunks.
    sender: Option<(Rank, Incarnation)>,
    /// The previous chunk that got a slot.
    last: Option<ContributionChunk>,
    /// Results not acknowledged yet.
    pub(super) results: Vec<PushResult>,
}

pub(super) struct Waiting {
    pub(super) handle: Arc<JobHandle>,
    pub(super) chunk: ContributionChunk,
    pub(super) payload: Option<Payload>,
    pub(super) patience: Duration,
}

impl Sink for Receiving {
    fn mode(&mut self) -> Mode {
        match &self.chunk {
            Some((_, Ok(Destination::Slot(..)))) => Mode::Direct(usize::MAX),
            _ => Mode::Payload,
        }
    }

    fn put(&mut self, bytes: &mut Bytes) {
        let bytes = mem::take(bytes);
        let Some((_, place)) = &mut self.chunk else { return };
        match place {
            Ok(Destination::Slot(_, writing)) => {
                if let Err(fault) = writing.write(&bytes) {
                    *place = Err(fault);
                }
            }
            Ok(Destination::Nowhere(_, sum)) => sum.update(&bytes),
            Err(_) => {}
        }
    }

    fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<usize> {
        match &mut self.chunk {
            Some((_, Ok(Destination::Slot(_, writing)))) => writing.read_from(most, read),
            // The chunk has lost its slot since its mode was asked for, so its bytes are read and dropped. A read of no
            // bytes would mean that the peer hung up.
            _ => read(&mut [0; 4096][..most.min(4096)]),
        }
    }
}

impl MessageSink<PushRequest> for Receiving {
    fn begin(&mut self, request: PushRequest, bytes: usize) -> Result<bool, Fault> {
        // Chunks of a peer that does not read its results stay unread on its connection.
        let is_ranks = self.connection.as_ref().is_none_or(|of| of.account.is_vouched());
        let most = if is_ranks { RESULTS_MOST } else { STRANGER_RESULTS };
        if self.results.len() >= most {
            self.held_back = Some((request, bytes));
            return Ok(false);
        }
        Ok(self.start(request, bytes))
    }

    fn end(&mut self) -> Result<bool, Fault> {
        let Some((request, place)) = self.chunk.take() else { return Ok(false) };
        let lent = request.place.is_some_and(|place| place.lent);
        let transport = if request.place.is_some() { "memfd" } else { self.services.transport };
        let outcome = place.and_then(|place| finish(place, (!lent).then_some(request.crc32), transport));
        self.results.push(result(request, outcome));
        // The task wakes for the first result, to start its timer, and for a full batch.
        Ok(self.results.len() == 1 || self.results.len() >= RESULTS_BATCHED)
    }
}

impl Receiving {
    pub(super) fn new(services: Services, caller: Caller, connection: Option<Connection>) -> Receiving {
        Receiving {
            services,
            caller,
            connection,
            held: Weak::new(),
            closing: None,
            chunk: None,
            waiting: None,
            held_back: None,
            sender: None,
            last: None,
            results: Vec::new(),
        }
    }

    pub(super) fn fences(&self) -> watch::Receiver<u64> {
        self.services.fences.subscribe()
    }

    /// Gives the current chunk's slot up if a newer process has taken the rank. The rest of the chunk is discarded.
    pub(super) fn end_if_fenced(&mut self) {
        let Some((_, place)) = &mut self.chunk else { return };
        let Ok(Destination::Slot(handle, writing)) = &place else { return };
        let ContributionChunk { contribution, incarnation, .. } = *writing.chunk();
        if let Err(fault) = handle.job.protocol.check_rank(contribution.rank, incarnation) {
            *place = Err(fault);
        }
    }

    /// Returns true if the sender must join again. Even an idle worker must learn this, since gradients that it sent
    /// may be needed again.
    pub(super) fn must_rejoin(&self) -> bool {
        let (Some((rank, incarnation)), Some(handle)) = (self.sender, self.held.upgrade()) else {
            return false;
        };
        handle.job.protocol.must_rejoin(rank, incarnation)
    }

    /// Finds the chunk's slot. Returns false while the slot is busy.
    pub(super) fn start(&mut self, request: PushRequest, bytes: usize) -> bool {
        let place = self.identify(&request, bytes).and_then(|waiting| {
            let place = place_now(&waiting.handle, &waiting.chunk)?;
            if !matches!(place, Some(Destination::Nowhere(..))) {
                self.check_order(&waiting.chunk)?;
            }
            Ok(match place {
                Some(place) => Ok((waiting.chunk, place.holding(waiting.payload, waiting.chunk.lent)?)),
                None => Err(waiting),
            })
        });
        if let (Ok(placed), Some(handle), Some(connection)) = (&place, self.held.upgrade(), &self.connection)
        {
            handle.seats.take(connection);
            let (Ok((chunk, _)) | Err(Waiting { chunk, .. })) = placed;
            let (rank, incarnation) = (chunk.contribution.rank, chunk.incarnation);
            if self.sender.replace((rank, incarnation)) != Some((rank, incarnation)) {
                let transport = self.services.transport;
                handle.processes.called(rank, incarnation, transport, &connection.account);
            }
        }
        match place {
            Ok(Ok((chunk, place))) => self.placed(request, &chunk, Ok(place)),
            Ok(Err(waiting)) => self.waiting = Some((request, waiting)),
            // A refused chunk is read to its end too, since the next chunk follows it.
            Err(fault) => self.chunk = Some((request, Err(fault))),
        }
        self.waiting.is_none()
    }

    fn identify(&mut self, request: &PushRequest, bytes: usize) -> Result<Waiting, Fault> {
        permit(&self.caller, request).inspect_err(|fault| note_refused_message(&self.caller, fault))?;
        let mut chunk = wire::chunk_from_wire(request, bytes as u64)?;
        let handle = match self.held.upgrade() {
            Some(handle) if handle.job.spec().name.as_str() == request.job && !handle.is_closed() => handle,
            _ => {
                let handle = self.services.jobs.get(&request.job)?;
                self.last = None;
                self.closing = Some(handle.closing());
                handle
            }
        };
        self.held = Arc::downgrade(&handle);
        handle.check_step(chunk.contribution.step)?;
        let patience = wire::deadline(request.deadline_ms)?;
        let Some(place) = &request.place else {
            return Ok(Waiting { handle, chunk, payload: None, patience });
        };
        if bytes > 0 {
            let remedy = "send one of them";
            return Err(Fault::invalid("push.place", "beside a payload", "instead of one", remedy));
        }
        let payload = self.services.links.find(place.link, &handle)?.payload(place, &chunk)?;
        chunk.bytes = payload.bytes();
        Ok(Waiting { handle, chunk, payload: Some(payload), patience })
    }

    /// Checks that a step's micro-steps ascend on a stream. Otherwise two streams might wait for each other.
    fn check_order(&self, chunk: &ContributionChunk) -> Result<(), Fault> {
        let now = chunk.contribution;
        let ahead = |last: &ContributionChunk| {
            let before = last.contribution;
            let same =
                (last.incarnation, before.rank, before.step) == (chunk.incarnation, now.rank, now.step);
            (same && before.micro_step > now.micro_step).then_some(before.micro_step)
        };
        let Some(ahead) = self.last.as_ref().and_then(ahead) else { return Ok(()) };
        let value = format!("{} ({now})", now.micro_step.0);
        let limit = format!("at least {}, which came before on this stream", ahead.0);
        let remedy = "send a step's micro-steps in ascending order on a stream, and what must be sent again on a new one";
        Err(Fault::new(FaultKind::Precondition, "micro_step", value, limit, remedy))
    }

    /// Records the destination of a chunk's payload, or the fault of a refused chunk.
    pub(super) fn placed(
        &mut self,
        request: PushRequest,
        chunk: &ContributionChunk,
        place: Result<Destination, Fault>,
    ) {
        if let Ok(Destination::Slot(..)) = place {
            self.last = Some(*chunk);
        }
        self.chunk = Some((request, place));
    }
}

fn result(request: PushRequest, outcome: Result<Fate, Fault>) -> PushResult {
    let PushRequest { step, micro_step, shard, chunk, .. } = request;
    let fate = outcome.as_ref().ok().copied();
    let [duplicate, superseded, decided] =
        [Fate::Duplicate, Fate::Superseded, Fate::Decided].map(|wanted| fate == Some(wanted));
    let refusal = outcome.err().map(|fault| {
        tracing::debug!(job = request.job, rank = request.rank, step, shard, %fault, "chunk refused");
        refusals::count(&fault);
        wire::fault_to_wire(&fault)
    });
    PushResult { step, micro_step, shard, chunk, duplicate, refusal, decided, superseded }
}
