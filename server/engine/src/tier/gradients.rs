//! Gradients on drives: their names, and the trait of a tier that writes and reads them.

use std::{
    ops::Range,
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use longshore_proto::{Fault, FaultKind, JobSpec, Layout, ShardId};

use super::fault::{FIELD, internal};
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    io::{Direction, SILENCE},
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

    /// Returns the fault of a drive that has owed answers for too long.
    fn check(&self, now: Instant) -> Result<(), Fault>;

    /// Reserves space for a shard that shall come to this server.
    fn make_room(&self, owned: OwnedShard) -> Result<(), Fault>;

    /// Gives back the space of a shard that another server owns from now on.
    fn release(&self, owned: OwnedShard);

    /// Names a gradient in an error.
    fn describe(&self, id: GradientId) -> String;

    fn written_bytes(&self) -> u64;
}

pub struct Transfer {
    /// Names the gradient in an error.
    of: String,
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
        Transfer { of: store.describe(id), done }
    }

    /// Waits for the buffer. If the drive is silent for too long, the disk keeps the buffer.
    pub fn wait(self) -> Result<Region, Fault> {
        self.wait_for(SILENCE)
    }

    fn wait_for(self, patience: Duration) -> Result<Region, Fault> {
        self.done.recv_timeout(patience).unwrap_or_else(|error| match error {
            RecvTimeoutError::Disconnected => Err(internal("the disk's thread has ended", "running")),
            RecvTimeoutError::Timeout => {
                let value = format!("{} (silent for {} s)", self.of, patience.as_secs());
                let remedy = "see the kernel's log for the device";
                Err(Fault::new(FaultKind::Deadline, FIELD, value, "answering", remedy))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::memory::Slab;

    /// Gradients on a drive that answers nothing.
    #[derive(Default)]
    struct Silent(Mutex<Vec<Moved>>);

    impl GradientStore for Silent {
        fn start(&self, _: Direction, _: GradientId, _: Range<usize>, _: Region, done: Moved) {
            crate::lock(&self.0).push(done);
        }

        fn check(&self, _: Instant) -> Result<(), Fault> {
            Ok(())
        }

        fn make_room(&self, _: OwnedShard) -> Result<(), Fault> {
            Ok(())
        }

        fn release(&self, _: OwnedShard) {}

        fn describe(&self, _: GradientId) -> String {
            "/mnt/a/gradients".into()
        }

        fn written_bytes(&self) -> u64 {
            0
        }
    }

    #[test]
    fn a_wait_for_a_silent_drive_ends() {
        let store = Silent::default();
        let buffer = Slab::allocate(4096).unwrap().carve_here(&[4096]).remove(0);
        let id = GradientId { owned: OwnedShard(0), slot: GradientSlot(0), kind: Kind::Sum };
        let transfer = Transfer::start(&store, Direction::Read, id, 4096, buffer);
        let fault = transfer.wait_for(Duration::ZERO).err().unwrap();
        assert_eq!((fault.kind, &*fault.value), (FaultKind::Deadline, "/mnt/a/gradients (silent for 0 s)"));
    }
}
