//! The step protocol as plain structs: events in, decisions out. No buffers, no threads, no clock.

mod admit;
mod bitmap;
mod decide;
mod machine;
mod members;
mod pause;
mod progress;
mod reads;
mod refusal;
mod scale;
mod shard;
mod view;

pub use machine::{Admission, Machine, Phase, Sum, Ticket, Work};
pub use progress::{Progress, RankProgress, Restoring};
pub use refusal::Refusal;
