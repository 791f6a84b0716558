//! Export of one version while training goes on: its weights, rounded as asked, or all state. The readers need not be
//! ranks of the job.

use std::{
    ops::Range,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use longshore_engine::job::{Ended, Exported, Piece, Snapshot, SnapshotInfo};
use longshore_proto::{
    Dtype, Fault, FaultKind, StateArray, Version,
    checksum::crc32,
    limits::{BLOCK_ELEMENTS, CHUNK_BYTES},
};
use longshore_wire::{self as wire, array_to_wire, dtype_from_wire, v1};
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};
use tokio_stream::Stream;
use tonic::Status;

use super::{Services, blocking, refuse, room::Room};
use crate::jobs::JobHandle;

/// Messages built ahead of the network: 4 MiB for each export.
const MESSAGES_AHEAD: usize = 4;
/// Memory of an export: the messages ahead, the message being built, and two encoded messages.
const EXPORT_BYTES: usize = (MESSAGES_AHEAD + 3) * CHUNK_BYTES;
/// Longest wait for a reader to take one message. Training does not wait for the reader, but the copies for the reader
/// stay in memory.
const STALL: Duration = Duration::from_secs(10);
/// Interval at which an export that waits for its reader checks that the job still exists.
const LOOK: Duration = Duration::from_millis(100);

type Message = Result<v1::ExportResponse, Status>;

/// Stream of messages, then the export's outcome. The outcome reaches even a reader that let messages pile up.
pub(crate) struct Messages {
    parts: mpsc::Receiver<v1::ExportResponse>,
    last: Option<oneshot::Receiver<Message>>,
}

impl Stream for Messages {
    type Item = Message;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Message>> {
        if let Some(part) = ready!(self.parts.poll_recv(context)) {
            return Poll::Ready(Some(Ok(part)));
        }
        let Some(last) = &mut self.last else { return Poll::Ready(None) };
        let last = ready!(Pin::new(last).poll(context));
        self.last = None;
        // The outcome is missing only if the export's task has ended with the server.
        Poll::Ready(last.ok())
    }
}

/// Starts an export. Later failures are the stream's last message.
pub(super) fn start(services: &Services, request: v1::ExportRequest, room: &Room) -> Result<Messages, Fault> {
    let handle = services.jobs.get(&request.job)?;
    let exported = exported(&request)?;
    let deadline = Instant::now() + wire::deadline(request.deadline_ms)?;
    let version = (request.version > 0).then_some(Version(request.version));
    let room = room.hold_now("export", EXPORT_BYTES)?;
    let snapshot = handle.job.begin_export(version, exported)?;
    let (sender, parts) = mpsc::channel(MESSAGES_AHEAD);
    let (end, last) = oneshot::channel();
    tokio::spawn(async move {
        let (_room, reader) = (room, sender.clone());
        let exported = tokio::select! {
            exported = export(handle, snapshot, exported, deadline, sender) => exported,
            // Returning drops all that the export holds. A message in flight is still sent.
            () = reader.closed() => return,
        };
        let message = |info: SnapshotInfo| v1::ExportResponse {
            version: info.version.0,
            applied: info.applied,
            end: true,
            ..Default::default()
        };
        // A reader that has left receives no outcome.
        let _ = end.send(exported.map(message).map_err(|fault| refuse("Export", &request.job, fault)));
    });
    Ok(Messages { parts, last: Some(last) })
}

fn exported(request: &v1::ExportRequest) -> Result<Exported, Fault> {
    match (request.state, dtype_from_wire("export.dtype", request.dtype)?) {
        (false, dtype) => Ok(Exported::Weights(dtype)),
        (true, Dtype::F32) => Ok(Exported::State),
        (true, dtype) => {
            let remedy = "ask for fp32, and round what you get";
            Err(Fault::invalid("export.dtype", dtype, "fp32 with all state", remedy))
        }
    }
}

/// Waits for the version without occupying a thread, then sends it from a blocking thread.
async fn export(
    handle: Arc<JobHandle>,
    snapshot: Snapshot,
    exported: Exported,
    deadline: Instant,
    sender: mpsc::Sender<v1::ExportResponse>,
) -> Result<SnapshotInfo, Fault> {
    let (version, name, from) = (snapshot.version(), handle.job.spec().name.clone(), Instant::now());
    let reached = || Ok((handle.job.progress().version >= version).then_some(()));
    let late = || {
        let value = format!("{} of {version}", handle.job.progress().version);
        let remedy = "the job has not come so far: ask for its current version";
        Fault::new(FaultKind::Deadline, "snapshot", value, "there in time", remedy)
    };
    handle.until(deadline, reached, late).await?;
    let (arrays, layout) = (exported.arrays(&handle.job), handle.job.layout().clone());
    // From here on only the snapshot refers to the job, and a snapshot does not keep its job alive.
    drop(handle);
    let (runtime, ended) = (Handle::current(), snapshot.ended());
    let info = blocking(move || {
        snapshot.run(deadline.into_std(), |piece| {
            // A frozen shard has weights and no state.
            let count = if layout.is_frozen(piece.shard) { 1 } else { arrays.len() };
            messages(piece, &arrays[..count], exported.dtype())
                .try_for_each(|message| send(&runtime, &sender, &ended, message))
        })
    });
    let info = info.await?;
    let took = from.elapsed().as_secs_f64();
    tracing::info!(job = %name, %version, ?exported, took, "exported");
    Ok(info)
}

/// Yields a piece's part of each array, in messages of whole blocks.
fn messages<'a>(
    piece: &'a Piece,
    arrays: &'static [StateArray],
    dtype: Dtype,
) -> impl Iterator<Item = v1::ExportResponse> + 'a {
    let block_bytes = BLOCK_ELEMENTS as usize * dtype.bytes() as usize;
    let most = CHUNK_BYTES / block_bytes;
    let blocks: Vec<&[u8]> = piece.blocks().collect();
    let count = blocks.len();
    let runs = (0..count).step_by(most).map(move |first| first..count.min(first + most));
    let message = move |run: Range<usize>, index: usize| {
        let of_array = index * block_bytes..(index + 1) * block_bytes;
        let parts: Vec<&[u8]> = blocks[run.clone()].iter().map(|block| &block[of_array.clone()]).collect();
        let payload = Bytes::from(parts.concat());
        v1::ExportResponse {
            shard: piece.shard.0,
            offset: (piece.first + run.start) as u64 * BLOCK_ELEMENTS,
            crc32: crc32(&payload),
            array: array_to_wire(arrays[index]),
            payload,
            ..Default::default()
        }
    };
    runs.flat_map(move |run| (0..arrays.len()).map(move |index| (run.clone(), index)))
        .map(move |(run, index)| message(run, index))
}

/// Sends a message. Runs on the export's blocking thread.
fn send(
    runtime: &Handle,
    sender: &mpsc::Sender<v1::ExportResponse>,
    ended: &Ended,
    message: v1::ExportResponse,
) -> Result<(), Fault> {
    let begun = Instant::now();
    loop {
        match runtime.block_on(timeout(LOOK, sender.reserve())) {
            Ok(Ok(place)) => {
                place.send(message);
                return Ok(());
            }
            Ok(Err(_)) => return Err(reader(FaultKind::Unavailable, "gone")),
            Err(_) if begun.elapsed() >= STALL => return Err(reader(FaultKind::Deadline, "taking nothing")),
            Err(_) => ended.fault().map_or(Ok(()), Err)?,
        }
    }
}

fn reader(kind: FaultKind, value: &str) -> Fault {
    let limit = format!("taking a message within {} s", STALL.as_secs());
    Fault::new(kind, "export.reader", value, limit, "export to a faster disk, or try again")
}
