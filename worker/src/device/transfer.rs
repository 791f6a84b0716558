//! Copies between the host and a device, done or under way.

use super::HostBuffer;
use crate::error::Result;

/// The end of a copy that a device makes by itself. It owns what the copy reads and writes until then.
pub trait Event: Send {
    /// Whether the copy is done, without waiting.
    ///
    /// # Errors
    /// `Device` where the device failed.
    fn is_done(&self) -> Result<bool>;

    /// Blocks until the copy is done, and gives the host buffer back. It is called once.
    ///
    /// # Errors
    /// `Device` where the device failed. It may still write then, and so the event must not free what the copy reads and
    /// writes: memory lost is better than memory corrupted.
    fn wait(&mut self) -> Result<HostBuffer>;
}

/// A copy that was started. When it is dropped it waits for the copy's end.
pub struct Transfer(TransferState);

enum TransferState {
    Done(HostBuffer),
    UnderWay(Box<dyn Event>),
    /// Nothing is left to wait for.
    Over,
}

impl Transfer {
    /// A copy that was done when it was started.
    pub fn done(host: HostBuffer) -> Transfer {
        Transfer(TransferState::Done(host))
    }

    /// A copy that ends with `event`.
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

    /// Blocks until the copy is done and gives the host buffer back.
    ///
    /// # Errors
    /// As [`Event::wait`].
    pub fn wait(mut self) -> Result<HostBuffer> {
        match std::mem::replace(&mut self.0, TransferState::Over) {
            TransferState::Done(host) => Ok(host),
            TransferState::UnderWay(mut event) => event.wait(),
            // Only this call and the drop leave it in this state, and each of them owns the transfer.
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
