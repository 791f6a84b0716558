//! A server's memory that holds a job's weights, for code that registers it with a device.

use std::{ops::Range, sync::Arc};

use longshore_memory::Foreign;

/// A server's images of the job, mapped read-only while this value lives. The server's next process has other
/// memory.
pub struct ImageMemory(Arc<Foreign>);

impl ImageMemory {
    pub(crate) fn new(images: Arc<Foreign>) -> ImageMemory {
        ImageMemory(images)
    }

    /// The address range in this process: whole pages.
    pub fn addresses(&self) -> Range<usize> {
        let (start, bytes) = (self.0.address(0, self.0.len()), self.0.len() as usize);
        start..start + bytes
    }
}
