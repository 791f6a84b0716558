//! Feeds any bytes in any pieces to the parser of Push and Pull. The parser must return the messages that prost
//! decodes, or an error.

#![no_main]

use bytes::{Buf, Bytes, BytesMut};
use libfuzzer_sys::fuzz_target;
use longshore_wire::{
    frame::{Event, Frame, Parser},
    v1::{PullRequest, PullResponse, PushRequest, PushResponse},
};

/// The messages of a stream with their payloads, and whether the stream ended well.
type Parsed<M> = (Vec<(M, Bytes)>, bool);

fn parse<M: Frame>(stream: &[u8], cuts: &[u8]) -> Parsed<M> {
    let (mut parser, mut messages) = (Parser::<M>::new(), Vec::new());
    let (mut payload, mut announced, mut open) = (BytesMut::new(), 0, None);
    let (mut rest, mut cut) = (stream, cuts.iter().cycle());
    while !rest.is_empty() {
        // Most pieces are short, and some have a frame's size.
        let wanted = match cut.next() {
            Some(255) | None => rest.len(),
            Some(&cut) if cut >= 192 => usize::from(cut - 191) * 257,
            Some(&cut) => usize::from(cut) + 1,
        };
        let mut piece = Bytes::copy_from_slice(&rest[..wanted.min(rest.len())]);
        rest.advance(piece.len());
        loop {
            match parser.next(&mut piece) {
                Ok(Some(Event::Head(message, bytes))) => {
                    assert!(open.is_none() && payload.is_empty());
                    (open, announced) = (Some(message), bytes);
                }
                Ok(Some(Event::Payload(slice))) => {
                    assert!(open.is_some() && !slice.is_empty());
                    payload.extend_from_slice(&slice);
                    assert!(payload.len() <= announced);
                }
                Ok(Some(Event::End)) => {
                    assert_eq!(payload.len(), announced);
                    messages.push((open.take().expect("an end follows a head"), payload.split().freeze()));
                }
                Ok(None) => break,
                Err(_) => {
                    assert!(parser.next(&mut Bytes::from_static(&[0; 9])).is_err(), "a fault must stay");
                    return (messages, false);
                }
            }
        }
        assert!(piece.is_empty(), "a piece is used up before the next");
    }
    (messages, parser.finish().is_ok())
}

/// Returns the messages that prost decodes from the same stream, one at a time.
fn expected<M: Frame>(mut stream: &[u8]) -> Parsed<M> {
    let mut messages = Vec::new();
    while !stream.is_empty() {
        let Some((prefix, rest)) = stream.split_first_chunk::<5>() else { return (messages, false) };
        let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        if prefix[0] != 0 || len > M::LIMIT || rest.len() < len {
            return (messages, false);
        }
        let Ok(mut message) = M::decode(&rest[..len]) else { return (messages, false) };
        let payload = message.take_payload();
        messages.push((message, payload));
        stream = &rest[len..];
    }
    (messages, true)
}

fn check<M: Frame + PartialEq>(stream: &[u8], cuts: &[u8]) {
    let (found, ended) = parse::<M>(stream, cuts);
    let (messages, whole) = expected::<M>(stream);
    assert_eq!(ended, whole);
    // Encoded messages are compared, because a NaN does not equal itself.
    let bytes = |parsed: &[(M, Bytes)]| -> Vec<(Vec<u8>, Bytes)> {
        parsed.iter().map(|(message, payload)| (message.encode_to_vec(), payload.clone())).collect()
    };
    assert_eq!(bytes(&found), bytes(&messages));
}

fuzz_target!(|input: (u8, Vec<u8>, &[u8])| {
    let (which, cuts, stream) = input;
    match which % 4 {
        0 => check::<PushRequest>(stream, &cuts),
        1 => check::<PullResponse>(stream, &cuts),
        2 => check::<PullRequest>(stream, &cuts),
        _ => check::<PushResponse>(stream, &cuts),
    }
});
