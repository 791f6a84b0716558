//! Memory of the machine and of accelerators behind one small trait, with a budget that allocation enforces, so that
//! "this model does not fit" is the same typed error on any machine.

mod budget;
mod choice;
#[cfg(feature = "cuda")]
mod cuda;
mod host;
mod pool;

use std::{any::Any, fmt, sync::Arc};

pub use budget::{Budget, Lease};
pub use choice::DeviceChoice;
#[cfg(feature = "cuda")]
pub use cuda::CudaDevice;
pub use host::HostDevice;
pub use pool::{Pool, PooledBuffer};

use crate::error::{DeviceError, Result, Shortage};

/// Where tensors live. Frameworks do the arithmetic; this allocates, copies and counts.
pub trait Device: Send + Sync {
    fn name(&self) -> &str;

    fn budget(&self) -> &Budget;

    /// `bytes` of the device's memory, contents undefined. `field` says what for, in the error.
    fn allocate(&self, field: &str, bytes: u64) -> Result<Buffer>;

    /// Host memory this device copies from and to fastest: page-locked where that matters.
    fn allocate_host(&self, bytes: u64) -> Result<HostBuffer>;

    /// Starts copying all of `source` to `target` at byte `offset`. The host buffer comes back when the copy is done.
    /// Copies of one device run in the order they were started.
    fn copy_in(&self, source: HostBuffer, target: &Buffer, offset: u64) -> Result<Transfer>;

    /// Starts filling `target` from `source` at byte `offset`.
    fn copy_out(&self, source: &Buffer, offset: u64, target: HostBuffer) -> Result<Transfer>;

    /// Counts memory that a framework allocates by itself.
    fn reserve(&self, field: &str, bytes: u64) -> Result<Lease, Shortage> {
        self.budget().reserve(field, bytes)
    }
}

/// Memory of a device; freed and given back to the budget with its last clone.
#[derive(Clone)]
pub struct Buffer {
    memory: Arc<dyn Any + Send + Sync>,
    bytes: u64,
    address: Option<u64>,
}

impl Buffer {
    fn new<M: Any + Send + Sync>(memory: M, bytes: u64, address: Option<u64>) -> Buffer {
        Buffer { memory: Arc::new(memory), bytes, address }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device address, to hand to a framework; None on the host.
    pub fn address(&self) -> Option<u64> {
        self.address
    }

    /// The memory as `M`, after checking that `bytes` from `offset` lie inside.
    fn of<M: Any>(&self, device: &str, offset: u64, bytes: u64) -> Result<&M, DeviceError> {
        let fail = |cause: String, remedy| DeviceError { device: device.into(), call: "copy", cause, remedy };
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let cause = format!("{bytes} bytes at {offset} in a buffer of {}", self.bytes);
            return Err(fail(cause, "copy inside the buffer"));
        }
        let remedy = "copy through the device that allocated the buffer";
        self.memory.downcast_ref().ok_or_else(|| fail("the buffer is another device's".into(), remedy))
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer {{ bytes: {}, address: {:?} }}", self.bytes, self.address)
    }
}

/// Bytes of host memory that a device can copy.
trait HostMemory: Send {
    fn bytes(&self) -> &[u8];
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl HostMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// Host memory, owned by whoever may touch it: during a copy, by the copy.
pub struct HostBuffer(Box<dyn HostMemory>);

impl std::ops::Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl std::ops::DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// Something on a device that will have happened.
trait Event: Send {
    fn is_done(&self) -> Result<bool>;
    fn wait(&self) -> Result<()>;
}

/// A copy under way. It owns both ends until it is done; dropped, it waits.
pub struct Transfer {
    host: Option<HostBuffer>,
    device: Option<Buffer>,
    /// None: done when it was made.
    event: Option<Box<dyn Event>>,
}

impl Transfer {
    pub fn is_done(&self) -> Result<bool> {
        self.event.as_ref().map_or(Ok(true), |event| event.is_done())
    }

    /// Blocks until the copy is done and gives the host buffer back.
    pub fn wait(mut self) -> Result<HostBuffer> {
        if let Some(event) = self.event.take()
            && let Err(error) = event.wait()
        {
            self.leak();
            return Err(error);
        }
        // `host` is there from construction to here, since `wait` takes the transfer.
        Ok(self.host.take().unwrap_or_else(|| HostBuffer(Box::new(Vec::new()))))
    }

    /// After a failed wait the device may still write: memory lost is better than memory corrupted.
    fn leak(&mut self) {
        std::mem::forget((self.host.take(), self.device.take()));
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let Some(event) = self.event.take()
            && let Err(error) = event.wait()
        {
            tracing::error!(%error, "a copy could not be awaited; its memory is kept");
            self.leak();
        }
    }
}
