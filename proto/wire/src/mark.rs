//! Outgoing messages, and marks that identify a call among the frames of its connection.

use std::hash::{BuildHasher, RandomState};

use bytes::{BufMut, Bytes, BytesMut};

/// Length of a marked call's first bytes: the prefix of a message, the mark's field, magic and number.
pub(crate) const START_BYTES: usize = PREFIX_BYTES + FIELD_BYTES;
const PREFIX_BYTES: usize = 5;
const FIELD_BYTES: usize = 3 + 8 + 8;
/// Key of field 100, of 16 bytes. No message has that field, so protobuf skips it.
const KEY: [u8; 3] = [0xA2, 0x06, 16];

/// An encoded message. Its two parts become two DATA frames, and one write sends the small one with the large one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    pub head: Bytes,
    pub payload: Bytes,
}

/// A number that names a call on its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mark {
    magic: [u8; 8],
    number: u64,
}

impl Mark {
    /// Magic of calls whose request is large.
    pub(crate) const REQUEST: [u8; 8] = *b"ls-push\0";
    /// Magic of calls whose answer is large.
    pub(crate) const ANSWER: [u8; 8] = *b"ls-pull\0";

    pub fn of_request() -> Mark {
        Mark { magic: Mark::REQUEST, number: random() }
    }

    pub fn of_answer() -> Mark {
        Mark { magic: Mark::ANSWER, number: random() }
    }

    /// Inserts the mark before the fields of a call's first message.
    pub fn put(self, message: Piece) -> Piece {
        let Piece { head, payload } = message;
        let Some((prefix, fields)) = head.split_first_chunk::<PREFIX_BYTES>() else {
            return Piece { head, payload };
        };
        let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) + FIELD_BYTES as u32;
        let mut marked = BytesMut::with_capacity(head.len() + FIELD_BYTES);
        marked.put_u8(prefix[0]);
        marked.put_u32(len);
        marked.put_slice(&KEY);
        marked.put_slice(&self.magic);
        marked.put_u64(self.number);
        marked.put_slice(fields);
        Piece { head: marked.freeze(), payload }
    }

    /// Returns the mark at the start of a call's first message.
    pub fn find(start: &[u8]) -> Option<Mark> {
        let field = start.get(PREFIX_BYTES..START_BYTES)?;
        let (key, rest) = field.split_first_chunk::<3>()?;
        let (magic, number) = rest.split_first_chunk::<8>()?;
        let known = *key == KEY && (*magic == Mark::REQUEST || *magic == Mark::ANSWER);
        let number = u64::from_be_bytes(number.try_into().ok()?);
        known.then_some(Mark { magic: *magic, number })
    }

    pub(crate) fn is_of_request(self) -> bool {
        self.magic == Mark::REQUEST
    }
}

/// Returns a random number. Counters would collide if a proxy joins the calls of strangers into one
/// connection.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        frame::{Event, Parser, encode},
        v1::PullRequest,
    };

    #[test]
    fn a_mark_is_found_and_changes_nothing() {
        let request = PullRequest { job: "gpt".into(), version: 7, ..PullRequest::default() };
        let mark = Mark::of_answer();
        let mut marked = mark.put(encode(&request)).head;
        assert_eq!(Mark::find(&marked), Some(mark));
        assert_eq!(Mark::find(&marked[..START_BYTES - 1]), None);
        assert_eq!(Mark::find(&encode(&request).head), None);
        let event = Parser::<PullRequest>::new().next(&mut marked);
        assert_eq!(event, Ok(Some(Event::Head(request, 0))));
        assert_ne!(Mark::of_answer(), Mark::of_answer());
    }
}
