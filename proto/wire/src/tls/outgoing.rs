//! Sealed records on their way to a socket.

/// Sealed records, oldest first. The buffer is used again.
#[derive(Default)]
pub(super) struct Outgoing {
    bytes: Vec<u8>,
    /// How many of the bytes were written.
    written: usize,
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What is to be written next.
    pub(super) fn rest(&self) -> &[u8] {
        &self.bytes[self.written..]
    }

    /// Where records are added, which take at most so many bytes.
    pub(super) fn room(&mut self, bytes: usize) -> &mut Vec<u8> {
        // No more than they need, where doubling might take twice as much.
        self.bytes.reserve_exact(bytes);
        &mut self.bytes
    }

    /// Notes that so many bytes were written.
    pub(super) fn advance(&mut self, bytes: usize) {
        self.written += bytes;
        if self.written == self.bytes.len() {
            self.bytes.clear();
            self.written = 0;
        }
    }
}
