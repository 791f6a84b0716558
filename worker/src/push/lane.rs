//! One data connection's push stream: sends queued chunks, takes acknowledgements, and after a break finds out what
//! the server still knows before sending again.

use std::{collections::VecDeque, time::Instant};

use longshore_proto::{Fault, FaultKind, Step, checksum::crc32, limits::CHUNK_BYTES};
use longshore_wire::{
    direct::Mark,
    dtype_to_wire, fault_from_status, fault_from_wire,
    frame::{self, Event, Incoming, PUSH, Piece, Pieces},
    v1::{MemfdPlace, PushRequest, PushResponse, PushResult},
};
use tokio::sync::mpsc;
use tonic::Status;

use super::{
    ChunkKey,
    refusal::{self, Verdict},
    retained::{Chunk, LaneId},
};
use crate::{
    error::{Error, Result},
    session::{Backoff, Core, SharedCore},
};

/// Requests handed to the transport ahead of its own window: one being framed, one ready.
const READY_REQUESTS: usize = 2;

/// The queues of all lanes.
pub(crate) struct Lanes {
    queues: Vec<Vec<mpsc::Sender<ChunkKey>>>,
}

impl Lanes {
    pub(super) fn queue(&self, (server, connection): LaneId) -> &mpsc::Sender<ChunkKey> {
        &self.queues[server][connection]
    }
}

/// Opens every lane; once, after joining.
pub(crate) fn start_lanes(core: &SharedCore) {
    core.lanes.get_or_init(|| {
        let start = |lane: LaneId| {
            let (sender, queue) = mpsc::channel(core.options.in_flight_chunks);
            core.spawn_for_session(Lane { core: core.clone(), id: lane, queue }.run());
            sender
        };
        let connections =
            |server| (0..core.options.connections).map(|connection| start((server, connection))).collect();
        Lanes { queues: (0..core.peers.len()).map(connections).collect() }
    });
}

struct Lane {
    core: SharedCore,
    id: LaneId,
    queue: mpsc::Receiver<ChunkKey>,
}

/// How one stream ended.
enum End {
    /// The session is over.
    Closed,
    /// The transport failed, or a refusal passes: everything goes out again.
    Broken(Fault),
    Failed(Error),
}

impl Lane {
    async fn run(mut self) {
        let mut backoff = Backoff::new();
        let mut broken: Option<Instant> = None;
        let mut resend = Vec::new();
        loop {
            let mut answered = false;
            self.relink().await;
            let fault = match self.stream(&resend, &mut answered).await {
                End::Closed => return,
                End::Failed(error) => return self.core.fail(error),
                End::Broken(fault) => fault,
            };
            if answered {
                backoff.reset();
            }
            // A lane that no chunk takes hears nothing from a server that is well: what it waits for counts.
            if answered || !self.core.retained.owes(self.id) {
                broken = None;
            }
            self.core.troubled(self.id.0, &fault);
            let since = *broken.get_or_insert_with(Instant::now);
            let deadline = self.core.options.deadline;
            tracing::debug!(server = self.core.peers[self.id.0].address, %fault, "a push stream broke");
            backoff.pause(Instant::now() + deadline).await;
            if self.core.out_of_patience(since, deadline) {
                let cause = self.core.trouble(self.id.0).unwrap_or(fault);
                let step = Some(Step(self.core.retained.newest()));
                return self.core.fail(self.core.explain(self.id.0, "Push", step, cause));
            }
            match Core::recover(&self.core, self.id.0).await {
                Ok(()) => {}
                // Whoever uploads opens the job again: nothing was trained that could be lost.
                Err(Error::StateLost(_)) if !self.core.has_trained() => {}
                // Asked for as long as a push may wait: told as what it is the end of, with its step.
                Err(Error::Call(failed)) if failed.fault.kind == FaultKind::Unavailable => {
                    let step = Some(Step(self.core.retained.newest()));
                    return self.core.fail(self.core.explain(self.id.0, "Push", step, failed.fault));
                }
                Err(error) => return self.core.fail(error),
            }
            resend = self.core.retained.to_resend(self.id);
        }
    }

    /// Without a link payloads go inline, so that a failure is no more than slow.
    async fn relink(&self) {
        if let Err(fault) = self.core.relink(self.id.0).await {
            tracing::warn!(server = self.core.peers[self.id.0].address, %fault, "no shared memory");
        }
    }

    /// One stream until it ends. Sending and receiving go on together from the first message: a server need not answer
    /// before it has one.
    async fn stream(&mut self, resend: &[ChunkKey], answered: &mut bool) -> End {
        let (ready, requests) = mpsc::channel(READY_REQUESTS);
        let (core, id) = (self.core.clone(), self.id);
        let queue = &mut self.queue;
        // Over a link no payload comes.
        let mut mark = core.link(id.0).is_none().then(Mark::of_request);
        let send = async {
            for key in resend {
                offer(&core, id.0, &ready, *key, &mut mark).await;
            }
            while let Some(key) = queue.recv().await {
                offer(&core, id.0, &ready, key, &mut mark).await;
            }
            End::Closed
        };
        let receive = receive(&core, id, requests, answered);
        tokio::select! {
            end = send => end,
            end = receive => end,
        }
    }
}

/// Hands a chunk to the transport, unless its step has been committed meanwhile. The first one takes the stream's mark.
async fn offer(core: &Core, server: usize, ready: &Pieces, key: ChunkKey, mark: &mut Option<Mark>) {
    let Some(chunk) = core.retained.send(&key) else { return };
    let place = place(core, server, &chunk).await;
    let head = |chunk_id: u32, crc32, place| PushRequest {
        job: core.job().to_string(),
        incarnation: core.incarnation().0,
        rank: core.options.rank.0,
        step: key.step.0,
        micro_step: key.micro_step.0,
        shard: key.shard.0,
        chunk: chunk_id,
        loss_scale: chunk.loss_scale,
        dtype: dtype_to_wire(core.spec().gradient_dtype),
        crc32,
        place,
        reads_version: chunk.reads.version.0,
        reads_decided_by: chunk.reads.decided_by.0,
        ..PushRequest::default()
    };
    let mut send = async |message| {
        let message = match mark.take() {
            Some(mark) => mark.put(message),
            None => message,
        };
        if ready.send(Ok(message)).await.is_err() {
            // The call has ended; the receiving side is about to say why.
            std::future::pending::<()>().await;
        }
    };
    // The retained payload itself goes out, if it does not stay where it is: it is not copied before the socket.
    let bytes = &chunk.payload.bytes;
    if place.is_some() {
        send(frame::encode(&head(key.chunk.0, chunk.crc32, place))).await;
    } else if chunk.is_lent() {
        // There was a link, and is none any more.
        for (index, start) in (0..bytes.len()).step_by(CHUNK_BYTES).enumerate() {
            let part = bytes.slice(start..bytes.len().min(start + CHUNK_BYTES));
            send(frame::encode_with(&head(index as u32, crc32(&part), None), part)).await;
        }
    } else {
        send(frame::encode_with(&head(key.chunk.0, chunk.crc32, None), bytes.clone())).await;
    }
}

/// Where the server can read a payload; None where it must be sent.
async fn place(core: &Core, server: usize, chunk: &Chunk) -> Option<MemfdPlace> {
    let (extent, offset) = chunk.payload.place.as_ref()?;
    let link = core.link(server)?;
    match link.memory(extent).await {
        Ok(memory) => {
            let (offset, bytes) = (*offset, chunk.payload.bytes.len() as u64);
            Some(MemfdPlace { link: link.id, memory, offset, bytes, lent: chunk.is_lent() })
        }
        Err(fault) => {
            tracing::debug!(server = core.peers[server].address, %fault, "a payload goes inline");
            None
        }
    }
}

async fn receive(
    core: &SharedCore,
    (server, connection): LaneId,
    requests: mpsc::Receiver<Result<Piece, Status>>,
    answered: &mut bool,
) -> End {
    let mut channel = core.peers[server].data(connection).channel;
    let mut answers = match frame::call::<PushResponse>(&mut channel, PUSH, requests).await {
        Ok(answers) => answers,
        Err(status) => return ended(core, server, &status),
    };
    let mut results = VecDeque::new();
    loop {
        let Some(result) = results.pop_front() else {
            match more(&mut answers, &mut results).await {
                Ok(()) => continue,
                Err(status) => return ended(core, server, &status),
            }
        };
        // A refusal may have to wait for the server, which may die meanwhile: then the wait would be for ever.
        let broken = async {
            loop {
                if let Err(status) = more(&mut answers, &mut results).await {
                    return status;
                }
            }
        };
        let settled = tokio::select! {
            biased;
            settled = settle(core, server, result) => settled,
            status = broken => Err(ended(core, server, &status)),
        };
        match settled {
            Ok(()) => *answered = true,
            Err(end) => return end,
        }
    }
}

/// Takes the next results as they come.
async fn more(
    answers: &mut Incoming<PushResponse>,
    results: &mut VecDeque<PushResult>,
) -> Result<(), Status> {
    match answers.next().await? {
        Some(Event::Head(answer, _)) => results.extend(answer.results),
        Some(Event::Payload(_) | Event::End) => {}
        None => return Err(Status::unavailable("the server closed the push stream")),
    }
    Ok(())
}

fn ended(core: &Core, server: usize, status: &Status) -> End {
    let fault = fault_from_status(status, &core.peers[server].address);
    match fault.kind {
        FaultKind::Unavailable => End::Broken(fault),
        _ => End::Failed(core.explain(server, "Push", None, fault)),
    }
}

/// One chunk's fate.
async fn settle(core: &SharedCore, server: usize, result: PushResult) -> Result<(), End> {
    let key = ChunkKey::from(&result);
    let Some(refusal) = result.refusal else {
        core.retained.acknowledge(&key);
        core.untroubled(server);
        return Ok(());
    };
    if !core.retained.contains(&key) {
        // Sent again just as its step was committed.
        return Ok(());
    }
    match refusal::judge(core, server, key, fault_from_wire(refusal)).await {
        Ok(Verdict::Decided) => core.retained.acknowledge(&key),
        Ok(Verdict::SendAgain(fault)) => return Err(End::Broken(fault)),
        Err(error) => return Err(End::Failed(error)),
    }
    Ok(())
}
