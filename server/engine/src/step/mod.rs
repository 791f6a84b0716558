//! The step protocol as plain structs: events in, decisions out. No buffers, no threads, no clock. `job::Protocol` owns
//! the machine and calls it under its lock, on any thread.

mod admit;
mod broken;
mod decide;
mod handover;
mod machine;
mod members;
mod pause;
mod refusal;
mod shard;
mod statements;
mod view;
mod wish;

pub use handover::Awaited;
pub use machine::{Admission, Machine, Phase, Sum, Ticket, Work};
pub use refusal::Refusal;
pub use view::{Progress, RankProgress, Restoring};
pub use wish::Wanted;
