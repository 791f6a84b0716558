//! Rank 0's decision on a step, made from the servers' gradient statistics. The function is pure and adds in block
//! order. Its bits depend neither on the number of servers nor on the order of their statistics. Called by the
//! pipeline's driver.

use std::ops::Range;

use longshore_memory::float::standard;
use longshore_proto::limits::BLOCK_ELEMENTS;

/// Statistics of one block of the summed gradient, which is still scaled.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockStats {
    pub sum_squares: f64,
    /// Index in the block of the first element that is inf or NaN.
    pub first_nonfinite: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// True on overflow: nothing is updated.
    pub skip: bool,
    /// Global norm of the unscaled gradient before clipping. Not finite on an overflow.
    pub norm: f64,
    /// In (0, 1]; 1 if the gradient is not clipped.
    pub clip_coefficient: f64,
    /// Flat index of the first element that overflowed.
    pub first_nonfinite: Option<u64>,
}

/// torch.nn.utils.clip_grad_norm_ adds the same 1e-6 against a division by zero.
const CLIP_EPSILON: f64 = 1e-6;

/// Decides a step. `blocks` are all blocks in global order. `shares` gives for each run of blocks the part of all
/// ranks that contributes to it ([`longshore_proto::JobSpec::block_shares`]). `clip` is the largest norm. `gradient_scale` is loss
/// scale x world size x micro-steps.
pub fn decide(
    blocks: &[BlockStats],
    shares: &[(Range<usize>, f64)],
    clip: Option<f64>,
    gradient_scale: f64,
) -> Decision {
    standard(|| {
        let first_nonfinite = blocks.iter().enumerate().find_map(|(block, stats)| {
            stats.first_nonfinite.map(|element| block as u64 * BLOCK_ELEMENTS + u64::from(element))
        });
        // A sum over fewer ranks counts as a mean after division by the share. A sum of squares is divided by the
        // share's square.
        let squares = shares.iter().flat_map(|(range, share)| {
            blocks[range.clone()].iter().map(move |stats| stats.sum_squares / (share * share))
        });
        let sum: f64 = squares.sum();
        let norm = sum.sqrt() / gradient_scale;
        // A sum of squares of finite f32 elements exceeds f64 only after 2^768 elements. Without a non-finite element,
        // a norm that is not finite is a defect elsewhere.
        let skip = first_nonfinite.is_some() || !norm.is_finite();
        let clip_coefficient = match clip {
            Some(clip) if !skip => (clip / (norm + CLIP_EPSILON)).min(1.0),
            _ => 1.0,
        };
        Decision { skip, norm, clip_coefficient, first_nonfinite }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(sum_squares: f64) -> BlockStats {
        BlockStats { sum_squares, first_nonfinite: None }
    }

    /// The share of blocks to which all ranks contribute.
    fn all(blocks: usize) -> Vec<(Range<usize>, f64)> {
        vec![(0..blocks, 1.0)]
    }

    #[test]
    fn a_partition_counts_as_the_mean_of_its_contributors() {
        // Four ranks with a loss scale of 2. All contribute to the first block, whose mean is 3. A single rank
        // contributes the second block, with gradient 4.
        let blocks = [stats((3.0f64 * 8.0).powi(2)), stats((4.0f64 * 2.0).powi(2))];
        let decision = decide(&blocks, &[(0..1, 1.0), (1..2, 0.25)], Some(2.5), 8.0);
        assert_eq!((decision.norm, decision.clip_coefficient), (5.0, 2.5 / (5.0 + 1e-6)));
    }

    #[test]
    fn norm_and_clip_as_torch() {
        let blocks = [stats(9.0 * 64.0), stats(16.0 * 64.0)];
        let decision = decide(&blocks, &all(2), None, 8.0);
        assert_eq!((decision.norm, decision.clip_coefficient, decision.skip), (5.0, 1.0, false));
        assert_eq!(decide(&blocks, &all(2), Some(1.0), 8.0).clip_coefficient, 1.0 / (5.0 + 1e-6));
        assert_eq!(decide(&blocks, &all(2), Some(10.0), 8.0).clip_coefficient, 1.0);
        assert_eq!(decide(&[stats(0.0)], &all(1), Some(1.0), 1.0).clip_coefficient, 1.0);
    }

    #[test]
    fn the_sum_is_in_block_order() {
        // The order decides the result: 2^53 + 1 + 1 loses both ones, and 1 + 1 + 2^53 keeps them.
        let big = 2f64.powi(53);
        let up = decide(&[stats(1.0), stats(1.0), stats(big)], &all(3), None, 1.0).norm;
        let down = decide(&[stats(big), stats(1.0), stats(1.0)], &all(3), None, 1.0).norm;
        assert_eq!(up, (big + 2.0).sqrt());
        let _foreign = longshore_memory::float::foreign_for_tests();
        let rounded_up = decide(&[stats(1.0), stats(1.0)], &all(2), None, 1.0).norm;
        assert_eq!(rounded_up.to_bits(), std::f64::consts::SQRT_2.to_bits());
        assert_eq!(down, big.sqrt());
    }

    #[test]
    fn an_overflow_skips_and_is_located() {
        let bad = BlockStats { sum_squares: f64::INFINITY, first_nonfinite: Some(17) };
        let decision = decide(&[stats(1.0), bad, bad], &all(3), Some(1.0), 1.0);
        assert!(decision.skip);
        assert_eq!(decision.first_nonfinite, Some(BLOCK_ELEMENTS + 17));
        assert_eq!(decision.clip_coefficient, 1.0);
        // Statistics without the non-finite elements skip the step as well.
        let excluded = BlockStats { sum_squares: 1.0, first_nonfinite: Some(0) };
        assert!(decide(&[excluded], &all(1), None, 1.0).skip);
    }
}
