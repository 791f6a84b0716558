//! The push stream of one data connection, as a background task of the session. A lane sends queued chunks and takes
//! acknowledgements. After a break the lane asks for the server's version, and then sends again.

use std::{collections::VecDeque, sync::Arc};

use longshore_proto::{Fault, FaultKind, ServerId, Step, Version, checksum::crc32, limits::CHUNK_BYTES};
use longshore_wire::{
    direct::Mark,
    dtype_to_wire, fault_from_wire,
    frame::{self, Event, Incoming, PUSH, Piece, Pieces},
    v1::{MemfdPlace, PushRequest, PushResponse, PushResult},
};
use tokio::sync::mpsc;
use tonic::Status;

use super::{
    ChunkKey, Gradients,
    gradients::Queues,
    refusal::{self, Verdict},
    retained::{Chunk, LaneId},
};
use crate::{
    cluster::{Backoff, Cluster},
    error::{Error, Misuse, Result},
    host::Instant,
    rank::{recover, version},
};

/// Number of requests passed to the transport ahead of its own window: one being framed, and one ready.
const READY_REQUESTS: usize = 2;

/// Opens every lane. Called once, after the rank has joined.
pub(crate) fn start_lanes(gradients: &Arc<Gradients>) {
    let queues = gradients.queues.get_or_init(Queues::default);
    for server in gradients.cluster.servers() {
        queues.get_or_make(server, || lanes_to(gradients, server));
    }
}

/// Opens the lanes to a server that has joined the job later.
pub(crate) fn open_lanes(gradients: &Arc<Gradients>, server: ServerId) -> Result<(), Misuse> {
    gradients.queues()?.get_or_make(server, || lanes_to(gradients, server));
    Ok(())
}

/// Starts the lanes to one server, and returns the senders of their queues.
fn lanes_to(gradients: &Arc<Gradients>, server: ServerId) -> Vec<mpsc::Sender<ChunkKey>> {
    let cluster = &gradients.cluster;
    let lane = |connection| {
        let (sender, queue) = mpsc::channel(cluster.options.in_flight_chunks);
        let id = LaneId { server, connection };
        let (of, lane) = (Arc::clone(cluster), Lane { gradients: gradients.clone(), id, queue });
        cluster.runtime.spawn_for_session(async move {
            tokio::select! {
                () = lane.run() => {}
                () = of.left(server) => {}
            }
        });
        sender
    };
    (0..cluster.options.connections).map(lane).collect()
}

struct Lane {
    gradients: Arc<Gradients>,
    id: LaneId,
    queue: mpsc::Receiver<ChunkKey>,
}

/// The end of a stream.
enum End {
    /// The session is over.
    Closed,
    /// The transport failed, or a refusal of the server will pass. All sent chunks are sent again.
    Broken(Fault),
    Failed(Error),
}

impl Lane {
    async fn run(mut self) {
        let gradients = Arc::clone(&self.gradients);
        let Gradients { cluster, rank, retained, .. } = &*gradients;
        let server = self.id.server;
        let mut backoff = Backoff::new();
        let mut broken: Option<Instant> = None;
        let mut resend = Vec::new();
        let mut least = rank.joined_at();
        loop {
            let mut answered = false;
            self.relink().await;
            let fault = match self.stream(&resend, least, &mut answered).await {
                End::Closed => return,
                End::Broken(_) | End::Failed(_) if cluster.has_left(server) => return,
                End::Failed(error) => return cluster.waits.fail(error),
                End::Broken(fault) => fault,
            };
            if answered {
                backoff.reset();
            }
            // A healthy server is silent on a lane without chunks. So the lane counts as broken only while its
            // server owes an answer.
            if answered || !retained.owes(self.id) {
                broken = None;
            }
            if cluster.troubles.note(server, &fault) {
                let (server, job, step) = (cluster.address(server), cluster.job(), retained.newest());
                tracing::warn!(server, %job, step, %fault, "waiting for a server: what it lacks is kept and sent again");
            }
            let since = *broken.get_or_insert_with(Instant::now);
            let deadline = cluster.options.deadline;
            tracing::debug!(server = cluster.address(server), %fault, "a push stream broke");
            backoff.pause(Instant::now() + deadline).await;
            if cluster.waits.out_of_patience(since, deadline) {
                let cause = cluster.troubles.of(server).unwrap_or(fault);
                let step = Some(Step(retained.newest()));
                return cluster.waits.fail(cluster.explain(server, "Push", step, cause));
            }
            let begun = Instant::now();
            let recovered = recover(cluster, rank, server).await;
            // The time in `recover` does not count, since the server may have read all of its state. `recover` has a
            // deadline of its own.
            broken = Some(since + begun.elapsed());
            match recovered {
                Ok(version) => least = version,
                // No step was made yet, so no state is lost. Rank 0 opens the job again and uploads the weights.
                Err(Error::StateLost(_)) if !rank.has_trained() => {}
                // `recover` called the server for as long as a push may wait. The error names the push and its step.
                Err(Error::Call(failed))
                    if matches!(failed.fault.kind, FaultKind::Unavailable | FaultKind::Deadline) =>
                {
                    let step = Some(Step(retained.newest()));
                    return cluster.waits.fail(cluster.explain(server, "Push", step, failed.fault));
                }
                Err(error) => return cluster.waits.fail(error),
            }
            resend = retained.to_resend(self.id);
        }
    }

    /// Makes a broken link again. Without a link payloads go inline, so a failure only costs speed.
    async fn relink(&self) {
        let Gradients { cluster, rank, .. } = &*self.gradients;
        if let Err(fault) = rank.relink(cluster, self.id.server).await {
            tracing::warn!(server = cluster.address(self.id.server), %fault, "no shared memory");
        }
    }

    /// Runs one stream to its end. Sending and receiving start together, since a server need not answer before the
    /// first message. The server has had version `least`.
    async fn stream(&mut self, resend: &[ChunkKey], least: Version, answered: &mut bool) -> End {
        let (ready, requests) = mpsc::channel(READY_REQUESTS);
        let (gradients, id) = (self.gradients.clone(), self.id);
        let queue = &mut self.queue;
        // With a link the stream carries no payload, so it needs no mark.
        let mut mark = gradients.rank.link(id.server).is_none().then(Mark::of_request);
        let send = async {
            for key in resend {
                offer(&gradients, id.server, &ready, *key, &mut mark).await;
            }
            while let Some(key) = queue.recv().await {
                offer(&gradients, id.server, &ready, key, &mut mark).await;
            }
            End::Closed
        };
        let receive = receive(&gradients, (id, least), requests, answered);
        tokio::select! {
            end = send => end,
            end = receive => end,
        }
    }
}

/// Passes a chunk to the transport, unless its step has been committed meanwhile. The first message carries the
/// stream's mark.
async fn offer(
    gradients: &Gradients,
    server: ServerId,
    ready: &Pieces,
    key: ChunkKey,
    mark: &mut Option<Mark>,
) {
    let Gradients { cluster, rank, retained, .. } = gradients;
    let Some(chunk) = retained.send(&key, server) else { return };
    let place = place(gradients, server, &chunk).await;
    let head = |chunk_id: u32, crc32, place| PushRequest {
        job: cluster.job().to_string(),
        incarnation: rank.incarnation().0,
        rank: cluster.options.rank.0,
        step: key.step.0,
        micro_step: key.micro_step.0,
        shard: key.shard.0,
        chunk: chunk_id,
        loss_scale: chunk.loss_scale,
        dtype: dtype_to_wire(cluster.spec().gradient_dtype),
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
            // The call has ended; the receiving side returns the reason.
            std::future::pending::<()>().await;
        }
    };
    // Inline payloads are sent from the retained bytes, without a copy before the socket.
    let bytes = &chunk.payload.bytes;
    if place.is_some() {
        send(frame::encode(&head(key.chunk.0, chunk.crc32, place))).await;
    } else if chunk.is_lent() {
        // The gradient was lent over a link that is gone, so it goes in chunks.
        for (index, start) in (0..bytes.len()).step_by(CHUNK_BYTES).enumerate() {
            let part = bytes.slice(start..bytes.len().min(start + CHUNK_BYTES));
            send(frame::encode_with(&head(index as u32, crc32(&part), None), part)).await;
        }
    } else {
        send(frame::encode_with(&head(key.chunk.0, chunk.crc32, None), bytes.clone())).await;
    }
}

/// Returns the place where the server can read a payload; None if the payload must be sent.
async fn place(gradients: &Gradients, server: ServerId, chunk: &Chunk) -> Option<MemfdPlace> {
    let (extent, offset) = chunk.payload.place.as_ref()?;
    let link = gradients.rank.link(server)?;
    match link.memory(extent).await {
        Ok(memory) => {
            let (offset, bytes) = (*offset, chunk.payload.bytes.len() as u64);
            Some(MemfdPlace { link: link.id, memory, offset, bytes, lent: chunk.is_lent() })
        }
        Err(fault) => {
            tracing::debug!(server = gradients.cluster.address(server), %fault, "a payload goes inline");
            None
        }
    }
}

async fn receive(
    gradients: &Gradients,
    (LaneId { server, connection }, least): (LaneId, Version),
    requests: mpsc::Receiver<Result<Piece, Status>>,
    answered: &mut bool,
) -> End {
    let cluster = &gradients.cluster;
    let mut channel = cluster.peer(server).data(connection).channel;
    let mut answers = match frame::call::<PushResponse>(&mut channel, PUSH, requests).await {
        Ok(answers) => answers,
        Err(status) => return ended(cluster, server, &status),
    };
    if let Err(fault) = check_not_behind(cluster, server, least).await {
        return End::Broken(fault);
    }
    let mut results = VecDeque::new();
    loop {
        let Some(result) = results.pop_front() else {
            match more(&mut answers, &mut results).await {
                Ok(()) => continue,
                Err(status) => return ended(cluster, server, &status),
            }
        };
        // Settling a refusal may wait for the server. If the server dies meanwhile, the wait must end.
        let broken = async {
            loop {
                if let Err(status) = more(&mut answers, &mut results).await {
                    return status;
                }
            }
        };
        let settled = tokio::select! {
            biased;
            settled = settle(gradients, server, result) => settled,
            status = broken => Err(ended(cluster, server, &status)),
        };
        match settled {
            Ok(()) => *answered = true,
            Err(end) => return end,
        }
    }
}

/// Checks that a server has not lost versions since it was joined. The stream itself does not show a loss: it never
/// breaks if it begins after the server's restart.
async fn check_not_behind(cluster: &Cluster, server: ServerId, least: Version) -> Result<(), Fault> {
    let found = match cluster.describe(server, false, cluster.options.deadline).await {
        Ok(answer) if version(&answer) >= least.0 => return Ok(()),
        Ok(answer) => version(&answer).to_string(),
        Err(_) if least == Version(0) => return Ok(()),
        Err(error) => format!("unknown ({error})"),
    };
    let limit = format!("at least {}, as when it was joined", least.0);
    let remedy = "the server is joined again, and what it lacks is sent again";
    Err(Fault::new(FaultKind::Unavailable, "version", found, limit, remedy))
}

/// Receives the next results.
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

fn ended(cluster: &Cluster, server: ServerId, status: &Status) -> End {
    let fault = cluster.fault(server, status);
    match fault.kind {
        FaultKind::Unavailable => End::Broken(fault),
        _ => End::Failed(cluster.explain(server, "Push", None, fault)),
    }
}

/// Acts on the server's result for one chunk.
async fn settle(gradients: &Gradients, server: ServerId, result: PushResult) -> Result<(), End> {
    let Gradients { cluster, retained, .. } = gradients;
    let key = ChunkKey::from(&result);
    let Some(refusal) = result.refusal else {
        retained.acknowledge(&key, server);
        cluster.troubles.clear(server);
        return Ok(());
    };
    if !retained.contains(&key) {
        // The chunk was sent again just as its step was committed.
        return Ok(());
    }
    match refusal::judge(gradients, server, key, fault_from_wire(refusal)).await {
        Ok(Verdict::Decided) => retained.acknowledge(&key, server),
        Ok(Verdict::SendAgain(fault)) => return Err(End::Broken(fault)),
        Err(error) => return Err(End::Failed(error)),
    }
    Ok(())
}
