//! Places of weights: the segments they arrive in, and the segments that are read in a server's memory.

use longshore_proto::{Param, Partition, limits::BLOCK_ELEMENTS};

use super::*;
use crate::device::Budget;

fn layout(blocks: u64) -> Layout {
    let param = Param { name: "p".into(), shape: vec![blocks * BLOCK_ELEMENTS], group: 0 };
    Layout::new(&[param], 1, 2 * BLOCK_ELEMENTS, &[Partition::whole(1)]).unwrap()
}

fn store(dtype: Dtype, order: &[Range<u64>]) -> Store {
    let pieces = cut(&layout(20), order).unwrap();
    Store::new(dtype, &pieces, &BufferPool::new(Budget::unlimited("test"), "test"), |_| false).unwrap()
}

fn all_of(segment: &Segment, mut read: impl FnMut(&[u8])) {
    let bytes = (segment.range.end - segment.range.start) * 4;
    assert!(segment.read(0..bytes as usize, |bytes| bytes.pieces(|_, piece| read(piece))).is_ok());
}

/// Writes as a fetch does, in pieces that do not end with elements.
fn write(store: &Store, at: u64, payload: &[u8]) -> bool {
    let Some(mut place) = store.place(at, payload.len() as u64 / store.dtype.bytes()).unwrap() else {
        return false;
    };
    let mut sum = Crc32::new();
    payload.chunks(100_003).for_each(|slice| store.put(&mut place, slice, &mut sum));
    assert_eq!(sum.value(), longshore_proto::checksum::crc32(payload));
    store.commit(place);
    true
}

#[test]
fn a_range_is_readable_once_all_of_it_came_in_any_cut() {
    let store = store(Dtype::F32, std::slice::from_ref(&(100..700_000)));
    let values: Vec<u8> = (0..699_900u32).flat_map(|index| index.to_le_bytes()).collect();
    let mut at = 0;
    for cut in [4usize, 1_000_000, 1_048_576, 400_000].into_iter().cycle() {
        let end = (at + cut).min(values.len());
        assert!(write(&store, 100 + at as u64 / 4, &values[at..end]));
        at = end;
        if at == values.len() {
            break;
        }
    }
    assert!(store.segments.iter().all(Segment::is_whole));
    let mut read: Vec<u8> = Vec::new();
    store
        .covering(&(100..700_000))
        .unwrap()
        .iter()
        .for_each(|segment| all_of(segment, |bytes| read.extend(bytes)));
    assert!(read == values);
}

#[test]
fn what_was_not_asked_for_or_comes_twice_is_refused() {
    let store = store(Dtype::Bf16, &[0..64, 128..256]);
    assert!(write(&store, 0, &[1; 64]));
    assert!(!write(&store, 0, &[1; 64]), "twice");
    assert!(!write(&store, 48, &[1; 16]), "a gap");
    assert!(!write(&store, 64, &[1; 2]), "not asked for");
    assert_eq!(store.segments[0].missing(Dtype::Bf16), 32..64);
    assert!(store.covering(&(0..128)).is_none() && store.covering(&(130..200)).is_some());
}

#[test]
fn what_is_not_committed_was_never_there() {
    let store = store(Dtype::F32, std::slice::from_ref(&(0..64)));
    let mut place = store.place(0, 64).unwrap().unwrap();
    store.put(&mut place, &[1; 256], &mut Crc32::new());
    assert!(!store.segments[0].is_whole());
    assert_eq!(store.segments[0].missing(Dtype::F32), 0..64);
    assert!(write(&store, 0, &[2; 256]));
    all_of(&store.segments[0], |bytes| assert_eq!(bytes, [2; 256]));
}

#[test]
fn bad_orders_are_refused() {
    let layout = layout(1);
    for order in [&[(0, 0)][..], &[(0, BLOCK_ELEMENTS + 1)], &[(0, 10), (9, 20)]] {
        let order: Vec<Range<u64>> = order.iter().map(|&(start, end)| start..end).collect();
        assert!(cut(&layout, &order).is_err(), "{order:?}");
    }
}
