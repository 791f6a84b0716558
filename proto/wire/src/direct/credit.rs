//! Flow-control windows returned for bytes that bypass h2.

use super::outward::Header;

/// Bytes returned at a time, or a quarter of the window if less. h2 withholds up to half of the window, so a
/// quarter is always open.
const STEP_BYTES: usize = 512 * 1024;

/// Window owed on a connection, and the pending frames that return it.
pub(super) struct Credit {
    pub(super) step: usize,
    pub(super) owed: usize,
    frames: Vec<u8>,
    written: usize,
}

impl Credit {
    pub(super) fn new(window: usize) -> Credit {
        Credit { step: STEP_BYTES.min(window / 4), owed: 0, frames: Vec::new(), written: 0 }
    }

    pub(super) fn is_due(&self) -> bool {
        self.owed >= self.step
    }

    /// Builds WINDOW_UPDATE frames for all that is owed, on the connection and on these streams. Returns the
    /// connection's part.
    pub(super) fn make(&mut self, streams: impl Iterator<Item = (u32, usize)>) -> usize {
        self.frames.clear();
        self.written = 0;
        let owed = std::mem::take(&mut self.owed);
        let connection = (0, owed);
        for (stream, bytes) in std::iter::once(connection).chain(streams) {
            let header = Header { len: 4, kind: Header::WINDOW_UPDATE, flags: 0, stream };
            self.frames.extend_from_slice(&header.write());
            self.frames.extend_from_slice(&(bytes as u32).to_be_bytes());
        }
        owed
    }

    /// Appends the GOAWAY frame that ends a connection.
    pub(super) fn end(&mut self, last: u32, code: u32) {
        let header = Header { len: 8, kind: Header::GO_AWAY, flags: 0, stream: 0 };
        self.frames.extend_from_slice(&header.write());
        self.frames.extend_from_slice(&last.to_be_bytes());
        self.frames.extend_from_slice(&code.to_be_bytes());
    }

    /// Returns the frames not written yet.
    pub(super) fn rest(&self) -> &[u8] {
        &self.frames[self.written..]
    }

    pub(super) fn advance(&mut self, written: usize) {
        self.written += written;
    }
}
