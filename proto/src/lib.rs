//! The contract between workers and servers: validated domain types and limits.
//!
//! The messages lie beside this crate in `longshore/v1`, and their generated code in `longshore-wire`.
//! `longshore-wire` converts a message into a domain type once, or names the wrong field in an error.

pub mod checksum;
pub mod commit;
pub mod contribution;
pub mod dtype;
pub mod fault;
pub mod hyper;
pub mod ids;
pub mod job;
pub mod layout;
pub mod left_out;
pub mod legible;
pub mod limits;
mod named;
pub mod partition;
pub mod placement;
pub mod properties;
pub mod remedies;
pub mod state;

pub use commit::{Commit, Correction, DECISION_AWAITED, STATE_AWAITED};
pub use contribution::{Contribution, ContributionChunk, Origin, Reads};
pub use dtype::Dtype;
pub use fault::{Fault, FaultKind};
pub use hyper::{Hyper, Moment, Rule};
pub use ids::{BlockId, ChunkId, Epoch, Incarnation, MicroStep, Rank, ServerId, ShardId, Step, Version};
pub use job::{JobName, JobSpec};
pub use layout::{Layout, Param, Slice};
pub use left_out::LeftOut;
pub use legible::{legible, legible_lines};
pub use partition::Partition;
pub use placement::{Handover, NO_SERVER, Placement, PlacementChange, check_max_exposed};
pub use properties::{JobProperties, Lifetime, TierKind};
pub use state::{Formats, MasterFormat, StateArray, StateFormat};
