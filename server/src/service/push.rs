//! Contributions in, acknowledgements out.
//!
//! A chunk's fields come before its payload. So the chunk is admitted first, and the connection's task then reads its
//! payload from the socket straight into its slot; the payload of a call without a mark is copied there from HTTP/2's
//! frames. Nothing more of a stream is taken while that slot is busy: a fast rank is held back by HTTP/2 flow
//! control, and the server holds nothing beside the slots but what its window allows. Over a link the payload is used
//! where it lies in the worker's memory, or is copied from there once its slot is free.

mod place;

use std::{
    future::poll_fn,
    io, mem,
    pin::Pin,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use http_body::Body as _;
use longshore_proto::{ContributionChunk, Fault, FaultKind, limits::STRANGER_RESULTS};
use longshore_wire::{
    self as wire,
    direct::{Claim, Mark, Taps},
    frame::{self, Pieces, SharedIntake},
    sink::{MessageSink, Mode, Read, Sink},
    v1::{PushRequest, PushResponse, PushResult},
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tonic::{Status, body::Body};

use self::place::{Destination, Fate, finish, place_now};
use super::{Services, refuse};
use crate::{jobs::JobHandle, memfd::Payload, trust::Caller};

/// How many acknowledgements go into one message. HTTP/2 peers would take many small messages for abuse, and each
/// costs a write of 5 to 10 microseconds at both ends, against 200 for a chunk.
const RESULTS_BATCHED: usize = 16;
/// How many results may wait to leave on one stream of a rank. Each takes 300 bytes, so that the 128 streams of a connection
/// hold 10 MB.
const RESULTS_MOST: usize = 256;
/// How long an acknowledgement waits for others. No worker waits for one: a commit frees what the worker retains.
const RESULTS_DELAY: Duration = Duration::from_millis(1);
/// Silence in the middle of a chunk is noticed after this to twice as much. Until it ends, no new process can take
/// the chunk's rank.
const CHUNK_SILENCE: Duration = Duration::from_secs(10);

/// `taps` are those of the call's connection.
pub(super) fn answer(services: Services, caller: Caller, taps: Option<Taps>, body: Body) -> Response<Body> {
    let (answers, pieces) = mpsc::channel(2);
    let (held, closing, chunk, waiting, results) = (Weak::new(), None, None, None, Vec::new());
    let stranger = taps.clone();
    let (held_back, last) = (None, None);
    let receiving =
        Receiving { services, caller, stranger, held, closing, chunk, waiting, held_back, last, results };
    let stream = Stream {
        intake: SharedIntake::new(receiving),
        body,
        taps,
        rest: Bytes::new(),
        following: None,
        claim: None,
        ended: false,
        answers,
        due: None,
    };
    tokio::spawn(stream.run());
    frame::answer(pieces)
}

/// One Push call: what waits and answers.
struct Stream {
    intake: SharedIntake<PushRequest, Receiving>,
    body: Body,
    /// Present until the first bytes have come, since those show whether the call is marked.
    taps: Option<Taps>,
    /// What h2 gave and the intake has not taken yet.
    rest: Bytes,
    /// The stream's place among those past h2, if it is marked.
    following: Option<Claim>,
    claim: Option<Claim>,
    ended: bool,
    answers: Pieces,
    /// When acknowledgements must leave.
    due: Option<Instant>,
}

/// Puts chunks into their slots, on whichever task they come.
struct Receiving {
    services: Services,
    /// It is asked about for each chunk, since a stream lasts as long as the job.
    caller: Caller,
    /// The connection, while it is a stranger's: until a rank's chunk has come on it.
    stranger: Option<Taps>,
    /// The job of the last chunk, which mostly is the next one's too. It is weak, so that an idle stream keeps no job
    /// alive.
    held: Weak<JobHandle>,
    /// Why that job is not served any more. A worker that has nothing to send must learn of it too, since what it had
    /// sent may be wanted again.
    closing: Option<watch::Receiver<Option<Fault>>>,
    chunk: Option<(PushRequest, Result<Destination, Fault>)>,
    /// A chunk whose slot is busy.
    waiting: Option<(PushRequest, Waiting)>,
    /// A chunk that came while too many results waited to leave, and the length of its payload.
    held_back: Option<(PushRequest, usize)>,
    /// The last chunk that was given a slot.
    last: Option<ContributionChunk>,
    /// Results that are not acknowledged yet.
    results: Vec<PushResult>,
}

struct Waiting {
    handle: Arc<JobHandle>,
    chunk: ContributionChunk,
    payload: Option<Payload>,
    patience: Duration,
}

/// The call is over, and its caller knows or is gone.
struct Over;

impl Stream {
    async fn run(mut self) {
        // A call that is broken off is dropped, and a chunk that was on its way gives its slot back.
        let Err(Over) = self.receive().await;
    }

    async fn receive(&mut self) -> Result<std::convert::Infallible, Over> {
        loop {
            let (fault, waiting, results, full) = {
                let mut intake = self.intake.lock();
                let waiting = intake.sink.waiting.take();
                let full = intake.sink.held_back.is_some();
                (intake.fault().cloned(), waiting, intake.sink.results.len(), full)
            };
            if let Some(fault) = fault {
                return self.over(Some(wire::status(&fault))).await;
            }
            if results == 0 {
                self.due = None;
            } else if full || results >= RESULTS_BATCHED || self.due.is_some_and(|due| due <= Instant::now())
            {
                self.acknowledge().await?;
            } else {
                self.due.get_or_insert_with(|| Instant::now() + RESULTS_DELAY);
            }
            if self.take_held_back() {
                continue;
            }
            if let Some((request, waiting)) = waiting {
                let chunk = waiting.chunk;
                let place = self.place(waiting).await?;
                {
                    let mut intake = self.intake.lock();
                    intake.sink.placed(&place, &chunk);
                    intake.sink.chunk = Some((request, place));
                }
                self.intake.go_on();
                self.claim.iter().for_each(Claim::resume);
            } else if !self.rest.is_empty() {
                self.intake.take(&mut self.rest);
            } else if let Some(claim) = self.following.take() {
                claim.install(Box::new(self.intake.clone()));
                self.claim = Some(claim);
            } else if self.ended && self.claim.as_ref().is_none_or(Claim::is_drained) {
                let finished = self.intake.lock().finish();
                return self.over(finished.err().map(|fault| wire::status(&fault))).await;
            } else {
                self.more().await?;
            }
        }
    }

    /// Begins with the chunk that was held back, once the results before it have left.
    fn take_held_back(&self) -> bool {
        let has_place = {
            let mut intake = self.intake.lock();
            let Some((request, bytes)) = intake.sink.held_back.take() else { return false };
            intake.sink.start(request, bytes)
        };
        if has_place {
            self.intake.go_on();
            self.claim.iter().for_each(Claim::resume);
        }
        true
    }

    /// Waits until something has come, or until it is time to act.
    async fn more(&mut self) -> Result<(), Over> {
        let (received, closing) = {
            let intake = self.intake.lock();
            (intake.received(), intake.sink.closing.clone())
        };
        let closed = async { closing?.wait_for(Option::is_some).await.ok()?.clone() };
        let patience = self.due.unwrap_or_else(|| Instant::now() + CHUNK_SILENCE);
        let frame = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context));
        tokio::select! {
            frame = frame, if !self.ended => match frame {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.following = self.taps.take().and_then(|taps| taps.claim(Mark::find(&data)?));
                        self.rest = data;
                    }
                }
                Some(Err(status)) => self.over(Some(status)).await.map(|_| ())?,
                None => self.ended = true,
            },
            () = self.intake.changed() => {}
            Some(fault) = closed => self.over(Some(refuse("Push", "", fault))).await.map(|_| ())?,
            () = sleep_until(patience) => {
                let silent = self.due.is_none() && {
                    let intake = self.intake.lock();
                    intake.received() == received && !intake.is_between_messages()
                };
                if silent {
                    let status = Status::unavailable("a chunk was not sent to its end");
                    self.over(Some(status)).await.map(|_| ())?;
                }
            }
        }
        Ok(())
    }

    /// Ends the call, after the results that wait.
    async fn over(&mut self, status: Option<Status>) -> Result<std::convert::Infallible, Over> {
        self.acknowledge().await?;
        if let Some(status) = status {
            // The peer went away, or sent what is no message; nothing of it was stored.
            tracing::debug!(%status, "push stream ended");
            let _ = self.answers.send(Err(status)).await;
        }
        Err(Over)
    }

    async fn acknowledge(&mut self) -> Result<(), Over> {
        self.due = None;
        let results = mem::take(&mut self.intake.lock().sink.results);
        if results.is_empty() {
            return Ok(());
        }
        self.answers.send(Ok(frame::encode(&PushResponse { results }))).await.map_err(|_| Over)
    }

    /// Waits for the chunk's slot.
    async fn place(&mut self, waiting: Waiting) -> Result<Result<Destination, Fault>, Over> {
        let Waiting { handle, chunk, payload, patience } = waiting;
        // This may take a step, so the worker is told first of what came before.
        self.acknowledge().await?;
        let late = || handle.late("push", chunk.contribution);
        tokio::select! {
            place = handle.until(Instant::now() + patience, || place_now(&handle, &chunk), late) => {
                Ok(place.and_then(|place| place.holding(payload, chunk.lent)))
            }
            () = self.answers.closed() => Err(Over),
        }
    }
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
            _ => Ok(0),
        }
    }
}

impl MessageSink<PushRequest> for Receiving {
    fn begin(&mut self, request: PushRequest, bytes: usize) -> Result<bool, Fault> {
        // What a peer sends who takes no answers stays on its connection.
        let most = if self.stranger.is_some() { STRANGER_RESULTS } else { RESULTS_MOST };
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
        // The first result makes the task begin to count the time.
        Ok(self.results.len() == 1 || self.results.len() >= RESULTS_BATCHED)
    }
}

impl Receiving {
    /// Finds the chunk's slot. Returns false while that is busy.
    fn start(&mut self, request: PushRequest, bytes: usize) -> bool {
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
        if place.is_ok() {
            self.stranger.take().iter().for_each(Taps::vouch);
        }
        match place {
            Ok(Ok((chunk, place))) => {
                let place = Ok(place);
                self.placed(&place, &chunk);
                self.chunk = Some((request, place));
            }
            Ok(Err(waiting)) => self.waiting = Some((request, waiting)),
            // A refused chunk is read to its end too, since the next one follows it.
            Err(fault) => self.chunk = Some((request, Err(fault))),
        }
        self.waiting.is_none()
    }

    fn identify(&mut self, request: &PushRequest, bytes: usize) -> Result<Waiting, Fault> {
        self.caller.permit(&request.job)?;
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

    /// Checks that the micro-steps of a step ascend on a stream: two streams on which they did not might wait for
    /// each other.
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

    fn placed(&mut self, place: &Result<Destination, Fault>, chunk: &ContributionChunk) {
        if let Ok(Destination::Slot(..)) = place {
            self.last = Some(*chunk);
        }
    }
}

fn result(request: PushRequest, outcome: Result<Fate, Fault>) -> PushResult {
    let PushRequest { step, micro_step, shard, chunk, .. } = request;
    let fate = outcome.as_ref().ok().copied();
    let [duplicate, superseded, decided] =
        [Fate::Duplicate, Fate::Superseded, Fate::Decided].map(|wanted| fate == Some(wanted));
    let refusal = outcome.err().map(|fault| {
        tracing::debug!(job = request.job, rank = request.rank, step, shard, %fault, "chunk refused");
        wire::fault_to_wire(&fault)
    });
    PushResult { step, micro_step, shard, chunk, duplicate, refusal, decided, superseded }
}
