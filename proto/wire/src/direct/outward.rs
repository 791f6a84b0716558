//! Follows the frames that go out: where a frame ends, how the first message of a call begins, which calls end, and
//! how much of the connection's window is granted.

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
    pub(super) const HEADERS: u8 = 1;
    pub(super) const PRIORITY: u8 = 2;
    pub(super) const RESET: u8 = 3;
    pub(super) const SETTINGS: u8 = 4;
    pub(super) const PING: u8 = 6;
    pub(super) const GO_AWAY: u8 = 7;
    pub(super) const WINDOW_UPDATE: u8 = 8;
    pub(super) const CONTINUATION: u8 = 9;
    pub(super) const END_STREAM: u8 = 1;
    pub(super) const ACK: u8 = 1;
    pub(super) const END_HEADERS: u8 = 4;
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

/// What was found among the frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// The first message of the call on this stream begins with a mark.
    Marked(u32, Mark),
    /// So much more of the connection's window was granted.
    Granted(usize),
    /// This end has nothing more to say on this stream.
    Ended(u32),
}

/// Where in the frames the written bytes end.
#[derive(Default)]
pub(super) struct Outward {
    /// How many bytes of the preface or of a frame's payload are not written yet.
    left: usize,
    header: [u8; HEADER_BYTES],
    /// How many bytes of the header were written.
    have: usize,
    /// The start of a payload, where that says something.
    start: Option<Start>,
}

struct Start {
    stream: u32,
    kind: u8,
    bytes: [u8; START_BYTES],
    have: usize,
    want: usize,
}

impl Outward {
    pub(super) fn after_preface(bytes: usize) -> Outward {
        Outward { left: bytes, ..Outward::default() }
    }

    /// Whether a frame may be put in here.
    pub(super) fn is_between_frames(&self) -> bool {
        self.left == 0 && self.have == 0
    }

    /// Follows bytes that were written. `marks` says whether to look for marks.
    pub(super) fn follow(&mut self, mut bytes: &[u8], marks: bool, mut seen: impl FnMut(Seen)) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let (now, later) = bytes.split_at(bytes.len().min(self.left));
                self.left -= now.len();
                bytes = later;
                self.gather(now).into_iter().for_each(&mut seen);
                continue;
            }
            let now = bytes.len().min(HEADER_BYTES - self.have);
            self.header[self.have..self.have + now].copy_from_slice(&bytes[..now]);
            self.have += now;
            bytes = &bytes[now..];
            if self.have == HEADER_BYTES {
                self.have = 0;
                self.begin(Header::read(&self.header), marks).into_iter().for_each(&mut seen);
            }
        }
    }

    fn begin(&mut self, Header { len, kind, flags, stream }: Header, marks: bool) -> Option<Seen> {
        self.left = len;
        let want = match kind {
            Header::DATA if marks && len >= START_BYTES => START_BYTES,
            Header::WINDOW_UPDATE if stream == 0 && len == 4 => 4,
            _ => 0,
        };
        self.start = (want > 0).then_some(Start { stream, kind, bytes: [0; START_BYTES], have: 0, want });
        let ends = match kind {
            Header::DATA | Header::HEADERS => flags & Header::END_STREAM != 0,
            kind => kind == Header::RESET,
        };
        ends.then_some(Seen::Ended(stream))
    }

    fn gather(&mut self, bytes: &[u8]) -> Option<Seen> {
        let start = self.start.as_mut()?;
        let now = bytes.len().min(start.want - start.have);
        start.bytes[start.have..start.have + now].copy_from_slice(&bytes[..now]);
        start.have += now;
        if start.have < start.want {
            return None;
        }
        let Start { stream, kind, bytes, .. } = self.start.take()?;
        if kind == Header::WINDOW_UPDATE {
            let granted = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) & 0x7FFF_FFFF;
            return Some(Seen::Granted(granted as usize));
        }
        Mark::find(&bytes).map(|mark| Seen::Marked(stream, mark))
    }
}
