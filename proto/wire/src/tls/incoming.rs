//! What has come from a socket and was not taken yet: records, of which the first may have been opened in place.

use std::ops::Range;

use rustls::{Error, InvalidMessage, PeerMisbehaved};

/// The header of a record: its type, a version and its length.
const HEADER_BYTES: usize = 5;
/// The longest record without its header: 2^14 bytes, and 256 for the type, padding and the tag (RFC 8446, 5.2).
const RECORD_BYTES: usize = (1 << 14) + 256;
/// What is read at once into an empty buffer. Most connections never need more.
const FIRST_BYTES: usize = 4 * 1024;
/// The most that is read at once, and the longest message of a handshake with its headers. It is four records, for which one
/// system call is a hundredth of what opening them takes, and which stay in the L2 cache until they are opened.
const MOST_BYTES: usize = 64 * 1024;

/// The only type of a record that is encrypted.
const ENCRYPTED: u8 = 23;
const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// Bytes lie between `start` and `end`. The buffer grows while reads fill it.
pub(super) struct Incoming {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// The part of the last record that was opened and is not taken. It lies before `start`.
    opened: Range<usize>,
}

impl Incoming {
    pub(super) fn new() -> Incoming {
        Incoming { buffer: vec![0; FIRST_BYTES], start: 0, end: 0, opened: 0..0 }
    }

    /// The bytes that have come.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..self.end]
    }

    pub(super) fn discard(&mut self, bytes: usize) {
        self.start = self.end.min(self.start + bytes);
    }

    /// Where more is read to. What was opened must have been taken. It is empty if a message does not fit.
    pub(super) fn room(&mut self) -> &mut [u8] {
        debug_assert!(self.opened.is_empty(), "room is made where opened bytes lie");
        let filled = self.end == self.buffer.len();
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if filled && self.buffer.len() < MOST_BYTES {
            self.buffer.resize(2 * self.buffer.len(), 0);
        }
        &mut self.buffer[self.end..]
    }

    /// Notes how many bytes were read to the room.
    pub(super) fn filled(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// Where the first record ends that begins `at` bytes behind the first; None while it is not whole.
    pub(super) fn end_of_record(&self, at: usize) -> Option<usize> {
        let rest = &self.buffer[self.start..self.end][at..];
        let &[_, _, _, high, low] = rest.first_chunk()?;
        let len = HEADER_BYTES + usize::from(u16::from_be_bytes([high, low]));
        (len <= rest.len()).then_some(at + len)
    }

    /// Takes the next record, which must be encrypted, without its header; None while it is not whole.
    ///
    /// # Errors
    /// Where it is no record that may come once hands are shaken.
    pub(super) fn next_record(&mut self) -> Result<Option<&mut [u8]>, Error> {
        let rest = &self.buffer[self.start..self.end];
        let Some(&[kind, version, _, high, low]) = rest.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        match kind {
            ENCRYPTED => {}
            CHANGE_CIPHER_SPEC => return Err(PeerMisbehaved::IllegalMiddleboxChangeCipherSpec.into()),
            ALERT | HANDSHAKE => return Err(Error::DecryptError),
            _ => return Err(InvalidMessage::InvalidContentType.into()),
        }
        if version != 3 {
            return Err(InvalidMessage::UnknownProtocolVersion.into());
        }
        let len = usize::from(u16::from_be_bytes([high, low]));
        if len > RECORD_BYTES {
            return Err(Error::PeerSentOversizedRecord);
        }
        if rest.len() < HEADER_BYTES + len {
            return Ok(None);
        }
        let from = self.start + HEADER_BYTES;
        self.start = from + len;
        Ok(Some(&mut self.buffer[from..from + len]))
    }

    /// Notes that the record that was taken last has been opened to so many bytes, from its first on.
    pub(super) fn open(&mut self, record: usize, bytes: usize) {
        let from = self.start - record;
        self.opened = from..from + bytes;
    }

    pub(super) fn has_opened(&self) -> bool {
        !self.opened.is_empty()
    }

    /// Takes opened bytes, at most as many as there is place for.
    pub(super) fn take(&mut self, place: &mut [u8]) -> usize {
        let now = place.len().min(self.opened.len());
        let from = self.opened.start;
        place[..now].copy_from_slice(&self.buffer[from..from + now]);
        self.opened.start += now;
        now
    }
}
