//! A shard's state in a tier: master weights and moments as arrays of bytes, block after block. A frozen shard has one
//! array, its weights as workers pull them.

use longshore_proto::{
    Dtype, Formats, JobSpec, Layout, MasterFormat, Rule, ShardId, StateArray, StateFormat,
    limits::BLOCK_ELEMENTS,
};

use crate::kernels::{
    Code, Gradient, ImageMut, Isa, MasterMut, Moment, MomentMut, State, StateLow, decode, widen,
};

const BLOCK: usize = BLOCK_ELEMENTS as usize;
const ARRAYS: usize = 3;

/// Layout of a shard's arrays. All trained shards of a job have the same layout, and so have all frozen ones.
///
/// All blocks of an array have one length, so code that moves, copies or checksums state needs no knowledge of formats.
/// Elements are little-endian. A block of 8-bit moments is the codes of its elements, then their scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    formats: Formats,
    frozen: Option<Dtype>,
    block: [usize; ARRAYS],
}

/// Whole blocks of a shard, for changes: master weights, first and second moments. An array that the job does
/// not have is empty.
#[derive(Debug)]
pub struct StateMut<'a> {
    shape: Shape,
    pub arrays: [&'a mut [u8]; ARRAYS],
}

/// Whole blocks of a shard for reading, in the form of [`StateMut`].
#[derive(Clone, Copy)]
pub struct StateRef<'a> {
    shape: Shape,
    pub arrays: [&'a [u8]; ARRAYS],
    /// Comparison of blocks with their checksums. None where the tier compares blocks as it reads them.
    guard: Option<&'a dyn Guard>,
}

impl Shape {
    pub fn of(spec: &JobSpec) -> Shape {
        Shape::new(spec.rule, spec.formats)
    }

    pub fn of_frozen(spec: &JobSpec) -> Shape {
        let weights = BLOCK * spec.image_dtype.bytes() as usize;
        Shape { formats: spec.formats, frozen: Some(spec.image_dtype), block: [weights, 0, 0] }
    }

    pub fn of_shard(spec: &JobSpec, layout: &Layout, shard: ShardId) -> Shape {
        if layout.is_frozen(shard) { Shape::of_frozen(spec) } else { Shape::of(spec) }
    }

    pub fn of_shards(spec: &JobSpec, layout: &Layout, shards: &[ShardId]) -> Vec<Shape> {
        shards.iter().map(|&shard| Shape::of_shard(spec, layout, shard)).collect()
    }

    pub fn new(rule: Rule, formats: Formats) -> Shape {
        let moment = |slot: usize| if slot < rule.state_slots() { formats.state.bytes(BLOCK) } else { 0 };
        let block = [formats.master.bytes(BLOCK), moment(0), moment(1)];
        Shape { formats, frozen: None, block }
    }

    /// The bytes of one block in each array; 0 for an array that the job does not have.
    pub fn block(&self) -> [usize; ARRAYS] {
        self.block
    }

    /// Returns the bytes of whole blocks in each array.
    pub fn arrays(&self, elements: usize) -> [usize; ARRAYS] {
        self.block.map(|bytes| bytes * (elements / BLOCK))
    }

    pub fn bytes(&self, elements: usize) -> usize {
        self.arrays(elements).iter().sum()
    }
}

/// Verdict of a guard on the update of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Update the block, then hand this number to [`Guard::end`].
    Go(usize),
    /// Leave the block alone: an earlier process has updated it to this version.
    Done,
    /// Leave the block alone: its bytes differ from the written ones.
    Damaged,
}

/// A tier's hooks around the update of each block. The updating thread calls them while its cache has the block.
pub trait Guard: Sync {
    fn begin(&self, block: usize, state: StateRef<'_>) -> Turn;

    /// `image` is the block's new image.
    fn end(&self, block: usize, number: usize, state: StateRef<'_>, image: &[u8]);
}

/// A shard's state, and the hooks around the update of each block.
pub type Guarded<'a> = (StateMut<'a>, &'a dyn Guard);

impl<'a> StateMut<'a> {
    /// # Panics
    /// Unless all arrays have the same number of whole blocks.
    pub fn new(shape: Shape, arrays: [&'a mut [u8]; ARRAYS]) -> StateMut<'a> {
        let blocks = arrays[0].len() / shape.block[0];
        assert_eq!([0, 1, 2].map(|array| arrays[array].len()), shape.block.map(|bytes| bytes * blocks));
        StateMut { shape, arrays }
    }

    pub fn as_ref(&self) -> StateRef<'_> {
        let [master, first, second] = &self.arrays;
        StateRef { shape: self.shape, arrays: [master, first, second], guard: None }
    }

    pub fn blocks(self) -> impl Iterator<Item = StateMut<'a>> {
        let (shape, count) = (self.shape, self.as_ref().blocks());
        let mut cuts: [_; ARRAYS] = {
            let [master, first, second] = self.arrays;
            let [a, b, c] = shape.block;
            [(master, a), (first, b), (second, c)].map(|(array, bytes)| array.chunks_exact_mut(bytes.max(1)))
        };
        (0..count).map(move |_| {
            let arrays = [0, 1, 2].map(|array| cuts[array].next().unwrap_or_default());
            StateMut { shape, arrays }
        })
    }

    /// Returns the state in the form that kernels of fp32 state take.
    ///
    /// # Panics
    /// If the job has any other format.
    pub fn f32(&mut self) -> State<'_> {
        assert!(self.shape.formats.is_fp32(), "state of {:?} taken for fp32", self.shape.formats);
        let [master, first, second] = &mut self.arrays;
        State { master: floats(master), first: floats(first), second: floats(second) }
    }

    /// A frozen shard's weights; None for any other shard.
    pub fn frozen(&mut self) -> Option<ImageMut<'_>> {
        let weights = &mut *self.arrays[0];
        Some(match self.shape.frozen? {
            Dtype::F32 => ImageMut::F32(bytemuck::cast_slice_mut(weights)),
            Dtype::F16 => ImageMut::F16(bytemuck::cast_slice_mut(weights)),
            Dtype::Bf16 => ImageMut::Bf16(bytemuck::cast_slice_mut(weights)),
        })
    }

    /// Returns one block in the form that kernels of all formats take.
    pub fn low(&mut self) -> StateLow<'_> {
        let format = self.shape.formats.state;
        let [master, first, second] = self.arrays.each_mut().map(|array| &mut **array);
        StateLow {
            master: self.shape.master(master),
            first: moment(format, first),
            second: moment(format, second),
        }
    }

    pub fn master(&mut self) -> MasterMut<'_> {
        self.shape.master(self.arrays[0])
    }
}

impl Shape {
    fn master<'a>(&self, array: &'a mut [u8]) -> MasterMut<'a> {
        match self.formats.master {
            MasterFormat::F32 => MasterMut::F32(bytemuck::cast_slice_mut(array)),
            MasterFormat::Bf16 => MasterMut::Bf16(bytemuck::cast_slice_mut(array)),
        }
    }
}

/// Returns the array as floats. An empty slice may start at any address, which bytemuck refuses.
fn floats(array: &mut [u8]) -> &mut [f32] {
    if array.is_empty() { &mut [] } else { bytemuck::cast_slice_mut(array) }
}

fn moment(format: StateFormat, array: &mut [u8]) -> MomentMut<'_> {
    if array.is_empty() {
        return MomentMut::Empty;
    }
    match format {
        StateFormat::F32 => MomentMut::F32(bytemuck::cast_slice_mut(array)),
        StateFormat::Bf16 => MomentMut::Bf16(bytemuck::cast_slice_mut(array)),
        StateFormat::Block8 => {
            let (codes, scales) = array.split_at_mut(BLOCK);
            MomentMut::Block8 { codes, scales: bytemuck::cast_slice_mut(scales) }
        }
    }
}

impl<'a> StateRef<'a> {
    /// # Panics
    /// Unless all arrays have the same number of whole blocks.
    pub fn new(shape: Shape, arrays: [&'a [u8]; ARRAYS]) -> StateRef<'a> {
        let blocks = arrays[0].len() / shape.block[0];
        assert_eq!(arrays.map(<[u8]>::len), shape.block.map(|bytes| bytes * blocks));
        StateRef { shape, arrays, guard: None }
    }

    /// Adds a guard, which can compare the state's blocks with their checksums.
    pub(super) fn guarded(self, guard: &'a dyn Guard) -> StateRef<'a> {
        StateRef { guard: Some(guard), ..self }
    }

    /// Returns false if a block differs from its checksum.
    pub fn is_whole(&self, block: usize) -> bool {
        self.guard.is_none_or(|guard| guard.begin(block, self.block(block)) != Turn::Damaged)
    }

    pub fn blocks(&self) -> usize {
        self.arrays[0].len() / self.shape.block[0]
    }

    /// Returns true for a frozen shard's state, which is its weights alone.
    pub fn is_frozen(&self) -> bool {
        self.shape.frozen.is_some()
    }

    pub fn block(&self, index: usize) -> StateRef<'a> {
        let part = |array: usize| {
            let bytes = self.shape.block[array];
            &self.arrays[array][index * bytes..(index + 1) * bytes]
        };
        StateRef { shape: self.shape, arrays: [part(0), part(1), part(2)], guard: None }
    }

    /// Hands one block of an array that the shard has to `with`, as f32.
    pub fn with_array<R>(
        &self,
        isa: Isa,
        rule: Rule,
        array: StateArray,
        block: usize,
        with: impl FnOnce(&[f32]) -> R,
    ) -> R {
        let slot = match array {
            StateArray::Master => return self.with_master(isa, block, with),
            StateArray::First => 0,
            StateArray::Second => 1,
        };
        let bytes = self.block(block).arrays[array.index()];
        if self.shape.formats.state == StateFormat::F32 {
            return with(bytemuck::cast_slice(bytes));
        }
        let mut wide = vec![0.0; BLOCK];
        let moment = match self.shape.formats.state {
            StateFormat::F32 => Moment::F32(bytemuck::cast_slice(bytes)),
            StateFormat::Bf16 => Moment::Bf16(bytemuck::cast_slice(bytes)),
            StateFormat::Block8 => {
                let (codes, scales) = bytes.split_at(BLOCK);
                Moment::Block8 { codes, scales: bytemuck::cast_slice(scales) }
            }
        };
        decode(isa, Code::of(rule, slot), moment, &mut wide);
        with(&wide)
    }

    /// Hands the master weights of one block to `with`, as f32. A frozen shard gives its weights.
    pub fn with_master<R>(&self, isa: Isa, block: usize, with: impl FnOnce(&[f32]) -> R) -> R {
        let bytes = self.block(block).arrays[0];
        let narrow = match (self.shape.frozen, self.shape.formats.master) {
            (Some(Dtype::F32), _) | (None, MasterFormat::F32) => return with(bytemuck::cast_slice(bytes)),
            (Some(Dtype::F16), _) => Gradient::f16(bytemuck::cast_slice(bytes)),
            (Some(Dtype::Bf16), _) | (None, MasterFormat::Bf16) => {
                Gradient::bf16(bytemuck::cast_slice(bytes))
            }
        };
        let mut wide = vec![0.0; BLOCK];
        widen(isa, narrow, &mut wide);
        with(&wide)
    }
}
