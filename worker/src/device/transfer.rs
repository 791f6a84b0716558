//! Copies between the host and a device, finished or under way.

use super::HostBuffer;
use crate::error::Result;

/// The completion of a device's copy. Until then the event owns the source and the target.
pub trait Event: Send {
    /// Returns true if the copy is done, without waiting.
    ///
    /// # Errors
    /// `Device` if the device failed.
    fn is_done(&self) -> Result<bool>;

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

    /// # Errors
    /// As [`Event::is_done`].
    pub fn is_done(&self) -> Result<bool> {
        match &self.0 {
            TransferState::UnderWay(event) => event.is_done(),
            TransferState::Done(_) | TransferState::Over => Ok(true),
        }
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
