//! Gradients on drives: their names, and the trait of a tier that writes and reads them.

use std::{
    ops::Range,
    sync::mpsc::{self, Receiver},
};

use longshore_proto::{Fault, JobSpec, Layout, ShardId};

use super::fault::internal;
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    io::Direction,
    memory::Region,
};

/// Returns the bytes that a shard's contributions and its sums take, in all gradient slots.
pub(crate) fn gradient_bytes(spec: &JobSpec, layout: &Layout, shard: ShardId) -> (u64, u64) {
    let contributors = layout.contributors(shard);
    let elements = layout.shard_len(shard) * spec.gradient_slots() as u64;
    let sum = if spec.accumulates(contributors) { 4 } else { 0 };
    (elements * spec.gradient_dtype.bytes() * contributors.len() as u64, elements * sum)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Contribution(Contributor),
    /// The sum of all contributors and micro-steps so far, in fp32.
    Sum,
}

/// Name of a stored gradient: the owned shard, the step's gradient slot, and the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientId {
    pub owned: OwnedShard,
    pub slot: GradientSlot,
    pub kind: Kind,
}

/// A thread of the disk calls this with the buffer once the transfer has ended.
pub type Moved = Box<dyn FnOnce(Region, Result<(), Fault>) + Send>;

/// The drives' room for the gradients of the steps in flight. Gradients die with the process, as they would in DRAM,
/// and workers send them again.
pub trait GradientStore: Send + Sync {
    /// Starts moving a buffer's first bytes to or from `within` a gradient.
    fn start(&self, direction: Direction, id: GradientId, within: Range<usize>, buffer: Region, done: Moved);

    /// Reserves space for a shard that shall come to this server.
    fn make_room(&self, owned: OwnedShard) -> Result<(), Fault>;

    /// Gives back the space of a shard that another server owns from now on.
    fn release(&self, owned: OwnedShard);

    /// Names a gradient in an error.
    fn describe(&self, id: GradientId) -> String;

    fn written_bytes(&self) -> u64;
}

pub struct Transfer {
    done: Receiver<Result<Region, Fault>>,
}

impl Transfer {
    /// Starts moving a whole gradient of `bytes` bytes to or from a buffer's first bytes.
    pub fn start(
        store: &dyn GradientStore,
        direction: Direction,
        id: GradientId,
        bytes: usize,
        buffer: Region,
    ) -> Transfer {
        let (sender, done) = mpsc::channel();
        let moved = move |buffer, result: Result<(), Fault>| {
            let _ = sender.send(result.map(|()| buffer));
        };
        store.start(direction, id, 0..bytes, buffer, Box::new(moved));
        Transfer { done }
    }

    pub fn wait(self) -> Result<Region, Fault> {
        self.done.recv().unwrap_or_else(|_| Err(internal("the disk's thread has ended", "running")))
    }
}
