//! Buffers of a device, host buffers for its copies, and the copies. Only the device knows the buffers' concrete type.

use std::{any::Any, fmt, ops, sync::Arc};

use crate::error::{DeviceError, Result};

/// Device memory. Dropping the last clone frees the memory, and returns its bytes to the budget.
#[derive(Clone)]
pub struct Buffer {
    memory: Arc<dyn Any + Send + Sync>,
    bytes: u64,
}

impl Buffer {
    /// Wraps memory that a device allocated. Dropping `memory` frees it and its lease of the device's budget.
    pub fn new<M: Any + Send + Sync>(memory: M, bytes: u64) -> Buffer {
        Buffer { memory: Arc::new(memory), bytes }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the memory with its concrete type, for a copy of `bytes` from `offset` by the device `name`.
    ///
    /// # Errors
    /// `Device` if the copy exceeds the buffer, or if the memory is no `M`: another device allocated the buffer.
    pub fn memory<M: Any>(&self, name: &str, offset: u64, bytes: u64) -> Result<&M, DeviceError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            let cause = format!("{bytes} bytes at {offset} in a buffer of {}", self.bytes);
            return Err(refused(name, cause, "copy inside the buffer"));
        }
        let remedy = "copy through the device that allocated the buffer";
        self.memory
            .downcast_ref()
            .ok_or_else(|| refused(name, "the buffer is another device's".into(), remedy))
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer {{ bytes: {} }}", self.bytes)
    }
}

/// Host memory that a device can copy. Its size never changes.
pub trait HostMemory: Any + Send {
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

/// Host memory. The owner has exclusive access: during a copy, the copy owns the buffer.
pub struct HostBuffer(Box<dyn HostMemory>);

impl HostBuffer {
    pub fn new(memory: impl HostMemory) -> HostBuffer {
        HostBuffer(Box::new(memory))
    }

    /// Checks that the memory is an `M`, for a device that copies no other type.
    ///
    /// # Errors
    /// `Device` if another device made the buffer.
    pub fn check<M: HostMemory>(&self, name: &str) -> Result<(), DeviceError> {
        let memory: &dyn Any = &*self.0;
        if memory.is::<M>() {
            return Ok(());
        }
        let remedy = "take host buffers from the device that copies them";
        Err(refused(name, "the host buffer is another device's".into(), remedy))
    }
}

impl ops::Deref for HostBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl ops::DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

fn refused(name: &str, cause: String, remedy: &'static str) -> DeviceError {
    DeviceError { device: name.into(), call: "copy", cause, remedy }
}

/// The completion of a device's copy. Until then the event owns the source and the target.
pub trait Event: Send {
    /// Blocks until the copy is done, and returns the host buffer. Called once.
    ///
    /// # Errors
    /// `Device` if the device failed. A failed device may still write, so the event must not free source or
    /// target: lost memory is better than corrupted memory.
    fn wait(&mut self) -> Result<HostBuffer>;
}

/// A started copy. Dropping it waits for the copy's end.
pub struct Transfer(TransferState);

enum TransferState {
    Done(HostBuffer),
    UnderWay(Box<dyn Event>),
    /// The host buffer was returned: there is nothing to wait for.
    Over,
}

impl Transfer {
    /// Returns a transfer that is already done.
    pub fn done(host: HostBuffer) -> Transfer {
        Transfer(TransferState::Done(host))
    }

    /// Returns a transfer that ends with `event`.
    pub fn under_way(event: impl Event + 'static) -> Transfer {
        Transfer(TransferState::UnderWay(Box::new(event)))
    }

    /// Blocks until the copy is done, and returns the host buffer.
    ///
    /// # Errors
    /// Errors of [`Event::wait`].
    pub fn wait(mut self) -> Result<HostBuffer> {
        match std::mem::replace(&mut self.0, TransferState::Over) {
            TransferState::Done(host) => Ok(host),
            TransferState::UnderWay(mut event) => event.wait(),
            // Unreachable: only this call and the drop set `Over`, and each owns the transfer.
            TransferState::Over => Ok(HostBuffer::new(Vec::new())),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if let TransferState::UnderWay(event) = &mut self.0
            && let Err(error) = event.wait()
        {
            tracing::error!(%error, "a copy could not be awaited; its memory is kept");
        }
    }
}
