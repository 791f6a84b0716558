//! The kernels' public functions. Each checks lengths, and calls an instruction set's function of the same name.
//!
//! All of them panic if lengths differ, or if this CPU lacks `isa`.

use std::ops::Range;

#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
use super::aarch64;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{
    Code, Gradient, ImageMut, Isa, Moment, MomentMut, Random, Scalars, State, StateLow, Statistics, scalar,
};
use crate::memory::float::standard;

/// Runs `$function` of the module that `$isa` names, in the standard floating-point mode whatever the caller's is.
macro_rules! dispatch {
    ($isa:expr, $function:ident($($argument:expr),*)) => {{
        let isa: Isa = $isa;
        assert!(isa.is_available(), "{isa} kernels called on a CPU without {isa}");
        standard(|| match isa {
            Isa::Scalar => scalar::$function($($argument),*),
            // SAFETY: this CPU has the instruction set, and the caller has compared the lengths.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::avx2::$function($($argument),*) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { x86::avx512::$function($($argument),*) },
            // SAFETY: as above.
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Isa::Neon => unsafe { aarch64::neon::$function($($argument),*) },
            #[allow(unreachable_patterns, reason = "which arms are left depends on the target")]
            _ => unreachable!("{isa} is not available on this target"),
        })
    }};
}

/// Makes one optimizer step of one range, master weights and state in place, and writes the image that
/// workers pull.
///
/// The image is the new weight rounded to the image's format. If `scalars` [look
/// ahead](Scalars::looking_ahead), the known part of the next step is subtracted from it first.
///
/// A state slot that the rule uses must be as long as the master weights, and an unused one empty.
pub fn update(isa: Isa, scalars: &Scalars, gradient: Gradient<'_>, state: State<'_>, image: ImageMut<'_>) {
    let count = gradient.len();
    let slots = scalars.rule().state_slots();
    assert_eq!(state.master.len(), count, "master weights against gradient");
    assert_eq!(state.first.len(), if slots > 0 { count } else { 0 }, "first state slot against gradient");
    assert_eq!(state.second.len(), if slots > 1 { count } else { 0 }, "second state slot against gradient");
    assert_eq!(image.len(), count, "image against gradient");
    dispatch!(isa, update(scalars, gradient, state, image))
}

/// `accumulator = gradient`, as f32.
pub fn widen(isa: Isa, gradient: Gradient<'_>, accumulator: &mut [f32]) {
    assert_eq!(accumulator.len(), gradient.len(), "accumulator against gradient");
    dispatch!(isa, widen(gradient, accumulator))
}

/// `accumulator += gradient`, as f32.
pub fn accumulate(isa: Isa, gradient: Gradient<'_>, accumulator: &mut [f32]) {
    assert_eq!(accumulator.len(), gradient.len(), "accumulator against gradient");
    dispatch!(isa, accumulate(gradient, accumulator))
}

/// Returns the statistics of a gradient before any scaling. Sums of squares of two halves do not add up to the bits of
/// the whole slice's.
pub fn statistics(isa: Isa, gradient: Gradient<'_>) -> Statistics {
    dispatch!(isa, statistics(gradient))
}

/// Runs [`accumulate`], then takes [`statistics`] of the accumulator, in one pass.
pub fn accumulate_statistics(isa: Isa, gradient: Gradient<'_>, accumulator: &mut [f32]) -> Statistics {
    assert_eq!(accumulator.len(), gradient.len(), "accumulator against gradient");
    dispatch!(isa, accumulate_statistics(gradient, accumulator))
}

/// Rounds weights to an image's format, to nearest and ties to even.
pub fn cast(isa: Isa, source: &[f32], image: ImageMut<'_>) {
    assert_eq!(image.len(), source.len(), "image against source");
    dispatch!(isa, cast(source, image))
}

/// Updates as [`update`] does, for state in any formats. The range is whole
/// [`QUANTIZATION_BLOCK`](super::QUANTIZATION_BLOCK)s, in which a param group may begin at any multiple of 16.
/// `segments` give the constants of each part of the range, one after another without gaps.
///
/// The rules compute in f32. Results are rounded stochastically, by bits that depend only on `random` and the element's
/// index.
///
/// # Panics
/// - If the range or its beginning is not a multiple of blocks.
/// - If segments leave gaps or differ in their rule.
/// - If a state slot that the rule uses is not there, or an unused one is not empty.
pub fn update_low(
    isa: Isa,
    segments: &[(Range<usize>, &Scalars)],
    gradient: Gradient<'_>,
    state: StateLow<'_>,
    image: ImageMut<'_>,
    random: Random,
) {
    state.check(segments, gradient, &image, random);
    dispatch!(isa, update_low(segments, gradient, state, image, random))
}

/// Decodes a moment whose 8-bit codes are `code`.
pub fn decode(isa: Isa, code: Code, moment: Moment<'_>, to: &mut [f32]) {
    moment.check("moment", to.len());
    dispatch!(isa, decode(code, moment, to))
}

/// Encodes a moment, rounded to nearest (bf16: ties to even; 8 bits: ties away from zero).
pub fn encode(isa: Isa, code: Code, from: &[f32], moment: MomentMut<'_>) {
    moment.as_ref().check("moment", from.len());
    match moment {
        MomentMut::Empty => {}
        MomentMut::F32(x) => cast(isa, from, ImageMut::F32(x)),
        MomentMut::Bf16(x) => cast(isa, from, ImageMut::Bf16(x)),
        MomentMut::Block8 { codes, scales } => dispatch!(isa, encode(code, from, codes, scales)),
    }
}
