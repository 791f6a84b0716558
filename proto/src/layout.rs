//! The flat space: parameters laid end to end, cut into shards and blocks.

use std::{collections::HashSet, fmt, ops::Range};

use crate::{
    dtype::Dtype,
    fault::Fault,
    ids::{BlockId, ChunkId, ShardId},
    limits::{
        ALIGN_ELEMENTS, BLOCK_ELEMENTS, CHUNK_BYTES, MAX_ELEMENTS, MAX_PARAM_DIMENSIONS,
        MAX_PARAM_NAME_BYTES, MAX_PARAMS, MAX_SHARDS,
    },
};

/// One tensor of the model, in registration order.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Param {
    pub name: String,
    pub shape: Vec<u64>,
    /// Index into the job's param groups.
    pub group: u32,
}

impl Param {
    /// None when the product overflows.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |product, &side| product.checked_mul(side))
    }
}

impl fmt::Display for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} in group {}", self.name, self.shape, self.group)
    }
}

/// A run of elements inside one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slice {
    pub shard: ShardId,
    /// The first element, counted from the shard's start.
    pub offset: u64,
    pub elements: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Placed {
    range: Range<u64>,
    group: u32,
}

/// Where every parameter, shard and block lies. The tail is padded to whole blocks. Padding and gaps hold zeros for
/// ever, since their gradient is zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    placed: Vec<Placed>,
    elements: u64,
    shard_elements: u64,
}

impl Layout {
    pub fn new(params: &[Param], groups: usize, shard_elements: u64) -> Result<Layout, Fault> {
        if params.is_empty() || params.len() > MAX_PARAMS {
            let limit = format!("in 1..={MAX_PARAMS}");
            return Err(Fault::invalid("spec.params", params.len(), limit, "send the model's parameters"));
        }
        let mut names = HashSet::with_capacity(params.len());
        let mut placed = Vec::with_capacity(params.len());
        let mut start = 0u64;
        for (index, param) in params.iter().enumerate() {
            let elements = check_param(index, param, groups)?;
            if !names.insert(param.name.as_str()) {
                let field = format!("spec.params[{index}].name");
                let remedy = "register a weight used twice as one parameter";
                return Err(Fault::invalid(field, &param.name, "unique", remedy));
            }
            placed.push(Placed { range: start..start + elements, group: param.group });
            start = (start + elements).next_multiple_of(ALIGN_ELEMENTS);
            if start > MAX_ELEMENTS {
                let limit = format!("at most {MAX_ELEMENTS} elements");
                return Err(Fault::invalid("spec.params", start, limit, "split the model into several jobs"));
            }
        }
        let layout = Layout { placed, elements: start.next_multiple_of(BLOCK_ELEMENTS), shard_elements };
        if layout.elements.div_ceil(shard_elements) > MAX_SHARDS {
            let limit = format!("large enough for at most {MAX_SHARDS} shards");
            return Err(Fault::invalid("spec.shard_elements", shard_elements, limit, "use larger shards"));
        }
        Ok(layout)
    }

    /// The elements of the flat space, which is whole blocks.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    pub fn shards(&self) -> u32 {
        self.elements.div_ceil(self.shard_elements) as u32
    }

    pub fn blocks(&self) -> u32 {
        (self.elements / BLOCK_ELEMENTS) as u32
    }

    /// The flat elements of a shard. The last shard may be shorter, but is whole blocks.
    pub fn shard_range(&self, shard: ShardId) -> Range<u64> {
        let start = u64::from(shard.0) * self.shard_elements;
        start..(start + self.shard_elements).min(self.elements)
    }

    pub fn shard_len(&self, shard: ShardId) -> u64 {
        let range = self.shard_range(shard);
        range.end - range.start
    }

    /// The global ids of a shard's blocks.
    pub fn shard_blocks(&self, shard: ShardId) -> Range<u32> {
        let range = self.shard_range(shard);
        (range.start / BLOCK_ELEMENTS) as u32..(range.end / BLOCK_ELEMENTS) as u32
    }

    /// The flat elements of a parameter, without padding.
    pub fn param_range(&self, param: usize) -> Range<u64> {
        self.placed[param].range.clone()
    }

    /// The parts of a flat range that are padding, in order.
    pub fn padding(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.placed.partition_point(|placed| placed.range.end <= range.start);
        let mut params = self.placed[first..].iter();
        let Range { start: mut at, end } = range;
        std::iter::from_fn(move || {
            while at < end {
                let next = params.next().map_or(end..end, |placed| placed.range.clone());
                let gap = at..next.start.min(end);
                at = next.end;
                if !gap.is_empty() {
                    return Some(gap);
                }
            }
            None
        })
    }

    /// The parameter holding a flat element, if it is not padding.
    pub fn param_at(&self, element: u64) -> Option<usize> {
        let after = self.placed.partition_point(|placed| placed.range.start <= element);
        let index = after.checked_sub(1)?;
        self.placed[index].range.contains(&element).then_some(index)
    }

    /// A block, cut where the param group changes, as (elements inside the block, group). A gap takes the group
    /// before it.
    pub fn block_groups(&self, block: BlockId) -> Vec<(Range<usize>, u32)> {
        let start = u64::from(block.0) * BLOCK_ELEMENTS;
        let end = start + BLOCK_ELEMENTS;
        let first = self.placed.partition_point(|placed| placed.range.start <= start).saturating_sub(1);
        let mut cuts: Vec<(Range<usize>, u32)> = Vec::new();
        for placed in self.placed[first..].iter().take_while(|placed| placed.range.start < end) {
            let at = placed.range.start.saturating_sub(start) as usize;
            match cuts.last_mut() {
                Some((range, group)) if *group != placed.group => {
                    range.end = at;
                    cuts.push((at..BLOCK_ELEMENTS as usize, placed.group));
                }
                Some(_) => {}
                None => cuts.push((0..BLOCK_ELEMENTS as usize, placed.group)),
            }
        }
        cuts
    }

    /// A flat range as slices of shards, in order.
    pub fn slices(&self, range: Range<u64>) -> Vec<Slice> {
        let mut slices = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let shard = ShardId((at / self.shard_elements) as u32);
            let within = self.shard_range(shard);
            let end = range.end.min(within.end);
            slices.push(Slice { shard, offset: at - within.start, elements: end - at });
            at = end;
        }
        slices
    }

    /// How many chunks a shard's data have on the wire.
    pub fn chunks(&self, shard: ShardId, dtype: Dtype) -> u32 {
        (self.shard_len(shard) * dtype.bytes()).div_ceil(CHUNK_BYTES as u64) as u32
    }

    /// The bytes of one chunk inside its shard; None beyond the last chunk.
    pub fn chunk_bytes(&self, shard: ShardId, chunk: ChunkId, dtype: Dtype) -> Option<Range<u64>> {
        let total = self.shard_len(shard) * dtype.bytes();
        let start = u64::from(chunk.0) * CHUNK_BYTES as u64;
        (start < total).then(|| start..(start + CHUNK_BYTES as u64).min(total))
    }
}

fn check_param(index: usize, param: &Param, groups: usize) -> Result<u64, Fault> {
    let field = |name: &str| format!("spec.params[{index}].{name}");
    if param.name.is_empty() || param.name.len() > MAX_PARAM_NAME_BYTES {
        let limit = format!("1 to {MAX_PARAM_NAME_BYTES} bytes");
        return Err(Fault::invalid(field("name"), format!("{:?}", param.name), limit, "shorten it"));
    }
    if param.shape.len() > MAX_PARAM_DIMENSIONS {
        let limit = format!("at most {MAX_PARAM_DIMENSIONS} dimensions");
        return Err(Fault::invalid(field("shape"), param.shape.len(), limit, "reshape the parameter"));
    }
    if param.group as usize >= groups {
        let limit = format!("below {groups}, the number of groups");
        return Err(Fault::invalid(field("group"), param.group, limit, "name the group in spec.groups"));
    }
    match param.elements() {
        Some(elements) if (1..=MAX_ELEMENTS).contains(&elements) => Ok(elements),
        _ => {
            let limit = format!("1 to {MAX_ELEMENTS} elements");
            Err(Fault::invalid(
                field("shape"),
                format!("{:?}", param.shape),
                limit,
                "leave empty tensors out",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn params(sizes: &[(u64, u32)]) -> Vec<Param> {
        let param = |(index, &(size, group))| Param { name: format!("p{index}"), shape: vec![size], group };
        sizes.iter().enumerate().map(param).collect()
    }

    proptest! {
        #[test]
        fn every_element_has_one_place(
            sizes in prop::collection::vec((1u64..200_000, 0u32..3), 1..20),
            shard_blocks in 1u64..4,
        ) {
            let layout = Layout::new(&params(&sizes), 3, shard_blocks * BLOCK_ELEMENTS).unwrap();
            prop_assert!(layout.elements().is_multiple_of(BLOCK_ELEMENTS));
            let mut end = 0;
            for (index, &(size, _)) in sizes.iter().enumerate() {
                let range = layout.param_range(index);
                prop_assert!(range.start >= end && range.start - end < ALIGN_ELEMENTS);
                prop_assert_eq!(range.end - range.start, size);
                prop_assert_eq!(layout.param_at(range.start), Some(index));
                prop_assert_eq!(layout.param_at(range.end - 1), Some(index));
                end = range.end;
                let slices = layout.slices(range.clone());
                prop_assert_eq!(slices.iter().map(|slice| slice.elements).sum::<u64>(), size);
                for slice in slices {
                    prop_assert!(slice.offset + slice.elements <= layout.shard_len(slice.shard));
                }
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
        fn block_groups_agree_with_params(sizes in prop::collection::vec((1u64..90_000, 0u32..3), 1..20)) {
            let layout = Layout::new(&params(&sizes), 3, BLOCK_ELEMENTS).unwrap();
            for block in 0..layout.blocks() {
                let cuts = layout.block_groups(BlockId(block));
                prop_assert_eq!(cuts.first().unwrap().0.start, 0);
                prop_assert_eq!(cuts.last().unwrap().0.end, BLOCK_ELEMENTS as usize);
                for pair in cuts.windows(2) {
                    prop_assert_eq!(pair[0].0.end, pair[1].0.start);
                    prop_assert_ne!(pair[0].1, pair[1].1);
                }
                for (range, group) in cuts {
                    for element in [range.start, range.end - 1] {
                        let flat = u64::from(block) * BLOCK_ELEMENTS + element as u64;
                        if let Some(param) = layout.param_at(flat) {
                            prop_assert_eq!(sizes[param].1, group);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_repeated_name_is_refused() {
        let mut twice = params(&[(4, 0), (4, 0)]);
        twice[1].name = "p0".into();
        let fault = Layout::new(&twice, 1, BLOCK_ELEMENTS).unwrap_err();
        assert_eq!(fault.field, "spec.params[1].name");
    }

    #[test]
    fn a_shape_that_overflows_is_refused() {
        let huge = [Param { name: "p".into(), shape: vec![u64::MAX, 2], group: 0 }];
        assert_eq!(Layout::new(&huge, 1, BLOCK_ELEMENTS).unwrap_err().field, "spec.params[0].shape");
    }
}
