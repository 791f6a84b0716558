//! The flat space for random parameters and partitions.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn params(sizes: &[(u64, u32)]) -> Vec<Param> {
    let param = |(index, &(size, group))| Param { name: format!("p{index}"), shape: vec![size], group };
    sizes.iter().enumerate().map(param).collect()
}

/// Partitions that begin at parameter 0 and at `firsts`, each with its own ranks.
fn partitions(firsts: &BTreeSet<usize>, params: usize) -> Vec<Partition> {
    let firsts = [0].into_iter().chain(firsts.iter().copied().filter(|&first| first < params));
    let partition = |(index, first)| {
        let ranks = (0..=index as u32).filter(|rank| rank % 2 == index as u32 % 2).map(Rank).collect();
        Partition { first: first as u32, ranks }
    };
    firsts.enumerate().map(partition).collect()
}

fn whole() -> [Partition; 1] {
    [Partition::whole(1)]
}

proptest! {
    #[test]
    fn every_element_has_one_place(
        sizes in prop::collection::vec((1u64..200_000, 0u32..3), 1..20),
        shard_blocks in 1u64..4,
        firsts in prop::collection::btree_set(1usize..20, 0..4),
    ) {
        let layout = Layout::new(&params(&sizes), 3, shard_blocks * BLOCK_ELEMENTS, &partitions(&firsts, sizes.len())).unwrap();
        prop_assert!(layout.elements().is_multiple_of(BLOCK_ELEMENTS));
        let mut end = 0;
        for (index, &(size, _)) in sizes.iter().enumerate() {
            let range = layout.param_range(index);
            let begins = index > 0 && partitions(&firsts, sizes.len()).iter().any(|partition| partition.first as usize == index);
            let gap = if begins { BLOCK_ELEMENTS } else { ALIGN_ELEMENTS };
            prop_assert!(range.start >= end && range.start - end < gap);
            prop_assert!(!begins || range.start.is_multiple_of(BLOCK_ELEMENTS));
            prop_assert_eq!(range.end - range.start, size);
            prop_assert_eq!(layout.param_at(range.start), Some(index));
            prop_assert_eq!(layout.param_at(range.end - 1), Some(index));
            end = range.end;
            let slices = layout.slices(range.clone());
            prop_assert_eq!(slices.iter().map(|slice| slice.elements).sum::<u64>(), size);
            for slice in slices {
                prop_assert!(slice.offset + slice.elements <= layout.shard_len(slice.shard));
                prop_assert_eq!(layout.contributors(slice.shard), layout.param_contributors(index));
            }
            let expected = partitions(&firsts, sizes.len()).into_iter().rfind(|partition| partition.first as usize <= index);
            prop_assert_eq!(layout.param_contributors(index), expected.unwrap().ranks);
        }
        for rank in (0..sizes.len() as u32).map(Rank) {
            let parts = layout.contributed_by(rank).collect::<Vec<_>>();
            for shard in (0..layout.shards()).map(ShardId) {
                let within = layout.shard_range(shard);
                let covered = parts.iter().any(|part| part.start <= within.start && within.end <= part.end);
                prop_assert_eq!(covered, layout.contributors(shard).contains(&rank));
            }
        }
        let mut at = 0;
        for shard in (0..layout.shards()).map(ShardId) {
            let within = layout.shard_range(shard);
            prop_assert!(within.start == at && within.end - at <= shard_blocks * BLOCK_ELEMENTS);
            at = within.end;
        }
        let padding: Vec<_> = layout.padding(0..layout.elements()).collect();
        let padded: u64 = padding.iter().map(|gap| gap.end - gap.start).sum();
        prop_assert_eq!(padded + sizes.iter().map(|(size, _)| size).sum::<u64>(), layout.elements());
        prop_assert!(padding.iter().flat_map(|gap| [gap.start, gap.end - 1]).all(|at| layout.param_at(at).is_none()));
        for shard in (0..layout.shards()).map(ShardId) {
            let within = layout.shard_range(shard);
            let cut = padding.iter().map(|gap| gap.start.max(within.start)..gap.end.min(within.end));
            let cut = cut.filter(|gap| !gap.is_empty()).collect::<Vec<_>>();
            prop_assert_eq!(layout.padding(within).collect::<Vec<_>>(), cut);
        }
        let total: u64 = (0..layout.shards()).map(|shard| layout.shard_len(ShardId(shard))).sum();
        prop_assert_eq!(total, layout.elements());
    }

    #[test]
    fn blocks_are_cut_where_parameters_begin(
        sizes in prop::collection::vec((1u64..90_000, 0u32..3), 1..20),
        firsts in prop::collection::btree_set(1usize..20, 0..4),
    ) {
        let partitions = partitions(&firsts, sizes.len());
        let layout = Layout::new(&params(&sizes), 3, BLOCK_ELEMENTS, &partitions).unwrap();
        let starts: Vec<u64> = (0..sizes.len()).map(|param| layout.param_range(param).start).collect();
        for block in 0..u64::from(layout.blocks()) {
            let here = block * BLOCK_ELEMENTS..(block + 1) * BLOCK_ELEMENTS;
            let begin: Vec<usize> = (0..sizes.len()).filter(|&param| here.contains(&starts[param])).collect();
            prop_assert_eq!(layout.params_from(here.clone()).collect::<Vec<_>>(), begin);
            let cuts = layout.block_params(BlockId(block as u32));
            prop_assert_eq!((cuts[0].0.start, cuts[cuts.len() - 1].0.end), (0, BLOCK_ELEMENTS as usize));
            prop_assert!(cuts.windows(2).all(|pair| pair[0].0.end == pair[1].0.start && pair[0].1 < pair[1].1));
            let groups = layout.block_groups(BlockId(block as u32));
            prop_assert!(groups.windows(2).all(|pair| pair[0].0.end == pair[1].0.start && pair[0].1 != pair[1].1));
            for (range, param) in cuts {
                let group = sizes[param].1;
                prop_assert_eq!(layout.param_group(param), group);
                prop_assert!(groups.iter().any(|(of, same)| *same == group && of.start <= range.start && range.end <= of.end));
                for element in [range.start, range.end - 1] {
                    let flat = here.start + element as u64;
                    prop_assert_eq!(starts.iter().rposition(|&start| start <= flat), Some(param));
                }
            }
        }
    }
}

#[test]
fn a_repeated_name_is_refused() {
    let mut twice = params(&[(4, 0), (4, 0)]);
    twice[1].name = "p0".into();
    let fault = Layout::new(&twice, 1, BLOCK_ELEMENTS, &whole()).unwrap_err();
    assert_eq!(fault.field, "spec.params[1].name");
}

#[test]
fn a_shape_that_overflows_is_refused() {
    let huge = [Param { name: "p".into(), shape: vec![u64::MAX, 2], group: 0 }];
    assert_eq!(Layout::new(&huge, 1, BLOCK_ELEMENTS, &whole()).unwrap_err().field, "spec.params[0].shape");
}
