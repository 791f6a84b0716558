//! Parser of outgoing frames: their ends, marks of first messages, ends of calls, and grants of the connection's
//! window.

use crate::mark::{Mark, START_BYTES};

pub(super) const HEADER_BYTES: usize = 9;
/// Bytes that a client sends before its first frame.
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

/// An event among outgoing frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    /// The first message of the call on this stream begins with a mark.
    Marked(u32, Mark),
    /// The connection's window grew by this many bytes.
    Granted(usize),
    /// This many bytes of this stream's DATA frames were written.
    Data(u32, usize),
    /// This end sends nothing more on this stream after the frame in progress.
    Ended(u32),
}

/// Position of the written bytes among the frames.
#[derive(Clone, Copy, Default)]
pub(super) struct Cursor {
    /// Bytes of the preface or of a frame's payload that are not written yet.
    left: usize,
    header: [u8; HEADER_BYTES],
    /// Bytes written of the header.
    have: usize,
    /// Stream of the DATA frame in progress, or 0.
    data_of: u32,
}

/// Kind of a run of written bytes.
pub(super) enum Follows {
    /// A part of a frame's header. The parsed header, if the part completes it.
    Header(Option<Header>),
    /// A part of a frame's payload. The number is the stream of a DATA frame, and 0 for other frames.
    Payload(u32),
}

impl Cursor {
    /// Advances to the next boundary. Returns the number of bytes before it, and their kind.
    pub(super) fn step(&mut self, bytes: &[u8]) -> (usize, Follows) {
        if self.left > 0 {
            let now = bytes.len().min(self.left);
            self.left -= now;
            return (now, Follows::Payload(self.data_of));
        }
        let now = bytes.len().min(HEADER_BYTES - self.have);
        self.header[self.have..self.have + now].copy_from_slice(&bytes[..now]);
        self.have += now;
        if self.have < HEADER_BYTES {
            return (now, Follows::Header(None));
        }
        let header = Header::read(&self.header);
        (self.have, self.left) = (0, header.len);
        self.data_of = if header.kind == Header::DATA { header.stream } else { 0 };
        (now, Follows::Header(Some(header)))
    }
}

/// Follower of all written bytes.
#[derive(Default)]
pub(super) struct Outward {
    cursor: Cursor,
    /// Start of the current payload, if its content matters.
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
        Outward { cursor: Cursor { left: bytes, ..Cursor::default() }, start: None }
    }

    pub(super) fn cursor(&self) -> Cursor {
        self.cursor
    }

    pub(super) fn is_between_frames(&self) -> bool {
        self.cursor.left == 0 && self.cursor.have == 0
    }

    /// Returns whether a DATA frame of this stream is partly written.
    pub(super) fn is_inside_data_of(&self, stream: u32) -> bool {
        self.cursor.left > 0 && self.cursor.data_of == stream
    }

    /// Parses written bytes as HTTP/2 frames, and reports them to `seen`. Marks are reported only if `marks` is set.
    pub(super) fn follow(&mut self, mut bytes: &[u8], marks: bool, mut seen: impl FnMut(Seen)) {
        while !bytes.is_empty() {
            let (now, what) = self.cursor.step(bytes);
            let (now, later) = bytes.split_at(now);
            bytes = later;
            match what {
                Follows::Header(None) => {}
                Follows::Header(Some(header)) => self.begin(header, marks).into_iter().for_each(&mut seen),
                Follows::Payload(stream) => {
                    self.gather(now).into_iter().for_each(&mut seen);
                    if stream > 0 {
                        seen(Seen::Data(stream, now.len()));
                    }
                }
            }
        }
    }

    fn begin(&mut self, Header { len, kind, flags, stream }: Header, marks: bool) -> Option<Seen> {
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
