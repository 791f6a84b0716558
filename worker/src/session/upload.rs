//! The initial weights, streamed to their owners: the flat space is walked once, one parameter in memory at a time.

use std::{
    collections::BTreeSet,
    ops::Range,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::join_all;
use longshore_proto::{ChunkId, Dtype, Fault, FaultKind, ShardId, checksum::crc32};
use longshore_wire::{
    fault_from_status,
    v1::{DescribeResponse, Phase, UploadRequest, UploadResponse},
};
use tokio::{sync::mpsc, task::JoinHandle};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{Core, SharedCore, retry::Backoff};
use crate::{
    convert,
    error::{Error, GradientError, Result, TimedOut},
};

/// Chunks under way to one server: enough to keep it busy while the next parameter is made.
const QUEUE_CHUNKS: usize = 8;

type Weights<'a> = &'a dyn Fn(usize) -> Vec<f32>;

/// Streams what is missing until nothing is. Before each walk every server is asked what it misses, and made ready to take
/// it: one that restarted has forgotten who had joined, and with the `memory` tier the job.
pub(super) fn upload(core: &SharedCore, weights: Weights<'_>) -> Result<()> {
    let start = Instant::now();
    let end = start + core.options.slow_deadline;
    let mut backoff = Backoff::new();
    loop {
        let missing = core.block_on(missing_shards(core))?;
        let Some(&first) = missing.first() else { return Ok(()) };
        let Some((server, fault)) = pass(core, weights, &missing, end)? else { continue };
        let address = &core.peers[server].address;
        tracing::debug!(server = address, %fault, "an upload broke, looking for what is missing");
        if !core.block_on(async { Ok(backoff.pause(end).await) })? {
            return Err(TimedOut {
                what: "the upload of the initial weights",
                server: Some(address.clone()),
                job: core.job().clone(),
                step: None,
                shard: Some(first),
                version: None,
                waited: start.elapsed(),
                last: Some(fault),
            }
            .into());
        }
    }
}

async fn missing_shards(core: &SharedCore) -> Result<BTreeSet<ShardId>> {
    let deadline = core.options.deadline;
    let answers = join_all((0..core.peers.len()).map(|server| core.describe(server, false, deadline))).await;
    let trained = answers
        .iter()
        .flatten()
        .filter_map(|answer| answer.progress.as_ref())
        .any(|progress| progress.version > 0);
    let mut missing = BTreeSet::new();
    for (server, answer) in answers.into_iter().enumerate() {
        let answer = match answer {
            // As long as nothing is trained nothing is lost with it.
            Err(Error::StateLost(_)) if !trained => {
                core.open_on(server).await?;
                core.describe(server, false, deadline).await?
            }
            other => other?,
        };
        missing.extend(missing_on(core, server, answer).await?);
    }
    Ok(missing)
}

/// What one server misses, once this rank has joined there.
async fn missing_on(core: &SharedCore, server: usize, answer: DescribeResponse) -> Result<Vec<ShardId>> {
    let progress = answer.progress.unwrap_or_default();
    if progress.phase() != Phase::Loading {
        return Ok(Vec::new());
    }
    let mine = answer.ranks.iter().find(|rank| rank.rank == core.options.rank.0);
    if mine.map_or(0, |rank| rank.incarnation) < core.incarnation().0 {
        core.rejoin(server).await?;
    }
    Ok(progress.missing_shards.into_iter().map(ShardId).collect())
}

/// One walk over the flat space. Returns the failure that cut it short, if it passes, and whose it was.
fn pass(
    core: &SharedCore,
    weights: Weights<'_>,
    missing: &BTreeSet<ShardId>,
    end: Instant,
) -> Result<Option<(usize, Fault)>> {
    let mut streams: Vec<Option<Stream>> = (0..core.peers.len()).map(|_| None).collect();
    let mut walk = Walk { core, weights, param: 0, values: None };
    let mut failed = None;
    'shards: for &shard in missing {
        let server = core.owner(shard);
        for chunk in (0..core.layout.chunks(shard, Dtype::F32)).map(ChunkId) {
            let payload = walk.chunk(shard, chunk)?;
            let request = UploadRequest {
                job: core.job().to_string(),
                incarnation: core.incarnation().0,
                shard: shard.0,
                chunk: chunk.0,
                crc32: crc32(&payload),
                payload,
            };
            let stream = streams[server].get_or_insert_with(|| Stream::open(core, server));
            if !core.block_on(stream.send(request, end))? {
                break 'shards;
            }
        }
    }
    for (server, stream) in streams.into_iter().enumerate() {
        let Some(stream) = stream else { continue };
        if let Err(status) = core.block_on(async { Ok(stream.close(end).await) })? {
            let fault = fault_from_status(&status, &core.peers[server].address);
            if !passes(&fault) {
                return Err(core.explain(server, "Upload", None, fault));
            }
            failed = Some((server, fault));
        }
    }
    Ok(failed)
}

/// Whether the next walk may do better: the transport failed, or the server has restarted since it was joined.
fn passes(fault: &Fault) -> bool {
    match fault.kind {
        FaultKind::Unavailable | FaultKind::Deadline => true,
        FaultKind::Precondition => fault.field == "rank",
        FaultKind::NotFound => fault.field == "job",
        _ => false,
    }
}

/// One Upload call.
struct Stream {
    queue: mpsc::Sender<UploadRequest>,
    answer: JoinHandle<Result<UploadResponse, Status>>,
}

impl Stream {
    fn open(core: &SharedCore, server: usize) -> Stream {
        let (queue, requests) = mpsc::channel(QUEUE_CHUNKS);
        let mut client = core.peers[server].tensors(0);
        let answer = async move {
            client.upload(ReceiverStream::new(requests)).await.map(|answer| answer.into_inner())
        };
        Stream { queue, answer: core.spawn_joined(answer) }
    }

    /// False when the call has ended early: `close` says why.
    async fn send(&self, request: UploadRequest, end: Instant) -> Result<bool> {
        Ok(matches!(tokio::time::timeout_at(end.into(), self.queue.send(request)).await, Ok(Ok(()))))
    }

    async fn close(self, end: Instant) -> Result<(), Status> {
        drop(self.queue);
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let abort = self.answer.abort_handle();
        match tokio::time::timeout(left, self.answer).await {
            Ok(Ok(answer)) => answer.map(|_| ()),
            Ok(Err(failed)) => Err(Status::internal(failed.to_string())),
            Err(_) => {
                abort.abort();
                Err(Status::deadline_exceeded("the upload was not answered in time"))
            }
        }
    }
}

/// Cuts chunks out of the flat space in ascending order, holding the values of one parameter.
struct Walk<'a> {
    core: &'a Core,
    weights: Weights<'a>,
    /// The first parameter that may still overlap.
    param: usize,
    values: Option<(usize, Vec<f32>)>,
}

impl Walk<'_> {
    /// A chunk as fp32, padding zero.
    fn chunk(&mut self, shard: ShardId, chunk: ChunkId) -> Result<Bytes> {
        let core = self.core;
        let bytes = core.layout.chunk_bytes(shard, chunk, Dtype::F32).unwrap_or(0..0);
        let start = core.layout.shard_range(shard).start + bytes.start / 4;
        let flat = start..start + (bytes.end - bytes.start) / 4;
        let mut payload = vec![0; (bytes.end - bytes.start) as usize];
        while self.param < core.spec().params.len() {
            let range = core.layout.param_range(self.param);
            if range.start >= flat.end {
                break;
            }
            if range.end > flat.start {
                self.fill(range.clone(), flat.clone(), &mut payload)?;
            }
            if range.end > flat.end {
                break;
            }
            self.param += 1;
        }
        Ok(payload.into())
    }

    fn fill(&mut self, range: Range<u64>, flat: Range<u64>, payload: &mut [u8]) -> Result<()> {
        let values = match self.values.take() {
            Some((param, values)) if param == self.param => values,
            _ => self.load(range.end - range.start)?,
        };
        let overlap = range.start.max(flat.start)..range.end.min(flat.end);
        let source = &values[(overlap.start - range.start) as usize..(overlap.end - range.start) as usize];
        let target = 4 * (overlap.start - flat.start) as usize..4 * (overlap.end - flat.start) as usize;
        convert::from_f32(Dtype::F32, source, &mut payload[target]);
        self.values = Some((self.param, values));
        Ok(())
    }

    fn load(&self, expected: u64) -> Result<Vec<f32>> {
        let values = (self.weights)(self.param);
        if values.len() as u64 == expected {
            return Ok(values);
        }
        let name = format!("{} (its initial weights)", self.core.spec().params[self.param].name);
        Err(Error::Gradient(GradientError::Length { name, given: values.len() as u64, expected }))
    }
}
