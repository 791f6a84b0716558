//! Tiers: storage of a job's state. The step protocol is the same on every tier, and only `factory` knows the kind.
//! `job` calls them through `contract`.

mod claim;
mod contract;
mod factory;
mod fault;
mod folder;
mod gradients;
pub mod inspect;
mod memory;
pub mod nvme;
mod record;
mod shm;
mod state;
mod storage;
mod stored;

pub use claim::{Claim, give_up_missing};
pub use contract::{
    Durable, ImageAge, ImageStore, Interrupted, KeptMemory, Opened, Recovered, Store, Taken, Tier,
    WriteBehind,
};
pub(crate) use factory::{format, shard_need};
pub use factory::{free_space, keeps_buffers, need, open, space};
pub(crate) use fault::without_place_in_tmpfs;
pub use folder::Header;
pub(crate) use folder::places;
pub(crate) use gradients::gradient_bytes;
pub use gradients::{GradientId, GradientStore, Kind, Moved, Transfer};
pub use state::{Guard, Guarded, Shape, StateMut, StateRef, Turn};
pub use storage::{DEFAULT_BUFFERS, Inputs, Spill, Storage, StoreNeed};
pub use stored::{Stored, StoredJob, delete_stored, finish_interrupted, stored_jobs};
