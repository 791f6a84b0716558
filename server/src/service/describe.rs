//! Describe and DescribeInParts. Lists grow with the model, so lists are copied in pieces, as the reader takes them.

use std::{ops::Range, sync::Arc};

use longshore_engine::{
    step::{Phase, RankProgress},
    tier::Spill,
};
use longshore_proto::{Fault, JobSpec, Param, Placement, limits::STOCK_MESSAGE_BYTES};
use longshore_wire::{Wire, param_to_wire, pieces, v1};

use super::{
    Services, convert, default_deadline, refuse,
    room::{Answers, Kept, Room, answers},
};
use crate::jobs::{Hashes, JobHandle};

/// Bytes of a description beside its lists, and bytes of each rank and each step in the description. A stock client
/// must have room for them.
const BESIDE_BYTES: usize = 64 * 1024;
const RANK_BYTES: usize = 64;
const STEP_BYTES: usize = 160;
/// Bytes of a packed number in a list, and bytes of a block's hash.
const NUMBER_BYTES: usize = 5;
const HASH_BYTES: usize = 44;

/// A piece of one of the lists that grow with the model.
enum Piece {
    Params(Range<usize>),
    Owners(Range<usize>),
    Missing(Range<usize>),
    Hashes(Range<usize>),
}

/// A description to be made.
struct Described {
    handle: Arc<JobHandle>,
    hashes: Option<Hashes>,
    brief: bool,
    /// Head of the description, without the lists.
    head: Box<dyn Fn() -> v1::DescribeResponse + Send + Sync>,
}

/// Returns the description as one message. Lists that a stock client has no room for are left out.
pub(super) async fn whole(
    services: &Services,
    request: &v1::DescribeRequest,
    room: &Room,
) -> Result<Kept<v1::DescribeResponse>, Fault> {
    let described = Described::new(services, request).await?;
    let build = || {
        let mut answer = (described.head)();
        let lists = described.pieces();
        let (params, others): (Vec<_>, Vec<_>) =
            lists.into_iter().partition(|(piece, _)| matches!(piece, Piece::Params(_)));
        let mut left = STOCK_MESSAGE_BYTES.saturating_sub(described.beside());
        // Parameters take the most bytes, so the other lists get room first.
        for list in [others, params] {
            let bytes: usize = list.iter().map(|(_, bytes)| bytes).sum();
            if bytes <= left {
                list.iter().for_each(|(piece, _)| answer.join(described.part(piece)));
                left -= bytes;
            } else {
                answer.lists_left_out = true;
            }
        }
        Ok(answer)
    };
    room.make(default_deadline(), build).await
}

/// Returns the description in parts: the head, then the lists.
pub(super) async fn in_parts(
    services: &Services,
    request: &v1::DescribeRequest,
    room: Room,
) -> Result<Answers<v1::DescribeResponse>, Fault> {
    let described = Described::new(services, request).await?;
    let head = room.make(default_deadline(), || Ok((described.head)())).await?;
    let (sender, answers) = answers();
    tokio::spawn(async move {
        if sender.send(Ok(head)).await.is_err() {
            return;
        }
        for (piece, _) in described.pieces() {
            let part = tokio::select! {
                part = room.make(default_deadline(), || Ok(described.part(&piece))) => part,
                () = sender.closed() => return,
            };
            let job = described.handle.job.spec().name.as_str();
            let part = part.map_err(|fault| refuse("DescribeInParts", job, fault));
            let failed = part.is_err();
            if sender.send(part).await.is_err() || failed {
                return;
            }
        }
    });
    Ok(answers)
}

impl Described {
    async fn new(services: &Services, request: &v1::DescribeRequest) -> Result<Described, Fault> {
        let handle = services.jobs.get(&request.job)?;
        // A job that waits for weights has no state yet.
        let hashes = match request.state_hash && handle.job.progress().phase != Phase::Loading {
            true => Some(handle.hashes(default_deadline()).await?),
            false => None,
        };
        let (brief, steps_after) = (request.brief, request.steps_after);
        let (of, services, info) = (Arc::clone(&handle), services.clone(), hashes.clone().map(|of| of.info));
        let head = move || {
            let mut head = services.head(&of, brief);
            if let Some(after) = steps_after {
                head.steps = of.history.after(after).into_iter().map(convert::decided).collect();
            }
            if let Some(info) = &info {
                (head.hash_version, head.hash_applied) = (info.version.0, info.applied);
            }
            head
        };
        Ok(Described { handle, hashes, brief, head: Box::new(head) })
    }

    /// Bytes of the description beside its lists.
    fn beside(&self) -> usize {
        let spec = self.handle.job.spec();
        let groups: usize = spec.groups.iter().map(|group| group.len() + 8).sum();
        let contributors: usize = spec.partitions.iter().map(|of| NUMBER_BYTES * of.ranks.len() + 32).sum();
        let state = self.handle.job.progress().last_commit.map_or(0, |commit| {
            commit.trainer_state.len() + commit.left_out.len() * 24 + commit.groups.len() * 100
        });
        BESIDE_BYTES
            + groups
            + contributors
            + state
            + RANK_BYTES * spec.world_size as usize
            + STEP_BYTES * self.handle.history.after(0).len()
    }

    /// Returns the pieces of all lists, each with its size in bytes.
    fn pieces(&self) -> Vec<(Piece, usize)> {
        let job = &self.handle.job;
        let missing = missing(&self.handle).len();
        let hashes = self.hashes.as_ref().map_or(0, |of| of.blocks.len());
        let (params, owners) = match self.brief {
            true => (&job.spec().params[..0], 0),
            false => (&job.spec().params[..], job.placement().owners.len()),
        };
        let param = |param: &Param| param.name.len() + 10 * param.shape.len() + 24;
        let mut all = Vec::new();
        all.extend(pieces(params.iter().map(param)).map(|(at, bytes)| (Piece::Params(at), bytes)));
        for (count, bytes, piece) in [
            (owners, NUMBER_BYTES, Piece::Owners as fn(Range<usize>) -> Piece),
            (missing, NUMBER_BYTES, Piece::Missing as fn(Range<usize>) -> Piece),
            (hashes, HASH_BYTES, Piece::Hashes as fn(Range<usize>) -> Piece),
        ] {
            all.extend(pieces((0..count).map(|_| bytes)).map(|(at, bytes)| (piece(at), bytes)));
        }
        all
    }

    fn part(&self, piece: &Piece) -> v1::DescribeResponse {
        let job = &self.handle.job;
        let mut part = v1::DescribeResponse::default();
        match piece {
            Piece::Params(at) => {
                let params = job.spec().params[at.clone()].iter().map(param_to_wire).collect();
                part.spec = Some(v1::JobSpec { params, ..Default::default() });
            }
            Piece::Owners(at) => {
                let placement = job.placement();
                let owners = placement.owners[at.clone()].iter().map(|owner| owner.0).collect();
                let replicas = placement.replicas.get(at.clone()).unwrap_or_default();
                let replicas = replicas.iter().map(|replica| replica.0).collect();
                part.placement = Some(v1::Placement { owners, replicas, ..Default::default() });
            }
            // The job may have got weights since the pieces were cut, so the list may be shorter.
            Piece::Missing(at) => {
                let missing = missing(&self.handle);
                let missing_shards = missing.get(at.start..).unwrap_or_default();
                let missing_shards = missing_shards.iter().take(at.len()).copied().collect();
                part.progress = Some(v1::JobProgress { missing_shards, ..Default::default() });
            }
            Piece::Hashes(at) => {
                let blocks = self.hashes.iter().flat_map(|of| &of.blocks[at.clone()]);
                part.hashes = blocks
                    .map(|(block, hash)| v1::BlockHash { block: block.0, hash: hash.to_vec().into() })
                    .collect();
            }
        }
        part
    }
}

fn missing(handle: &JobHandle) -> Vec<u32> {
    convert::progress(handle.job.progress()).missing_shards
}

impl Services {
    /// Returns a description without the lists that grow with the model.
    fn head(&self, handle: &Arc<JobHandle>, brief: bool) -> v1::DescribeResponse {
        let job = &handle.job;
        let (pushed_bytes, pulled_bytes) = job.traffic();
        let rank = |rank: RankProgress| {
            let transport = self.transport_of(handle, &rank);
            let watches =
                rank.incarnation.is_some_and(|process| handle.processes.is_watching(rank.rank, process));
            convert::rank(rank, transport, watches)
        };
        let span = handle.pace.span();
        let spec = || {
            let spec = job.spec();
            let (name, groups, partitions) =
                (spec.name.clone(), spec.groups.clone(), spec.partitions.clone());
            JobSpec { params: Vec::new(), name, groups, partitions, ..*spec }.to_wire()
        };
        let placement =
            || Placement { owners: Vec::new(), replicas: Vec::new(), ..job.placement() }.to_wire();
        let (written_of_checkpoints, bytes_of_checkpoints) =
            job.snapshots.checkpoint_progress().unwrap_or_default();
        v1::DescribeResponse {
            owner: handle.owner.clone().unwrap_or_default(),
            idle_ms: handle.look().as_millis() as u64,
            spec: (!brief).then(spec),
            placement: (!brief).then(placement),
            server: job.server().0,
            tier: job.spec().tier.number(),
            progress: Some(v1::JobProgress {
                missing_shards: Vec::new(),
                ..convert::progress(job.progress())
            }),
            ranks: job.protocol.ranks().into_iter().map(rank).collect(),
            memory_bytes: job.memory_bytes(),
            hashes: Vec::new(),
            hash_version: 0,
            hash_applied: 0,
            pushed_bytes,
            pulled_bytes,
            waiting_for: job.protocol.waiting_for().unwrap_or_default(),
            isa: job.compute().isa().to_string(),
            threads: job.compute().threads() as u32,
            disk_bytes: job.disk_bytes(),
            disk_written_bytes: job.written_bytes(),
            paced_steps: span.steps,
            paced_seconds: span.time.as_secs_f64(),
            paced_written_bytes: span.written,
            drive_endurance_bytes: self.drive_endurance,
            lists_left_out: false,
            tensors: job.spec().params.len() as u32,
            parameters: job.spec().params.iter().filter_map(Param::elements).sum(),
            spill: job.spill().map_or("", Spill::name).into(),
            checkpoints: handle.checkpoints.last(),
            steps: Vec::new(),
            failure: job.protocol.check_alive().err().map(|fault| fault.to_string()).unwrap_or_default(),
            update_seconds: handle.busy.updates().as_secs_f64(),
            elements: handle.elements(),
            update_bytes: job.update_bytes(),
            checkpoint_bytes: bytes_of_checkpoints,
            checkpoint_written_bytes: written_of_checkpoints,
            scaling: convert::scaling(handle),
        }
    }
}
