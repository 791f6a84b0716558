//! The normal distribution's quantiles, with the same bits on every host.
//!
//! M. J. Wichura: Algorithm AS 241, The percentage points of the normal distribution (Applied Statistics 37, 1988), its
//! variant for 16 digits. It takes additions, multiplications, divisions and square roots, which IEEE 754 rounds in one way,
//! and a logarithm, which hosts' libraries round in many: so that is formed here. Nothing is contracted to fused operations,
//! since Rust does that nowhere by itself.

const CENTRE: [[f64; 8]; 2] = [
    [
        3.387_132_872_796_366_5,
        133.141_667_891_784_38,
        1_971.590_950_306_551_3,
        13_731.693_765_509_46,
        45_921.953_931_549_87,
        67_265.770_927_008_7,
        33_430.575_583_588_13,
        2_509.080_928_730_122_7,
    ],
    [
        1.0,
        42.313_330_701_600_91,
        687.187_007_492_057_9,
        5_394.196_021_424_751,
        21_213.794_301_586_597,
        39_307.895_800_092_71,
        28_729.085_735_721_943,
        5_226.495_278_852_854,
    ],
];
const TAIL: [[f64; 8]; 2] = [
    [
        1.423_437_110_749_683_5,
        4.630_337_846_156_546,
        5.769_497_221_460_691,
        3.647_848_324_763_204_5,
        1.270_458_252_452_368_4,
        0.241_780_725_177_450_6,
        0.022_723_844_989_269_184,
        7.745_450_142_783_414e-4,
    ],
    [
        1.0,
        2.053_191_626_637_759,
        1.676_384_830_183_803_8,
        0.689_767_334_985_1,
        0.148_103_976_427_480_08,
        0.015_198_666_563_616_457,
        5.475_938_084_995_345e-4,
        1.050_750_071_644_416_9e-9,
    ],
];
const FAR: [[f64; 8]; 2] = [
    [
        6.657_904_643_501_103,
        5.463_784_911_164_114,
        1.784_826_539_917_291_3,
        0.296_560_571_828_504_87,
        0.026_532_189_526_576_124,
        1.242_660_947_388_078_4e-3,
        2.711_555_568_743_487_6e-5,
        2.010_334_399_292_288_1e-7,
    ],
    [
        1.0,
        0.599_832_206_555_888,
        0.136_929_880_922_735_8,
        0.014_875_361_290_850_615,
        7.868_691_311_456_133e-4,
        1.846_318_317_510_054_8e-5,
        1.421_511_758_316_446e-7,
        2.044_263_103_389_939_8e-15,
    ],
];

/// The value below which a standard normal variable is with probability `p`, which is above 0 and below 1. Its relative
/// error is about 1e-16 by the algorithm, and 1e-15 with the rounding of its operations.
pub(super) fn quantile(p: f64) -> f64 {
    let from_half = p - 0.5;
    if from_half.abs() <= 0.425 {
        return from_half * ratio(&CENTRE, 0.180625 - from_half * from_half);
    }
    let of_tail = if from_half < 0.0 { p } else { 1.0 - p };
    let root = (-logarithm(of_tail)).sqrt();
    let deviation = if root <= 5.0 { ratio(&TAIL, root - 1.6) } else { ratio(&FAR, root - 5.0) };
    if from_half < 0.0 { -deviation } else { deviation }
}

/// The probability that a standard normal variable is below `value`, which is not above 0: that whose quantile it is. So
/// no second approximation is needed. It takes 64 quantiles, and is asked for once a run of parameters.
pub(super) fn probability_below(value: f64) -> f64 {
    // Positive numbers have the order of their bits.
    let (mut low, mut high) = (f64::MIN_POSITIVE.to_bits(), 0.5f64.to_bits());
    while low < high {
        let middle = low + (high - low) / 2;
        if quantile(f64::from_bits(middle)) < value {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    f64::from_bits(low)
}

fn ratio([above, below]: &[[f64; 8]; 2], x: f64) -> f64 {
    let polynomial = |factors: &[f64; 8]| factors.iter().rev().fold(0.0, |sum, factor| sum * x + factor);
    polynomial(above) / polynomial(below)
}

/// The natural logarithm of a normal number above 0. With x = m 2^e and s = (m - 1) / (m + 1) it is e ln 2 + 2 atanh s, by the
/// series of atanh. As |s| is below 0.172, what is left out is below 1e-18.
fn logarithm(x: f64) -> f64 {
    const MANTISSA_BITS: u32 = 52;
    const ONE: u64 = 1023;
    let exponent = (x.to_bits() >> MANTISSA_BITS) as i64 - ONE as i64;
    let mantissa = f64::from_bits(x.to_bits() & ((1 << MANTISSA_BITS) - 1) | ONE << MANTISSA_BITS);
    let (mantissa, exponent) = match mantissa > std::f64::consts::SQRT_2 {
        true => (mantissa * 0.5, exponent + 1),
        false => (mantissa, exponent),
    };
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = (0..=11).rev().fold(0.0, |sum, term| sum * square + 1.0 / f64::from(2 * term + 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities and their quantiles, to the digits that f64 has (computed with 50 digits).
    const KNOWN: [(f64, f64); 13] = [
        (0.5, 0.0),
        (0.25, -0.674_489_750_196_081_7),
        (0.0751, -1.438_825_392_752_54),
        (0.074_999, -1.439_538_535_345_230_7),
        (0.975, 1.959_963_984_540_053_9),
        (0.9999, 3.719_016_485_455_708_4),
        (1e-3, -3.090_232_306_167_813_5),
        (1e-10, -6.361_340_902_404_056),
        (1.3e-11, -6.667_611_456_510_741),
        (1.5e-11, -6.646_570_887_477_113),
        (1.110_223_024_625_156_5e-16, -8.209_536_151_601_387),
        (1.0 - 1.110_223_024_625_156_5e-16, 8.209_536_151_601_387),
        (1e-300, -37.047_096_299_361_2),
    ];

    #[test]
    fn known_quantiles_come_out_on_both_sides() {
        for (p, expected) in KNOWN {
            let found = quantile(p);
            assert!((found - expected).abs() <= 2e-15 * expected.abs(), "{p}: {found} for {expected}");
        }
    }

    #[test]
    fn probabilities_are_those_of_their_quantiles() {
        for value in [-1e-9, -0.3, -1.0, -2.5, -5.0, -8.2, -20.0, -30.0] {
            let found = quantile(probability_below(value));
            assert!((found - value).abs() <= 1e-14 * value.abs().max(1.0), "{value}: {found}");
        }
        assert_eq!(probability_below(0.0), 0.5);
    }

    #[test]
    fn the_logarithm_is_that_of_the_library_but_for_rounding() {
        // It is asked for in the tails alone.
        for step in 1..=75_000u32 {
            let x = f64::from(step) / 1e6;
            assert!((logarithm(x) / x.ln() - 1.0).abs() <= 4e-16, "{x}");
        }
        assert!((logarithm(1e-300) - 1e-300f64.ln()).abs() < 2e-13);
    }
}
