//! 8-bit moments of a chunk in an update. The loop of the rule decodes them and finds the largest of each
//! block. Encoding follows after the loop.

use super::super::isa::LANES;
use super::passes::{BLOCKS, CHUNK, Codes, CodesOf, Encoding, Largest, Passes};
use super::random::{Random, Usage};
use super::{Code, MomentMut, QUANTIZATION_BLOCK, StateLow};
use std::ops::Range;

const BLOCK: usize = QUANTIZATION_BLOCK;

/// Scales and largest magnitudes of a chunk's blocks. The first moment comes first.
#[repr(align(64))]
pub(super) struct Chunk {
    largest: [[Largest; BLOCKS]; 2],
    scales: [[f32; BLOCKS]; 2],
}

impl Chunk {
    pub(super) const NEW: Chunk = Chunk { largest: [[[0; LANES]; BLOCKS]; 2], scales: [[0.0; BLOCKS]; 2] };

    /// Called before the first part of a chunk.
    #[inline(always)]
    pub(super) fn begin(&mut self, state: &StateLow, chunk: &Range<usize>) {
        self.largest = Chunk::NEW.largest;
        for (moment, to) in [&state.first, &state.second].into_iter().zip(&mut self.scales) {
            if let MomentMut::Block8 { scales, .. } = moment {
                for (to, &scale) in to.iter_mut().zip(&scales[chunk.start / BLOCK..chunk.end / BLOCK]) {
                    *to = if scale.is_finite() { scale } else { f32::NAN };
                }
            }
        }
    }

    #[inline(always)]
    pub(super) fn part<'a>(
        &'a mut self,
        moments: [&'a MomentMut; 2],
        [first, second]: [&'a mut [f32]; 2],
        part: &Range<usize>,
        start: usize,
    ) -> Codes<'a> {
        let ([scales, other_scales], [largest, other_largest]) = (&self.scales, &mut self.largest);
        let codes = moments.map(|moment| match moment {
            MomentMut::Block8 { codes, .. } => &codes[part.clone()],
            _ => &[],
        });
        Codes {
            first: CodesOf { codes: codes[0], floats: first, scales, largest },
            second: CodesOf { codes: codes[1], floats: second, scales: other_scales, largest: other_largest },
            start,
        }
    }

    /// Called after the last part of a chunk. Encodes the values that the loops left in `floats`.
    #[inline(always)]
    pub(super) fn end<P: Passes>(
        &self,
        passes: P,
        codes: [Code; 2],
        state: &mut StateLow,
        chunk: &Range<usize>,
        floats: [&[f32; CHUNK]; 2],
        random: Random,
    ) {
        let (mut unused, mut unused_scales) = ([], []);
        for (index, start) in chunk.clone().step_by(BLOCK).enumerate() {
            let element = random.after(start).first_element;
            let inside = index * BLOCK..(index + 1) * BLOCK;
            let MomentMut::Block8 { codes: first, scales: first_scales } = &mut state.first else { return };
            let (second, second_scales) = match &mut state.second {
                MomentMut::Block8 { codes, scales } => (&mut codes[start..start + BLOCK], &mut scales[..]),
                _ => (&mut unused[..], &mut unused_scales[..]),
            };
            let block = Encoding {
                from: floats.map(|floats| &floats[inside.clone()]),
                largest: [&self.largest[0][index], &self.largest[1][index]],
                to: [&mut first[start..start + BLOCK], second],
            };
            let scales =
                passes.encode_both(codes[0], block, random.key(element, Usage::Moments), element as u32);
            first_scales[start / BLOCK] = scales[0];
            if let Some(scale) = second_scales.get_mut(start / BLOCK) {
                *scale = scales[1];
            }
        }
    }
}
