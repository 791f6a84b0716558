//! Encoding of messages: prefix and head in one small buffer, and the payload beside it, uncopied. [`keep_buffers`]
//! keeps freed buffers in the process.

use std::{hint::black_box, sync::Once};

use bytes::{BufMut, Bytes, BytesMut};
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint},
};

use super::{Frame, Piece};

/// Encodes a message without payload, or with the payload inside.
pub fn encode(message: &impl Message) -> Piece {
    let len = message.encoded_len();
    let mut head = BytesMut::with_capacity(5 + len);
    head.put_u8(0);
    head.put_u32(len as u32);
    // The buffer has room for the whole message, so encoding cannot fail.
    let _ = message.encode(&mut head);
    Piece { head: head.freeze(), payload: Bytes::new() }
}

/// Encodes a message with `payload` as its payload, uncopied. `head`'s own payload must be empty.
pub fn encode_with<M: Frame>(head: &M, payload: Bytes) -> Piece {
    let Some(field) = M::PAYLOAD.filter(|_| !payload.is_empty()) else { return encode(head) };
    let fields = head.encoded_len();
    // Key and length of the payload take at most 5 + 10 bytes.
    let mut bytes = BytesMut::with_capacity(5 + fields + 15);
    bytes.put_bytes(0, 5);
    let _ = head.encode(&mut bytes);
    encode_key(field, WireType::LengthDelimited, &mut bytes);
    encode_varint(payload.len() as u64, &mut bytes);
    let len = bytes.len() - 5 + payload.len();
    bytes[1..5].copy_from_slice(&(len as u32).to_be_bytes());
    Piece { head: bytes.freeze(), payload }
}

/// Largest block whose release raises glibc's thresholds. Larger requests than a threshold are mapped one by one, and
/// heaps are trimmed above twice the threshold. Freeing a mapped block raises the threshold to its size, up to 32 MiB.
const LARGEST_RAISED_BYTES: usize = 31 * 1024 * 1024;

/// Raises glibc's thresholds; each process that moves chunks calls this once. HTTP/2 reads each DATA frame into memory
/// of its own. With glibc's defaults a frame's pages are unmapped, mapped and cleared again, which costs as much as
/// copying them. Each thread that frees frames may keep 62 MiB for later frames. Other allocators only see a block
/// allocated and freed.
pub fn keep_buffers() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(black_box(Vec::<u8>::with_capacity(black_box(LARGEST_RAISED_BYTES)))));
}
