//! An update of low-precision state as a sequence of passes. Every instruction set has the same sequence, and passes of
//! its own.

use super::super::{Gradient, ImageMut, Scalars, State, isa::LANES};
use super::passes::{BLOCKS, CHUNK, Codes, CodesOf, Encoding, Halves, InLoop, Largest, Passes};
use super::random::{Half, Random, Usage};
use super::{Code, MasterMut, Moment, MomentMut, QUANTIZATION_BLOCK, StateLow};
use longshore_proto::Rule;
use std::ops::Range;

const BLOCK: usize = QUANTIZATION_BLOCK;

/// Scales and largest magnitudes of a chunk's blocks of 8-bit moments, the first moment first. The loop of the rule
/// decodes the blocks, and finds the largest new magnitude of each. Encoding follows after the loop.
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

/// f32 copies of arrays in other formats, and a block's random bits.
#[repr(align(64))]
struct Scratch {
    master: [f32; CHUNK],
    first: [f32; CHUNK],
    second: [f32; CHUNK],
    random: [u32; BLOCK],
    coded: Chunk,
}

impl Scratch {
    const NEW: Scratch = Scratch {
        master: [0.0; CHUNK],
        first: [0.0; CHUNK],
        second: [0.0; CHUNK],
        random: [0; BLOCK],
        coded: Chunk::NEW,
    };
}

/// Way in which moments are brought to f32 and back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Both ways, in the loop of the rule.
    Halves,
    /// To f32 in the loop of the rule, and back after it.
    Codes,
    /// In passes of their own.
    Apart,
}

impl Way {
    /// SGD's moments take passes of their own, for SGD may leave a part of a block alone.
    fn of(rule: Rule, state: &StateLow) -> Way {
        use MomentMut::{Bf16, Block8, Empty};
        match (&state.first, &state.second) {
            _ if rule == Rule::Sgd => Way::Apart,
            (Bf16(_), Bf16(_) | Empty) => Way::Halves,
            (Block8 { .. }, Block8 { .. } | Empty) => Way::Codes,
            _ => Way::Apart,
        }
    }
}

#[inline(always)]
pub(in super::super) fn update<P: Passes>(
    passes: P,
    mut segments: &[(Range<usize>, &Scalars)],
    gradient: Gradient,
    mut state: StateLow,
    mut image: ImageMut,
    random: Random,
) {
    let mut scratch = Scratch::NEW;
    let scratch = &mut scratch;
    let Some((_, scalars)) = segments.first() else { return };
    let codes = [0, 1].map(|slot| Code::of(scalars.rule(), slot));
    let way = if passes.fuses(&image) { Way::of(scalars.rule(), &state) } else { Way::Apart };
    let ahead = scalars.looks_ahead();
    for start in (0..gradient.len()).step_by(CHUNK) {
        let chunk = start..(start + CHUNK).min(gradient.len());
        if let MasterMut::Bf16(x) = &state.master {
            passes.widen_bf16(&x[chunk.clone()], &mut scratch.master[..chunk.len()]);
        }
        match way {
            Way::Apart => load(passes, codes, &state, &chunk, scratch),
            Way::Codes => scratch.coded.begin(&state, &chunk),
            Way::Halves => {}
        }
        let mut written = [false; CHUNK / BLOCK];
        let mut at = start;
        while at < chunk.end {
            let (range, scalars) = &segments[0];
            let part = at..range.end.min(chunk.end).min(random.end_of_key(at));
            if scalars.writes_state() {
                written[(at - start) / BLOCK..(part.end - start).div_ceil(BLOCK)].fill(true);
            }
            let (gradient, inside) = (gradient.slice(part.clone()), at - start..part.end - start);
            let (master, image) = match &mut state.master {
                MasterMut::F32(x) => (&mut x[part.clone()], Some(image.slice(part.clone()))),
                // Only the loop of the rule knows the part of the next step that an image looks ahead by. So the loop
                // makes the image, from the new weight before it is rounded.
                MasterMut::Bf16(_) => {
                    (&mut scratch.master[inside.clone()], ahead.then(|| image.slice(part.clone())))
                }
            };
            match way {
                Way::Apart => {
                    let first = floats(&mut state.first, &mut scratch.first, &part, &inside);
                    let second = floats(&mut state.second, &mut scratch.second, &part, &inside);
                    passes.update(scalars, gradient, State { master, first, second }, image);
                }
                Way::Halves => {
                    let element = random.after(at).first_element;
                    let key = random.key(element, Usage::Moments);
                    let (first, second) = (state.first.halves(&part), state.second.halves(&part));
                    let halves = InLoop::Halves(Halves { first, second, key, element: element as u32 });
                    passes.update_low_moments(scalars, gradient, master, halves, image);
                }
                Way::Codes => {
                    let moments = [&state.first, &state.second];
                    let floats = [&mut scratch.first[inside.clone()], &mut scratch.second[inside.clone()]];
                    let codes = InLoop::Codes(scratch.coded.part(moments, floats, &part, inside.start));
                    passes.update_low_moments(scalars, gradient, master, codes, image);
                }
            }
            at = part.end;
            if at == range.end {
                segments = &segments[1..];
            }
        }
        match way {
            Way::Apart => store(passes, codes, &mut state, &chunk, written, scratch, random),
            Way::Codes => {
                let floats = [&scratch.first, &scratch.second];
                scratch.coded.end(passes, codes, &mut state, &chunk, floats, random);
            }
            Way::Halves => {}
        }
        if let MasterMut::Bf16(master) = &mut state.master {
            let image = (!ahead).then(|| image.slice(chunk.clone()));
            store_master(passes, &mut master[chunk], scratch, image, random.after(start));
        }
    }
    passes.finish();
}

impl MomentMut<'_> {
    /// The bf16 elements of a part; an empty slice for any other format.
    #[inline(always)]
    fn halves(&mut self, part: &Range<usize>) -> &mut [u16] {
        match self {
            MomentMut::Bf16(x) => &mut x[part.clone()],
            _ => &mut [],
        }
    }
}

/// Returns the f32 values of a part of a moment, for a rule.
#[inline(always)]
fn floats<'a>(
    moment: &'a mut MomentMut,
    scratch: &'a mut [f32; CHUNK],
    part: &Range<usize>,
    inside: &Range<usize>,
) -> &'a mut [f32] {
    match moment {
        MomentMut::Empty => &mut [],
        MomentMut::F32(x) => &mut x[part.clone()],
        MomentMut::Bf16(_) | MomentMut::Block8 { .. } => &mut scratch[inside.clone()],
    }
}

#[inline(always)]
fn load<P: Passes>(
    passes: P,
    codes: [Code; 2],
    state: &StateLow,
    chunk: &Range<usize>,
    scratch: &mut Scratch,
) {
    let moments = [(&state.first, &mut scratch.first), (&state.second, &mut scratch.second)];
    for ((moment, floats), code) in moments.into_iter().zip(codes) {
        match moment {
            MomentMut::Empty | MomentMut::F32(_) => {}
            MomentMut::Bf16(x) => passes.widen_bf16(&x[chunk.clone()], &mut floats[..chunk.len()]),
            MomentMut::Block8 { codes, scales } => {
                let scales = &scales[chunk.start / BLOCK..chunk.end / BLOCK];
                let moment = Moment::Block8 { codes: &codes[chunk.clone()], scales };
                decode(passes, code, moment, &mut floats[..chunk.len()]);
            }
        }
    }
}

/// Encodes the moments of the written blocks. State that a rule leaves alone keeps its bits.
#[inline(always)]
fn store<P: Passes>(
    passes: P,
    codes: [Code; 2],
    state: &mut StateLow,
    chunk: &Range<usize>,
    written: [bool; CHUNK / BLOCK],
    scratch: &mut Scratch,
    random: Random,
) {
    let exact = |moment: &MomentMut| matches!(moment, MomentMut::Empty | MomentMut::F32(_));
    if exact(&state.first) && exact(&state.second) {
        return;
    }
    for (index, start) in chunk.clone().step_by(BLOCK).enumerate().filter(|(index, _)| written[*index]) {
        let element = random.after(start).first_element;
        passes.random(random.key(element, Usage::Moments), element as u32, &mut scratch.random);
        let inside = index * BLOCK..(index + 1) * BLOCK;
        let moments = [
            (&mut state.first, &scratch.first[inside.clone()], Half::Low),
            (&mut state.second, &scratch.second[inside], Half::High),
        ];
        for ((moment, floats, half), code) in moments.into_iter().zip(codes) {
            match moment {
                MomentMut::Empty | MomentMut::F32(_) => {}
                MomentMut::Bf16(x) => {
                    passes.round_bf16(floats, &scratch.random, half, &mut x[start..start + BLOCK]);
                }
                MomentMut::Block8 { codes, scales } => {
                    let codes = &mut codes[start..start + BLOCK];
                    scales[start / BLOCK] = passes.encode(code, floats, &scratch.random, half, codes);
                }
            }
        }
    }
}

#[inline(always)]
fn store_master<P: Passes>(
    passes: P,
    master: &mut [u16],
    scratch: &Scratch,
    mut image: Option<ImageMut>,
    random: Random,
) {
    for (index, master) in master.chunks_exact_mut(BLOCK).enumerate() {
        let inside = index * BLOCK..(index + 1) * BLOCK;
        let element = random.after(inside.start).first_element;
        let (new, key) = (&scratch.master[inside.clone()], random.key(element, Usage::Master));
        let image = image.as_mut().map(|image| image.slice(inside));
        passes.round_master(new, key, element as u32, master, image);
    }
}

#[inline(always)]
pub(in super::super) fn decode<P: Passes>(passes: P, code: Code, moment: Moment, to: &mut [f32]) {
    match moment {
        Moment::F32(x) => to.copy_from_slice(x),
        Moment::Bf16(x) => passes.widen_bf16(x, to),
        Moment::Block8 { codes, scales } => {
            for ((from, &scale), to) in codes.chunks_exact(BLOCK).zip(scales).zip(to.chunks_exact_mut(BLOCK))
            {
                passes.decode(code, from, scale, to);
            }
        }
    }
}

/// Encodes a moment in 8-bit codes. Random bits of half a unit make the rounding go to nearest.
#[inline(always)]
pub(in super::super) fn encode<P: Passes>(
    passes: P,
    code: Code,
    from: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
) {
    let half = [0x8000_8000; BLOCK];
    for ((from, scale), to) in from.chunks_exact(BLOCK).zip(scales).zip(codes.chunks_exact_mut(BLOCK)) {
        *scale = passes.encode(code, from, &half, Half::Low, to);
    }
}
