//! Conversions on every instruction set: 16 bits against the `half` crate and their definition, and the 8-bit code
//! against its definition in f64.

use half::{bf16, f16};

use super::super::*;
use super::data::{Array, Kind, Noise};

const BLOCK: usize = QUANTIZATION_BLOCK;
const CODES: [Code; 2] = [Code::Signed, Code::Unsigned];
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

/// Inputs have every sign, exponent and kept bit. The cut bits are nothing, a little, just below half, half, just above
/// half, or almost one. f16 cuts 13 bits (more where it is denormal), bf16 16.
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
    // The limit is halfway between 65504, the largest f16, and 65536, which would follow.
    if magnitude >= 65520.0 {
        return sign | 0x7C00;
    }
    let exponent = ((x.to_bits() >> 23 & 0xFF) as i32 - 127).max(-14);
    let units = (magnitude * 2f64.powi(10 - exponent)).round_ties_even() as u16;
    // 1024 units are the hidden bit, and 2048 carry into the next exponent by themselves.
    sign | ((((exponent + 14) as u16) << 10) + units)
}

/// The magnitudes as defined.
fn magnitudes(code: Code) -> Vec<f64> {
    let top = if code == Code::Signed { 127 } else { 255 };
    let d = |q: i32| {
        let decade = if q == 0 { return 0.0 } else { q.ilog2() as i32 };
        10f64.powi(decade) * (1.0 + 9.0 * f64::from(q - (1 << decade)) / 2f64.powi(decade))
    };
    (0..=top).map(|q| d(q) / d(top)).collect()
}

fn code_of(code: Code, q: usize, negative: bool) -> u8 {
    if negative && code == Code::Signed { !(q as u8) } else { q as u8 }
}

#[test]
fn every_code_decodes_to_its_definition() {
    for (isa, code) in Isa::available().into_iter().flat_map(|isa| CODES.map(|code| (isa, code))) {
        let codes: Vec<u8> = (0..=255).collect();
        for scale in [1.0f32, 3.7e-9, 1e30] {
            let mut values = vec![0.0; BLOCK];
            decode(isa, code, Moment::Block8 { codes: &codes, scales: &[scale] }, &mut values);
            for (q, magnitude) in magnitudes(code).into_iter().enumerate() {
                for (negative, sign) in [(false, 1.0), (true, if code == Code::Signed { -1.0 } else { 1.0 })]
                {
                    let value = f64::from(values[code_of(code, q, negative) as usize]);
                    let expected = sign * magnitude * f64::from(scale);
                    assert!(
                        (value - expected).abs() <= 2e-6 * expected.abs(),
                        "{code:?} {q}: {value} {expected}"
                    );
                }
            }
            let top = magnitudes(code).len() - 1;
            assert_eq!(values[top], scale, "the largest is exact");
        }
    }
}

/// Every value gets the nearest code, and a value halfway between two gets the one further from zero, up to f32's
/// rounding. A positive sum of squares gets no 0.
#[test]
fn encoding_takes_the_nearest_code() {
    for code in CODES {
        let table = magnitudes(code);
        let mut noise = Noise(3);
        for round in 0..200 {
            let mut values: Vec<f32> = (0..BLOCK)
                .map(|_| {
                    let x = 10f32.powf(-5.0 + 5.0 * noise.unit());
                    if code == Code::Signed && noise.below(2) == 0 { -x } else { x }
                })
                .collect();
            let scale = [1.0f32, 0.3e-6, 7e12][round % 3];
            values.iter_mut().for_each(|x| *x *= scale);
            values[round % BLOCK] = scale;
            let (mut codes, mut scales) = (vec![0; BLOCK], [0.0]);
            let moment = MomentMut::Block8 { codes: &mut codes, scales: &mut scales };
            encode(Isa::Scalar, code, &values, moment);
            assert_eq!(scales, [scale]);
            for (&x, &found) in values.iter().zip(&codes) {
                let magnitude = f64::from(x.abs()) / f64::from(scale);
                let q = if code == Code::Signed && x < 0.0 { !found } else { found } as usize;
                let above = table.get(q + 1).map_or(f64::INFINITY, |above| (table[q] + above) / 2.0);
                let lowest = if code == Code::Unsigned { 1 } else { 0 };
                let below = if q == lowest { 0.0 } else { (table[q - 1] + table[q]) / 2.0 };
                let slack = 2e-6 * magnitude.max(1e-3 * table[1]);
                assert!(below - slack <= magnitude && magnitude <= above + slack, "{code:?} {x}: {q}");
            }
        }
    }
}

#[test]
fn decoded_values_encode_to_what_they_came_from_on_every_isa() {
    for code in CODES {
        let mut noise = Noise(9);
        for _ in 0..300 {
            let mut codes: Vec<u8> = (0..BLOCK).map(|_| noise.next() as u8).collect();
            let top = magnitudes(code).len() - 1;
            codes[noise.below(BLOCK)] = code_of(code, top, noise.below(2) == 0);
            // Scales begin at 2^-100: f32's denormals hold too few bits of a smaller scale's smallest codes.
            let scales = [f32::from_bits((27 << 23) + noise.below(228 << 23) as u32)];
            let mut values = vec![0.0; BLOCK];
            decode(Isa::Scalar, code, Moment::Block8 { codes: &codes, scales: &scales }, &mut values);
            for isa in Isa::available() {
                let (mut back, mut back_scales) = (vec![1; BLOCK], [1.0]);
                let moment = MomentMut::Block8 { codes: &mut back, scales: &mut back_scales };
                encode(isa, code, &values, moment);
                assert_eq!((back_scales, &back), (scales, &codes), "{isa} {code:?}");
            }
        }
    }
}

#[test]
fn conversions_are_the_same_on_every_isa() {
    let mut noise = Noise(21);
    for round in 0..300 {
        let (code, count) = (CODES[round % 2], 3 * BLOCK);
        let mut array = Array::noisy(Kind::F32, count, &mut noise, round % 4 > 1);
        let run = |isa, floats: &[f32]| {
            let (mut codes, mut scales, mut half) = (vec![1; count], [1.0; 3], vec![1; count]);
            let moment = MomentMut::Block8 { codes: &mut codes, scales: &mut scales };
            encode(isa, code, floats, moment);
            encode(isa, code, floats, MomentMut::Bf16(&mut half));
            let (mut decoded, mut widened) = (vec![1.0; count], vec![1.0; count]);
            decode(isa, code, Moment::Block8 { codes: &codes, scales: &scales }, &mut decoded);
            decode(isa, code, Moment::Bf16(&half), &mut widened);
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            (codes, bits(&scales), half, bits(&decoded), bits(&widened))
        };
        let floats = array.floats();
        let expected = run(Isa::Scalar, floats);
        for isa in Isa::available() {
            assert!(run(isa, floats) == expected, "{isa} {code:?}");
        }
    }
}

#[test]
fn blocks_that_are_not_finite_or_have_no_normal_number() {
    for (isa, code) in Isa::available().into_iter().flat_map(|isa| CODES.map(|code| (isa, code))) {
        for (odd, scale, decoded) in [
            (f32::NAN, f32::NAN, f32::NAN),
            (f32::INFINITY, f32::NAN, f32::NAN),
            (f32::NEG_INFINITY, f32::NAN, f32::NAN),
            (1e-38, 0.0, 0.0),
            (0.0, 0.0, 0.0),
        ] {
            let (mut values, mut codes, mut scales) = (vec![0.0; BLOCK], vec![1; BLOCK], [1.0]);
            values[200] = odd;
            encode(isa, code, &values, MomentMut::Block8 { codes: &mut codes, scales: &mut scales });
            assert_eq!((scales[0].to_bits(), &codes), (scale.to_bits(), &vec![0; BLOCK]), "{isa} {odd}");
            decode(isa, code, Moment::Block8 { codes: &codes, scales: &scales }, &mut values);
            assert!(values.iter().all(|x| x.to_bits() == decoded.to_bits()), "{isa} {odd}");
        }
    }
}
