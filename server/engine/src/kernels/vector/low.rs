//! Low-precision state for 16 lanes, as `scalar/low.rs` specifies it, operation for operation.

use super::super::low::{
    self as passes, Code, Encoding, Half, InLoop, Key, Largest, Passes, QUANTIZATION_BLOCK, Random, StateLow,
    Tables,
};
use super::super::scalar::{
    convert::{Bf16, CANONICAL_NAN, F16, F32, Nothing},
    low::scale,
};
use super::super::{Gradient, ImageMut, Moment, Scalars, State, isa::LANES};
use super::floats::{self, Kernels as Lanes};
use super::lanes::LanesFormat;
use super::moments::{Decoder, Hash, larger, round, sixteen};
use std::{marker::PhantomData, ops::Range};

const BLOCK: usize = QUANTIZATION_BLOCK;
const ONE: u32 = 0x3F80_0000;

/// The passes of an instruction set. The caller that makes this value ensures that the CPU has the
/// instruction set.
#[derive(Clone, Copy)]
struct Vector<V>(PhantomData<V>);

#[inline(always)]
pub(in super::super) unsafe fn update_low<V: Lanes>(
    segments: &[(Range<usize>, &Scalars)],
    gradient: Gradient,
    state: StateLow,
    image: ImageMut,
    random: Random,
) {
    passes::update(Vector::<V>(PhantomData), segments, gradient, state, image, random);
}

#[inline(always)]
pub(in super::super) unsafe fn decode<V: Lanes>(code: Code, moment: Moment, to: &mut [f32]) {
    passes::decode(Vector::<V>(PhantomData), code, moment, to);
}

#[inline(always)]
pub(in super::super) unsafe fn encode<V: Lanes>(
    code: Code,
    from: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
) {
    passes::encode(Vector::<V>(PhantomData), code, from, codes, scales);
}

/// SAFETY, for all methods: a `Vector` is made only where this CPU has the instruction set, and the slices have one
/// length, a multiple of 16.
impl<V: Lanes> Passes for Vector<V> {
    #[inline(always)]
    fn update(self, s: &Scalars, gradient: Gradient, state: State, image: Option<ImageMut>) {
        match image {
            Some(image) if image.elements_to_alignment(V::STREAM_ALIGNMENT) > 0 => {
                // SAFETY: as above.
                unsafe { floats::update::<V>(s, gradient, state, image) }
            }
            // SAFETY: as above; the image, if it is there, is aligned.
            _ => unsafe { V::update_floats(s, gradient, state, image) },
        }
    }

    #[inline(always)]
    fn update_low_moments(
        self,
        s: &Scalars,
        gradient: Gradient,
        master: &mut [f32],
        moments: InLoop,
        image: Option<ImageMut>,
    ) {
        // SAFETY: as above, and the image, if it is there, is aligned: `fuses` was asked.
        unsafe { V::update_low_moments(s, gradient, master, moments, image) }
    }

    #[inline(always)]
    fn fuses(self, image: &ImageMut) -> bool {
        image.elements_to_alignment(V::STREAM_ALIGNMENT) == 0
    }

    #[inline(always)]
    fn widen_bf16(self, from: &[u16], to: &mut [f32]) {
        // SAFETY: as above.
        unsafe { floats::widen::<V>(Gradient::bf16(from), to) }
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
        unsafe {
            let scale = scale(across(largest::<V>(from)));
            encode_scaled::<V>(code, from, scale, random, half, to);
            scale
        }
    }

    #[inline(always)]
    fn encode_both(self, code: Code, block: Encoding, key: Key, first: u32) -> [f32; 2] {
        let Encoding { from, largest: [a, b], to: [to, to_second] } = block;
        let scales = [scale(across(*a)), scale(across(*b))];
        let both = !to_second.is_empty();
        // SAFETY: as above.
        unsafe {
            if !is_plain(scales[0]) || both && !is_plain(scales[1]) {
                let mut random = [0; BLOCK];
                random_block::<V>(key, first, &mut random);
                encode_scaled::<V>(code, from[0], scales[0], &random, Half::Low, to);
                if both {
                    encode_scaled::<V>(Code::Unsigned, from[1], scales[1], &random, Half::High, to_second);
                }
                return scales;
            }
            let hash = Hash::<V>::new(key, first);
            match (code, both) {
                (Code::Signed, true) => encode_loop::<V, true, true>(from, scales, hash, to, to_second),
                (Code::Signed, false) => encode_loop::<V, true, false>(from, scales, hash, to, to_second),
                (Code::Unsigned, true) => encode_loop::<V, false, true>(from, scales, hash, to, to_second),
                (Code::Unsigned, false) => encode_loop::<V, false, false>(from, scales, hash, to, to_second),
            }
        }
        scales
    }

    #[inline(always)]
    fn round_master(self, new: &[f32], key: Key, first: u32, master: &mut [u16], image: Option<ImageMut>) {
        let skipped = |image: &ImageMut| image.elements_to_alignment(V::STREAM_ALIGNMENT);
        let aligned = image.as_ref().is_none_or(|image| skipped(image) == 0);
        // SAFETY: as above, and the image is aligned where it must be.
        unsafe {
            let hash = Hash::new(key, first);
            match image {
                Some(ImageMut::F32(i)) => master_block::<V, F32>(new, hash, master, i, aligned),
                Some(ImageMut::F16(i)) => master_block::<V, F16>(new, hash, master, i, aligned),
                Some(ImageMut::Bf16(i)) => master_block::<V, Bf16>(new, hash, master, i, aligned),
                None => master_block::<V, Nothing>(new, hash, master, &mut [(); BLOCK], aligned),
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
    let hash = Hash::<V>::new(key, first);
    for i in (0..BLOCK).step_by(LANES) {
        V::store_words(hash.at(i), to.as_mut_ptr().add(i));
    }
}

#[inline(always)]
unsafe fn round_block<V: Lanes, const HIGH: bool>(from: &[f32], random: &[u32; BLOCK], to: &mut [u16]) {
    for i in (0..BLOCK).step_by(LANES) {
        let random = V::load_words(random.as_ptr().add(i));
        V::store_half(round::<V, HIGH>(V::load(from.as_ptr().add(i)), random), to.as_mut_ptr().add(i));
    }
}

#[inline(always)]
unsafe fn master_block<V: Lanes, I: LanesFormat>(
    new: &[f32],
    hash: Hash<V>,
    master: &mut [u16],
    image: &mut [I::Bits],
    aligned: bool,
) {
    for i in (0..BLOCK).step_by(LANES) {
        let master_at = master.as_mut_ptr().add(i);
        let rounded = round::<V, false>(V::load(new.as_ptr().add(i)), hash.at(i));
        V::store_half(rounded, master_at);
        let emitted = V::from_bf16(rounded).quiet();
        let image_at = image.as_mut_ptr().add(i);
        if aligned { I::stream(emitted, image_at) } else { I::store(emitted, image_at) }
    }
}

/// Returns the bits of each lane's largest magnitude in a block.
#[inline(always)]
unsafe fn largest<V: Lanes>(from: &[f32]) -> Largest {
    let mut largest = V::splat_words(0);
    for i in (0..BLOCK).step_by(LANES) {
        largest = larger(largest, V::load(from.as_ptr().add(i)));
    }
    let mut lanes = [0; LANES];
    V::store_words(largest, lanes.as_mut_ptr());
    lanes
}

#[inline(always)]
fn across(largest: Largest) -> u32 {
    largest.into_iter().fold(0, u32::max)
}

#[inline(always)]
unsafe fn decode_block<V: Lanes, const SIGNED: bool>(from: &[u8], scale: f32, to: &mut [f32]) {
    let (decoder, scale) =
        (Decoder::<V>::new(if SIGNED { Code::Signed } else { Code::Unsigned }), V::splat(scale));
    for i in (0..BLOCK).step_by(LANES) {
        let from = from.as_ptr().add(i);
        let values = if SIGNED { decoder.signed(from, scale) } else { decoder.unsigned(from, scale) };
        values.store(to.as_mut_ptr().add(i));
    }
}

/// Returns true if codes are made with this scale. A scale of 0 or NaN already decides all values.
#[inline(always)]
fn is_plain(scale: f32) -> bool {
    scale > 0.0
}

#[inline(always)]
unsafe fn encode_scaled<V: Lanes>(
    code: Code,
    from: &[f32],
    scale: f32,
    random: &[u32; BLOCK],
    half: Half,
    to: &mut [u8],
) {
    match (code, half) {
        _ if !is_plain(scale) => to.fill(0),
        (Code::Signed, Half::Low) => encode_block::<V, true, false>(from, scale, random, to),
        (Code::Signed, Half::High) => encode_block::<V, true, true>(from, scale, random, to),
        (Code::Unsigned, Half::Low) => encode_block::<V, false, false>(from, scale, random, to),
        (Code::Unsigned, Half::High) => encode_block::<V, false, true>(from, scale, random, to),
    }
}

#[inline(always)]
unsafe fn encode_block<V: Lanes, const SIGNED: bool, const HIGH: bool>(
    from: &[f32],
    scale: f32,
    random: &[u32; BLOCK],
    to: &mut [u8],
) {
    let encoder = Encoder::<V>::new(if SIGNED { Code::Signed } else { Code::Unsigned }, scale);
    for i in (0..BLOCK).step_by(4 * LANES) {
        let random = random.as_ptr().add(i);
        let random = [
            V::load_words(random),
            V::load_words(random.add(LANES)),
            V::load_words(random.add(2 * LANES)),
            V::load_words(random.add(3 * LANES)),
        ];
        encoder.four::<SIGNED, HIGH>(from.as_ptr().add(i), random, to.as_mut_ptr().add(i));
    }
}

/// Encodes one moment or both. Both go at once because an element's random bits are for both.
#[inline(always)]
unsafe fn encode_loop<V: Lanes, const SIGNED: bool, const BOTH: bool>(
    from: [&[f32]; 2],
    scales: [f32; 2],
    hash: Hash<V>,
    to: &mut [u8],
    to_second: &mut [u8],
) {
    let first = Encoder::<V>::new(if SIGNED { Code::Signed } else { Code::Unsigned }, scales[0]);
    let second = Encoder::<V>::new(Code::Unsigned, if BOTH { scales[1] } else { scales[0] });
    for i in (0..BLOCK).step_by(4 * LANES) {
        let random = [hash.at(i), hash.at(i + LANES), hash.at(i + 2 * LANES), hash.at(i + 3 * LANES)];
        first.four::<SIGNED, false>(from[0].as_ptr().add(i), random, to.as_mut_ptr().add(i));
        if BOTH {
            second.four::<false, true>(from[1].as_ptr().add(i), random, to_second.as_mut_ptr().add(i));
        }
    }
}

/// Turns values into codes.
#[derive(Clone, Copy)]
struct Encoder<V> {
    lower: [V; 2],
    upper: [V; 2],
    reciprocal: V,
}

impl<V: Lanes> Encoder<V> {
    #[inline(always)]
    unsafe fn new(code: Code, scale: f32) -> Self {
        let tables = code.tables();
        Encoder {
            lower: [V::load(tables.lower[0].as_ptr()), V::load(tables.lower[1].as_ptr())],
            upper: [V::load(tables.upper[0].as_ptr()), V::load(tables.upper[1].as_ptr())],
            reciprocal: V::splat(1.0 / scale),
        }
    }

    /// Makes sixty-four codes. `map` would not do: a closure's code would be compiled without the instruction set.
    #[inline(always)]
    unsafe fn four<const SIGNED: bool, const HIGH: bool>(
        self,
        from: *const f32,
        random: [V::Words; 4],
        to: *mut u8,
    ) {
        let codes = [
            self.codes::<SIGNED, HIGH>(from, random[0]),
            self.codes::<SIGNED, HIGH>(from.add(LANES), random[1]),
            self.codes::<SIGNED, HIGH>(from.add(2 * LANES), random[2]),
            self.codes::<SIGNED, HIGH>(from.add(3 * LANES), random[3]),
        ];
        V::store_bytes::<SIGNED>(codes, to);
    }

    #[inline(always)]
    unsafe fn codes<const SIGNED: bool, const HIGH: bool>(
        self,
        from: *const f32,
        random: V::Words,
    ) -> V::Words {
        let bits = V::load(from).to_words();
        let magnitude = V::from_words(V::and_words(bits, V::splat_words(!Tables::SIGN))).mul(self.reciprocal);
        let at = V::max_words(magnitude.to_words(), V::splat_words(Tables::LEAST));
        let at = V::shift_right::<{ Tables::ENCODE_SHIFT }>(at);
        let lower = magnitude.mul(self.lower[0].lookup(at)).add(self.lower[1].lookup(at));
        let upper = magnitude.mul(self.upper[0].lookup(at)).add(self.upper[1].lookup(at));
        // Packing does the reference's third minimum, with `last`. No magnitude is above 1, for the
        // reciprocal's error is at most half a unit. So the sum below stays under `top + 2` and saturates to
        // `top`.
        let position = lower.min(upper);
        let random = V::shift_left::<7>(sixteen::<V, HIGH>(random));
        let random = V::or_words(random, V::splat_words(ONE));
        let q = position.add(V::from_words(random)).truncate();
        if SIGNED {
            V::xor_words(q, V::sign_mask(bits))
        } else {
            // A positive value becomes 1 at least.
            V::max_words(q, V::min_words(bits, V::splat_words(1)))
        }
    }
}
