//! Slices of the kernels: borrowed arrays in one of three element formats. 16-bit elements are `u16` bit patterns, as
//! in payloads and images.

use std::ops::Range;

use crate::memory::Source;

/// A gradient: as a worker sent or lends it, or the sum of several.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    F32(Source<'a, f32>),
    F16(Source<'a, u16>),
    Bf16(Source<'a, u16>),
}

impl<'a> Gradient<'a> {
    pub fn f32(elements: &'a [f32]) -> Gradient<'a> {
        Gradient::F32(elements.into())
    }

    pub fn f16(elements: &'a [u16]) -> Gradient<'a> {
        Gradient::F16(elements.into())
    }

    pub fn bf16(elements: &'a [u16]) -> Gradient<'a> {
        Gradient::Bf16(elements.into())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Gradient::F32(elements) => elements.len(),
            Gradient::F16(elements) | Gradient::Bf16(elements) => elements.len(),
        }
    }

    pub fn slice(&self, range: Range<usize>) -> Gradient<'a> {
        match self {
            Gradient::F32(elements) => Gradient::F32(elements.slice(range)),
            Gradient::F16(elements) => Gradient::F16(elements.slice(range)),
            Gradient::Bf16(elements) => Gradient::Bf16(elements.slice(range)),
        }
    }
}

/// Target of the image that workers pull.
#[derive(Debug)]
pub enum ImageMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [u16]),
    Bf16(&'a mut [u16]),
}

impl ImageMut<'_> {
    pub(crate) fn len(&self) -> usize {
        match self {
            ImageMut::F32(elements) => elements.len(),
            ImageMut::F16(elements) | ImageMut::Bf16(elements) => elements.len(),
        }
    }

    /// The bytes, as workers pull them.
    pub fn bytes(&self) -> &[u8] {
        match self {
            ImageMut::F32(elements) => bytemuck::cast_slice(elements),
            ImageMut::F16(elements) | ImageMut::Bf16(elements) => bytemuck::cast_slice(elements),
        }
    }

    /// A shorter borrow of a part.
    pub fn slice(&mut self, range: Range<usize>) -> ImageMut<'_> {
        match self {
            ImageMut::F32(elements) => ImageMut::F32(&mut elements[range]),
            ImageMut::F16(elements) => ImageMut::F16(&mut elements[range]),
            ImageMut::Bf16(elements) => ImageMut::Bf16(&mut elements[range]),
        }
    }

    /// Returns the number of elements before the first one at a multiple of `bytes`, or all if there is none.
    pub(super) fn elements_to_alignment(&self, bytes: usize) -> usize {
        let elements = match self {
            ImageMut::F32(elements) => elements.as_ptr().align_offset(bytes),
            ImageMut::F16(elements) | ImageMut::Bf16(elements) => elements.as_ptr().align_offset(bytes),
        };
        elements.min(self.len())
    }
}

/// Master weights and optimizer state of one range. A slot that the rule does not use is an empty slice
/// ([`Rule::state_slots`](super::Rule::state_slots)).
#[derive(Debug)]
pub struct State<'a> {
    pub master: &'a mut [f32],
    pub first: &'a mut [f32],
    pub second: &'a mut [f32],
}

impl State<'_> {
    /// A shorter borrow of a part.
    pub fn slice(&mut self, range: Range<usize>) -> State<'_> {
        fn part(slot: &mut [f32], range: Range<usize>) -> &mut [f32] {
            if slot.is_empty() { slot } else { &mut slot[range] }
        }
        State {
            master: &mut self.master[range.clone()],
            first: part(self.first, range.clone()),
            second: part(self.second, range),
        }
    }
}
