//! A minimal protobuf scan that finds where a payload begins. Unusual encodings are left to prost, on the whole
//! message.

/// Result of scanning the start of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
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

/// Scans fields from `from`, where a field begins.
pub(super) fn find_payload(head: &[u8], mut from: usize, payload: Option<u32>) -> Found {
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
