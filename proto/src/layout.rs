//! The flat space: parameters end to end, cut into shards and blocks.

use std::{collections::HashSet, fmt, ops::Range};

use crate::{
    dtype::Dtype,
    fault::Fault,
    ids::{BlockId, ChunkId, Rank, ShardId},
    limits::{
        ALIGN_ELEMENTS, BLOCK_ELEMENTS, CHUNK_BYTES, MAX_ELEMENTS, MAX_PARAM_DIMENSIONS,
        MAX_PARAM_NAME_BYTES, MAX_PARAMS, MAX_SHARDS,
    },
    partition::Partition,
};

/// A tensor of the model, in registration order.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Param {
    pub name: String,
    pub shape: Vec<u64>,
    /// Index into the job's param groups.
    pub group: u32,
}

impl Param {
    /// Returns the number of elements, or None if the product overflows.
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
    /// First element, counted from the shard's start.
    pub offset: u64,
    pub elements: u64,
}

#[derive(Clone, Debug, PartialEq)]
struct Placed {
    range: Range<u64>,
    group: u32,
}

/// Positions of parameters, shards and blocks in the flat space. Each partition is padded to whole blocks. Padding
/// stays zero, since its gradient is zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    placed: Vec<Placed>,
    partitions: Vec<Cut>,
    elements: u64,
    shard_elements: u64,
}

/// A partition of the flat space. All its shards have `shard_elements`, except that the last may be shorter.
#[derive(Clone, Debug, PartialEq)]
struct Cut {
    range: Range<u64>,
    first_shard: u32,
    contributors: Vec<Rank>,
}

impl Layout {
    /// Lays out `params`. `partitions` must have passed `partition::check`: ascending, the first at parameter 0.
    pub fn new(
        params: &[Param],
        groups: usize,
        shard_elements: u64,
        partitions: &[Partition],
    ) -> Result<Layout, Fault> {
        if params.is_empty() || params.len() > MAX_PARAMS {
            let limit = format!("in 1..={MAX_PARAMS}");
            return Err(Fault::invalid("spec.params", params.len(), limit, "send the model's parameters"));
        }
        let mut names = HashSet::with_capacity(params.len());
        let mut placed = Vec::with_capacity(params.len());
        let mut starts = Vec::with_capacity(partitions.len());
        let mut start = 0u64;
        for (index, param) in params.iter().enumerate() {
            let elements = check_param(index, param, groups)?;
            if partitions.get(starts.len()).is_some_and(|partition| partition.first as usize == index) {
                start = start.next_multiple_of(BLOCK_ELEMENTS);
                starts.push(start);
            }
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
        let elements = start.next_multiple_of(BLOCK_ELEMENTS);
        let ends = starts.iter().copied().skip(1).chain([elements]);
        let mut cuts = Vec::with_capacity(partitions.len());
        let mut shards = 0;
        for ((&start, end), partition) in starts.iter().zip(ends).zip(partitions) {
            let contributors = partition.ranks.clone();
            cuts.push(Cut { range: start..end, first_shard: shards as u32, contributors });
            shards += (end - start).div_ceil(shard_elements);
            if shards > MAX_SHARDS {
                let limit = format!("large enough for at most {MAX_SHARDS} shards");
                return Err(Fault::invalid(
                    "spec.shard_elements",
                    shard_elements,
                    limit,
                    "use larger shards",
                ));
            }
        }
        Ok(Layout { placed, partitions: cuts, elements, shard_elements })
    }

    /// Returns the number of elements of the flat space, which is a whole number of blocks.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    pub fn shards(&self) -> u32 {
        self.partitions.last().map_or(0, |cut| {
            cut.first_shard + (cut.range.end - cut.range.start).div_ceil(self.shard_elements) as u32
        })
    }

    /// Returns the ranks that contribute to a shard, ascending. Gradients are summed in this order.
    pub fn contributors(&self, shard: ShardId) -> &[Rank] {
        &self.cut_of(shard).contributors
    }

    pub fn param_contributors(&self, param: usize) -> &[Rank] {
        &self.cut_at(self.placed[param].range.start).contributors
    }

    pub fn is_frozen(&self, shard: ShardId) -> bool {
        self.contributors(shard).is_empty()
    }

    pub fn is_param_frozen(&self, param: usize) -> bool {
        self.param_contributors(param).is_empty()
    }

    /// Returns the flat range and the contributors of each partition, in order. A frozen partition has none.
    pub fn partitions(&self) -> impl Iterator<Item = (Range<u64>, &[Rank])> {
        self.partitions.iter().map(|cut| (cut.range.clone(), cut.contributors.as_slice()))
    }

    /// Returns the flat ranges whose gradients a rank contributes, in order.
    pub fn contributed_by(&self, rank: Rank) -> impl Iterator<Item = Range<u64>> {
        let partitions = self.partitions();
        partitions.filter(move |(_, ranks)| ranks.binary_search(&rank).is_ok()).map(|(range, _)| range)
    }

    fn cut_of(&self, shard: ShardId) -> &Cut {
        let after = self.partitions.partition_point(|cut| cut.first_shard <= shard.0);
        &self.partitions[after - 1]
    }

    fn cut_at(&self, element: u64) -> &Cut {
        let after = self.partitions.partition_point(|cut| cut.range.start <= element);
        &self.partitions[after - 1]
    }

    fn shard_at(&self, element: u64) -> ShardId {
        let cut = self.cut_at(element);
        ShardId(cut.first_shard + ((element - cut.range.start) / self.shard_elements) as u32)
    }

    pub fn blocks(&self) -> u32 {
        (self.elements / BLOCK_ELEMENTS) as u32
    }

    /// Returns the flat elements of a shard. A partition's last shard may be shorter, but is whole blocks.
    pub fn shard_range(&self, shard: ShardId) -> Range<u64> {
        let cut = self.cut_of(shard);
        let start = cut.range.start + u64::from(shard.0 - cut.first_shard) * self.shard_elements;
        start..(start + self.shard_elements).min(cut.range.end)
    }

    pub fn shard_len(&self, shard: ShardId) -> u64 {
        let range = self.shard_range(shard);
        range.end - range.start
    }

    /// Returns the global ids of a shard's blocks.
    pub fn shard_blocks(&self, shard: ShardId) -> Range<u32> {
        let range = self.shard_range(shard);
        (range.start / BLOCK_ELEMENTS) as u32..(range.end / BLOCK_ELEMENTS) as u32
    }

    /// Returns the flat elements of a parameter, without padding.
    pub fn param_range(&self, param: usize) -> Range<u64> {
        self.placed[param].range.clone()
    }

    /// Yields the padding inside a flat range, in order.
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

    /// Returns the parameter that holds a flat element, or None for padding.
    pub fn param_at(&self, element: u64) -> Option<usize> {
        let after = self.placed.partition_point(|placed| placed.range.start <= element);
        let index = after.checked_sub(1)?;
        self.placed[index].range.contains(&element).then_some(index)
    }

    /// Returns the parameters that have elements in a flat range.
    pub fn params_in(&self, range: Range<u64>) -> Range<usize> {
        let first = self.placed.partition_point(|placed| placed.range.end <= range.start);
        let end = self.placed.partition_point(|placed| placed.range.start < range.end);
        first..end.max(first)
    }

    pub fn param_group(&self, param: usize) -> u32 {
        self.placed[param].group
    }

    /// Returns the parameters that begin in a flat range.
    pub fn params_from(&self, range: Range<u64>) -> Range<usize> {
        let before = |element: u64| self.placed.partition_point(|placed| placed.range.start < element);
        before(range.start)..before(range.end)
    }

    /// Cuts a block where a parameter begins. Returns (elements inside the block, parameter); padding counts to the
    /// parameter before it.
    pub fn block_params(&self, block: BlockId) -> Vec<(Range<usize>, usize)> {
        let start = u64::from(block.0) * BLOCK_ELEMENTS;
        let begin = self.params_from(start + 1..start + BLOCK_ELEMENTS);
        // A parameter begins at element 0 of the flat space, so `begin.start` is at least 1.
        let first = begin.start - 1;
        let at = |param: usize| self.placed[param].range.start.saturating_sub(start) as usize;
        let ends = begin.clone().map(at).chain([BLOCK_ELEMENTS as usize]);
        let mut from = 0;
        let cut = |(param, end): (usize, usize)| {
            let range = from..end;
            from = end;
            (range, param)
        };
        (first..begin.end).zip(ends).map(cut).collect()
    }

    /// Cuts a block where the param group changes. Returns (elements inside the block, group); padding counts to the
    /// group before it.
    pub fn block_groups(&self, block: BlockId) -> Vec<(Range<usize>, u32)> {
        let mut cuts: Vec<(Range<usize>, u32)> = Vec::new();
        for (range, param) in self.block_params(block) {
            let group = self.param_group(param);
            match cuts.last_mut() {
                Some((last, same)) if *same == group => last.end = range.end,
                _ => cuts.push((range, group)),
            }
        }
        cuts
    }

    /// Returns a flat range as slices of shards, in order.
    pub fn slices(&self, range: Range<u64>) -> Vec<Slice> {
        let mut slices = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let shard = self.shard_at(at);
            let within = self.shard_range(shard);
            let end = range.end.min(within.end);
            slices.push(Slice { shard, offset: at - within.start, elements: end - at });
            at = end;
        }
        slices
    }

    pub fn chunks(&self, shard: ShardId, dtype: Dtype) -> u32 {
        (self.shard_len(shard) * dtype.bytes()).div_ceil(CHUNK_BYTES as u64) as u32
    }

    /// Returns the bytes of one chunk inside its shard, or None beyond the last chunk.
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
#[path = "layout_tests.rs"]
mod tests;
