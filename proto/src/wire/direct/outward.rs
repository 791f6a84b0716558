//! Follows the frames that go out: where one ends, and how the first message of a call begins.

use super::mark::{Mark, START_BYTES};

pub(super) const HEADER_BYTES: usize = 9;
/// What a client sends before its first frame.
pub(super) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A frame's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) len: usize,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

impl Header {
    pub(super) const DATA: u8 = 0;
    pub(super) const RESET: u8 = 3;
    pub(super) const WINDOW_UPDATE: u8 = 8;
    pub(super) const END_STREAM: u8 = 1;
    pub(super) const PADDED: u8 = 8;

    pub(super) fn read(bytes: &[u8; HEADER_BYTES]) -> Header {
        let [a, b, c, kind, flags, stream @ ..] = *bytes;
        let len = u32::from_be_bytes([0, a, b, c]) as usize;
        Header { len, kind, flags, stream: u32::from_be_bytes(stream) & 0x7FFF_FFFF }
    }

    pub(super) fn write(self) -> [u8; HEADER_BYTES] {
        let [_, a, b, c] = (self.len as u32).to_be_bytes();
        let [d, e, f, g] = self.stream.to_be_bytes();
        [a, b, c, self.kind, self.flags, d, e, f, g]
    }
}

/// Where in the frames the written bytes end.
#[derive(Default)]
pub(super) struct Outward {
    /// Of the preface or a frame's payload, not yet written.
    left: usize,
    header: [u8; HEADER_BYTES],
    /// Bytes of the header that were written.
    have: usize,
    /// The start of a DATA frame's payload, where it may have a mark.
    start: Option<Start>,
}

struct Start {
    stream: u32,
    bytes: [u8; START_BYTES],
    have: usize,
}

impl Outward {
    pub(super) fn after_preface(bytes: usize) -> Outward {
        Outward { left: bytes, ..Outward::default() }
    }

    /// Whether a frame may be put in here.
    pub(super) fn is_between_frames(&self) -> bool {
        self.left == 0 && self.have == 0
    }

    /// Follows bytes that were written. `marks`: whether to look for them; found ones are told with their stream.
    pub(super) fn follow(&mut self, mut bytes: &[u8], marks: bool, mut found: impl FnMut(u32, Mark)) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let (now, later) = bytes.split_at(bytes.len().min(self.left));
                self.left -= now.len();
                bytes = later;
                if let Some((stream, mark)) = self.gather(now) {
                    found(stream, mark);
                }
                continue;
            }
            let now = bytes.len().min(HEADER_BYTES - self.have);
            self.header[self.have..self.have + now].copy_from_slice(&bytes[..now]);
            self.have += now;
            bytes = &bytes[now..];
            if self.have == HEADER_BYTES {
                let Header { len, kind, stream, .. } = Header::read(&self.header);
                (self.have, self.left) = (0, len);
                let may_begin = marks && kind == Header::DATA && len >= START_BYTES;
                self.start = may_begin.then_some(Start { stream, bytes: [0; START_BYTES], have: 0 });
            }
        }
    }

    fn gather(&mut self, bytes: &[u8]) -> Option<(u32, Mark)> {
        let start = self.start.as_mut()?;
        let now = bytes.len().min(START_BYTES - start.have);
        start.bytes[start.have..start.have + now].copy_from_slice(&bytes[..now]);
        start.have += now;
        if start.have < START_BYTES {
            return None;
        }
        let Start { stream, bytes, .. } = self.start.take()?;
        Mark::find(&bytes).map(|mark| (stream, mark))
    }
}
