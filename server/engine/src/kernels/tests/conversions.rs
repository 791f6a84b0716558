//! Conversions on every instruction set, against the `half` crate and against their definition.

use half::{bf16, f16};

use super::super::*;

const CANONICAL: u32 = 0x7FC0_0000;

fn canonical(x: f32) -> u32 {
    if x.is_nan() { CANONICAL } else { x.to_bits() }
}

#[test]
fn every_16_bit_pattern_widens_as_half_says() {
    let patterns: Vec<u16> = (0..=u16::MAX).collect();
    let mut widened = vec![0.0; patterns.len()];
    for isa in Isa::available() {
        widen(isa, Gradient::f16(&patterns), &mut widened);
        for (&bits, &x) in patterns.iter().zip(&widened) {
            assert_eq!(x.to_bits(), canonical(f16::from_bits(bits).to_f32()), "{isa} f16 {bits:#06x}");
        }
        widen(isa, Gradient::bf16(&patterns), &mut widened);
        for (&bits, &x) in patterns.iter().zip(&widened) {
            assert_eq!(x.to_bits(), canonical(bf16::from_bits(bits).to_f32()), "{isa} bf16 {bits:#06x}");
        }
    }
}

/// Inputs have every sign, exponent and kept bit, with every case of the cut bits. The cases are: nothing, a
/// little, just below half, half, just above, almost one. f16 cuts 13 bits (more where it is denormal), bf16
/// 16.
#[test]
fn every_rounding_case_narrows_as_defined() {
    const CUT_13: [u32; 6] = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF];
    let (mut source, mut f16s, mut bf16s) = (vec![0.0; 8192 * 6], vec![0; 8192 * 6], vec![0; 8192 * 6]);
    for chunk in 0..64u32 {
        for (i, x) in source.iter_mut().enumerate() {
            let kept = chunk * 8192 + (i / 6) as u32;
            *x = f32::from_bits(kept << 13 | CUT_13[i % 6]);
        }
        for isa in Isa::available() {
            cast(isa, &source, ImageMut::F16(&mut f16s));
            cast(isa, &source, ImageMut::Bf16(&mut bf16s));
            for (i, &x) in source.iter().enumerate() {
                let expected = if x.is_nan() { 0x7E00 } else { define_f16(x) };
                assert_eq!(f16s[i], expected, "{isa} f16 of {:#010x}", x.to_bits());
                let expected = if x.is_nan() { 0x7FC0 } else { bf16::from_f32(x).to_bits() };
                assert_eq!(bf16s[i], expected, "{isa} bf16 of {:#010x}", x.to_bits());
            }
        }
    }
}

/// f16 by its definition: the nearest multiple of the unit in the last place, ties to even. Exact in f64.
fn define_f16(x: f32) -> u16 {
    let magnitude = f64::from(x.abs());
    let sign = if x.is_sign_negative() { 0x8000 } else { 0 };
    // This is halfway between the largest f16, 65504, and the next one if there were one.
    if magnitude >= 65520.0 {
        return sign | 0x7C00;
    }
    let exponent = ((x.to_bits() >> 23 & 0xFF) as i32 - 127).max(-14);
    let units = (magnitude * 2f64.powi(10 - exponent)).round_ties_even() as u16;
    // 1024 units are the hidden bit, and 2048 carry into the next exponent by themselves.
    sign | ((((exponent + 14) as u16) << 10) + units)
}
