//! Amends weights: subtracts the step that they lack, made of the gradient that this worker holds. Servers do the same for a
//! process that joins, operation for operation (docs/protocol.md).

use longshore_proto::{Dtype, limits::RATE_ELEMENTS};

use crate::convert;

/// How many elements share a rate.
const GROUP: usize = RATE_ELEMENTS as usize;
/// How many elements are amended at a time on the stack: their f32 stay in the L1 cache.
const TILE: usize = 1024;
/// The NaN that servers store.
const CANONICAL_NAN: u32 = 0x7FC0_0000;

/// Subtracts `clamp(rate * (gradient * multiplier), limit)` from each weight, in place: single f32 operations in this order,
/// rounded to the weights' type at the end. `first` is the number of the first weight, counted from the first element of the
/// first rate's group.
///
/// # Panics
/// If lengths differ, or there are not enough rates.
pub fn amend(
    (weight, weights): (Dtype, &mut [u8]),
    (first, rates): (usize, &[f32]),
    (dtype, gradient): (Dtype, &[u8]),
    (multiplier, limit): (f32, f32),
) {
    let (bytes_of, count) = (weight.bytes() as usize, weights.len() / weight.bytes() as usize);
    let gradient_of = dtype.bytes() as usize;
    assert_eq!(count * gradient_of, gradient.len(), "a gradient for each weight");
    let (mut wide, mut missing) = ([0.0; TILE], [0.0; TILE]);
    let mut at = 0;
    while at < count {
        // A tile ends with a group, so that only the first tile may begin inside a group.
        let end = count.min(at + TILE - (first + at) % GROUP);
        let bytes = &mut weights[at * bytes_of..end * bytes_of];
        let (wide, missing) = (&mut wide[..end - at], &mut missing[..end - at]);
        convert::to_f32(weight, bytes, wide);
        convert::to_f32(dtype, &gradient[at * gradient_of..end * gradient_of], missing);
        let mut from = 0;
        while from < wide.len() {
            let to = wide.len().min(from + GROUP - (first + at + from) % GROUP);
            let rate = rates[(first + at + from) / GROUP];
            amend_group(&mut wide[from..to], &missing[from..to], rate, (multiplier, limit));
            from = to;
        }
        convert::from_f32(weight, wide, bytes);
        at = end;
    }
}

/// Amends weights of one group. The loop has no branch, so that it becomes vector code.
fn amend_group(weights: &mut [f32], gradient: &[f32], rate: f32, (multiplier, limit): (f32, f32)) {
    for (weight, g) in weights.iter_mut().zip(gradient) {
        let step = rate * (*g * multiplier);
        let step = if step > limit { limit } else { step };
        let step = if step < -limit { -limit } else { step };
        let amended = *weight - step;
        *weight = if amended.is_nan() { f32::from_bits(CANONICAL_NAN) } else { amended };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_group_gets_the_rate_of_its_group() {
        let weights: Vec<f32> = (0..200).map(|index| index as f32).collect();
        let gradient = vec![2.0; 200];
        let (mut bytes, mut wire) = (vec![0; 800], vec![0; 400]);
        convert::from_f32(Dtype::F32, &weights, &mut bytes);
        convert::from_f32(Dtype::Bf16, &gradient, &mut wire);
        amend(
            (Dtype::F32, &mut bytes),
            (60, &[1.0, 10.0, 100.0, 0.0, 5.0]),
            (Dtype::Bf16, &wire),
            (0.5, 50.0),
        );
        let mut found = vec![0.0; 200];
        convert::to_f32(Dtype::F32, &bytes, &mut found);
        for (index, (found, weight)) in found.iter().zip(&weights).enumerate() {
            let rate = [1.0, 10.0, 50.0, 0.0, 5.0][(60 + index) / 64];
            assert_eq!(*found, weight - rate, "{index}");
        }
    }
}
