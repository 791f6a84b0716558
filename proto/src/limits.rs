//! Every limit of the protocol, with the reason for its value. Relations between them are checked at compile time.

use std::time::Duration;

/// Elements of a block: the unit of norms, checksums and parallel update. At 14 bytes of state and gradient an element
/// a block is 900 KiB, so one block's working set stays in a core's 1 MiB L2.
pub const BLOCK_ELEMENTS: u64 = 64 * 1024;
/// Each parameter starts at a multiple of this: 64 fp32 elements are four cache lines, so no two parameters share one.
pub const ALIGN_ELEMENTS: u64 = 64;
/// Elements that share a scale in 8-bit state. bitsandbytes takes 256 too: larger groups lose more to one outlier, smaller ones
/// pay more for scales (here 1.6 %).
pub const QUANTIZATION_ELEMENTS: usize = 256;
/// Default shard: 16 MiB of fp32 master, 8 MiB on a 16-bit wire.
pub const DEFAULT_SHARD_ELEMENTS: u64 = 4 * 1024 * 1024;
/// Largest shard: 1 Gi elements. Offsets inside a shard fit 32 bits.
pub const MAX_SHARD_ELEMENTS: u64 = 1 << 30;

/// Payload of one data-plane message.
pub const CHUNK_BYTES: usize = 1024 * 1024;
/// HTTP/2 window of a server's data connection: what a sender may have under way while the server does not read. 16 ranks
/// with two connections each filled windows of 16 MiB with 300 MiB; at 2 MiB pushes are as fast (0.85 of raw TCP).
pub const WINDOW_BYTES: usize = 2 * CHUNK_BYTES;
/// Data connections of a rank to each server, unless its options say otherwise.
pub const DATA_CONNECTIONS: usize = 2;
/// What a server may hold of one data connection: its window, the frame being read, and what the allocator keeps of
/// earlier frames and of an upload's messages, which tonic's codec holds more than once.
pub const CONNECTION_BYTES: usize = WINDOW_BYTES + 5 * CHUNK_BYTES;
/// And of one by which images are pulled that were read from drives: messages made, ready, and being sent. With sixteen
/// ranks whose gradients were on the drives, too, both together came to 9 MiB.
pub const SPILLED_PULL_BYTES: usize = 4 * CHUNK_BYTES;
/// Exports of a job that a server gives at once. Each of them reads all of its weights between two updates.
pub const MAX_EXPORTS_AT_ONCE: usize = 4;
/// Checkpoints of a job that a server writes at once: one of training's and one of an operator's.
pub const MAX_CHECKPOINTS_AT_ONCE: usize = 2;
/// Memory of a snapshot (an export, a checkpoint, a state hash) beside what the server's budget lends it while training goes on.
pub const SNAPSHOT_BYTES: usize = 8 * 1024 * 1024;
/// A worker's connections to a server: control, data, and one that is made anew while the old one is not yet found dead.
pub const CONNECTIONS_PER_RANK: usize = DATA_CONNECTIONS + 2;

// What strangers can make a server hold: docs/limits.md adds it up.

/// Connections that a server takes beside those of its jobs' ranks.
pub const SPARE_CONNECTIONS: usize = 1024;
/// Calls open at once on a connection. A worker has a dozen; gRPC's own guidance is 100.
pub const MAX_CONNECTION_CALLS: u32 = 128;
/// Calls open at once on all connections. With more, a connection that has more than [`CALLS_SHARE`] is ended.
pub const MAX_CALLS: usize = 4096;
/// Calls that a connection may always have open: those of a worker, whatever strangers do.
pub const CALLS_SHARE: usize = 4;
/// Headers of a call as they are sent, ended or not. HTTP/2 alone allows them a frame and as much again in five more.
pub const MAX_HEADER_BLOCK_BYTES: usize = 32 * 1024;
/// Headers of a call once they are unpacked; gRPC libraries allow 8 to 16 KiB.
pub const MAX_HEADER_LIST_BYTES: u32 = 16 * 1024;
/// What strangers' connections may hold together of frames and messages that have not ended, beyond
/// [`UNFINISHED_SHARE_BYTES`] a connection and [`SMALL_MESSAGE_BYTES`] a call. Four of the largest control messages.
pub const MAX_UNFINISHED_BYTES: usize = 4 * MAX_CONTROL_MESSAGE_BYTES;
pub const UNFINISHED_SHARE_BYTES: usize = 64 * 1024;
/// Larger than any control message but a job's description, a commit with a trainer's state, and uploads.
pub const SMALL_MESSAGE_BYTES: usize = 4 * 1024;
/// What a connection without a call costs a server, and what a call that waits costs it: tasks, HTTP/2's state, buffers.
pub const IDLE_CONNECTION_BYTES: usize = 48 * 1024;
pub const IDLE_CALL_BYTES: usize = 10 * 1024;
/// So this is the most that strangers can make a server hold, whatever they send.
pub const STRANGERS_BYTES: usize = SPARE_CONNECTIONS * (IDLE_CONNECTION_BYTES + UNFINISHED_SHARE_BYTES)
    + (MAX_CALLS + SPARE_CONNECTIONS * CALLS_SHARE) * (IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES)
    + MAX_UNFINISHED_BYTES;
/// A client sends its preface and its settings as soon as it is connected.
pub const PREFACE_DEADLINE: Duration = Duration::from_secs(10);
/// A worker's data connections wait for their first call while the job is opened and its weights are uploaded.
pub const FIRST_CALL_DEADLINE: Duration = Duration::from_secs(600);
/// A message once it has begun: the largest one at 3 Mbit/s.
pub const MESSAGE_DEADLINE: Duration = Duration::from_secs(60);

/// What stock gRPC clients accept unless told otherwise.
pub const STOCK_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Room for the fields beside a chunk's payload: ids and the job's name.
pub const CHUNK_HEADROOM_BYTES: usize = 4 * 1024;
/// Largest control message: a `JobSpec` with as many parameters as a large mixture of experts (60,000 at 200 bytes).
pub const MAX_CONTROL_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

pub const MAX_JOB_NAME_BYTES: usize = 128;
pub const MAX_PARAM_NAME_BYTES: usize = 512;
pub const MAX_PARAM_DIMENSIONS: usize = 8;
pub const MAX_PARAMS: usize = 1 << 20;
pub const MAX_GROUPS: usize = 1024;
pub const MAX_WORLD_SIZE: u32 = 4096;
pub const MAX_MICRO_STEPS: u32 = 65536;
pub const MAX_SERVERS: usize = 4096;
/// Largest flat space of one job: 2^44 elements, 16 T parameters; byte counts stay far inside u64.
pub const MAX_ELEMENTS: u64 = 1 << 44;
/// Largest number of shards of one job; bounds per-shard bookkeeping before anything is allocated.
pub const MAX_SHARDS: u64 = 1 << 20;
/// A trainer's own resume data on a commit: random states and loader positions, not tensors.
pub const MAX_TRAINER_STATE_BYTES: usize = 1024 * 1024;
pub const MAX_PAUSE_REASON_BYTES: usize = 4096;
/// Slices of one pull: a whole large model layer by layer.
pub const MAX_PULL_SLICES: usize = 1 << 20;
/// Images kept of each shard, by version parity.
pub const IMAGES: u64 = 2;
/// Steps a worker may be ahead of the decided version: one exact, one more delayed.
pub const MAX_DELAY: u32 = 1;

/// Longest wait of one call when the caller names none.
pub const DEFAULT_DEADLINE_MS: u64 = 60_000;
/// Longest wait a caller may ask for.
pub const MAX_DEADLINE_MS: u64 = 24 * 3600 * 1000;

const _: () = {
    assert!(
        CHUNK_BYTES + CHUNK_HEADROOM_BYTES <= STOCK_MESSAGE_BYTES,
        "stock clients must be able to pull a chunk"
    );
    assert!(
        MAX_HEADER_BLOCK_BYTES >= MAX_HEADER_LIST_BYTES as usize,
        "headers that are small enough must fit their block"
    );
    assert!(CHUNK_BYTES.is_multiple_of(4096), "chunks must stay page aligned inside a shard");
    assert!(BLOCK_ELEMENTS.is_multiple_of(ALIGN_ELEMENTS), "blocks must start on aligned elements");
    assert!(DEFAULT_SHARD_ELEMENTS.is_multiple_of(BLOCK_ELEMENTS), "shards are whole blocks");
    assert!(MAX_SHARD_ELEMENTS.is_multiple_of(BLOCK_ELEMENTS), "shards are whole blocks");
    assert!(MAX_SHARD_ELEMENTS * 4 <= u32::MAX as u64 + 1, "byte offsets inside a shard must fit 32 bits");
    assert!(MAX_TRAINER_STATE_BYTES < STOCK_MESSAGE_BYTES, "a commit must fit one message");
};
