//! Arrays of a job's shards, laid out as on a server, for benches of memory.

use anyhow::Context;
use longshore_engine::{
    kernels::{self, Gradient, Isa, Rule},
    memory::{Region, Slab, Traffic},
    threads::ThreadPool,
    tier::{self, StateMut},
};
use longshore_proto::{
    Dtype, Formats,
    limits::{BLOCK_ELEMENTS, DEFAULT_SHARD_ELEMENTS},
};

pub(super) const BLOCK: usize = BLOCK_ELEMENTS as usize;
const SHARD: usize = DEFAULT_SHARD_ELEMENTS as usize;
/// Bytes of a parameter: gradient and image in the widest format, and three fp32 arrays.
const BYTES_PER_PARAM: u64 = 20;
/// Default number of parameters. Their arrays fit in no cache: a round moves 5.6 GB through memory.
const DEFAULT_PARAMS: u64 = 200_000_000;

/// Formats of the arrays. An update and its limit move the same bytes, since they share the formats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    pub(super) wire: Dtype,
    pub(super) state: tier::Shape,
}

pub(super) struct Arrays {
    pub(super) shards: Vec<Shard>,
    /// Formats of the values that the state holds now.
    formats: Formats,
}

pub(super) struct Shard {
    pub(super) len: usize,
    /// This array and the arrays below have room for fp32. Cases with fewer bits use the first part.
    pub(super) gradient: Region,
    master: Region,
    pub(super) first: Region,
    second: Region,
    image: Region,
}

impl Shape {
    /// Bytes through memory for each block: state is read and written.
    pub(super) fn block_bytes(&self) -> usize {
        let wire = BLOCK * self.wire.bytes() as usize;
        2 * (wire + self.state.block().iter().sum::<usize>())
    }
}

impl Arrays {
    /// Allocates the arrays in shards, as a server does. The threads that will use them touch them first.
    pub(super) fn allocate(params: usize, pool: &ThreadPool) -> anyhow::Result<Arrays> {
        let mut lengths = vec![SHARD; params / SHARD];
        lengths.extend((!params.is_multiple_of(SHARD)).then_some(params % SHARD));
        let sizes: Vec<usize> = lengths.iter().flat_map(|&len| [len * 4; 5]).collect();
        let slab = Slab::allocate(Slab::bytes_for(sizes.iter().copied()))?;
        let mut regions = slab.carve(&sizes, pool)?.into_iter();
        let mut next = || regions.next().context("a region was carved for every size");
        let mut shards = Vec::new();
        for len in lengths {
            let mut shard = Shard {
                len,
                gradient: next()?,
                master: next()?,
                first: next()?,
                second: next()?,
                image: next()?,
            };
            shard.fill_gradient(pool);
            shards.push(shard);
        }
        let mut arrays = Arrays { shards, formats: Formats { seed: 1, ..Formats::default() } };
        arrays.refill(pool);
        Ok(arrays)
    }

    pub(super) fn prepare(&mut self, pool: &ThreadPool, formats: Formats) {
        if self.formats != formats {
            self.formats = formats;
            self.refill(pool);
        }
    }

    fn refill(&mut self, pool: &ThreadPool) {
        let shape = tier::Shape::new(Rule::AdamW, self.formats);
        for shard in &mut self.shards {
            let (_, state, _) = shard.cut(Shape { wire: Dtype::F32, state: shape });
            pool.blocks(state.blocks().collect(), |mut block: StateMut<'_>| fill(&mut block));
        }
    }
}

impl Shard {
    fn fill_gradient(&mut self, pool: &ThreadPool) {
        let gradient = self.gradient.u16_mut().chunks_mut(2 * BLOCK);
        pool.blocks(gradient.collect(), |part: &mut [u16]| fill_gradient(part));
    }

    /// Returns the parts of the arrays that a case uses: gradient, state and image.
    pub(super) fn cut(&mut self, shape: Shape) -> (&[u8], StateMut<'_>, &mut [u8]) {
        let wire = self.len * shape.wire.bytes() as usize;
        let [master, first, second] = shape.state.arrays(self.len);
        let arrays = [
            &mut self.master.bytes_mut()[..master],
            &mut self.first.bytes_mut()[..first],
            &mut self.second.bytes_mut()[..second],
        ];
        (
            &self.gradient.bytes()[..wire],
            StateMut::new(shape.state, arrays),
            &mut self.image.bytes_mut()[..wire],
        )
    }
}

/// Moves the bytes of one update of all parameters without arithmetic, which is the update's limit.
pub(super) fn move_bytes(arrays: &mut Arrays, pool: &ThreadPool, shape: Shape) {
    for shard in &mut arrays.shards {
        let (gradient, state, image) = shard.cut(shape);
        let wire = BLOCK * shape.wire.bytes() as usize;
        let blocks = gradient.chunks(wire).zip(state.blocks()).zip(image.chunks_mut(wire));
        let items = blocks.map(|((read, state), write)| Traffic { read, update: state.arrays, write });
        pool.blocks(items.collect(), |block: Traffic<'_>| block.run(BLOCK));
    }
}

/// Fills a block with values that stay positive and far from denormal. This holds in every format, under every rule,
/// after any number of updates. Instructions on denormal values or NaNs may take longer.
fn fill(block: &mut StateMut<'_>) {
    use kernels::{MasterMut, MomentMut, encode};
    let low = block.low();
    match low.master {
        MasterMut::F32(master) => master.fill(0.5),
        MasterMut::Bf16(master) => master.fill(0x3F00),
    }
    let values = |value: f32| -> Vec<f32> {
        // Each group of 8-bit moments gets codes of all sizes.
        (0..BLOCK).map(|at| value * (1 + at % 64) as f32 / 64.0).collect()
    };
    for (code, moment, value) in
        [(kernels::Code::Signed, low.first, 0.01), (kernels::Code::Unsigned, low.second, 0.001)]
    {
        if !matches!(moment, MomentMut::Empty) {
            encode(Isa::detect(), code, &values(value), moment);
        }
    }
}

pub(super) fn gradient_of(wire: Dtype, bytes: &[u8]) -> Gradient<'_> {
    match wire {
        Dtype::F32 => Gradient::f32(bytemuck::cast_slice(bytes)),
        Dtype::F16 => Gradient::f16(bytemuck::cast_slice(bytes)),
        Dtype::Bf16 => Gradient::bf16(bytemuck::cast_slice(bytes)),
    }
}

/// Fills with values of about 1 as f16, and about 0.008 as bf16 and f32.
pub(super) fn fill_gradient(part: &mut [u16]) {
    part.iter_mut().enumerate().for_each(|(at, bits)| *bits = 0x3C00 | ((at * 40503) >> 7 & 0x7F) as u16);
}

/// Returns the number of parameters: whole blocks, at least one.
pub(super) fn fitting(asked: Option<u64>, available: u64) -> anyhow::Result<usize> {
    let blocks = match asked {
        Some(params) => params / BLOCK_ELEMENTS,
        None => DEFAULT_PARAMS.min(available / 2 / BYTES_PER_PARAM) / BLOCK_ELEMENTS,
    };
    let params = blocks.max(1) * BLOCK_ELEMENTS;
    let need = params.saturating_mul(BYTES_PER_PARAM);
    if need > available {
        let largest = available / BYTES_PER_PARAM;
        anyhow::bail!(
            "{params} parameters take {need} bytes, but {available} are available: ask for --params of at most {largest}"
        );
    }
    Ok(usize::try_from(params)?)
}
