//! The distributions are what they are called, and the bits are those that were fixed once.

use longshore_proto::{Drawn, InitialWeights, Initialisation, Layout, Param, Partition};

use super::Made;

const SAMPLES: usize = 1_000_000;

fn layout(sizes: &[u64]) -> Layout {
    let params = sizes.iter().enumerate();
    let params: Vec<Param> = params
        .map(|(index, &elements)| Param { name: format!("p{index}"), shape: vec![elements], group: 0 })
        .collect();
    Layout::new(&params, 1, 1 << 16, &[Partition::whole(1)]).expect("a layout")
}

fn drawn(seed: u64, weights: InitialWeights, count: usize) -> Vec<f32> {
    let made = Made::new(Initialisation::by_param(seed, [weights]));
    let mut values = vec![0.0; count];
    made.write(&layout(&[count as u64]), 0, &mut values);
    values
}

fn mean_and_std(values: &[f32]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|&value| f64::from(value)).sum::<f64>() / count;
    let square = values.iter().map(|&value| (f64::from(value) - mean).powi(2)).sum::<f64>() / count;
    (mean, square.sqrt())
}

/// How many samples in order are taken for one where distances are looked for.
const STRIDE: usize = 16;

/// The greatest distance between the share of samples below a value and the probability of that.
fn kolmogorov_smirnov(mut values: Vec<f32>, probability: impl Fn(f64) -> f64) -> f64 {
    values.sort_by(f32::total_cmp);
    let count = values.len() as f64;
    let distance = |(index, &value): (usize, &f32)| {
        let expected = probability(f64::from(value));
        (expected - index as f64 / count).abs().max((expected - (index + 1) as f64 / count).abs())
    };
    values.iter().enumerate().step_by(STRIDE).map(distance).fold(0.0, f64::max) + STRIDE as f64 / count
}

/// Such a distance is exceeded by one set of samples in 10^6.
fn limit() -> f64 {
    2.7 / (SAMPLES as f64).sqrt()
}

/// The probability that a standard normal variable is below x, by the trapezoidal rule: another way than the quantile's.
fn normal(x: f64) -> f64 {
    const STEPS: u32 = 200;
    let width = x.clamp(-8.0, 8.0) / f64::from(STEPS);
    let density = |step: u32| {
        let at = width * f64::from(step);
        (-at * at / 2.0).exp() * if step == 0 || step == STEPS { 0.5 } else { 1.0 }
    };
    0.5 + width * (0..=STEPS).map(density).sum::<f64>() / (2.0 * std::f64::consts::PI).sqrt()
}

#[test]
fn normal_weights_have_their_mean_their_deviation_their_tails_and_their_shape() {
    let values = drawn(1, InitialWeights::Normal { mean: 0.5, std: 0.02 }, SAMPLES);
    let (mean, std) = mean_and_std(&values);
    // Five standard errors.
    assert!((mean - 0.5).abs() < 5.0 * 0.02 / 1e3, "{mean}");
    assert!((std - 0.02).abs() < 5.0 * 0.02 / (2.0 * SAMPLES as f64).sqrt(), "{std}");
    for (deviations, probability) in [(2.0, 0.045_500_264), (3.0, 0.002_699_796), (4.0, 6.334_25e-5)] {
        let beyond =
            values.iter().filter(|&&value| (f64::from(value) - 0.5).abs() > deviations * 0.02).count();
        let expected = probability * SAMPLES as f64;
        assert!((beyond as f64 - expected).abs() < 5.0 * expected.sqrt() + 1.0, "{deviations}: {beyond}");
    }
    let distance = kolmogorov_smirnov(values, |value| normal((value - 0.5) / 0.02));
    assert!(distance < limit(), "{distance}");
}

#[test]
fn neighbours_and_parameters_are_not_correlated() {
    let (sizes, made) = ([SAMPLES as u64; 2], InitialWeights::Normal { mean: 0.0, std: 1.0 });
    let layout = layout(&sizes);
    let made = Made::new(Initialisation::by_param(9, [made, made]));
    let mut values = vec![0.0; layout.elements() as usize];
    made.write(&layout, 0, &mut values);
    let [first, second] = [0, 1].map(|param| {
        let range = layout.param_range(param);
        &values[range.start as usize..range.end as usize]
    });
    for (what, left, right) in
        [("neighbours", &first[1..], &first[..SAMPLES - 1]), ("parameters", first, second)]
    {
        let products = left.iter().zip(right).map(|(&left, &right)| f64::from(left) * f64::from(right));
        let correlation = products.sum::<f64>() / SAMPLES as f64;
        assert!(correlation.abs() < 5.0 / (SAMPLES as f64).sqrt(), "{what}: {correlation}");
    }
}

#[test]
fn uniform_weights_are_even_and_stay_below_the_upper_bound() {
    let values = drawn(2, InitialWeights::Uniform { low: -0.1, high: 0.3 }, SAMPLES);
    assert!(values.iter().all(|&value| f64::from(value) >= -0.1 && f64::from(value) < 0.3));
    let (mean, std) = mean_and_std(&values);
    let expected = 0.4 / 12f64.sqrt();
    assert!((mean - 0.1).abs() < 5.0 * expected / 1e3, "{mean}");
    assert!((std - expected).abs() < 5.0 * expected / 1e3, "{std}");
    let distance = kolmogorov_smirnov(values, |value| (value + 0.1) / 0.4);
    assert!(distance < limit(), "{distance}");
    let narrow = InitialWeights::Uniform { low: 1.0, high: f64::from(1f32.next_up()) };
    assert!(drawn(2, narrow, 1000).iter().all(|&value| value == 1.0));
}

#[test]
fn truncated_weights_lie_between_their_bounds_wherever_these_are() {
    for (low, high) in [(-2.0, 2.0), (-0.5, 3.0), (1.0, 2.0), (-3.0, -2.5), (9.0, 12.0), (-30.0, -29.0)] {
        let weights = InitialWeights::TruncatedNormal {
            mean: 1.0,
            std: 0.5,
            low: 1.0 + low / 2.0,
            high: 1.0 + high / 2.0,
        };
        let values = drawn(3, weights, SAMPLES);
        let deviations: Vec<f64> = values.iter().map(|&value| (f64::from(value) - 1.0) / 0.5).collect();
        let bounds = low - 1e-6..=high + 1e-6;
        assert!(deviations.iter().all(|deviation| bounds.contains(deviation)), "{low} to {high}");
        // Where f64 cannot tell probabilities apart by subtraction, only the bounds are compared.
        if low >= -3.0 && high <= 3.0 {
            let (below, between) = (normal(low), normal(high) - normal(low));
            let distance =
                kolmogorov_smirnov(values, |value| (normal((value - 1.0) / 0.5) - below) / between);
            assert!(distance < limit(), "{low} to {high}: {distance}");
        } else {
            // Far out the distribution falls like exp(-d x), d being the nearer bound: on average 1/d from that.
            let near = low.abs().min(high.abs());
            let mean =
                deviations.iter().map(|deviation| deviation.abs() - near).sum::<f64>() / SAMPLES as f64;
            assert!((mean * near - 1.0).abs() < 0.03, "{low} to {high}: {mean}");
        }
    }
}

/// What each case expects is the FNV-1a hash of the bytes. A program in another language computed it from docs/protocol.md.
#[test]
fn the_bits_are_those_that_jobs_were_begun_with() {
    let cases: [(InitialWeights, u64); 5] = [
        (InitialWeights::Constant(0.1), 0x20f9_0a1e_8702_f1eb),
        (InitialWeights::Uniform { low: -1.0, high: 1.0 }, 0x5d9e_3425_991f_44a3),
        (InitialWeights::Normal { mean: 0.0, std: 0.02 }, 0x4127_5ee4_1029_d024),
        (
            InitialWeights::TruncatedNormal { mean: 0.0, std: 0.02, low: -0.04, high: 0.04 },
            0xcadb_4de1_00df_b62c,
        ),
        (InitialWeights::TruncatedNormal { mean: 0.0, std: 1.0, low: 2.0, high: 9.0 }, 0x8a56_7e9a_e305_6a28),
    ];
    for (weights, expected) in cases {
        let values = drawn(0x0123_4567_89ab_cdef, weights, 100_003);
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for byte in values.iter().flat_map(|value| value.to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        assert_eq!(format!("{hash:016x}"), format!("{expected:016x}"), "{weights:?}: {:?}", &values[..4]);
    }
}

#[test]
fn a_part_has_the_weights_that_it_has_in_the_whole() {
    let layout = layout(&[100_001, 3, 70_000, 1]);
    let normal = InitialWeights::Normal { mean: 0.0, std: 1.0 };
    let kinds = [normal, InitialWeights::Uploaded, normal, InitialWeights::Uniform { low: 0.0, high: 1.0 }];
    let made = Made::new(Initialisation::by_param(5, kinds));
    let mut whole = vec![7.0; layout.elements() as usize];
    made.write(&layout, 0, &mut whole);
    for start in (0..whole.len()).step_by(64 * 37) {
        let length = 64 * (1 + start % 101).min((whole.len() - start) / 64);
        let mut part = vec![7.0; length];
        made.write(&layout, start as u64, &mut part);
        assert!(part == whole[start..start + length], "from {start}");
    }
    let uploaded = layout.param_range(1);
    assert!(whole[uploaded.start as usize..uploaded.end as usize].iter().all(|&value| value == 7.0));
    for gap in layout.padding(0..layout.elements()) {
        assert!(whole[gap.start as usize..gap.end as usize].iter().all(|&value| value == 7.0));
    }
    assert!(made.is_uploaded(&layout, uploaded.start..uploaded.end));
    assert!(!made.is_uploaded(&layout, 0..64));
}

#[test]
fn parameters_that_are_parts_have_the_weights_of_the_whole() {
    let normal = InitialWeights::Normal { mean: 0.0, std: 1.0 };
    let (whole, behind) = (100_003, 501);
    let values = |sizes: &[u64], made: Initialisation| {
        let (made, layout) = (Made::new(made), layout(sizes));
        let mut all = vec![0.0; layout.elements() as usize];
        made.write(&layout, 0, &mut all);
        let of = |param| layout.param_range(param).start as usize..layout.param_range(param).end as usize;
        (0..sizes.len()).map(|param| all[of(param)].to_vec()).collect::<Vec<_>>()
    };
    let expected = values(&[whole, behind], Initialisation::by_param(5, [normal; 2]));
    // Parts may begin at odd elements, and end within a pair.
    let sizes = [1, 2, 70_001, 29_999];
    let parts = sizes.iter().scan(0, |element, size| {
        let drawn = Drawn { param: 0, element: *element };
        *element += size;
        Some((normal, drawn))
    });
    let made = Initialisation::by_part(5, parts.chain([(normal, Drawn { param: 1, element: 0 })]));
    let found = values(&[1, 2, 70_001, 29_999, behind], made);
    assert!(found[..4].concat() == expected[0]);
    assert!(found[4] == expected[1], "what is behind keeps its numbers");
}
