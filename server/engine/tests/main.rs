//! The engine's tests through its public objects, as one program.

mod arrival;
mod checkpoint;
mod common;
mod filled;
mod killed;
mod machine;
mod moves;
mod recovery;
mod refusals;
mod same_bits;
mod snapshots;
mod storage;
