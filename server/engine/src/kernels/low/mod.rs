//! State in fewer bits: 16- and 8-bit moments and 16-bit master weights. A step moves every parameter through
//! memory once in and once out, so fewer bits are less traffic; see [`bytes_per_parameter`].
//!
//! Fewer bytes cost arithmetic. On one core that moves 29 GB/s, AdamW on a bf16 wire takes 0.95 ns a parameter with f32
//! moments, 0.74 with bf16 ones and 1.43 with 8-bit ones (docs/update.md). 8-bit moments therefore save time only where
//! several cores share the memory's bandwidth.
//!
//! An update goes in chunks of four [`QUANTIZATION_BLOCK`]s, which stay in L1. The loop of the rule widens and rounds
//! bf16 moments, and decodes 8-bit ones. New 8-bit moments stay on the stack as f32, to be encoded once the largest of
//! each block is known. Other combinations of formats take a pass of their own for each conversion.
//!
//! Encoding in an update rounds stochastically, because rounding to nearest would lose small changes: with `beta2 =
//! 0.999` a second moment changes by 0.1 % a step. Half a unit is 0.2 to 0.4 % in bf16 and up to 4 % in 8 bits.
//! Conversions ([`encode`](super::encode), [`decode`](super::decode)) round to nearest. Decoded values encode to the
//! same bits (8 bits: from a scale of 2^-100 on).

mod code;
mod drive;
mod passes;
mod random;

pub use self::code::Code;
pub use self::random::Random;
pub use longshore_proto::{MasterFormat, StateFormat};
use longshore_proto::{Rule, limits::QUANTIZATION_ELEMENTS};

pub(super) use self::code::Tables;
pub(super) use self::drive::{decode, encode, update};
pub(super) use self::passes::{CHUNK, Codes, CodesOf, Encoding, Halves, InLoop, Largest, Passes};
pub(super) use self::random::{Half, Key};

use super::{Gradient, ImageMut, isa::LANES};
use std::ops::Range;

/// Number of elements that share a scale in [`StateFormat::Block8`]. Calls on low-precision state take whole blocks.
pub const QUANTIZATION_BLOCK: usize = QUANTIZATION_ELEMENTS;

/// A moment to update.
#[derive(Debug)]
pub enum MomentMut<'a> {
    /// The rule has no such moment.
    Empty,
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    Block8 {
        codes: &'a mut [u8],
        scales: &'a mut [f32],
    },
}

impl MomentMut<'_> {
    pub fn as_ref(&self) -> Moment<'_> {
        match self {
            MomentMut::Empty => Moment::F32(&[]),
            MomentMut::F32(x) => Moment::F32(x),
            MomentMut::Bf16(x) => Moment::Bf16(x),
            MomentMut::Block8 { codes, scales } => Moment::Block8 { codes, scales },
        }
    }
}

/// A moment to read.
#[derive(Clone, Copy, Debug)]
pub enum Moment<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    Block8 { codes: &'a [u8], scales: &'a [f32] },
}

impl Moment<'_> {
    fn len(&self) -> usize {
        match self {
            Moment::F32(x) => x.len(),
            Moment::Bf16(x) => x.len(),
            Moment::Block8 { codes, .. } => codes.len(),
        }
    }

    /// Checks the conditions that every pass over the moment assumes.
    pub(super) fn check(&self, name: &str, count: usize) {
        assert_eq!(self.len(), count, "length of {name}");
        if let Moment::Block8 { codes, scales } = self {
            assert_eq!(codes.len() % QUANTIZATION_BLOCK, 0, "{name}: whole blocks");
            assert_eq!(scales.len(), codes.len() / QUANTIZATION_BLOCK, "{name}: a scale per block");
        }
    }
}

/// Master weights to update.
#[derive(Debug)]
pub enum MasterMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
}

impl MasterMut<'_> {
    fn len(&self) -> usize {
        match self {
            MasterMut::F32(x) => x.len(),
            MasterMut::Bf16(x) => x.len(),
        }
    }
}

/// Master weights and state of one range in any formats, as [`State`](super::State) holds them in f32.
#[derive(Debug)]
pub struct StateLow<'a> {
    pub master: MasterMut<'a>,
    pub first: MomentMut<'a>,
    pub second: MomentMut<'a>,
}

impl StateLow<'_> {
    /// Panics where [`update_low`](super::update_low) promises to.
    pub(super) fn check(
        &self,
        segments: &[(Range<usize>, &super::Scalars)],
        gradient: Gradient,
        image: &ImageMut,
        random: Random,
    ) {
        let count = gradient.len();
        assert_eq!(count % QUANTIZATION_BLOCK, 0, "a call is for whole blocks");
        assert_eq!(random.first_element % QUANTIZATION_BLOCK as u64, 0, "a call begins with a block");
        assert_eq!(self.master.len(), count, "master weights against gradient");
        assert_eq!(image.len(), count, "image against gradient");
        let mut end = 0;
        for (range, scalars) in segments {
            assert!(range.start == end && range.end % LANES == 0, "segment {range:?} after {end}");
            assert_eq!(scalars.rule(), segments[0].1.rule(), "one rule for all segments");
            end = range.end;
        }
        assert_eq!(end, count, "segments against gradient");
        let slots = segments.first().map_or(0, |(_, scalars)| scalars.rule().state_slots());
        self.first.as_ref().check("first state slot", if slots > 0 { count } else { 0 });
        self.second.as_ref().check("second state slot", if slots > 1 { count } else { 0 });
    }
}

/// The memory traffic of one step in bytes a parameter: master weights and moments are read and written, the gradient
/// (`gradient` bytes) is read, and the image (`image` bytes) is written.
pub fn bytes_per_parameter(
    rule: Rule,
    master: MasterFormat,
    moments: StateFormat,
    gradient: usize,
    image: usize,
) -> f64 {
    let block = QUANTIZATION_BLOCK;
    let state = master.bytes(block) + rule.state_slots() * moments.bytes(block);
    2.0 * state as f64 / block as f64 + (gradient + image) as f64
}
