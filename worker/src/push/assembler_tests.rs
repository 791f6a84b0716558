//! The assembler against a naive flat conversion: random layouts, types and orders.

use std::collections::BTreeMap;

use longshore_proto::{Dtype, JobName, Param, Partition, limits::BLOCK_ELEMENTS};
use proptest::prelude::*;

use super::*;
use crate::{
    device::Budget,
    error::{Error, GradientError, Misuse},
};

fn spec(sizes: &[u64], shard_blocks: u64, dtype: Dtype) -> JobSpec {
    let param =
        |(index, &size): (usize, &u64)| Param { name: format!("p{index}"), shape: vec![size], group: 0 };
    JobSpec {
        gradient_dtype: dtype,
        image_dtype: dtype,
        shard_elements: shard_blocks * BLOCK_ELEMENTS,
        ..JobSpec::new(JobName::parse("name", "test").unwrap(), sizes.iter().enumerate().map(param).collect())
    }
}

/// Distinct values. Some overflow f16.
fn gradient(param: usize, elements: u64) -> Vec<f32> {
    (0..elements).map(|index| (param as f32 + 1.0) * 0.37 * (index as f32 - 1000.0)).collect()
}

type Chunks = BTreeMap<ChunkKey, Vec<u8>>;

fn naive(spec: &JobSpec, layout: &Layout) -> Chunks {
    let dtype = spec.gradient_dtype;
    let mut flat = vec![0.0f32; layout.elements() as usize];
    for param in 0..spec.params.len() {
        let range = layout.param_range(param);
        flat[range.start as usize..range.end as usize]
            .copy_from_slice(&gradient(param, range.end - range.start));
    }
    let mut chunks = Chunks::new();
    for shard in (0..layout.shards()).map(ShardId) {
        let range = layout.shard_range(shard);
        let mut wire = vec![0; ((range.end - range.start) * dtype.bytes()) as usize];
        convert::from_f32(dtype, &flat[range.start as usize..range.end as usize], &mut wire);
        for (chunk, bytes) in wire.chunks(CHUNK_BYTES).enumerate() {
            let key =
                ChunkKey { step: Step(1), micro_step: MicroStep(0), shard, chunk: ChunkId(chunk as u32) };
            chunks.insert(key, bytes.to_vec());
        }
    }
    chunks
}

/// Returns the bytes that leave, with lent gradients cut into chunks.
fn assemble(spec: &JobSpec, layout: &Layout, pool: &BufferPool, order: &[usize], ways: &[Way]) -> Chunks {
    let plan = ChunkSource { spec, layout, pool };
    let mut collector = Collector::new((Step(1), MicroStep(0)), Rank(0), (spec, layout), ways.to_vec());
    let mut chunks = Chunks::new();
    for &param in order {
        let range = layout.param_range(param);
        let gradient = gradient(param, range.end - range.start);
        let keep = |key: ChunkKey, payload: Payload, crc| {
            let lent = ways[key.shard.index()] == Way::Lent;
            assert!(if lent { key.chunk == ChunkId(0) } else { crc == crc32(&payload.bytes) });
            let unit = if lent { CHUNK_BYTES } else { payload.bytes.len() };
            for (index, part) in payload.bytes.chunks(unit).enumerate() {
                let key = ChunkKey { chunk: ChunkId(key.chunk.0 + index as u32), ..key };
                assert!(chunks.insert(key, part.to_vec()).is_none(), "{key:?} left twice");
            }
            Ok(())
        };
        let mut write = |range: Range<usize>, target: &mut [u8]| {
            convert::from_f32(spec.gradient_dtype, &gradient[range], target);
            Ok(())
        };
        collector.put(&plan, param, gradient.len() as u64, &mut write, keep).unwrap();
    }
    collector.finish(spec).unwrap();
    assert!(collector.open.is_empty());
    chunks
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_order_gives_the_flat_chunks(
        sizes in prop::collection::vec(prop_oneof![1u64..200, 1u64..300_000, Just(524_288)], 1..12),
        shard_blocks in 1u64..20,
        dtype in prop_oneof![Just(Dtype::F32), Just(Dtype::F16), Just(Dtype::Bf16)],
        seed in any::<u64>(),
    ) {
        let spec = spec(&sizes, shard_blocks, dtype);
        let layout = spec.validate().unwrap();
        let pool = BufferPool::new(Budget::unlimited("test"), "test");
        // Dirty buffers show padding that is not zeroed.
        for shard in 0..layout.shards() {
            let whole = layout.shard_len(ShardId(shard)) * dtype.bytes();
            pool.take(whole as usize).unwrap().as_mut().fill(0xAB);
            for chunk in 0..layout.chunks(ShardId(shard), dtype) {
                let range = layout.chunk_bytes(ShardId(shard), ChunkId(chunk), dtype).unwrap();
                pool.take((range.end - range.start) as usize).unwrap().as_mut().fill(0xAB);
            }
        }
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|&param| (param as u64 + 1).wrapping_mul(seed | 1).rotate_left(17));
        let way = |shard: u32| if seed >> (shard % 64) & 1 == 0 { Way::Lent } else { Way::Chunks };
        let ways: Vec<Way> = (0..layout.shards()).map(way).collect();
        prop_assert!(assemble(&spec, &layout, &pool, &order, &ways) == naive(&spec, &layout));
    }
}

#[test]
fn wrong_puts_are_refused_by_name() {
    let spec = spec(&[100, 200], 1, Dtype::Bf16);
    let layout = spec.validate().unwrap();
    let pool = BufferPool::new(Budget::unlimited("test"), "test");
    let plan = ChunkSource { spec: &spec, layout: &layout, pool: &pool };
    let ways = vec![Way::Chunks; layout.shards() as usize];
    let mut collector = Collector::new((Step(1), MicroStep(0)), Rank(0), (&spec, &layout), ways);
    let mut put = |param, elements: usize| {
        let result = collector.put(&plan, param, elements as u64, &mut |_, _| Ok(()), |_, _, _| Ok(()));
        let error = match result {
            Err(Error::Gradient(error)) => Some(error),
            _ => None,
        };
        (error, collector.finish(&spec))
    };
    assert_eq!(put(2, 1).0, Some(GradientError::Unknown { param: 2, params: 2 }));
    assert_eq!(put(0, 99).0, Some(GradientError::Length { name: "p0".into(), given: 99, expected: 100 }));
    let (none, unfinished) = put(0, 100);
    assert_eq!((none, unfinished), (None, Err(GradientError::Missing { name: "p1".into(), missing: 1 })));
    assert_eq!(put(0, 100).0, Some(GradientError::Twice { name: "p0".into() }));
    assert_eq!(put(1, 200), (None, Ok(())));
}

#[test]
fn a_list_with_a_wrong_gradient_puts_none_of_them() {
    let spec = spec(&[100, 200], 1, Dtype::Bf16);
    let layout = spec.validate().unwrap();
    let pool = BufferPool::new(Budget::unlimited("test"), "test");
    let plan = ChunkSource { spec: &spec, layout: &layout, pool: &pool };
    let ways = vec![Way::Chunks; layout.shards() as usize];
    let mut collector = Collector::new((Step(1), MicroStep(0)), Rank(0), (&spec, &layout), ways);
    let mut put = |gradients: &[(usize, u64)]| {
        collector.put_together(&plan, gradients, &mut |_| Ok(()), |_, _, _| Ok(())).is_ok()
    };
    assert!(!put(&[(0, 100), (1, 199)]) && !put(&[(0, 100), (0, 100)]));
    assert!(put(&[(0, 100), (1, 200)]));
    assert_eq!(collector.finish(&spec), Ok(()));
}

/// A gradient that a device could not copy does not leave.
#[test]
fn a_chunk_whose_writing_failed_does_not_leave() {
    let spec = spec(&[100], 1, Dtype::Bf16);
    let layout = spec.validate().unwrap();
    let pool = BufferPool::new(Budget::unlimited("test"), "test");
    let plan = ChunkSource { spec: &spec, layout: &layout, pool: &pool };
    let ways = vec![Way::Chunks; layout.shards() as usize];
    let mut collector = Collector::new((Step(1), MicroStep(0)), Rank(0), (&spec, &layout), ways);
    let mut left = 0;
    let mut count = |_, _, _| {
        left += 1;
        Ok(())
    };
    let put = collector.put(&plan, 0, 100, &mut |_, _| Err(Misuse("no device").into()), &mut count);
    assert!(matches!(put, Err(Error::Misuse(_))));
    assert_eq!(left, 0);
}

#[test]
fn a_rank_puts_its_own_partitions_and_no_other() {
    let partition = |first, rank| Partition { first, ranks: vec![Rank(rank)] };
    let spec = JobSpec {
        world_size: 2,
        partitions: vec![partition(0, 0), partition(1, 1), partition(2, 0)],
        ..spec(&[100, 200, 300], 1, Dtype::Bf16)
    };
    let layout = spec.validate().unwrap();
    let pool = BufferPool::new(Budget::unlimited("test"), "test");
    let plan = ChunkSource { spec: &spec, layout: &layout, pool: &pool };
    let ways = vec![Way::Chunks; layout.shards() as usize];
    let mut collector = Collector::new((Step(1), MicroStep(0)), Rank(0), (&spec, &layout), ways);
    let mut left = Vec::new();
    let mut put = |collector: &mut Collector, param: usize| {
        let elements = spec.params[param].elements().unwrap();
        collector.put(&plan, param, elements, &mut |_, _| Ok(()), |key, _, _| {
            left.push(key.shard.0);
            Ok(())
        })
    };
    let refused = put(&mut collector, 1);
    let expected = GradientError::NotContributor { name: "p1".into(), rank: 0 };
    assert!(matches!(refused, Err(Error::Gradient(error)) if error == expected));
    put(&mut collector, 2).unwrap();
    let missing = GradientError::Missing { name: "p0".into(), missing: 1 };
    assert_eq!(collector.finish(&spec), Err(missing));
    put(&mut collector, 0).unwrap();
    assert_eq!(collector.finish(&spec), Ok(()));
    assert_eq!(left, [2, 0]);
}
