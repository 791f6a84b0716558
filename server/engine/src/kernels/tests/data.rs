//! Inputs for the tests: arrays full of ordinary and of awkward values, at any alignment.

use half::{bf16, f16};
use std::ops::Range;

use super::super::*;

pub(super) const BLOCK: usize = 65_536;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32,
    F16,
    Bf16,
}

pub(super) const KINDS: [Kind; 3] = [Kind::F32, Kind::F16, Kind::Bf16];

/// SplitMix64: a seed determines all of a test's data.
pub(super) struct Noise(pub(super) u64);

impl Noise {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// A number in [-1, 1).
    pub(super) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    /// An ordinary value; with `wild` often a special one or any bit pattern.
    pub(super) fn value(&mut self, wild: bool) -> f32 {
        const SPECIAL: [u32; 20] = [
            0x0000_0000, // +0
            0x8000_0000, // -0
            0x0000_0001, // smallest denormal
            0x8000_0001,
            0x007F_FFFF, // largest denormal
            0x0080_0000, // smallest normal
            0x3380_0000, // 2^-24, the smallest f16 denormal
            0x3300_0000, // 2^-25, halfway to it
            0x3300_0001,
            0x3880_0000, // 2^-14, the smallest f16 normal
            0x477F_E000, // 65504, the largest f16
            0x477F_F000, // halfway to f16's overflow
            0x7F7F_FFFF, // the largest f32
            0xFF7F_FFFF,
            0x7F7F_8000, // halfway to bf16's overflow
            0x7F80_0000, // infinity
            0xFF80_0000,
            0x7FC0_0000, // NaNs, quiet and signalling, of both signs
            0xFFC1_2345,
            0x7F80_0001,
        ];
        match if wild { self.below(8) } else { 7 } {
            0 | 1 => f32::from_bits(SPECIAL[self.below(SPECIAL.len())]),
            2 => f32::from_bits(self.next() as u32),
            _ => self.unit() * [1.0, 1e-3, 1e-8, 300.0][self.below(4)],
        }
    }
}

/// A gradient or an image, owned, with unused elements before it so that it starts at any alignment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Array {
    kind: Kind,
    offset: usize,
    bits: Vec<u32>,
    half: Vec<u16>,
}

impl Array {
    /// Element patterns of `kind`; with `wild` some are special.
    pub(super) fn noisy(kind: Kind, count: usize, noise: &mut Noise, wild: bool) -> Array {
        let mut array = Array::blank(kind, count, noise);
        for i in 0..count {
            let value = noise.value(wild);
            match kind {
                Kind::F32 => array.bits[array.offset + i] = value.to_bits(),
                Kind::F16 => array.half[array.offset + i] = f16::from_f32(value).to_bits(),
                Kind::Bf16 => array.half[array.offset + i] = bf16::from_f32(value).to_bits(),
            }
        }
        array
    }

    /// An array filled with a pattern that no kernel writes.
    pub(super) fn blank(kind: Kind, count: usize, noise: &mut Noise) -> Array {
        let offset = noise.below(40);
        match kind {
            Kind::F32 => Array { kind, offset, bits: vec![0x7FBA_DBAD; offset + count], half: vec![] },
            _ => Array { kind, offset, bits: vec![], half: vec![0x7FBA; offset + count] },
        }
    }

    fn zero(kind: Kind, count: usize) -> Array {
        match kind {
            Kind::F32 => Array { kind, offset: 0, bits: vec![0; count], half: vec![] },
            _ => Array { kind, offset: 0, bits: vec![], half: vec![0; count] },
        }
    }

    pub(super) fn gradient(&self) -> Gradient<'_> {
        match self.kind {
            Kind::F32 => Gradient::f32(&bytemuck::cast_slice(&self.bits)[self.offset..]),
            Kind::F16 => Gradient::f16(&self.half[self.offset..]),
            Kind::Bf16 => Gradient::bf16(&self.half[self.offset..]),
        }
    }

    pub(super) fn image(&mut self) -> ImageMut<'_> {
        match self.kind {
            Kind::F32 => ImageMut::F32(&mut bytemuck::cast_slice_mut(&mut self.bits)[self.offset..]),
            Kind::F16 => ImageMut::F16(&mut self.half[self.offset..]),
            Kind::Bf16 => ImageMut::Bf16(&mut self.half[self.offset..]),
        }
    }

    pub(super) fn floats(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.bits)[self.offset..]
    }
}

/// Master weights and state of some elements, for one rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owned {
    pub(super) master: Array,
    first: Array,
    second: Array,
}

impl Owned {
    pub(super) fn noisy(rule: Rule, count: usize, noise: &mut Noise, wild: bool) -> Owned {
        let of = |slot: usize| if rule.state_slots() > slot { count } else { 0 };
        let master = Array::noisy(Kind::F32, count, noise, wild);
        let mut first = Array::noisy(Kind::F32, of(0), noise, wild);
        let mut second = Array::noisy(Kind::F32, of(1), noise, wild);
        // Unless wild, sums of squares are not negative.
        for (slot, array) in [&mut first, &mut second].into_iter().enumerate() {
            if Code::of(rule, slot) == Code::Unsigned && !wild {
                array.floats().iter_mut().for_each(|x| *x = x.abs());
            }
        }
        Owned { master, first, second }
    }

    pub(super) fn state(&mut self) -> State<'_> {
        State { master: self.master.floats(), first: self.first.floats(), second: self.second.floats() }
    }
}

/// Hyperparameters that make every term of a rule count.
pub(super) fn hyper(noise: &mut Noise) -> Hyper {
    Hyper {
        lr: [1e-3, 0.1, 1.0][noise.below(3)],
        beta1: [0.9, 0.0, 0.95][noise.below(3)],
        beta2: [0.999, 0.98][noise.below(2)],
        eps: [1e-8, 1e-6, 0.0][noise.below(3)],
        weight_decay: [0.0, 0.01, 0.3][noise.below(3)],
        momentum: [0.0, 0.9, 0.5][noise.below(3)],
        dampening: [0.0, 0.25][noise.below(2)],
        nesterov: noise.below(2) == 1,
        lr_decay: [0.0, 0.01][noise.below(2)],
        momentum_decay: 0.01,
    }
}

pub(super) const FORMATS: [StateFormat; 3] = [StateFormat::F32, StateFormat::Bf16, StateFormat::Block8];

/// Low-precision state of some blocks, owned.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OwnedLow {
    pub(super) master: Array,
    first: OwnedMoment,
    second: OwnedMoment,
}

/// A moment in one of the formats. Floats are bits, so that NaNs compare.
#[derive(Clone, Debug, PartialEq)]
enum OwnedMoment {
    Empty,
    Plain(Array),
    Block8 { codes: Vec<u8>, scales: Array },
}

impl OwnedMoment {
    fn noisy(format: StateFormat, count: usize, noise: &mut Noise, wild: bool) -> OwnedMoment {
        if count == 0 {
            return OwnedMoment::Empty;
        }
        match format {
            StateFormat::F32 => OwnedMoment::Plain(Array::noisy(Kind::F32, count, noise, wild)),
            StateFormat::Bf16 => OwnedMoment::Plain(Array::noisy(Kind::Bf16, count, noise, wild)),
            StateFormat::Block8 => {
                let codes = (0..count).map(|_| noise.next() as u8).collect();
                let mut scales = Array::noisy(Kind::F32, count / QUANTIZATION_BLOCK, noise, wild);
                scales.floats().iter_mut().for_each(|x| *x = x.abs());
                OwnedMoment::Block8 { codes, scales }
            }
        }
    }

    fn zero(format: StateFormat, count: usize) -> OwnedMoment {
        match format {
            StateFormat::F32 => OwnedMoment::Plain(Array::zero(Kind::F32, count)),
            StateFormat::Bf16 => OwnedMoment::Plain(Array::zero(Kind::Bf16, count)),
            StateFormat::Block8 => OwnedMoment::Block8 {
                codes: vec![0; count],
                scales: Array::zero(Kind::F32, count / QUANTIZATION_BLOCK),
            },
        }
    }

    fn part(&mut self, range: Range<usize>) -> MomentMut<'_> {
        match self {
            OwnedMoment::Empty => MomentMut::Empty,
            OwnedMoment::Plain(array) => match array.kind {
                Kind::F32 => MomentMut::F32(&mut array.floats()[range]),
                _ => MomentMut::Bf16(&mut array.half[array.offset..][range]),
            },
            OwnedMoment::Block8 { codes, scales } => {
                let blocks = range.start / QUANTIZATION_BLOCK..range.end / QUANTIZATION_BLOCK;
                MomentMut::Block8 { codes: &mut codes[range], scales: &mut scales.floats()[blocks] }
            }
        }
    }
}

impl OwnedLow {
    pub(super) fn noisy(
        rule: Rule,
        (master, first, second): (MasterFormat, StateFormat, StateFormat),
        count: usize,
        noise: &mut Noise,
        wild: bool,
    ) -> OwnedLow {
        let of = |slot: usize| if rule.state_slots() > slot { count } else { 0 };
        let master = if master == MasterFormat::F32 { Kind::F32 } else { Kind::Bf16 };
        OwnedLow {
            master: Array::noisy(master, count, noise, wild),
            first: OwnedMoment::noisy(first, of(0), noise, wild),
            second: OwnedMoment::noisy(second, of(1), noise, wild),
        }
    }

    /// State of a rule with two moments, before the first step.
    pub(super) fn zero(master: MasterFormat, moments: StateFormat, count: usize) -> OwnedLow {
        let kind = if master == MasterFormat::F32 { Kind::F32 } else { Kind::Bf16 };
        let [first, second] = [(); 2].map(|()| OwnedMoment::zero(moments, count));
        OwnedLow { master: Array::zero(kind, count), first, second }
    }

    pub(super) fn part(&mut self, range: Range<usize>) -> StateLow<'_> {
        let master = match self.master.kind {
            Kind::F32 => MasterMut::F32(&mut self.master.floats()[range.clone()]),
            _ => MasterMut::Bf16(&mut self.master.half[self.master.offset..][range.clone()]),
        };
        StateLow { master, first: self.first.part(range.clone()), second: self.second.part(range) }
    }
}

/// An image that begins on a cache line, as all images of a server do. So it can be aligned for streaming.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Lines {
    kind: Kind,
    offset: usize,
    lines: Vec<Line>,
}

#[derive(Clone, Copy, Debug, PartialEq, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u32; 16]);

impl Lines {
    /// An image of `count` elements, a multiple of 32, aligned or not.
    pub(super) fn blank(kind: Kind, count: usize, noise: &mut Noise) -> Lines {
        let offset = [0, noise.below(64)][noise.below(2)];
        Lines { kind, offset, lines: vec![Line([0x7FBA_DBAD; 16]); count / 16 + 4] }
    }

    pub(super) fn part(&mut self, range: Range<usize>) -> ImageMut<'_> {
        let range = self.offset + range.start..self.offset + range.end;
        match self.kind {
            Kind::F32 => ImageMut::F32(&mut bytemuck::cast_slice_mut(&mut self.lines)[range]),
            Kind::F16 => ImageMut::F16(&mut bytemuck::cast_slice_mut(&mut self.lines)[range]),
            Kind::Bf16 => ImageMut::Bf16(&mut bytemuck::cast_slice_mut(&mut self.lines)[range]),
        }
    }
}
