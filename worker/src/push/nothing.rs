//! Marks a parameter without a gradient, in jobs with `leave_out`: every element is -0 on the wire. Adding -0 changes
//! nothing, and only a sum of -0 alone begins with -0.

use longshore_proto::Dtype;

/// The last byte of -0 in every wire type; the other bytes are 0.
const SIGN: u8 = 0x80;

/// Fills `target` with -0.
pub(super) fn fill(dtype: Dtype, target: &mut [u8]) {
    target.fill(0);
    target.chunks_exact_mut(dtype.bytes() as usize).for_each(sign);
}

/// Returns true if a gradient begins with -0.
pub(super) fn is_at(dtype: Dtype, gradient: &[u8]) -> bool {
    let first = &gradient[..dtype.bytes() as usize];
    first.split_last().is_some_and(|(&last, others)| last == SIGN && others.iter().all(|&byte| byte == 0))
}

/// Replaces a leading -0 of a real gradient by +0, which means the same to any rule.
pub(super) fn deny(dtype: Dtype, gradient: &mut [u8]) {
    if is_at(dtype, gradient) {
        gradient[..dtype.bytes() as usize].fill(0);
    }
}

fn sign(element: &mut [u8]) {
    if let Some(last) = element.last_mut() {
        *last = SIGN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert;

    #[test]
    fn only_minus_zero_is_nothing() {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let width = dtype.bytes() as usize;
            let mut wire = vec![1; 3 * width];
            fill(dtype, &mut wire);
            let mut values = [1.0; 3];
            convert::to_f32(dtype, &wire, &mut values);
            assert!(values.iter().all(|value| value.to_bits() == (-0.0f32).to_bits()), "{dtype}");
            assert!(is_at(dtype, &wire));
            deny(dtype, &mut wire);
            assert!(wire[..width].iter().all(|&byte| byte == 0) && is_at(dtype, &wire[width..]), "{dtype}");
            for value in [0.0, 1.0, -1.0, f32::NAN, f32::NEG_INFINITY] {
                convert::from_f32(dtype, &[value], &mut wire[..width]);
                let before = wire.clone();
                deny(dtype, &mut wire);
                assert!(!is_at(dtype, &wire) && wire == before, "{value} in {dtype}");
            }
        }
    }
}
