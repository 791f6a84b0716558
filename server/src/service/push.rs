//! Contributions in, acknowledgements out.
//!
//! A chunk's fields come before its payload, so that it is admitted first and its payload goes from the connection's
//! buffer straight to its place. A stream is not read further while that place is busy: a fast rank is held back by
//! HTTP/2 flow control, and nothing is held here beside the slots but the frame in hand. Over a link the payload is
//! copied from the worker's memory instead, once its place is free.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use http::Response;
use longshore_engine::job::{Admitted, Job, Writing, check_sum};
use longshore_proto::{
    ContributionChunk, Fault,
    checksum::{Crc32, TILE_BYTES},
    wire::{
        self,
        frame::{self, Event, Incoming, Pieces},
        v1::{PushRequest, PushResponse, PushResult},
    },
};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};
use tonic::{Status, body::Body};

use super::{Services, default_deadline, refuse};
use crate::{jobs::JobHandle, memfd::Payload};

/// Acknowledgements in one message. Many small messages would be taken for abuse by HTTP/2 peers, and each costs a
/// write of 5 to 10 microseconds at both ends, against 200 for a chunk.
const RESULTS_BATCHED: usize = 16;
/// Longest time an acknowledgement waits for others. No worker waits for one: a commit frees what it retains.
const RESULTS_DELAY: Duration = Duration::from_millis(1);
/// Longest silence in the middle of a chunk. Until it ends its rank cannot be taken by a new process.
const CHUNK_SILENCE: Duration = Duration::from_secs(10);

pub(super) fn answer(services: Services, body: Body) -> Response<Body> {
    let (answers, pieces) = mpsc::channel(2);
    let incoming = Incoming::request(body);
    let (held, closing, results) = (Weak::new(), None, Vec::new());
    tokio::spawn(Stream { services, incoming, answers, held, closing, results }.run());
    frame::answer(pieces)
}

/// One Push call.
struct Stream {
    services: Services,
    incoming: Incoming<PushRequest>,
    answers: Pieces,
    /// The job of the last chunk: mostly the next one's too. Weak: an idle stream keeps no job alive.
    held: Weak<JobHandle>,
    /// Why that job is not served any more: a worker that has nothing to send must learn of it, too, since what it had sent
    /// may be wanted again.
    closing: Option<watch::Receiver<Option<Fault>>>,
    /// Not yet acknowledged.
    results: Vec<PushResult>,
}

/// Where a payload goes.
enum Place {
    Slot(Arc<JobHandle>, Writing<Arc<Job>>),
    /// It is here already: its checksum is compared, and that is all.
    Nowhere(Crc32),
}

/// The call is over, and its caller knows or is gone.
struct Over;

impl Stream {
    async fn run(mut self) {
        // What is broken off is dropped, and with it the place of a chunk that was on its way.
        let Err(Over) = self.receive().await;
    }

    async fn receive(&mut self) -> Result<std::convert::Infallible, Over> {
        loop {
            match self.event().await? {
                Event::Head(request, bytes) => self.chunk(request, bytes).await?,
                // The parser gives neither before a head, and `chunk` takes those after it.
                Event::Payload(_) | Event::End => {}
            }
        }
    }

    /// The next event, and what was to be acknowledged if it does not come at once.
    async fn event(&mut self) -> Result<Event<PushRequest>, Over> {
        if !self.results.is_empty() {
            if let Ok(event) = timeout(RESULTS_DELAY, self.next()).await {
                return self.unless_over(event).await;
            }
            self.acknowledge().await?;
        }
        let event = self.next().await;
        self.unless_over(event).await
    }

    /// The next event between chunks, or the end of the job.
    async fn next(&mut self) -> Result<Option<Event<PushRequest>>, Status> {
        let Some(closing) = &mut self.closing else { return self.incoming.next().await };
        let closed = async { closing.wait_for(Option::is_some).await.ok()?.clone() };
        tokio::select! {
            biased;
            event = self.incoming.next() => event,
            Some(fault) = closed => Err(refuse("Push", "", fault)),
        }
    }

    async fn unless_over(
        &mut self,
        event: Result<Option<Event<PushRequest>>, Status>,
    ) -> Result<Event<PushRequest>, Over> {
        let status = match event {
            Ok(Some(event)) => return Ok(event),
            Ok(None) => None,
            Err(status) => Some(status),
        };
        self.acknowledge().await?;
        if let Some(status) = status {
            // The peer went away or sent what is no message; nothing of it was stored.
            tracing::debug!(%status, "push stream ended");
            let _ = self.answers.send(Err(status)).await;
        }
        Err(Over)
    }

    async fn acknowledge(&mut self) -> Result<(), Over> {
        if self.results.is_empty() {
            return Ok(());
        }
        let answer = PushResponse { results: std::mem::take(&mut self.results) };
        self.answers.send(Ok(frame::encode(&answer))).await.map_err(|_| Over)
    }

    /// One chunk, from its head to its end. A refused one is read to its end too: the next one follows it.
    async fn chunk(&mut self, request: PushRequest, bytes: usize) -> Result<(), Over> {
        let lent = request.place.is_some_and(|place| place.lent);
        let mut place = self.place(&request, bytes).await?.and_then(|(mut place, payload)| {
            match payload {
                Some(payload) if lent => place.lend(payload)?,
                Some(payload) => place.fetch(&payload),
                None => {}
            }
            Ok(place)
        });
        loop {
            let event = match timeout(CHUNK_SILENCE, self.incoming.next()).await {
                Ok(event) => self.unless_over(event).await?,
                Err(_) => {
                    self.unless_over(Err(Status::unavailable("a chunk was not sent to its end"))).await?
                }
            };
            let Event::Payload(slice) = event else { break };
            match &mut place {
                Ok(Place::Slot(_, writing)) => {
                    if let Err(fault) = writing.write(&slice) {
                        place = Err(fault);
                    }
                }
                Ok(Place::Nowhere(sum)) => sum.update(&slice),
                Err(_) => {}
            }
        }
        let outcome = place.and_then(|place| finish(place, (!lent).then_some(request.crc32)));
        self.results.push(result(request, outcome));
        if self.results.len() >= RESULTS_BATCHED {
            self.acknowledge().await?;
        }
        Ok(())
    }

    async fn place(
        &mut self,
        request: &PushRequest,
        bytes: usize,
    ) -> Result<Result<(Place, Option<Payload>), Fault>, Over> {
        let (handle, chunk, payload) = match self.identify(request, bytes) {
            Ok(identified) => identified,
            Err(fault) => return Ok(Err(fault)),
        };
        match place_now(&handle, &chunk) {
            Ok(Some(place)) => return Ok(Ok((place, payload))),
            Ok(None) => {}
            Err(fault) => return Ok(Err(fault)),
        }
        // It may take a step until the place is free: let the worker know of what came before.
        self.acknowledge().await?;
        let late = || handle.late("push", chunk.contribution);
        tokio::select! {
            place = handle.until(default_deadline(), || place_now(&handle, &chunk), late) => {
                Ok(place.map(|place| (place, payload)))
            }
            () = self.answers.closed() => Err(Over),
        }
    }

    fn identify(
        &mut self,
        request: &PushRequest,
        bytes: usize,
    ) -> Result<(Arc<JobHandle>, ContributionChunk, Option<Payload>), Fault> {
        let mut chunk = wire::chunk_from_wire(request, bytes as u64)?;
        let handle = match self.held.upgrade() {
            Some(handle) if handle.job.spec().name.as_str() == request.job && !handle.is_closed() => handle,
            _ => {
                let handle = self.services.jobs.get(&request.job)?;
                self.closing = Some(handle.closing());
                handle
            }
        };
        self.held = Arc::downgrade(&handle);
        handle.check_step(chunk.contribution.step)?;
        let Some(place) = &request.place else { return Ok((handle, chunk, None)) };
        if bytes > 0 {
            let remedy = "send one of them";
            return Err(Fault::invalid("push.place", "beside a payload", "instead of one", remedy));
        }
        let payload = self.services.links.find(place.link, &handle)?.payload(place, &chunk)?;
        chunk.bytes = payload.bytes();
        Ok((handle, chunk, Some(payload)))
    }
}

impl Place {
    /// Uses a payload where it lies in the worker's memory.
    fn lend(&mut self, payload: Payload) -> Result<(), Fault> {
        match self {
            Place::Slot(_, writing) => writing.lend(payload.into_lent()),
            Place::Nowhere(_) => Ok(()),
        }
    }

    /// Takes a payload that lies in the worker's memory.
    fn fetch(&mut self, payload: &Payload) {
        match self {
            Place::Slot(_, writing) => writing.fetch(&mut |from, target| payload.copy(from, target)),
            Place::Nowhere(sum) => {
                let mut tile = [0; TILE_BYTES];
                let bytes = payload.bytes() as usize;
                for from in (0..bytes).step_by(TILE_BYTES) {
                    let tile = &mut tile[..TILE_BYTES.min(bytes - from)];
                    payload.copy(from, tile);
                    sum.update(tile);
                }
            }
        }
    }
}

/// None while the place is busy.
fn place_now(handle: &Arc<JobHandle>, chunk: &ContributionChunk) -> Result<Option<Place>, Fault> {
    Ok(match Job::admit(Arc::clone(&handle.job), chunk)? {
        Admitted::Busy => None,
        Admitted::Duplicate => Some(Place::Nowhere(Crc32::new())),
        Admitted::Write(writing) => Some(Place::Slot(Arc::clone(handle), writing)),
    })
}

/// True when the chunk was held already.
fn finish(place: Place, crc32: Option<u32>) -> Result<bool, Fault> {
    match place {
        Place::Slot(handle, writing) => {
            handle.perform(writing.finish()?);
            Ok(false)
        }
        Place::Nowhere(sum) => crc32.map_or(Ok(()), |claimed| check_sum(claimed, sum.value())).map(|()| true),
    }
}

fn result(request: PushRequest, outcome: Result<bool, Fault>) -> PushResult {
    let PushRequest { step, micro_step, shard, chunk, .. } = request;
    let duplicate = *outcome.as_ref().unwrap_or(&false);
    let refusal = outcome.err().map(|fault| {
        tracing::debug!(job = request.job, rank = request.rank, step, shard, %fault, "chunk refused");
        wire::fault_to_wire(&fault)
    });
    PushResult { step, micro_step, shard, chunk, duplicate, refusal }
}
