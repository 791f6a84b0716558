//! Every limit of the protocol, with the reason for its value. Compile-time assertions check relations between limits.

use std::{ops::RangeInclusive, time::Duration};

/// Number of the protocol. A new field that changes a result's bits or a message's meaning raises the number.
pub const PROTOCOL: u32 = 1;

/// Elements of a block, the unit of norms, checksums and parallel update. At 14 bytes of state and gradient an element,
/// a block is 900 KiB. Its working set then stays in a core's 1 MiB L2.
pub const BLOCK_ELEMENTS: u64 = 64 * 1024;
/// Alignment of each parameter's start: 64 fp32 elements are four cache lines, so no two parameters share a line.
pub const ALIGN_ELEMENTS: u64 = 64;
/// Elements that share a scale in 8-bit state, as in bitsandbytes. Larger groups lose more to one outlier; smaller
/// groups pay more for scales (here 1.6 %).
pub const QUANTIZATION_ELEMENTS: usize = 256;
/// Default shard: 16 MiB of fp32 master weights, 8 MiB on a 16-bit wire.
pub const DEFAULT_SHARD_ELEMENTS: u64 = 4 * 1024 * 1024;
/// Largest shard: 1 Gi elements, so that offsets inside a shard fit 32 bits.
pub const MAX_SHARD_ELEMENTS: u64 = 1 << 30;

/// Memory of a server's process beside its jobs' admitted need: code, threads, and the allocator's cache of messages.
/// With two arenas (`memory::few_arenas`) a process took up to 32 MB in the 12 configurations of docs/plan.md.
pub const PROCESS_BYTES: u64 = 32 * 1024 * 1024;

/// Part of a step's time that updates may wait for moving shards, unless an operator sets another part. A move then
/// makes a step at most a twentieth longer.
pub const DEFAULT_MAX_EXPOSED: f64 = 0.05;

/// Largest payload of one data-plane message.
pub const CHUNK_BYTES: usize = 1024 * 1024;
/// HTTP/2 window of a server's data connection: bytes in flight while the server does not read. With windows of 16 MiB,
/// 16 ranks with two connections each had 300 MiB in flight. Pushes are as fast with 2 MiB: 0.85 of raw TCP.
pub const WINDOW_BYTES: usize = 2 * CHUNK_BYTES;
/// Default number of data connections from a rank to each server.
pub const DATA_CONNECTIONS: usize = 2;
/// Largest memory of one data connection on a server: its window, the current frame, and memory that the allocator
/// keeps. The allocator keeps several earlier frames and upload messages, since tonic's codec buffers each message
/// twice.
pub const CONNECTION_BYTES: usize = WINDOW_BYTES + 5 * CHUNK_BYTES;
/// Additional memory of a connection if images are read from drives, or frozen weights from the state. The memory holds
/// messages built, queued and being sent. With sixteen ranks, and gradients on drives too, a connection took 9 MiB in
/// all.
pub const SPILLED_PULL_BYTES: usize = 4 * CHUNK_BYTES;
/// Largest number of exports of one job that a server serves at once. Each export reads all of the job's weights
/// between two updates.
pub const MAX_EXPORTS_AT_ONCE: usize = 4;
/// Largest number of checkpoints of one job that a server writes at once: training's and an operator's.
pub const MAX_CHECKPOINTS_AT_ONCE: usize = 2;
/// Memory of a snapshot (export, checkpoint, state hash) beside the memory that the server's budget lends to it.
pub const SNAPSHOT_BYTES: usize = 8 * 1024 * 1024;
/// Connections from a worker to a server: one for control, [`DATA_CONNECTIONS`], and a replacement while a dead
/// connection is undetected.
pub const CONNECTIONS_PER_RANK: usize = DATA_CONNECTIONS + 2;

// The limits below bound the memory that strangers can make a server hold; docs/limits.md adds them up.

/// Connections that a server accepts beside the connections of its jobs' ranks.
pub const SPARE_CONNECTIONS: usize = 1024;
/// Number of connections that one identity, or one address, must leave to others. A quarter of all connections is
/// enough where that is fewer.
pub const OTHERS_CONNECTIONS: usize = 256;
/// Number of connections of the Unix socket that are accepted beyond the limit of all connections. Connections of root
/// and of the server's own user are always accepted.
pub const LOCAL_CONNECTIONS: usize = 16;
/// Largest number of open calls on one connection. A worker has a dozen; gRPC's own guidance is 100.
pub const MAX_CONNECTION_CALLS: u32 = 128;
/// Largest number of open calls on all connections. Beyond the limit, the server closes a connection with more than
/// [`CALLS_SHARE`] calls.
pub const MAX_CALLS: usize = 4096;
/// Number of calls that a connection may always have open, even if strangers' calls exceed [`MAX_CALLS`]. A worker
/// needs this many.
pub const CALLS_SHARE: usize = 4;
/// Largest header block of a call as sent, complete or not. The crate h2 alone would allow a whole frame of headers and
/// further frames after it.
pub const MAX_HEADER_BLOCK_BYTES: usize = 32 * 1024;
/// Largest headers of a call once unpacked; gRPC libraries allow 8 to 16 KiB.
pub const MAX_HEADER_LIST_BYTES: u32 = 16 * 1024;
/// Bytes that all connections together may make a server hold. Incomplete frames and messages count, and answers that
/// wait for their readers. Four of the largest control messages fit. [`UNFINISHED_SHARE_BYTES`] a connection,
/// [`SMALL_MESSAGE_BYTES`] a call and [`RANK_SHARE_BYTES`] a rank's connection come on top.
pub const MAX_UNFINISHED_BYTES: usize = 4 * MAX_CONTROL_MESSAGE_BYTES;
/// Largest part of [`MAX_UNFINISHED_BYTES`] that one identity, or one address, may hold. The largest description of a
/// job fits.
pub const SHARE_BYTES: usize = MAX_UNFINISHED_BYTES / 4 * 3;
/// Bytes that a rank's connection may hold beside the shared room. Admission has counted them in [`CONNECTION_BYTES`].
pub const RANK_SHARE_BYTES: usize = 4 * CHUNK_BYTES;
/// Time limit for a peer to read an answer, as [`MESSAGE_DEADLINE`] is the time limit to send a message.
pub const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
pub const UNFINISHED_SHARE_BYTES: usize = 64 * 1024;
/// Control messages are smaller, except a job's description, a commit with trainer state, and uploads.
pub const SMALL_MESSAGE_BYTES: usize = 4 * 1024;
/// Memory of a connection without a call, and of a waiting call: tasks, HTTP/2 state, buffers.
pub const IDLE_CONNECTION_BYTES: usize = 48 * 1024;
pub const IDLE_CALL_BYTES: usize = 10 * 1024;
/// Largest number of a Push call's results that wait for a sender that does not read them. The limit ends when a rank's
/// chunk has arrived on the connection.
pub const STRANGER_RESULTS: usize = 4;
/// Memory of a stranger's waiting results in one call. [`STRANGER_RESULTS`] wait, and each of three encoded, unsent
/// messages holds as many again. The largest result quotes the beginning of a wrong job name in 400 bytes.
pub const UNTAKEN_RESULTS_BYTES: usize = 4 * STRANGER_RESULTS * 400;
/// Largest memory that strangers can make a server hold.
pub const STRANGERS_BYTES: usize = SPARE_CONNECTIONS * (IDLE_CONNECTION_BYTES + UNFINISHED_SHARE_BYTES)
    + (MAX_CALLS + SPARE_CONNECTIONS * CALLS_SHARE)
        * (IDLE_CALL_BYTES + SMALL_MESSAGE_BYTES + UNTAKEN_RESULTS_BYTES)
    + MAX_UNFINISHED_BYTES;
/// Memory of a handshake in progress. With 256 handshakes at once a server held 3 KiB for each without a first byte. In
/// later stages it held 10 to 25 KiB. The limit is higher, since rustls accepts up to 64 KiB of a handshake.
pub const HANDSHAKE_BYTES: usize = 112 * 1024;
/// Largest size of one end's certificates. The peer keeps them with the keys for the lifetime of the connection. A
/// chain of three certificates with RSA keys of 4096 bits has 6 KiB.
pub const MOST_CHAIN_BYTES: usize = 12 * 1024;
/// Memory of TLS for a connection, beside [`IDLE_CONNECTION_BYTES`]. The buffers in rustls have 32 KiB of received
/// records and 18 KiB of decrypted data. Outgoing records take 64 KiB, and up to 136 KiB if each is small.
/// [`MOST_CHAIN_BYTES`] and the keys take the remaining bytes.
pub const TLS_CONNECTION_BYTES: usize = 208 * 1024;
/// Additional memory that strangers can make a server hold if it speaks TLS.
pub const STRANGERS_TLS_BYTES: usize =
    SPARE_CONNECTIONS * TLS_CONNECTION_BYTES + MAX_HANDSHAKES * HANDSHAKE_BYTES;
/// Time limit for a client's preface and settings, which a client sends at once.
pub const PREFACE_DEADLINE: Duration = Duration::from_secs(10);
/// Time limit of a TLS handshake, and the number of concurrent handshakes. A handshake takes one round trip and some
/// milliseconds of CPU time.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
pub const MAX_HANDSHAKES: usize = 256;
/// Time limit for a connection's first call. A worker's data connections wait while the job is opened and its weights
/// are uploaded.
pub const FIRST_CALL_DEADLINE: Duration = Duration::from_secs(600);
/// Time limit of a message from its first byte. The largest message arrives in time at 3 Mbit/s.
pub const MESSAGE_DEADLINE: Duration = Duration::from_secs(60);

/// Largest message that stock gRPC clients accept by default.
pub const STOCK_MESSAGE_BYTES: usize = 4 * 1024 * 1024;
/// Room for the fields beside a chunk's payload: ids and the job's name.
pub const CHUNK_HEADROOM_BYTES: usize = 4 * 1024;
/// Largest control message: a `JobSpec` with 60,000 parameters of 200 bytes, as in a large mixture of experts.
pub const MAX_CONTROL_MESSAGE_BYTES: usize = 16 * 1024 * 1024;

pub const MAX_JOB_NAME_BYTES: usize = 128;
pub const MAX_PARAM_NAME_BYTES: usize = 512;
pub const MAX_PARAM_DIMENSIONS: usize = 8;
pub const MAX_PARAMS: usize = 1 << 20;
/// Largest number of parameters of a job with `leave_out`: as many as a large mixture of experts has. Each left-out
/// parameter takes 20 bytes of a version's record. All of them fit beside the largest trainer state.
pub const MAX_LEAVE_OUT_PARAMS: usize = 1 << 16;
pub const MAX_GROUPS: usize = 1024;
pub const MAX_WORLD_SIZE: u32 = 4096;
/// The number of ranks, so that each rank can have a partition of its own.
pub const MAX_PARTITIONS: usize = MAX_WORLD_SIZE as usize;
/// Largest number of contributors of all partitions together. A spec with so many takes 300 KB on the wire.
pub const MAX_CONTRIBUTORS: usize = 1 << 16;
pub const MAX_MICRO_STEPS: u32 = 65536;
pub const MAX_SERVERS: usize = 4096;
/// Largest flat space of one job: 2^44 elements, 16 T parameters. Byte counts stay far inside u64.
pub const MAX_ELEMENTS: u64 = 1 << 44;
/// Largest number of shards of one job. The limit bounds per-shard bookkeeping before any allocation.
pub const MAX_SHARDS: u64 = 1 << 20;
/// Largest number of handovers in flight that a plan makes. A version's record names each in about 60 bytes.
pub const MAX_MOVING_SHARDS: usize = 4096;
/// Largest number of shards of a server with tier `nvme` that gains shards while no rank is connected. The server
/// writes no new table of checksums then, and the version's record has about 120 bytes for each fetched shard.
pub const MAX_FETCHED_SHARDS: usize = 12_000;
/// Largest resume data that a trainer may attach to a commit: random states and loader positions, not tensors.
pub const MAX_TRAINER_STATE_BYTES: usize = 1024 * 1024;
pub const MAX_PAUSE_REASON_BYTES: usize = 4096;
/// Largest number of slices of one pull. A waiting pull keeps its slices in memory, up to a day. With slices of 4 Mi
/// elements a pull reaches 64 Gi elements.
pub const MAX_PULL_SLICES: usize = 1 << 14;
/// Largest delay of a job. With delay 1, step t+1 computes with version t-1.
pub const MAX_DELAY: u32 = 1;

/// Range of loss scale x world size x micro-steps. Gradients are multiplied by the inverse, so the inverse must be a
/// finite f32 above 0. An infinite inverse would make NaN of a gradient of 0.
pub const GRADIENT_SCALES: RangeInclusive<f64> = 1e-30..=1e40;

/// Longest wait of a call that names no deadline.
pub const DEFAULT_DEADLINE_MS: u64 = 60_000;
/// Longest wait that a caller may ask for.
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
    assert!(WINDOW_BYTES + RANK_SHARE_BYTES < CONNECTION_BYTES, "admission must count a rank's own share");
    assert!(CHUNK_BYTES.is_multiple_of(4096), "chunks must stay page aligned inside a shard");
    assert!(BLOCK_ELEMENTS.is_multiple_of(ALIGN_ELEMENTS), "blocks must start on aligned elements");
    assert!(DEFAULT_SHARD_ELEMENTS.is_multiple_of(BLOCK_ELEMENTS), "shards are whole blocks");
    assert!(MAX_SHARD_ELEMENTS.is_multiple_of(BLOCK_ELEMENTS), "shards are whole blocks");
    assert!(MAX_SHARD_ELEMENTS * 4 <= u32::MAX as u64 + 1, "byte offsets inside a shard must fit 32 bits");
    assert!(MAX_TRAINER_STATE_BYTES < STOCK_MESSAGE_BYTES, "a commit must fit one message");
};
