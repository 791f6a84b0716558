//! Reasons to refuse an event, each with the values that show it, and their texts.

use longshore_proto::{
    BlockId, ChunkId, Contribution, Dtype, Epoch, Fault, FaultKind, Incarnation, JobSpec, Layout, MicroStep,
    Origin, Rank, Reads, ServerId, ShardId, Step, Version,
    fault::{ORIGIN, OWED, READS, READS_VERSION},
    limits::{BLOCK_ELEMENTS, GRADIENT_SCALES},
};

/// Reason to refuse an event, which then changes nothing.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    Loading { missing: usize },
    Paused { reason: String },
    NotLoading { version: Version },
    UnknownRank { rank: Rank, world_size: u32 },
    WorldSize { rank: Rank, world_size: u32, most: u32 },
    NotJoined { rank: Rank },
    Fenced { rank: Rank, incarnation: Incarnation, current: Incarnation },
    Left { rank: Rank, incarnation: Incarnation },
    NotOwned { shard: ShardId, shards: u32 },
    Elsewhere { shard: ShardId, step: Step, owner: ServerId },
    GivenUp { shard: ShardId, step: Step },
    Broken { shard: ShardId, block: BlockId, at: String, is_last: bool },
    NotContributor { contribution: Contribution, contributors: Vec<Rank> },
    Frozen { contribution: Contribution, param: String },
    WrongDtype { dtype: Dtype, expected: Dtype },
    WrongLength { contribution: Contribution, chunk: ChunkId, bytes: u64, expected: u64 },
    UnknownChunk { shard: ShardId, chunk: ChunkId, chunks: u32 },
    UnknownMicroStep { micro_step: MicroStep, micro_steps: u32 },
    BadLossScale { loss_scale: f64 },
    UnusableLossScale { loss_scale: f64, contributions: u64 },
    WrongLossScale { contribution: Contribution, loss_scale: f64, expected: Vec<f64> },
    OtherLossScale { contribution: Contribution, loss_scale: f64, earlier: f64 },
    MicroStepTooEarly { contribution: Contribution, missing: ChunkId },
    StepTooEarly { step: Step, newest: Step },
    StepZero,
    OtherChecksum { contribution: Contribution, chunk: ChunkId, crc32: u32, earlier: u32 },
    CommitTooEarly { step: Step, next: Step },
    CommitTooOld { step: Step, version: Version },
    CommitOwed { step: Step, missing: String },
    CommitIncomplete { step: Step, missing: String },
    WrongGradientScale { step: Step, gradient_scale: f64, scales: Vec<f64>, contributions: u64 },
    NotFinite { step: Step, shard: ShardId, element: u64 },
    OtherCommit { step: Step, field: &'static str },
    OtherOrigin { step: Step, origin: Origin, found: Origin },
    Withdrawn { reads: Reads, decided_by: Incarnation },
    OtherReads { contribution: Contribution, reads: Version, other: Rank, version: Version },
    NotRankZero { incarnation: Incarnation, current: Incarnation },
    VersionTooNew { version: Version, newest: Version },
    VersionGone { version: Version, kept: Vec<Version> },
    StepDecided { step: Step, version: Version },
    NotPaused,
    PauseTooNew { version: Version, current: Version },
    LossScaleInUse { loss_scale: f64, version: Version },
    OtherResume { loss_scale: f64, earlier: f64 },
    NotDurable { step: Step, durable: Version },
    OtherPlacement { version: Version, epoch: Epoch, current: Version, ours: Epoch },
    PlacementChanged { rank: Rank, incarnation: Incarnation, epoch: Epoch },
    OtherUpload { shard: ShardId, chunk: ChunkId, crc32: u32, earlier: u32 },
}

impl Refusal {
    /// Returns the refusal of a shard whose state is broken. `block` is the first block that differs from its checksum.
    pub(crate) fn broken(
        (spec, layout): (&JobSpec, &Layout),
        shard: ShardId,
        block: BlockId,
        is_last: bool,
    ) -> Refusal {
        let at = spec.name_element(layout, u64::from(block.0) * BLOCK_ELEMENTS);
        Refusal::Broken { shard, block, at, is_last }
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        use FaultKind::{Conflict, Corrupt, Fenced, Invalid, NotFound, Precondition, Unavailable};
        match refusal {
            Refusal::Loading { missing } => Fault::new(
                Precondition,
                "job.phase",
                format!("loading, {missing} shards missing"),
                "training",
                "upload the initial weights or restore a checkpoint first",
            ),
            Refusal::Paused { reason } => Fault::new(
                Precondition,
                "job.phase",
                "paused",
                "training",
                format!(
                    "wait until an operator resumes the job (`longshore resume`), which is paused because: {reason}"
                ),
            ),
            Refusal::NotLoading { version } => Fault::new(
                Precondition,
                "job.phase",
                format!("training at {version}"),
                "loading",
                "weights may be loaded only before the first step; delete the job to start over",
            ),
            Refusal::UnknownRank { rank, world_size } => Fault::new(
                Invalid,
                "rank",
                rank.0,
                format!("below the world size, {world_size}"),
                "start as many workers as the job was opened for",
            ),
            Refusal::WorldSize { rank, world_size, most } => Fault::new(
                Invalid,
                "world_size",
                format!("{world_size}, of {rank}"),
                format!(
                    "above the rank, and at most {most}, the job's; equal to that in a job with partitions"
                ),
                "start fewer ranks; for more, checkpoint the job and restore it in one that is opened with max_ranks",
            ),
            Refusal::NotJoined { rank } => {
                Fault::new(Precondition, "rank", rank.0, "joined", "call Training.Join first")
            }
            Refusal::Fenced { rank, incarnation, current } if incarnation == current => Fault::new(
                Fenced,
                "incarnation",
                incarnation.0,
                format!("above {}, which {rank} has joined as before", current.0),
                "join with a higher incarnation",
            ),
            Refusal::Fenced { rank, incarnation, current } => Fault::new(
                Fenced,
                "incarnation",
                incarnation.0,
                format!("{}, which {rank} has joined as since", current.0),
                "stop this process: another one has taken its rank",
            ),
            Refusal::Left { rank, incarnation } => Fault::new(
                Precondition,
                "incarnation",
                incarnation.0,
                format!("one that has not left ({rank})"),
                "join again with a higher incarnation",
            ),
            Refusal::NotOwned { shard, shards } => Fault::new(
                NotFound,
                "shard",
                shard.0,
                format!("one this server owns, of {shards} in the job"),
                "send it to its owner: see placement in Admin.Describe",
            ),
            Refusal::Elsewhere { shard, step, owner } => Fault::new(
                Precondition,
                "shard",
                format!("{} at {step}", shard.0),
                format!("one of this server's at that step: it is {owner}'s"),
                "send it to its owner: see placement in Admin.Describe",
            ),
            Refusal::GivenUp { shard, step } => Fault::new(
                Unavailable,
                "shard",
                format!("{} at {step}, of a server that is given up", shard.0),
                "on a server that answers",
                "ask again after the next step, whose decision gives the shard to another server",
            ),
            Refusal::Broken { shard, block, at, is_last } => {
                let limit = "the bytes that were written: a bit has flipped in this server's memory";
                let remedy = match is_last {
                    true => {
                        "restore the last checkpoint, since no other server has the shard; then test this host's memory"
                    }
                    false => "ask the shard's other holder; if it repeats, test this host's memory",
                };
                Fault::new(Corrupt, "state", format!("{block} of {shard}, from {at} on"), limit, remedy)
            }
            Refusal::Frozen { contribution, param } => Fault::new(
                Invalid,
                "shard",
                format!("{} ({contribution}), which has {param}", contribution.shard.0),
                "a shard that is trained: this one is frozen (spec.partitions)",
                "send no gradient of frozen parameters, or open a job in which they are trained",
            ),
            Refusal::NotContributor { contribution, contributors } => {
                let named: Vec<u32> = contributors.iter().take(8).map(|rank| rank.0).collect();
                let more = if contributors.len() > 8 { " and more" } else { "" };
                Fault::new(
                    Invalid,
                    "rank",
                    format!("{} ({contribution})", contribution.rank.0),
                    format!("one of the shard's contributors, {named:?}{more}"),
                    "send gradients only to the shards of your own partitions (spec.partitions)",
                )
            }
            Refusal::WrongDtype { dtype, expected } => Fault::new(
                Invalid,
                "dtype",
                dtype,
                format!("{expected}, as the job was opened"),
                "convert the tensor",
            ),
            Refusal::WrongLength { contribution, chunk, bytes, expected } => Fault::new(
                Invalid,
                "payload",
                format!("{bytes} bytes ({contribution}, {chunk})"),
                format!("{expected} bytes"),
                "chunks are 1 MiB, the last one of a shard what is left",
            ),
            Refusal::UnknownChunk { shard, chunk, chunks } => Fault::new(
                Invalid,
                "chunk",
                chunk.0,
                format!("below {chunks}, the chunks of {shard}"),
                "cut the shard into chunks of 1 MiB",
            ),
            Refusal::UnknownMicroStep { micro_step, micro_steps } => Fault::new(
                Invalid,
                "micro_step",
                micro_step.0,
                format!("below {micro_steps}, as the job was opened"),
                "count micro-steps from 0",
            ),
            Refusal::BadLossScale { loss_scale } => Fault::new(
                Invalid,
                "loss_scale",
                loss_scale,
                "finite and above 0",
                "send 1 when the loss is not scaled",
            ),
            Refusal::UnusableLossScale { loss_scale, contributions } => Fault::new(
                Invalid,
                "loss_scale",
                loss_scale,
                format!(
                    "{:e} to {:e} once multiplied by {contributions}, world size x micro-steps",
                    GRADIENT_SCALES.start(),
                    GRADIENT_SCALES.end()
                ),
                "resume with another loss scale, or with none",
            ),
            Refusal::WrongLossScale { contribution, loss_scale, expected } => Fault::new(
                Conflict,
                "loss_scale",
                format!("{loss_scale} ({contribution})"),
                format!("{}, that of the version which the step reads", one_of(&expected)),
                "use Commit.loss_scale of that version, or what the operator chose who resumed it",
            ),
            Refusal::OtherLossScale { contribution, loss_scale, earlier } => Fault::new(
                Conflict,
                "loss_scale",
                format!("{loss_scale} ({contribution})"),
                format!("{earlier}, as the step's first contribution"),
                "use the loss scale of the version the step reads, on every rank; if the first one is wrong, the rank that \
                 sent it must join again",
            ),
            Refusal::MicroStepTooEarly { contribution, missing } => Fault::new(
                Precondition,
                "micro_step",
                format!("{} ({contribution})", contribution.micro_step.0),
                format!("sent after {missing} of the micro-step before"),
                "send a step's micro-steps in ascending order, a chunk of each on the same stream, or wait for the earlier \
                 one's acknowledgement",
            ),
            Refusal::StepTooEarly { step, newest } => Fault::new(
                Precondition,
                "step",
                step.0,
                format!("at most {}", newest.0),
                "wait for the commit of the step before; delayed steps need max_delay 1",
            ),
            Refusal::StepZero => Fault::new(Invalid, "step", 0, "at least 1", "count steps from 1"),
            Refusal::OtherChecksum { contribution, chunk, crc32, earlier } => Fault::new(
                Conflict,
                "crc32",
                format!("{crc32:08x} ({contribution}, {chunk})"),
                format!("{earlier:08x}, as this chunk was stored before"),
                "the worker computed two different gradients for one batch: make its arithmetic deterministic, \
                 or restart the step from a checkpoint",
            ),
            Refusal::CommitTooEarly { step, next } => Fault::new(
                Precondition,
                "commit.step",
                step.0,
                format!("{}, the next undecided step", next.0),
                "commit steps in order",
            ),
            Refusal::CommitTooOld { step, version } => Fault::new(
                Precondition,
                "commit.step",
                step.0,
                format!("above {}: the job is at {version}", version.0),
                "join again to learn where the job stands",
            ),
            Refusal::CommitOwed { step, missing } => Fault::new(
                Precondition,
                OWED,
                format!("without that of {missing} ({step})"),
                "of all processes that have joined",
                "wait for that process: its gradient is not summed again, and it reads a version that the step overwrites",
            ),
            Refusal::CommitIncomplete { step, missing } => Fault::new(
                Precondition,
                "commit.step",
                step.0,
                format!("complete; missing: {missing}"),
                "wait for Training.Stats of every shard before committing",
            ),
            Refusal::WrongGradientScale { step, gradient_scale, scales, contributions } => Fault::new(
                Conflict,
                "commit.gradient_scale",
                format!("{gradient_scale} ({step})"),
                format!(
                    "{} x {contributions}, the step's loss scale x world size x micro-steps",
                    one_of(&scales)
                ),
                "divide by the scale that the step's gradients have",
            ),
            Refusal::NotFinite { step, shard, element } => Fault::new(
                Conflict,
                "commit.skip",
                format!("false ({step})"),
                format!("true, since element {element} of {shard}'s gradient is inf or NaN"),
                "skip a step that overflowed: see first_nonfinite in Training.Stats",
            ),
            Refusal::OtherCommit { step, field } => Fault::new(
                Conflict,
                format!("commit.{field}"),
                format!("another value for {step}"),
                "as first decided",
                "a step is decided once: join again and continue from the job's version",
            ),
            Refusal::OtherOrigin { step, origin, found } => Fault::new(
                Conflict,
                ORIGIN,
                format!("{:016x} for {step}", origin.0),
                format!("{:016x}, of the contributions that this server has", found.0),
                "a rank's process was replaced since: join again, with fence_only first, and decide the step anew",
            ),
            Refusal::Withdrawn { reads, decided_by } => Fault::new(
                Conflict,
                READS,
                format!("{} as decided by {}", reads.version, reads.decided_by),
                format!("{} as decided by {decided_by}: the earlier decision was taken back", reads.version),
                "join again and compute the step with the weights as they are now",
            ),
            Refusal::OtherReads { contribution, reads, other, version } => Fault::new(
                Conflict,
                READS_VERSION,
                format!("{} ({contribution})", reads.0),
                format!("{}, with which {other} computed the same step", version.0),
                "call flush on all ranks after the same step, or on none, and give all ranks the same schedule",
            ),
            Refusal::NotRankZero { incarnation, current } => Fault::new(
                Fenced,
                "incarnation",
                incarnation.0,
                format!("{}, rank 0's", current.0),
                "only rank 0 decides; join as rank 0",
            ),
            Refusal::VersionTooNew { version, newest } => Fault::new(
                Precondition,
                "version",
                version.0,
                format!("at most {}", newest.0),
                "ask for a version that a step in flight will make",
            ),
            Refusal::VersionGone { version, kept } => Fault::new(
                NotFound,
                "version",
                version.0,
                format!("one of those kept: {}", join(&kept)),
                "join again and continue from the job's version",
            ),
            Refusal::StepDecided { step, version } => Fault::new(
                Precondition,
                "step",
                step.0,
                format!("undecided; the job is at {version}"),
                "join again and continue from the job's version",
            ),
            Refusal::NotDurable { step, durable } => Fault::new(
                Precondition,
                "commit.step",
                step.0,
                format!("{}: {durable} is the newest durable version", durable.0 + 1),
                "wait until every server has reported the version before as durable",
            ),
            Refusal::NotPaused => {
                Fault::new(Precondition, "job.phase", "training", "paused", "there is nothing to resume")
            }
            Refusal::PauseTooNew { version, current } => Fault::new(
                Precondition,
                "version",
                version.0,
                format!("at most {}, this server's", current.0),
                "wait until rank 0 has brought this server to the others' version, then resume again",
            ),
            Refusal::LossScaleInUse { loss_scale, version } => Fault::new(
                Precondition,
                "loss_scale",
                loss_scale,
                "0 (kept) where a pause did not come with a decision",
                format!(
                    "ranks may have begun a step with the scale of {version}: resume without a loss scale"
                ),
            ),
            Refusal::OtherResume { loss_scale, earlier } => Fault::new(
                Conflict,
                "loss_scale",
                loss_scale,
                format!("{earlier}, with which the job was resumed already"),
                "resume with the same scale, or without one, where the pause still lasts",
            ),
            Refusal::OtherPlacement { version, epoch, current, ours } => Fault::new(
                Conflict,
                "placement.epoch",
                format!("{} at {version}", epoch.0),
                format!("above {} at {current}", ours.0),
                "ask for the servers again: another process has decided meanwhile",
            ),
            Refusal::PlacementChanged { rank, incarnation, epoch } => Fault::new(
                Conflict,
                "placement.epoch",
                format!("below {}, when {rank} joined as {}", epoch.0, incarnation.0),
                epoch.0,
                "join with a higher incarnation, and ask for the servers again",
            ),
            Refusal::OtherUpload { shard, chunk, crc32, earlier } => Fault::new(
                Conflict,
                "crc32",
                format!("{crc32:08x} ({shard}, {chunk})"),
                format!("{earlier:08x}, as this chunk was uploaded before"),
                "delete the job to start over with other weights",
            ),
        }
    }
}

fn join(versions: &[Version]) -> String {
    if versions.is_empty() {
        return "none yet".to_string();
    }
    versions.iter().map(|version| version.0.to_string()).collect::<Vec<_>>().join(" and ")
}

fn one_of(scales: &[f64]) -> String {
    scales.iter().map(|scale| scale.to_string()).collect::<Vec<_>>().join(" or ")
}
