//! The parser against prost: arbitrary messages, field orders and cuts, and damage.

use bytes::{BufMut, BytesMut};
use longshore_proto::fault::Fault;
use proptest::prelude::*;
use prost::encoding::{WireType, encode_key, encode_varint};

use super::{
    v1::{MemfdPlace, PushRequest},
    *,
};

fn request() -> impl Strategy<Value = PushRequest> {
    let numbers = (any::<u64>(), any::<u32>(), any::<u64>(), 0u32..3, any::<u32>(), any::<u32>());
    let payload = prop_oneof![
        Just(Vec::new()),
        prop::collection::vec(any::<u8>(), 1..700),
        (0usize..300_000).prop_map(|len| (0..len).map(|index| index as u8).collect()),
    ];
    ("[a-z]{0,300}", numbers, any::<f64>(), 0i32..5, any::<u32>(), payload).prop_map(
        |(job, (incarnation, rank, step, micro_step, shard, chunk), loss_scale, dtype, crc32, payload)| {
            let loss_scale = if loss_scale.is_nan() { 1.0 } else { loss_scale };
            let payload = payload.into();
            let place =
                MemfdPlace { link: incarnation, memory: shard, offset: 1, bytes: 2, lent: rank % 2 == 0 };
            let place = (step % 2 == 0).then_some(place);
            PushRequest {
                job,
                incarnation,
                rank,
                step,
                micro_step,
                shard,
                chunk,
                loss_scale,
                dtype,
                crc32,
                place,
                reads_version: step / 3,
                reads_decided_by: incarnation / 2,
                deadline_ms: shard.into(),
                payload,
            }
        },
    )
}

fn prefixed(message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0];
    bytes.put_u32(message.len() as u32);
    bytes.extend_from_slice(message);
    bytes
}

/// Returns all messages of a stream fed in pieces, with their payloads reassembled.
fn parse(stream: &[u8], cuts: &[usize]) -> Result<Vec<PushRequest>, Fault> {
    let mut parser = Parser::<PushRequest>::new();
    let mut messages: Vec<PushRequest> = Vec::new();
    let mut payload = BytesMut::new();
    let mut announced = 0;
    let (mut at, mut cut) = (0, cuts.iter().cycle());
    while at < stream.len() {
        let len = (*cut.next().unwrap()).clamp(1, stream.len() - at);
        let mut piece = Bytes::copy_from_slice(&stream[at..at + len]);
        at += len;
        while let Some(event) = parser.next(&mut piece)? {
            match event {
                Event::Head(message, bytes) => {
                    assert!(message.payload.is_empty());
                    announced = bytes;
                    messages.push(message);
                }
                Event::Payload(slice) => payload.extend_from_slice(&slice),
                Event::End => {
                    assert_eq!(payload.len(), announced);
                    messages.last_mut().unwrap().payload = payload.split().freeze();
                }
            }
        }
        assert!(piece.is_empty());
    }
    parser.finish().map(|()| messages)
}

fn cuts() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        Just(vec![1]),
        Just(vec![usize::MAX]),
        prop::collection::vec(prop_oneof![1usize..12, 1usize..5000, 1usize..400_000], 1..20),
    ]
}

/// A field of each wire type, known or not.
fn field() -> impl Strategy<Value = Vec<u8>> {
    let number = prop_oneof![1u32..20, Just(15), Just(15), 1u32..(1 << 29)];
    let value = prop_oneof![
        any::<u64>().prop_map(|value| (WireType::Varint, varint(value))),
        any::<[u8; 8]>().prop_map(|bytes| (WireType::SixtyFourBit, bytes.to_vec())),
        any::<[u8; 4]>().prop_map(|bytes| (WireType::ThirtyTwoBit, bytes.to_vec())),
        prop::collection::vec(any::<u8>(), 0..6000)
            .prop_map(|bytes| { (WireType::LengthDelimited, [varint(bytes.len() as u64), bytes].concat()) }),
    ];
    (number, value).prop_map(|(number, (kind, value))| {
        let mut bytes = Vec::new();
        encode_key(number, kind, &mut bytes);
        [bytes, value].concat()
    })
}

fn varint(value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_varint(value, &mut bytes);
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_messages_survive_any_cuts(
        messages in prop::collection::vec((request(), any::<bool>()), 1..5),
        cuts in cuts(),
    ) {
        let mut stream = Vec::new();
        for (message, generated) in &messages {
            if *generated {
                stream.extend(prefixed(&message.encode_to_vec()));
            } else {
                let head = PushRequest { payload: Bytes::new(), ..message.clone() };
                let piece = encode_with(&head, message.payload.clone());
                stream.extend([piece.head, piece.payload].concat());
            }
        }
        let sent: Vec<PushRequest> = messages.into_iter().map(|(message, _)| message).collect();
        prop_assert!(parse(&stream, &cuts) == Ok(sent));
    }

    #[test]
    fn what_is_encoded_is_what_prost_encodes(message in request()) {
        let head = PushRequest { payload: Bytes::new(), ..message.clone() };
        let piece = encode_with(&head, message.payload.clone());
        prop_assert!([piece.head, piece.payload].concat() == prefixed(&message.encode_to_vec()));
    }

    #[test]
    fn fields_in_any_order_mean_what_they_mean_to_prost(
        fields in prop::collection::vec(field(), 0..8),
        message in request(),
        at in 0usize..8,
        cuts in cuts(),
    ) {
        let mut fields = fields;
        fields.insert(at.min(fields.len()), message.encode_to_vec());
        let bytes = fields.concat();
        let expected = PushRequest::decode(bytes.as_slice()).ok().map(|message| vec![message]);
        let found = parse(&prefixed(&bytes), &cuts).ok();
        // Messages are compared as bytes: a damaged loss scale may be NaN.
        let encoded = |messages: &Option<Vec<PushRequest>>| {
            messages.as_ref().map(|messages| messages.iter().map(Message::encode_to_vec).collect::<Vec<_>>())
        };
        prop_assert!(encoded(&found) == encoded(&expected));
    }

    #[test]
    fn damage_is_refused_or_means_what_it_means_to_prost(
        message in request(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        kept in any::<prop::sample::Index>(),
        cuts in cuts(),
    ) {
        let mut bytes = message.encode_to_vec();
        prop_assume!(!bytes.is_empty());
        // The damage hits the fields, not the middle of a long payload.
        let span = bytes.len().min(120);
        for (index, value) in &damage {
            let index = index.index(span);
            bytes[index] = *value;
        }
        let expected = PushRequest::decode(bytes.as_slice()).is_ok();
        prop_assert_eq!(parse(&prefixed(&bytes), &cuts).is_ok(), expected);
        // A truncated stream is refused, whatever the damage.
        let stream = prefixed(&bytes);
        let kept = 1 + kept.index(stream.len() - 1);
        prop_assert!(kept == stream.len() || parse(&stream[..kept], &cuts).is_err());
    }

    #[test]
    fn noise_never_panics(noise in prop::collection::vec(any::<u8>(), 0..2000), cuts in cuts()) {
        let _ = parse(&noise, &cuts);
        let quiet: Vec<u8> = noise.iter().map(|byte| byte & 0x1F).collect();
        let _ = parse(&prefixed(&quiet), &cuts);
    }
}

#[test]
fn a_length_alone_allocates_nothing() {
    let mut parser = Parser::<PushRequest>::new();
    let limit = PushRequest::LIMIT as u32;
    let mut piece = Bytes::copy_from_slice(&[&[0u8][..], &limit.to_be_bytes()].concat());
    assert_eq!(parser.next(&mut piece), Ok(None));
    // The largest payload is announced, and no byte of it came.
    let mut head = Vec::new();
    encode_key(15, WireType::LengthDelimited, &mut head);
    encode_varint(u64::from(limit) - 4, &mut head);
    assert_eq!(head.len(), 4);
    let event = parser.next(&mut head.into()).unwrap();
    assert_eq!(event, Some(Event::Head(PushRequest::default(), limit as usize - 4)));
    assert!(parser.gathered.capacity() < 1024);
}

#[test]
fn what_a_server_must_not_take_is_refused_by_name() {
    let field = |bytes: &[u8]| parse(bytes, &[usize::MAX]).unwrap_err().field;
    assert_eq!(field(&[1, 0, 0, 0, 1, 0]), "message.compressed");
    assert_eq!(field(&[0, 0xFF, 0xFF, 0xFF, 0xFF]), "message");
    assert_eq!(field(&[0, 0, 0, 0, 9, 1]), "message");
}

#[test]
fn a_fault_is_final() {
    let mut parser = Parser::<PushRequest>::new();
    assert!(parser.next(&mut Bytes::from_static(&[7, 0, 0, 0, 0])).is_err());
    assert!(parser.next(&mut Bytes::from_static(&[0, 0, 0, 0, 0])).is_err());
    assert!(parser.finish().is_err());
}
