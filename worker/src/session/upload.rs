//! Uploads a new job's filling to the owners. Each pass walks the flat space once, shard by shard.

use std::{cell::RefCell, collections::BTreeMap, ops::Range, time::Duration};

use bytes::Bytes;
use longshore_proto::{
    ChunkId, Dtype, Fault, FaultKind, JobSpec, Layout, LeftOut, ServerId, ShardId, StateArray,
    checksum::crc32, left_out::check_uploaded,
};
use longshore_wire::{
    array_to_wire, fault_from_status, left_outs_from_wire, left_outs_to_wire,
    v1::{DescribeResponse, JobProgress, Phase, UploadRequest, UploadResponse},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::open::open_on;
use crate::{
    cluster::{Backoff, ByServer, Cluster, Ended, Task},
    convert,
    error::{Error, GradientError, OtherFilling, Result, TimedOut},
    host::{self, Instant},
    rank::RankState,
};

/// Weights, or an optimizer's whole state.
pub trait Filling {
    /// Number of updates that made the state; None for weights alone.
    fn applied(&self) -> Option<u64>;

    /// Parameters whose state fewer updates made.
    fn left_out(&self) -> &[LeftOut] {
        &[]
    }

    /// Writes elements of one array of a parameter, from element `at` on, as little-endian fp32. The arrays of a
    /// shard are requested in the order of [`StateArray::ALL`], and again for a server that is retried.
    fn write(&self, array: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()>;
}

/// Weights that a function makes parameter by parameter. A single parameter is in memory at a time.
pub(super) struct ByParam<'a> {
    spec: &'a JobSpec,
    layout: &'a Layout,
    weights: &'a dyn Fn(usize) -> Vec<f32>,
    held: RefCell<Option<(usize, Vec<f32>)>>,
}

impl<'a> ByParam<'a> {
    pub(super) fn new(
        spec: &'a JobSpec,
        layout: &'a Layout,
        weights: &'a dyn Fn(usize) -> Vec<f32>,
    ) -> ByParam<'a> {
        ByParam { spec, layout, weights, held: RefCell::default() }
    }

    fn make(&self, param: usize) -> Result<Vec<f32>> {
        let values = (self.weights)(param);
        let (given, place) = (values.len() as u64, self.layout.param_range(param));
        if given == place.end - place.start {
            return Ok(values);
        }
        let name = format!("{} (its initial weights)", self.spec.params[param].name);
        Err(Error::Gradient(GradientError::Length { name, given, expected: place.end - place.start }))
    }
}

impl Filling for ByParam<'_> {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn write(&self, _: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()> {
        let mut held = self.held.borrow_mut();
        let values = match held.take() {
            Some((of, values)) if of == param => values,
            _ => self.make(param)?,
        };
        let (_, values) = held.insert((param, values));
        let at = at as usize;
        convert::from_f32(Dtype::F32, &values[at..at + target.len() / size_of::<f32>()], target);
        Ok(())
    }
}

/// Number of chunks under way to one server: enough to keep the server busy while the next parameter is made.
const QUEUE_CHUNKS: usize = 8;

/// Uploads missing shards until none is missing. Before each pass every server is asked for its missing shards, and is
/// joined and opened again if needed. A restarted server has forgotten its ranks and, with the `memory` tier, the job.
pub(super) fn upload(cluster: &Cluster, rank: &RankState, filling: &dyn Filling) -> Result<()> {
    let start = Instant::now();
    let end = start + cluster.options.slow_deadline;
    let mut backoff = Backoff::new();
    check_uploaded(filling.left_out(), cluster.spec(), filling.applied())?;
    loop {
        let missing = cluster.runtime.block_on(missing_shards(
            cluster,
            rank,
            (filling.applied(), filling.left_out()),
        ))?;
        let Some((&first, _)) = missing.first_key_value() else { return Ok(()) };
        let Some((server, fault)) = pass(cluster, rank, filling, &missing, end)? else { continue };
        let address = cluster.address(server);
        tracing::debug!(server = address, %fault, "an upload broke, looking for what is missing");
        if !cluster.runtime.block_on(async { Ok(backoff.pause(end).await) })? {
            return Err(TimedOut {
                what: "the upload of what the job is filled with",
                server: Some(address.into()),
                job: cluster.job().clone(),
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

async fn missing_shards(
    cluster: &Cluster,
    rank: &RankState,
    given: (Option<u64>, &[LeftOut]),
) -> Result<BTreeMap<ShardId, Vec<ServerId>>> {
    let deadline = cluster.options.deadline;
    let answers = cluster.on_each(|server| cluster.describe(server, false, deadline)).await;
    let trained = answers
        .values()
        .flatten()
        .filter_map(|answer| answer.progress.as_ref())
        .any(|progress| progress.version > 0);
    let mut missing: BTreeMap<ShardId, Vec<ServerId>> = BTreeMap::new();
    for (server, answer) in answers {
        let answer = match answer {
            // Before the first step, nothing is lost with the job.
            Err(Error::StateLost(_)) if !trained => {
                open_on(cluster, server, false).await?;
                cluster.describe(server, false, deadline).await?
            }
            other => other?,
        };
        check_alike(cluster, server, answer.progress.as_ref(), given)?;
        for shard in missing_on(cluster, rank, server, answer).await? {
            missing.entry(shard).or_default().push(server);
        }
    }
    Ok(missing)
}

/// Checks that a full server, which trains, was filled with the same contents that this process uploads.
fn check_alike(
    cluster: &Cluster,
    server: ServerId,
    progress: Option<&JobProgress>,
    (applied, left_out): (Option<u64>, &[LeftOut]),
) -> Result<()> {
    let full = |progress: &&JobProgress| progress.phase() != Phase::Loading && progress.version == 0;
    let Some(progress) = progress.filter(full) else { return Ok(()) };
    let (found, given) = (progress.applied, applied.unwrap_or(0));
    if found != given {
        let (server, job) = (cluster.address(server).into(), cluster.job().clone());
        return Err(OtherFilling { server, job, found, given }.into());
    }
    if left_outs_from_wire(progress.left_out.clone()) != left_out {
        let value = format!("of {} parameters", left_out.len());
        let limit =
            format!("of {}, as {} was filled with them", progress.left_out.len(), cluster.address(server));
        let remedy = "load the state again that the job was begun with, or delete the job to start over";
        return Err(Fault::new(FaultKind::Conflict, "left_out", value, limit, remedy).into());
    }
    Ok(())
}

/// Returns the shards that one server misses, and joins the server if needed.
async fn missing_on(
    cluster: &Cluster,
    rank: &RankState,
    server: ServerId,
    answer: DescribeResponse,
) -> Result<Vec<ShardId>> {
    let mine = answer.ranks.iter().find(|known| known.rank == cluster.options.rank.0);
    if mine.map_or(0, |known| known.incarnation) < rank.incarnation().0 {
        rank.rejoin(cluster, server).await?;
    }
    let progress = answer.progress.unwrap_or_default();
    if progress.phase() != Phase::Loading {
        return Ok(Vec::new());
    }
    Ok(progress.missing_shards.into_iter().map(ShardId).collect())
}

/// Walks the flat space once. Returns a passing failure that cut the walk short, with its server.
fn pass(
    cluster: &Cluster,
    rank: &RankState,
    filling: &dyn Filling,
    missing: &BTreeMap<ShardId, Vec<ServerId>>,
    end: Instant,
) -> Result<Option<(ServerId, Fault)>> {
    let mut streams: ByServer<Option<Stream>> = ByServer::new(cluster.servers(), |_| None);
    let applied = filling.applied();
    let arrays = match applied {
        None => &[StateArray::Master][..],
        Some(_) => StateArray::of(cluster.spec().rule),
    };
    let mut failed = None;
    'shards: for (&shard, servers) in missing {
        // A frozen shard has weights alone.
        let arrays = if cluster.layout.is_frozen(shard) { &arrays[..1] } else { arrays };
        let chunks = || (0..cluster.layout.chunks(shard, Dtype::F32)).map(ChunkId);
        for (array, chunk) in arrays.iter().flat_map(|&array| chunks().map(move |chunk| (array, chunk))) {
            let payload = read(cluster, filling, array, shard, chunk)?;
            let request = UploadRequest {
                job: cluster.job().to_string(),
                incarnation: rank.incarnation().0,
                shard: shard.0,
                chunk: chunk.0,
                crc32: crc32(&payload),
                array: array_to_wire(array),
                applied,
                left_out: left_outs_to_wire(filling.left_out()),
                payload,
            };
            for &server in servers {
                let stream = streams[server].get_or_insert_with(|| Stream::open(cluster, server));
                if !cluster.runtime.block_on(stream.send(request.clone(), end))? {
                    break 'shards;
                }
            }
        }
    }
    for (server, stream) in streams {
        let Some(stream) = stream else { continue };
        if let Err(status) = cluster.runtime.block_on(async { Ok(stream.close(end).await) })? {
            let fault = fault_from_status(&status, cluster.address(server));
            if !passes(&fault) {
                return Err(cluster.explain(server, "Upload", None, fault));
            }
            failed = Some((server, fault));
        }
    }
    Ok(failed)
}

/// Returns true if another try may succeed: the transport failed, or the server has restarted since it was joined.
fn passes(fault: &Fault) -> bool {
    match fault.kind {
        FaultKind::Unavailable | FaultKind::Deadline => true,
        FaultKind::Precondition => fault.field == "rank",
        FaultKind::NotFound => fault.field == "job",
        _ => false,
    }
}

/// An open Upload call.
struct Stream {
    queue: mpsc::Sender<UploadRequest>,
    answer: Task<Result<UploadResponse, Status>>,
}

impl Stream {
    fn open(cluster: &Cluster, server: ServerId) -> Stream {
        let (queue, requests) = mpsc::channel(QUEUE_CHUNKS);
        let mut client = cluster.peer(server).tensors(0);
        let answer = async move {
            client.upload(ReceiverStream::new(requests)).await.map(|answer| answer.into_inner())
        };
        Stream { queue, answer: cluster.runtime.spawn_joined(answer) }
    }

    /// Returns false if the call has ended early; `close` returns the reason.
    async fn send(&self, request: UploadRequest, end: Instant) -> Result<bool> {
        Ok(matches!(host::timeout_at(end, self.queue.send(request)).await, Ok(Ok(()))))
    }

    async fn close(self, end: Instant) -> Result<(), Status> {
        drop(self.queue);
        let left = end.duration_since(Instant::now()).max(Duration::from_millis(1));
        match host::timeout(left, self.answer).await {
            Ok(Ok(answer)) => answer.map(|_| ()),
            Ok(Err(Ended)) => Err(Status::internal("the upload's task ended early")),
            Err(_) => Err(Status::deadline_exceeded("the upload was not answered in time")),
        }
    }
}

/// Returns the flat elements of an fp32 chunk.
fn flat_range(cluster: &Cluster, shard: ShardId, chunk: ChunkId) -> Range<u64> {
    let bytes = cluster.layout.chunk_bytes(shard, chunk, Dtype::F32).unwrap_or(0..0);
    let start = cluster.layout.shard_range(shard).start;
    start + bytes.start / 4..start + bytes.end / 4
}

/// Reads a chunk as fp32, with zeros as padding.
fn read(
    cluster: &Cluster,
    filling: &dyn Filling,
    array: StateArray,
    shard: ShardId,
    chunk: ChunkId,
) -> Result<Bytes> {
    let layout = &cluster.layout;
    let flat = flat_range(cluster, shard, chunk);
    let mut payload = vec![0; 4 * (flat.end - flat.start) as usize];
    for param in layout.params_in(flat.clone()) {
        let range = layout.param_range(param);
        let (from, to) = (range.start.max(flat.start), range.end.min(flat.end));
        let target = 4 * (from - flat.start) as usize..4 * (to - flat.start) as usize;
        filling.write(array, param, from - range.start, &mut payload[target])?;
    }
    Ok(payload.into())
}
