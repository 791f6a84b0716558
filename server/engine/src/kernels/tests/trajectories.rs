//! Optimisation in low precision: the same problem is solved with f32 state and with fewer bits.

use super::super::*;
use super::data::Noise;

const COUNT: usize = 1024;

/// Moments and master weights of AdamW in some format.
struct Run {
    formats: (MasterFormat, StateFormat),
    master: Vec<f32>,
    floats: [Vec<f32>; 2],
    halves: [Vec<u16>; 3],
    codes: [Vec<u8>; 2],
    scales: [Vec<f32>; 2],
}

impl Run {
    fn new(formats: (MasterFormat, StateFormat)) -> Run {
        let blocks = COUNT / QUANTIZATION_BLOCK;
        Run {
            formats,
            master: vec![0.0; COUNT],
            floats: [vec![0.0; COUNT], vec![0.0; COUNT]],
            halves: [vec![0; COUNT], vec![0; COUNT], vec![0; COUNT]],
            codes: [vec![0; COUNT], vec![0; COUNT]],
            scales: [vec![0.0; blocks], vec![0.0; blocks]],
        }
    }

    /// Makes a step. The next gradient is computed at the image.
    fn step(&mut self, hyper: &Hyper, step: u64, gradient: &[f32], image: &mut [f32]) {
        let scalars = Scalars::new(Rule::AdamW, hyper, step, 1.0);
        let [master, half_first, half_second] = &mut self.halves;
        let ([f32_first, f32_second], [first_codes, second_codes]) = (&mut self.floats, &mut self.codes);
        let [first_scales, second_scales] = &mut self.scales;
        let (first, second) = match self.formats.1 {
            StateFormat::F32 => (MomentMut::F32(f32_first), MomentMut::F32(f32_second)),
            StateFormat::Bf16 => (MomentMut::Bf16(half_first), MomentMut::Bf16(half_second)),
            StateFormat::Block8 => (
                MomentMut::Block8 { codes: first_codes, scales: first_scales },
                MomentMut::Block8 { codes: second_codes, scales: second_scales },
            ),
        };
        let master = match self.formats.0 {
            MasterFormat::F32 => MasterMut::F32(&mut self.master),
            MasterFormat::Bf16 => MasterMut::Bf16(master),
        };
        let state = StateLow { master, first, second };
        let random = Random { seed: 1, step, first_element: 0 };
        let (gradient, image) = (Gradient::f32(gradient), ImageMut::F32(image));
        update_low(Isa::detect(), &[(0..COUNT, &scalars)], gradient, state, image, random);
    }

    fn second(&self) -> Vec<f32> {
        let moment = match self.formats.1 {
            StateFormat::F32 => Moment::F32(&self.floats[1]),
            StateFormat::Bf16 => Moment::Bf16(&self.halves[2]),
            StateFormat::Block8 => Moment::Block8 { codes: &self.codes[1], scales: &self.scales[1] },
        };
        let mut values = vec![0.0; COUNT];
        decode(Isa::detect(), Code::Unsigned, moment, &mut values);
        values
    }
}

const FORMATS: [(MasterFormat, StateFormat); 5] = [
    (MasterFormat::F32, StateFormat::F32),
    (MasterFormat::F32, StateFormat::Bf16),
    (MasterFormat::F32, StateFormat::Block8),
    (MasterFormat::Bf16, StateFormat::Bf16),
    (MasterFormat::Bf16, StateFormat::Block8),
];

/// The problem is a logistic regression of noisy labels on 1024 features of very different sizes. Batches are
/// 64 of 4096 samples.
#[test]
fn logistic_regression_ends_where_it_does_in_f32() {
    let losses = FORMATS.map(|formats| {
        let mut noise = Noise(1);
        let size: Vec<f32> = (0..COUNT).map(|_| 10f32.powf(-1.0 + noise.unit())).collect();
        let truth: Vec<f32> = (0..COUNT).map(|_| noise.unit()).collect();
        let samples: Vec<(Vec<f32>, f32)> = (0..2048)
            .map(|_| {
                let x: Vec<f32> = size.iter().map(|size| size * noise.unit()).collect();
                let logit: f32 = x.iter().zip(&truth).map(|(x, w)| x * w).sum();
                (x, if logit + 0.3 * noise.unit() > 0.0 { 1.0 } else { 0.0 })
            })
            .collect();
        let forward =
            |w: &[f32], x: &[f32]| 1.0 / (1.0 + (-w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>()).exp());
        let (mut run, mut weights) = (Run::new(formats), vec![0.0; COUNT]);
        let mut gradient = vec![0.0; COUNT];
        for step in 1..=600 {
            gradient.fill(0.0);
            for _ in 0..32 {
                let (x, label) = &samples[noise.below(samples.len())];
                let error = (forward(&weights, x) - label) / 32.0;
                gradient.iter_mut().zip(x).for_each(|(g, x)| *g += error * x);
            }
            let decay = 1.0 - step as f64 / 601.0;
            run.step(&Hyper { lr: 1e-2 * decay, ..Hyper::default() }, step, &gradient, &mut weights);
        }
        let loss = |(x, label): &(Vec<f32>, f32)| {
            let p = forward(&weights, x).clamp(1e-6, 1.0 - 1e-6);
            -(label * p.ln() + (1.0 - label) * (1.0 - p).ln())
        };
        samples.iter().map(loss).sum::<f32>() / samples.len() as f32
    });
    let reference = losses[0];
    println!("losses {losses:?}");
    for loss in losses {
        assert!(reference < 0.35 && (loss / reference - 1.0).abs() < 0.05, "{losses:?}");
    }
}

/// A second moment forgets: after gradients become 30 times smaller, so does its root, within the noise of rounding.
/// Rounded to nearest, bf16's and the 8-bit code's would stay where they were.
#[test]
fn second_moments_follow_gradients_down() {
    for formats in FORMATS {
        let (mut noise, mut run) = (Noise(2), Run::new(formats));
        let mut image = vec![0.0; COUNT];
        let size: Vec<f32> = (0..COUNT).map(|_| 10f32.powf(-1.0 + noise.unit())).collect();
        let mut mean_ratio = |run: &mut Run, steps: std::ops::RangeInclusive<u64>, factor: f32| {
            for step in steps {
                let gradient: Vec<f32> = size.iter().map(|size| factor * size * noise.unit()).collect();
                run.step(&Hyper { lr: 1e-3, ..Hyper::default() }, step, &gradient, &mut image);
            }
            // The mean square of a uniform number in [-1, 1) is 1/3.
            let ratios =
                run.second().into_iter().zip(&size).map(|(v, size)| 3.0 * v / (factor * size).powi(2));
            ratios.sum::<f32>() / COUNT as f32
        };
        let settled = mean_ratio(&mut run, 1..=4000, 1.0);
        let after = mean_ratio(&mut run, 4001..=16_000, 1.0 / 30.0);
        println!("{formats:?}: {settled} {after}");
        // After 4000 steps 1.8 % are still to come.
        assert!((settled - 0.98).abs() < 0.05 && (after - 1.0).abs() < 0.1, "{formats:?}: {settled} {after}");
    }
}
