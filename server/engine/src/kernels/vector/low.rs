//! Low-precision state for 16 lanes. Operation for operation what `scalar/low.rs` specifies.

use super::super::low::{
    self as passes, Code, Half, Key, Passes, QUANTIZATION_BLOCK, Random, StateLow, Tables,
};
use super::super::scalar::{convert::CANONICAL_NAN, low::scale};
use super::super::{Gradient, ImageMut, LANES, Moment, Scalars, State};
use super::lanes::{Lanes, LanesFormat};
use super::{Bf16, F16, F32, update_middle};
use std::{marker::PhantomData, ops::Range};

const BLOCK: usize = QUANTIZATION_BLOCK;
const SIGN: u32 = 1 << 31;
const ONE: u32 = 0x3F80_0000;

/// The passes of an instruction set. Whoever has one has made sure that this CPU has the other.
struct Vector<V>(PhantomData<V>);

impl<V> Clone for Vector<V> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<V> Copy for Vector<V> {}

/// See [`super::super::update_low`].
#[inline(always)]
pub(in super::super) unsafe fn update_low<V: Lanes>(
    segments: &[(Range<usize>, &Scalars)],
    gradient: Gradient,
    state: StateLow,
    image: ImageMut,
    compensation: f32,
    random: Random,
) {
    passes::update(Vector::<V>(PhantomData), segments, gradient, state, image, compensation, random);
}

/// See [`super::super::decode`].
#[inline(always)]
pub(in super::super) unsafe fn decode<V: Lanes>(code: Code, moment: Moment, to: &mut [f32]) {
    passes::decode(Vector::<V>(PhantomData), code, moment, to);
}

/// See [`super::super::encode`].
#[inline(always)]
pub(in super::super) unsafe fn encode<V: Lanes>(
    code: Code,
    from: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
) {
    passes::encode(Vector::<V>(PhantomData), code, from, codes, scales);
}

/// SAFETY, for all: a `Vector` is made where this CPU has the instruction set, and the slices are as long as each
/// other and a multiple of 16.
impl<V: Lanes> Passes for Vector<V> {
    #[inline(always)]
    fn update(
        self,
        s: &Scalars,
        gradient: Gradient,
        state: State,
        image: Option<ImageMut>,
        compensation: f32,
    ) {
        match image {
            // SAFETY: as above; an image that is not there needs no alignment.
            None => unsafe { update_middle::<V>(s, gradient, state, None, compensation) },
            Some(image) if image.elements_to_alignment(V::STREAM_ALIGNMENT) == 0 => {
                // SAFETY: as above, and the image is aligned.
                unsafe { update_middle::<V>(s, gradient, state, Some(image), compensation) }
            }
            // SAFETY: as above.
            Some(image) => unsafe { super::update::<V>(s, gradient, state, image, compensation) },
        }
    }

    #[inline(always)]
    fn widen_bf16(self, from: &[u16], to: &mut [f32]) {
        // SAFETY: as above.
        unsafe { super::widen::<V>(Gradient::Bf16(from), to) }
    }

    #[inline(always)]
    fn decode(self, code: Code, from: &[u8], scale: f32, to: &mut [f32]) {
        if !scale.is_finite() {
            to.fill(CANONICAL_NAN);
            return;
        }
        // SAFETY: as above.
        unsafe {
            match code {
                Code::Signed => decode_block::<V, true>(from, scale, to),
                Code::Unsigned => decode_block::<V, false>(from, scale, to),
            }
        }
    }

    #[inline(always)]
    fn random(self, key: Key, first: u32, to: &mut [u32; BLOCK]) {
        // SAFETY: as above.
        unsafe { random_block::<V>(key, first, to) }
    }

    #[inline(always)]
    fn round_bf16(self, from: &[f32], random: &[u32; BLOCK], half: Half, to: &mut [u16]) {
        // SAFETY: as above.
        unsafe {
            match half {
                Half::Low => round_block::<V, false>(from, random, to),
                Half::High => round_block::<V, true>(from, random, to),
            }
        }
    }

    #[inline(always)]
    fn encode(self, code: Code, from: &[f32], random: &[u32; BLOCK], half: Half, to: &mut [u8]) -> f32 {
        // SAFETY: as above.
        let scale = unsafe { scale(largest::<V>(from)) };
        if scale == 0.0 || scale.is_nan() {
            to.fill(0);
            return scale;
        }
        // SAFETY: as above.
        unsafe {
            match (code, half) {
                (Code::Signed, Half::Low) => encode_block::<V, true, false>(from, scale, random, to),
                (Code::Signed, Half::High) => encode_block::<V, true, true>(from, scale, random, to),
                (Code::Unsigned, Half::Low) => encode_block::<V, false, false>(from, scale, random, to),
                (Code::Unsigned, Half::High) => encode_block::<V, false, true>(from, scale, random, to),
            }
        }
        scale
    }

    #[inline(always)]
    fn round_master(self, new: &[f32], random: &[u32; BLOCK], master: &mut [u16], image: ImageMut, c: f32) {
        let aligned = image.elements_to_alignment(V::STREAM_ALIGNMENT) == 0;
        // SAFETY: as above, and the image is aligned where it must be.
        unsafe {
            match image {
                ImageMut::F32(i) => master_block::<V, F32>(new, random, master, i, aligned, c),
                ImageMut::F16(i) => master_block::<V, F16>(new, random, master, i, aligned, c),
                ImageMut::Bf16(i) => master_block::<V, Bf16>(new, random, master, i, aligned, c),
            }
        }
    }

    #[inline(always)]
    fn finish(self) {
        // SAFETY: as above.
        unsafe { V::fence() }
    }
}

#[inline(always)]
unsafe fn random_block<V: Lanes>(key: Key, first: u32, to: &mut [u32; BLOCK]) {
    const COUNT: [u32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    let mut index = V::add_words(V::load_words(COUNT.as_ptr()), V::splat_words(first));
    let (before, between) = (V::splat_words(key.before), V::splat_words(key.between));
    for i in (0..BLOCK).step_by(LANES) {
        let x = V::xor_words(index, before);
        let x = V::xor_words(x, V::shift_right::<16>(x));
        let x = V::mul_words(x, V::splat_words(Key::FIRST_MULTIPLIER));
        let x = V::add_words(V::xor_words(x, V::shift_right::<15>(x)), between);
        let x = V::mul_words(x, V::splat_words(Key::SECOND_MULTIPLIER));
        V::store_words(V::xor_words(x, V::shift_right::<16>(x)), to.as_mut_ptr().add(i));
        index = V::add_words(index, V::splat_words(LANES as u32));
    }
}

/// Sixteen random bits in the lower half of each word.
#[inline(always)]
unsafe fn sixteen<V: Lanes, const HIGH: bool>(random: *const u32) -> V::Words {
    let random = V::load_words(random);
    if HIGH { V::shift_right::<16>(random) } else { V::and_words(random, V::splat_words(0xFFFF)) }
}

#[inline(always)]
unsafe fn round_block<V: Lanes, const HIGH: bool>(from: &[f32], random: &[u32; BLOCK], to: &mut [u16]) {
    for i in (0..BLOCK).step_by(LANES) {
        let bits = V::load(from.as_ptr().add(i)).to_words();
        let rounded = V::add_words(bits, sixteen::<V, HIGH>(random.as_ptr().add(i)));
        V::store_half(V::upper_half(rounded), to.as_mut_ptr().add(i));
    }
}

#[inline(always)]
unsafe fn master_block<V: Lanes, I: LanesFormat>(
    new: &[f32],
    random: &[u32; BLOCK],
    master: &mut [u16],
    image: &mut [I::Bits],
    aligned: bool,
    c: f32,
) {
    let compensation = V::splat(c);
    for i in (0..BLOCK).step_by(LANES) {
        let master_at = master.as_mut_ptr().add(i);
        let old = V::from_bf16(V::load_half(master_at));
        let bits = V::load(new.as_ptr().add(i)).to_words();
        let rounded = V::upper_half(V::add_words(bits, sixteen::<V, false>(random.as_ptr().add(i))));
        V::store_half(rounded, master_at);
        let new = V::from_bf16(rounded);
        let emitted = if c == 0.0 { new } else { new.sub(compensation.mul(old.sub(new))) };
        let image_at = image.as_mut_ptr().add(i);
        if aligned { I::stream(emitted.quiet(), image_at) } else { I::store(emitted.quiet(), image_at) }
    }
}

/// Bits of the largest magnitude.
#[inline(always)]
unsafe fn largest<V: Lanes>(from: &[f32]) -> u32 {
    let mut largest = V::splat_words(0);
    for i in (0..BLOCK).step_by(LANES) {
        let bits = V::load(from.as_ptr().add(i)).to_words();
        largest = V::max_words(largest, V::and_words(bits, V::splat_words(!SIGN)));
    }
    let mut lanes = [0; LANES];
    V::store_words(largest, lanes.as_mut_ptr());
    lanes.into_iter().fold(0, u32::max)
}

#[inline(always)]
unsafe fn decode_block<V: Lanes, const SIGNED: bool>(from: &[u8], scale: f32, to: &mut [f32]) {
    let tables = if SIGNED { Code::Signed.tables() } else { Code::Unsigned.tables() };
    let (slope, offset) = (V::load(tables.slope.as_ptr()), V::load(tables.offset.as_ptr()));
    let (scale, half) = (V::splat(scale), V::splat(0.5));
    for i in (0..BLOCK).step_by(LANES) {
        let from = from.as_ptr().add(i);
        let bytes = if SIGNED { V::load_signed_bytes(from) } else { V::load_unsigned_bytes(from) };
        let f = V::convert(bytes).add(half);
        let at = V::shift_right::<{ Tables::DECODE_SHIFT }>(f.to_words());
        let mut offset = offset.lookup(at);
        if SIGNED {
            let sign = V::and_words(f.to_words(), V::splat_words(SIGN));
            offset = V::from_words(V::xor_words(offset.to_words(), sign));
        }
        f.mul(slope.lookup(at)).add(offset).mul(scale).store(to.as_mut_ptr().add(i));
    }
}

#[inline(always)]
unsafe fn encode_block<V: Lanes, const SIGNED: bool, const HIGH: bool>(
    from: &[f32],
    scale: f32,
    random: &[u32; BLOCK],
    to: &mut [u8],
) {
    let tables = if SIGNED { Code::Signed.tables() } else { Code::Unsigned.tables() };
    let lower = tables.lower.each_ref().map(|line| V::load(line.as_ptr()));
    let upper = tables.upper.each_ref().map(|line| V::load(line.as_ptr()));
    let (last, reciprocal) = (V::splat(tables.last), V::splat(1.0 / scale));
    for i in (0..BLOCK).step_by(LANES) {
        let bits = V::load(from.as_ptr().add(i)).to_words();
        let magnitude = V::from_words(V::and_words(bits, V::splat_words(!SIGN))).mul(reciprocal);
        let at = V::max_words(magnitude.to_words(), V::splat_words(Tables::LEAST));
        let at = V::shift_right::<{ Tables::ENCODE_SHIFT }>(at);
        let on_lower = magnitude.mul(lower[0].lookup(at)).add(lower[1].lookup(at));
        let on_upper = magnitude.mul(upper[0].lookup(at)).add(upper[1].lookup(at));
        let position = on_lower.min(on_upper).min(last);
        let random = V::shift_left::<7>(sixteen::<V, HIGH>(random.as_ptr().add(i)));
        let random = V::from_words(V::or_words(random, V::splat_words(ONE)));
        let q = position.add(random).truncate();
        let q = if SIGNED { V::xor_words(q, V::sign_mask(bits)) } else { q };
        V::store_bytes(q, to.as_mut_ptr().add(i));
    }
}
