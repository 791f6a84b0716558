//! Every limit of the protocol, with the reason for its value. Relations between them are checked at compile time.

use std::time::Duration;

/// The elements of a block, which is the unit of norms, checksums and parallel update. At 14 bytes of state and
/// gradient an element a block is 900 KiB, so one block's working set stays in a core's 1 MiB L2.
pub const BLOCK_ELEMENTS: u64 = 64 * 1024;
/// Each parameter starts at a multiple of this: 64 fp32 elements are four cache lines, so no two parameters share one.
pub const ALIGN_ELEMENTS: u64 = 64;
/// How many elements share a scale in 8-bit state. bitsandbytes takes 256 too: larger groups lose more to one
/// outlier, and smaller ones pay more for scales (here 1.6 %).
pub const QUANTIZATION_ELEMENTS: usize = 256;
/// The default shard: 16 MiB of fp32 master weights, 8 MiB on a 16-bit wire.
pub const DEFAULT_SHARD_ELEMENTS: u64 = 4 * 1024 * 1024;
/// The largest shard: 1 Gi elements, so that offsets inside a shard fit 32 bits.
pub const MAX_SHARD_ELEMENTS: u64 = 1 << 30;

/// What a server's process takes beside what jobs are admitted with: code, threads, and what the allocator keeps of
/// messages. With two arenas (`memory::few_arenas`) it was up to 32 MB in the 12 configurations of docs/plan.md.
pub const PROCESS_BYTES: u64 = 32 * 1024 * 1024;

/// The most payload of one data-plane message.
pub const CHUNK_BYTES: usize = 1024 * 1024;
/// The HTTP/2 window of a server's data connection: how much a sender may have under way while the server does not
/// read. 16 ranks with two connections each filled windows of 16 MiB with 300 MiB; at 2 MiB pushes are as fast (0.85
/// of raw TCP).
pub const WINDOW_BYTES: usize = 2 * CHUNK_BYTES;
/// How many data connections a rank has to each server, unless its options say otherwise.
pub const DATA_CONNECTIONS: usize = 2;
/// What a server may hold for one data connection: its window, the frame being read, and what the allocator keeps of
/// earlier frames and of an upload's messages, which tonic's codec holds more than once.
pub const CONNECTION_BYTES: usize = WINDOW_BYTES + 5 * CHUNK_BYTES;
/// The memory that a connection also takes on a server where images are read from drives, or frozen weights from the
/// state: messages made, ready, and being sent. With sixteen ranks whose gradients were on the drives too, a
/// connection came to 9 MiB in all.
pub const SPILLED_PULL_BYTES: usize = 4 * CHUNK_BYTES;
/// How many exports of a job a server gives at once. Each of them reads all of its weights between two updates.
pub const MAX_EXPORTS_AT_ONCE: usize = 4;
/// How many checkpoints of a job a server writes at once: one of training's and one of an operator's.
pub const MAX_CHECKPOINTS_AT_ONCE: usize = 2;
/// The memory of a snapshot (an export, a checkpoint, a state hash) beside what the server's budget lends it while
/// training goes on.
pub const SNAPSHOT_BYTES: usize = 8 * 1024 * 1024;
/// How many connections a worker has to a server: control, data, and one that is made anew while the old one is not
/// yet found dead.
pub const CONNECTIONS_PER_RANK: usize = DATA_CONNECTIONS + 2;

// The limits that follow say what strangers can make a server hold: docs/limits.md adds it up.

/// How many connections a server takes beside those of its jobs' ranks.
pub const SPARE_CONNECTIONS: usize = 1024;
/// How many calls may be open at once on a connection. A worker has a dozen; gRPC's own guidance is 100.
pub const MAX_CONNECTION_CALLS: u32 = 128;
/// How many calls may be open at once on all connections. Beyond that, a connection that has more than
/// [`CALLS_SHARE`] is ended.
pub const MAX_CALLS: usize = 4096;
/// How many calls a connection may always have open, whatever strangers do. A worker needs so many.
pub const CALLS_SHARE: usize = 4;
/// The largest headers of a call as they are sent, ended or not. HTTP/2 alone allows them a frame and as much again
/// in five more.
pub const MAX_HEADER_BLOCK_BYTES: usize = 32 * 1024;
/// The largest headers of a call once they are unpacked; gRPC libraries allow 8 to 16 KiB.
pub const MAX_HEADER_LIST_BYTES: u32 = 16 * 1024;
/// How many bytes of unfinished frames and messages strangers' connections may hold together, beyond
/// [`UNFINISHED_SHARE_BYTES`] a connection and [`SMALL_MESSAGE_BYTES`] a call. It is four of the largest control
/// messages.
pub const MAX_UNFINISHED_BYTES: usize = 4 * MAX_CONTROL_MESSAGE_BYTES;
pub const UNFINISHED_SHARE_BYTES: usize = 64 * 1024;
/// Every control message is smaller, but for a job's description, a commit with a trainer's state, and uploads.
pub const SMALL_MESSAGE_BYTES: usize = 4 * 1024;
/// What a connection without a call costs a server, and what a waiting call costs it: tasks, HTTP/2's state, buffers.
pub const IDLE_CONNECTION_BYTES: usize = 48 * 1024;
pub const IDLE_CALL_BYTES: usize = 10 * 1024;
/// How many results of a Push call may wait for a sender that does not take them, until a rank's chunk has come on its
/// connection.
pub const STRANGER_RESULTS: usize = 4;
/// What they cost a call: as many lie in each of three messages that are encoded and not sent. The largest result quotes
/// the beginning of a wrong job name in 400 bytes.
pub const UNTAKEN_RESULTS_BYTES: usize = 4 * STRANGER_RESULTS * 400;
/// The most that strangers can make a server hold, whatever they send.
pub const STRANGERS_BYTES: usize = SPARE_CONNECTIONS * (IDLE_CONNECTION_BYTES + UNFINISHED_SHARE_BYTES)
    + (MAX_CALLS + SPARE_CONNECTIONS * CALLS_SHARE)
        * (IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES + UNTAKEN_RESULTS_BYTES)
    + MAX_UNFINISHED_BYTES;
/// Cost of a handshake under way. A server held 3 KiB for each of 256 without a first byte, 10 within a hello, 25 within a hello of
/// 16 KB, and 14 after its own answer. rustls takes at most 64 KiB of a handshake.
pub const HANDSHAKE_BYTES: usize = 112 * 1024;
/// The most that one end's certificates may have. The other end keeps them with the keys for as long as the connection lasts. A chain
/// of three certificates with RSA keys of 4096 bits has 6 KiB.
pub const MOST_CHAIN_BYTES: usize = 12 * 1024;
/// Cost of TLS for a connection, beside [`IDLE_CONNECTION_BYTES`]. rustls buffers 32 KiB of records that have come, 18 KiB of opened data,
/// and 64 KiB of records on their way out, which take up to 136 where each record is small. [`MOST_CHAIN_BYTES`] and the keys are the
/// rest.
pub const TLS_CONNECTION_BYTES: usize = 208 * 1024;
/// How much more strangers can make a server hold that speaks TLS.
pub const STRANGERS_TLS_BYTES: usize =
    SPARE_CONNECTIONS * TLS_CONNECTION_BYTES + MAX_HANDSHAKES * HANDSHAKE_BYTES;
/// How long a client may take to send its preface and settings, which it does as soon as it is connected.
pub const PREFACE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a TLS handshake may take, and how many may go on at once. One takes a round trip, and some thousandths of a
/// second of CPU time.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
pub const MAX_HANDSHAKES: usize = 256;
/// How long a connection may wait with its first call. A worker's data connections wait while the job is opened and
/// its weights are uploaded.
pub const FIRST_CALL_DEADLINE: Duration = Duration::from_secs(600);
/// How long a message may take once it has begun: the largest one at 3 Mbit/s.
pub const MESSAGE_DEADLINE: Duration = Duration::from_secs(60);

/// The largest message that stock gRPC clients accept unless told otherwise.
pub const STOCK_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Room for the fields beside a chunk's payload: ids and the job's name.
pub const CHUNK_HEADROOM_BYTES: usize = 4 * 1024;
/// The largest control message: a `JobSpec` with as many parameters as a large mixture of experts (60,000 at 200
/// bytes).
pub const MAX_CONTROL_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

pub const MAX_JOB_NAME_BYTES: usize = 128;
pub const MAX_PARAM_NAME_BYTES: usize = 512;
pub const MAX_PARAM_DIMENSIONS: usize = 8;
pub const MAX_PARAMS: usize = 1 << 20;
/// The most parameters of a job that leaves out those without a gradient: as many as a large mixture of experts has. Each
/// takes 20 bytes of a decided version's record once it was left out, and all fit beside the largest trainer state.
pub const MAX_LEAVE_OUT_PARAMS: usize = 1 << 16;
pub const MAX_GROUPS: usize = 1024;
pub const MAX_WORLD_SIZE: u32 = 4096;
/// As many as ranks, so that each can have one of its own.
pub const MAX_PARTITIONS: usize = MAX_WORLD_SIZE as usize;
/// The contributors of all partitions together. A spec that names them takes 300 KB on the wire.
pub const MAX_CONTRIBUTORS: usize = 1 << 16;
pub const MAX_MICRO_STEPS: u32 = 65536;
pub const MAX_SERVERS: usize = 4096;
/// The largest flat space of one job: 2^44 elements, 16 T parameters. Byte counts stay far inside u64.
pub const MAX_ELEMENTS: u64 = 1 << 44;
/// The largest number of shards of one job. It bounds per-shard bookkeeping before anything is allocated.
pub const MAX_SHARDS: u64 = 1 << 20;
/// The most resume data that a trainer may put on a commit: random states and loader positions, not tensors.
pub const MAX_TRAINER_STATE_BYTES: usize = 1024 * 1024;
pub const MAX_PAUSE_REASON_BYTES: usize = 4096;
/// The most slices of one pull: a whole large model layer by layer.
pub const MAX_PULL_SLICES: usize = 1 << 20;
/// How many images are kept of each shard, by version parity.
pub const IMAGES: u64 = 2;
/// How many steps a worker may be ahead of the decided version beyond one exact step.
pub const MAX_DELAY: u32 = 1;

/// The longest wait of one call when the caller names none.
pub const DEFAULT_DEADLINE_MS: u64 = 60_000;
/// The longest wait that a caller may ask for.
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
