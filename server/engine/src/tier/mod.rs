//! Tiers: storage of a job's state. The step protocol is the same on every tier, and only `factory` knows the
//! kind.

mod claim;
mod contract;
mod factory;
mod fault;
mod folder;
mod gradients;
pub mod inspect;
mod memory;
mod need;
pub mod nvme;
mod record;
mod removal;
mod report;
mod shm;
mod state;
mod storage;
mod stored;
mod watch;

pub use claim::{Claim, give_up_missing};
pub use contract::{
    Durable, Guard, ImageAge, ImageStore, Interrupted, KeptMemory, KeptShard, Opened, Recovered, Store,
    Taken, Tier, Together, Turn, Unguarded, WriteBehind,
};
pub use factory::{keeps_buffers, need, open};
pub use folder::Header;
pub use gradients::{GradientId, GradientStore, Kind, Moved, Transfer};
pub use need::StoreNeed;
pub use removal::{delete_stored, finish_interrupted};
pub use state::{Shape, StateMut, StateRef};
pub use storage::{Inputs, Spill, Storage};
pub use stored::{Stored, StoredJob, stored_jobs};
