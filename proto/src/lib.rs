//! The contract between workers and servers: validated domain types, limits, and (feature `wire`) generated code.
//!
//! Wire types stop at the edge: a message becomes a domain type once, in `wire::convert`, or an error that says which
//! field is wrong. The engine uses the domain types alone and builds without the `wire` feature.

pub mod checksum;
pub mod commit;
pub mod contribution;
pub mod dtype;
pub mod fault;
pub mod hyper;
pub mod ids;
pub mod job;
pub mod layout;
pub mod limits;
pub mod placement;
pub mod state;
#[cfg(feature = "wire")]
pub mod wire;

pub use commit::Commit;
pub use contribution::{Contribution, ContributionChunk, Origin, Reads};
pub use dtype::Dtype;
pub use fault::{Fault, FaultKind};
pub use hyper::{Hyper, Rule};
pub use ids::{BlockId, ChunkId, Epoch, Incarnation, MicroStep, Rank, ServerId, ShardId, Step, Version};
pub use job::{JobName, JobSpec, TierKind};
pub use layout::{Layout, Param, Slice};
pub use placement::Placement;
pub use state::{Formats, MasterFormat, StateFormat};
