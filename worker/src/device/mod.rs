//! Memory of the host and of accelerators behind one trait, `Device`. Allocation enforces a budget, so "this model
//! does not fit" is the same typed error on any machine.
//!
//! A framework can bring its own device: an implementation of [`Device`], with memory in [`Buffer`] and
//! [`HostBuffer`]. An [`Event`] reports the end of a copy.

mod budget;
mod buffer;
mod choice;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod pool;

pub use budget::{Budget, Lease};
pub use buffer::{Buffer, Event, HostBuffer, HostMemory, Transfer};
pub use choice::DeviceChoice;
#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;
pub use host::HostDevice;
pub use pool::{BufferPool, PooledBuffer};

use crate::error::{Result, Shortage};

/// A place for tensors. Frameworks compute; a device allocates, copies and counts. All sizes and offsets are in
/// bytes. Elements are little-endian and without gaps, so a parameter's range in a layout is its range in a
/// buffer.
///
/// Buffers belong to the device that allocated them. Any thread may call a device.
pub trait Device: Send + Sync {
    /// The device's name in messages, such as `cuda:0`.
    fn name(&self) -> &str;

    /// The budget of allocations and reservations. [`Device::allocate`] respects it.
    fn budget(&self) -> &Budget;

    /// Allocates `bytes` of device memory with undefined contents. A lease of the budget lasts until the last
    /// clone of the buffer is dropped. `field` names the use of the memory, for the error.
    ///
    /// # Errors
    /// `Shortage` if the budget is used up; `Device` if the device itself refuses.
    fn allocate(&self, field: &str, bytes: u64) -> Result<Buffer>;

    /// Allocates `bytes` zeroed bytes of the host memory that this device copies fastest, for example page-locked
    /// memory. Host memory does not count in the device's budget.
    ///
    /// # Errors
    /// `Device` if the host has no such memory.
    fn allocate_host(&self, bytes: u64) -> Result<HostBuffer>;

    /// Starts a copy of all of `source` to `target` at byte `offset`. The transfer returns the host buffer at the
    /// end. Copies of one device run in the order in which they start.
    ///
    /// # Errors
    /// `Device` if the copy exceeds the buffer, if a buffer is another device's, or if the device refuses. The
    /// host buffer is then lost.
    fn copy_in(&self, source: HostBuffer, target: &Buffer, offset: u64) -> Result<Transfer>;

    /// Starts a copy that fills all of `target` from `source` at byte `offset`. The framework's own writes to that
    /// range must be finished.
    ///
    /// # Errors
    /// Errors of [`Device::copy_in`].
    fn copy_out(&self, source: &Buffer, offset: u64, target: HostBuffer) -> Result<Transfer>;

    /// Counts memory that a framework allocates itself.
    ///
    /// # Errors
    /// If the budget is used up.
    fn reserve(&self, field: &str, bytes: u64) -> Result<Lease, Shortage> {
        self.budget().reserve(field, bytes)
    }
}
