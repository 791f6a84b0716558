//! Buffers of pulled payloads, used again and again.
//!
//! A pull copies its piece of the image once, in the pass that takes its checksum, and sends the copy. Sending the
//! image's own memory would save that copy, but then whoever reads slowly would keep the update of the version after
//! next from its buffer. The copy's place is warm in cache and the socket reads it from there.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use longshore_proto::limits::CHUNK_BYTES;

/// Idle buffers kept: 64 MiB, what 16 pulls at once have under way.
const IDLE_MOST: usize = 64;

#[derive(Default)]
pub(crate) struct Recycler {
    idle: Mutex<Vec<Vec<u8>>>,
}

impl Recycler {
    /// A buffer for a piece of at most one chunk, holding whatever its last user left.
    pub(super) fn take(self: &Arc<Self>, bytes: usize) -> Lent {
        let found = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = found.unwrap_or_default();
        if buffer.len() < bytes {
            buffer.resize(bytes.max(CHUNK_BYTES), 0);
        }
        Lent { buffer, bytes, home: Arc::clone(self) }
    }
}

/// Goes back on drop; as the owner of a `Bytes`, once the last of it was sent.
pub(super) struct Lent {
    buffer: Vec<u8>,
    bytes: usize,
    home: Arc<Recycler>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.bytes]
    }
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.bytes]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut idle = self.home.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE_MOST {
            idle.push(mem::take(&mut self.buffer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_its_bytes_are_gone() {
        let recycler = Arc::new(Recycler::default());
        let mut lent = recycler.take(100);
        lent.as_mut().fill(7);
        let bytes = bytes::Bytes::from_owner(lent);
        let address = bytes.as_ptr();
        let other = recycler.take(10);
        assert_ne!(other.as_ref().as_ptr(), address, "still in use");
        drop(bytes);
        assert_eq!(recycler.take(CHUNK_BYTES).as_ref().as_ptr(), address);
        assert_eq!(other.as_ref().len(), 10);
    }
}
