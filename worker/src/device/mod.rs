//! Memory of the machine and of accelerators behind one small trait. Allocation enforces a budget, so that "this
//! model does not fit" is the same typed error on any machine.
//!
//! A framework brings its own device: it implements [`Device`], keeps what memory it likes in a [`Buffer`] and a
//! [`HostBuffer`], and tells with an [`Event`] when a copy is done.

mod budget;
mod buffer;
mod choice;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod pool;
mod transfer;

pub use budget::{Budget, Lease};
pub use buffer::{Buffer, HostBuffer, HostMemory};
pub use choice::DeviceChoice;
#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;
pub use host::HostDevice;
pub use pool::{BufferPool, PooledBuffer};
pub use transfer::{Event, Transfer};

use crate::error::{Result, Shortage};

/// A place where tensors live. Frameworks do the arithmetic; a device allocates, copies and counts. All sizes and offsets are
/// in bytes. The bytes are little-endian elements without gaps, so a parameter's range in a layout is its range here.
///
/// A buffer belongs to the device that allocated it. Calls may come from any thread.
pub trait Device: Send + Sync {
    /// The device's name in messages, such as `cuda:0`.
    fn name(&self) -> &str;

    /// The budget for what is allocated and reserved. [`Device::allocate`] keeps to it.
    fn budget(&self) -> &Budget;

    /// Allocates `bytes` of the device's memory, whose contents are undefined. The memory holds a lease of the budget until
    /// the last clone of the buffer is dropped. `field` says what the memory is for, in the error.
    ///
    /// # Errors
    /// `Shortage` where the budget is used up; `Device` where the device itself refuses.
    fn allocate(&self, field: &str, bytes: u64) -> Result<Buffer>;

    /// Allocates `bytes` zero bytes of the host memory that this device copies from and to fastest: page-locked memory where
    /// that matters. It does not count in the device's budget.
    ///
    /// # Errors
    /// `Device` where the host has no such memory.
    fn allocate_host(&self, bytes: u64) -> Result<HostBuffer>;

    /// Starts copying all of `source` to `target` at byte `offset`. The host buffer comes back when the copy is done.
    /// Copies of one device run in the order in which they were started.
    ///
    /// # Errors
    /// `Device` where the copy reaches beyond the buffer, where a buffer is another device's, and where the device refuses.
    /// The host buffer is lost then.
    fn copy_in(&self, source: HostBuffer, target: &Buffer, offset: u64) -> Result<Transfer>;

    /// Starts filling all of `target` from `source` at byte `offset`. A framework's own work that writes there must be
    /// finished.
    ///
    /// # Errors
    /// As [`Device::copy_in`].
    fn copy_out(&self, source: &Buffer, offset: u64, target: HostBuffer) -> Result<Transfer>;

    /// Counts memory that a framework allocates by itself.
    ///
    /// # Errors
    /// The budget is used up.
    fn reserve(&self, field: &str, bytes: u64) -> Result<Lease, Shortage> {
        self.budget().reserve(field, bytes)
    }
}
