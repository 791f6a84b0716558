//! A resumable parser of length-prefixed messages, over arbitrarily cut pieces of a stream.
//!
//! No memory is allocated for an announced length: memory grows with received bytes. A payload at the end of its
//! message, where field order puts it, is never gathered.

use std::marker::PhantomData;

use bytes::{Buf, Bytes};
use longshore_proto::{Fault, limits::CHUNK_HEADROOM_BYTES};

use super::Frame;

const PREFIX_BYTES: usize = 5;
/// Bytes examined at once while fields before the payload are read. The fields of a push or pull take about 80 bytes.
const HEAD_STEP: usize = 256;

/// Events of each message: its head, pieces of its payload, its end.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<M> {
    /// All fields except the payload, and the payload's length in bytes.
    Head(M, usize),
    Payload(Bytes),
    End,
}

enum ParseState {
    Prefix,
    /// Gathers the fields before the payload. The fields before `scanned` are complete.
    Head {
        scanned: usize,
    },
    Payload {
        left: usize,
    },
    /// Gathers a message whose payload is not at its end, for prost.
    Whole,
    /// The message was decoded whole. Its payload and its end are still to be returned.
    Decoded {
        payload: Bytes,
    },
    End,
    Failed(Fault),
}

/// Parser of one stream, fed by [`Parser::next`]. After a fault it only repeats the fault.
pub struct Parser<M> {
    state: ParseState,
    /// Bytes of the prefix, of the fields before the payload, or of a whole message.
    pub(super) gathered: Vec<u8>,
    /// Bytes of the current message not yet taken from the stream.
    left: usize,
    message: PhantomData<fn() -> M>,
}

impl<M: Frame> Default for Parser<M> {
    fn default() -> Self {
        Parser { state: ParseState::Prefix, gathered: Vec::new(), left: 0, message: PhantomData }
    }
}

impl<M: Frame> Parser<M> {
    pub fn new() -> Parser<M> {
        Parser::default()
    }

    /// Returns whether the stream may end here.
    pub fn is_between_messages(&self) -> bool {
        matches!(self.state, ParseState::Prefix) && self.gathered.is_empty()
    }

    /// Returns the remaining bytes of the current payload, or 0 outside a payload.
    pub fn payload_left(&self) -> usize {
        if let ParseState::Payload { left } = self.state { left } else { 0 }
    }

    /// Skips payload bytes that reached their place directly: at most [`Parser::payload_left`].
    pub fn skip(&mut self, bytes: usize) {
        if let ParseState::Payload { left } = &mut self.state {
            let bytes = bytes.min(*left);
            *left -= bytes;
            self.left -= bytes;
        }
    }

    /// Returns the next event, or None once `piece` is used up.
    ///
    /// # Errors
    /// `Invalid` for a compressed, oversized or malformed message: the stream cannot continue after it.
    pub fn next(&mut self, piece: &mut Bytes) -> Result<Option<Event<M>>, Fault> {
        let result = self.advance(piece);
        if let Err(fault) = &result {
            self.state = ParseState::Failed(fault.clone());
        }
        result
    }

    /// Checks that the stream did not end inside a message.
    pub fn finish(&self) -> Result<(), Fault> {
        match &self.state {
            ParseState::Failed(fault) => Err(fault.clone()),
            _ if self.is_between_messages() => Ok(()),
            _ => {
                let value = format!("ended with {} bytes missing", self.left);
                Err(Fault::invalid("message", value, "whole", "send each message to its end"))
            }
        }
    }

    fn advance(&mut self, piece: &mut Bytes) -> Result<Option<Event<M>>, Fault> {
        loop {
            match &mut self.state {
                ParseState::Prefix => {
                    self.gather(piece, PREFIX_BYTES);
                    if self.gathered.len() < PREFIX_BYTES {
                        return Ok(None);
                    }
                    self.begin()?;
                }
                ParseState::Head { scanned } => {
                    let scanned = *scanned;
                    if let Some(event) = self.head(piece, scanned)? {
                        return Ok(Some(event));
                    }
                    let unfinished = matches!(self.state, ParseState::Head { .. }) && self.left > 0;
                    if unfinished && piece.is_empty() {
                        return Ok(None);
                    }
                }
                ParseState::Payload { left: 0 } => self.state = ParseState::End,
                ParseState::Payload { left } => {
                    if piece.is_empty() {
                        return Ok(None);
                    }
                    let now = piece.split_to(piece.len().min(*left));
                    *left -= now.len();
                    self.left -= now.len();
                    return Ok(Some(Event::Payload(now)));
                }
                ParseState::Whole => {
                    let wanted = self.gathered.len() + self.left;
                    self.left -= self.gather(piece, wanted);
                    if self.left > 0 {
                        return Ok(None);
                    }
                    return self.decode_whole().map(Some);
                }
                ParseState::Decoded { payload } => {
                    let payload = std::mem::take(payload);
                    self.state = ParseState::End;
                    if !payload.is_empty() {
                        return Ok(Some(Event::Payload(payload)));
                    }
                }
                ParseState::End => {
                    self.state = ParseState::Prefix;
                    return Ok(Some(Event::End));
                }
                ParseState::Failed(fault) => return Err(fault.clone()),
            }
        }
    }

    /// Gathers bytes until there are `wanted` or the piece is empty. Returns the number taken.
    fn gather(&mut self, piece: &mut Bytes, wanted: usize) -> usize {
        let now = piece.len().min(wanted.saturating_sub(self.gathered.len()));
        self.gathered.extend_from_slice(&piece[..now]);
        piece.advance(now);
        now
    }

    fn begin(&mut self) -> Result<(), Fault> {
        let compressed = self.gathered[0];
        let announced: [u8; 4] = self.gathered[1..].try_into().unwrap_or_default();
        let len = u32::from_be_bytes(announced) as usize;
        if compressed != 0 {
            let remedy = "send without compression: gradients and weights do not shrink";
            return Err(Fault::invalid("message.compressed", compressed, "0", remedy));
        }
        if len > M::LIMIT {
            let limit = format!("at most {} bytes", M::LIMIT);
            return Err(Fault::invalid("message", format!("{len} bytes"), limit, SMALLER));
        }
        self.gathered.clear();
        self.left = len;
        self.state = ParseState::Head { scanned: 0 };
        Ok(())
    }

    /// Takes a part of the fields before the payload, and gives back bytes of the payload.
    fn head(&mut self, piece: &mut Bytes, scanned: usize) -> Result<Option<Event<M>>, Fault> {
        let before = piece.clone();
        let step = HEAD_STEP.min(self.left);
        self.left -= self.gather(piece, self.gathered.len() + step);
        match find_payload(&self.gathered, scanned, M::PAYLOAD) {
            // The usual case: the payload is the rest of the message.
            Found::Payload { tag, data, len } if len == (self.gathered.len() - data + self.left) as u64 => {
                let over = self.gathered.len() - data;
                *piece = before.slice(before.len() - piece.len() - over..);
                self.left += over;
                let message = decode::<M>(&self.gathered[..tag])?;
                self.gathered.clear();
                self.state = ParseState::Payload { left: self.left };
                Ok(Some(Event::Head(message, self.left)))
            }
            Found::More { from } if from == self.gathered.len() && self.left == 0 => {
                let message = decode::<M>(&self.gathered)?;
                self.gathered.clear();
                self.state = ParseState::End;
                Ok(Some(Event::Head(message, 0)))
            }
            Found::More { from } if self.left > 0 && self.gathered.len() < CHUNK_HEADROOM_BYTES => {
                self.state = ParseState::Head { scanned: from };
                Ok(None)
            }
            _ => {
                self.state = ParseState::Whole;
                Ok(None)
            }
        }
    }

    fn decode_whole(&mut self) -> Result<Event<M>, Fault> {
        // prost takes the payload out of a `Bytes` without a copy.
        let whole = Bytes::from(std::mem::take(&mut self.gathered));
        M::check_memory(&whole)?;
        let mut message = M::decode(whole).map_err(malformed)?;
        let payload = message.take_payload();
        let len = payload.len();
        self.state = ParseState::Decoded { payload };
        Ok(Event::Head(message, len))
    }
}

/// Remedy for a message that is too large.
pub(super) const SMALLER: &str = "send at most 1 MiB of payload, and pull in several calls";

fn decode<M: Frame>(head: &[u8]) -> Result<M, Fault> {
    M::check_memory(head)?;
    M::decode(head).map_err(malformed)
}

fn malformed(error: prost::DecodeError) -> Fault {
    Fault::invalid(
        "message",
        error,
        "the protobuf message of this call",
        "use the .proto files of the server",
    )
}

/// Result of scanning the start of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// An incomplete field begins at `from`; all fields before it are complete.
    More { from: usize },
    /// The payload's tag is at `tag`; its `len` bytes begin at `data`.
    Payload { tag: usize, data: usize, len: u64 },
    /// An encoding that a writer in field order does not produce: groups, wrong wire types, overlong numbers.
    Unusual,
}

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH: u64 = 2;
const FIXED32: u64 = 5;

/// Finds where a payload begins, by a minimal scan of fields from `from`, where a field begins. Unusual encodings are
/// left to prost, on the whole message.
fn find_payload(head: &[u8], mut from: usize, payload: Option<u32>) -> Found {
    loop {
        let more = Found::More { from };
        let (key, after_key) = match varint(head, from) {
            Varint::Is(key, after) => (key, after),
            Varint::More => return more,
            Varint::Overlong => return Found::Unusual,
        };
        let is_payload = payload.is_some_and(|number| key >> 3 == u64::from(number));
        if key >> 3 == 0 || key > u64::from(u32::MAX) || (is_payload && key & 7 != LENGTH) {
            return Found::Unusual;
        }
        let end = match key & 7 {
            VARINT => match varint(head, after_key) {
                Varint::Is(_, after) => after as u64,
                Varint::More => return more,
                Varint::Overlong => return Found::Unusual,
            },
            FIXED64 => after_key as u64 + 8,
            FIXED32 => after_key as u64 + 4,
            LENGTH => match varint(head, after_key) {
                Varint::Is(len, data) if is_payload => return Found::Payload { tag: from, data, len },
                Varint::Is(len, data) => (data as u64).saturating_add(len),
                Varint::More => return more,
                Varint::Overlong => return Found::Unusual,
            },
            _ => return Found::Unusual,
        };
        if end > head.len() as u64 {
            return more;
        }
        from = end as usize;
    }
}

enum Varint {
    /// The number, and the index of the next byte.
    Is(u64, usize),
    More,
    Overlong,
}

fn varint(bytes: &[u8], from: usize) -> Varint {
    let mut value = 0u64;
    for index in 0..10 {
        let Some(&byte) = bytes.get(from + index) else { return Varint::More };
        // The tenth byte has room for one bit.
        if index == 9 && byte > 1 {
            return Varint::Overlong;
        }
        value |= u64::from(byte & 0x7F) << (7 * index);
        if byte < 0x80 {
            return Varint::Is(value, from + index + 1);
        }
    }
    Varint::Overlong
}
