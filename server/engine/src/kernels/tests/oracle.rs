//! The rules against PyTorch's formulas in f64, and their bits against constants.

use super::super::*;
use super::data::{Array, BLOCK, Kind, Noise, Owned};

const STEPS: u64 = 100;

/// Element of the oracle, in f64. Each rule is as PyTorch's documentation writes it down (Lion: its paper).
struct Oracle {
    weight: f64,
    first: f64,
    second: f64,
}

impl Oracle {
    fn step(&mut self, rule: Rule, h: &Hyper, t: u64, gradient: f64) {
        let mut g = gradient;
        match rule {
            Rule::AdamW | Rule::Lion => self.weight -= h.lr * h.weight_decay * self.weight,
            _ => g += h.weight_decay * self.weight,
        }
        match rule {
            Rule::AdamW | Rule::Adam => {
                self.first = h.beta1 * self.first + (1.0 - h.beta1) * g;
                self.second = h.beta2 * self.second + (1.0 - h.beta2) * g * g;
                let mean = self.first / (1.0 - h.beta1.powi(t as i32));
                let square = self.second / (1.0 - h.beta2.powi(t as i32));
                self.weight -= h.lr * mean / (square.sqrt() + h.eps);
            }
            Rule::NAdam => {
                let mu = |i: u64| h.beta1 * (1.0 - 0.5 * 0.96f64.powf(i as f64 * h.momentum_decay));
                let product = (1..=t).map(mu).product::<f64>();
                self.first = h.beta1 * self.first + (1.0 - h.beta1) * g;
                self.second = h.beta2 * self.second + (1.0 - h.beta2) * g * g;
                let denominator = (self.second / (1.0 - h.beta2.powi(t as i32))).sqrt() + h.eps;
                self.weight -= h.lr * (1.0 - mu(t)) / (1.0 - product) * g / denominator;
                self.weight -= h.lr * mu(t + 1) / (1.0 - product * mu(t + 1)) * self.first / denominator;
            }
            Rule::Sgd => {
                let mut direction = g;
                if h.momentum != 0.0 {
                    self.first = if t == 1 { g } else { h.momentum * self.first + (1.0 - h.dampening) * g };
                    direction = if h.nesterov { g + h.momentum * self.first } else { self.first };
                }
                self.weight -= h.lr * direction;
            }
            Rule::Lion => {
                let direction = h.beta1 * self.first + (1.0 - h.beta1) * g;
                self.weight -= h.lr * if direction == 0.0 { 0.0 } else { direction.signum() };
                self.first = h.beta2 * self.first + (1.0 - h.beta2) * g;
            }
            Rule::Adagrad => {
                self.first += g * g;
                let lr = h.lr / (1.0 + (t - 1) as f64 * h.lr_decay);
                self.weight -= lr * g / (self.first.sqrt() + h.eps);
            }
        }
    }
}

/// Steps `count` weights and their oracles side by side and returns the largest relative difference.
fn run(rule: Rule, hyper: &Hyper, count: usize) -> f64 {
    let mut noise = Noise(7);
    // The weights stay away from 0, so that a relative difference means something.
    let mut master: Vec<f32> =
        (0..count).map(|i| if i % 2 == 0 { 2.0 } else { -2.0 } + noise.unit()).collect();
    let mut oracles: Vec<Oracle> =
        master.iter().map(|&w| Oracle { weight: w.into(), first: 0.0, second: 0.0 }).collect();
    let mut first = vec![0.0; count];
    let mut second = vec![0.0; if rule.state_slots() > 1 { count } else { 0 }];
    let mut image = vec![0.0; count];
    let multiplier = 1.0 / 1024.0;
    for t in 1..=STEPS {
        let gradient: Vec<f32> = (0..count).map(|i| (noise.unit() + 0.1 * (i % 5) as f32) * 1024.0).collect();
        let scalars = Scalars::new(rule, hyper, t, multiplier);
        let state = State { master: &mut master, first: &mut first, second: &mut second };
        update(Isa::detect(), &scalars, Gradient::f32(&gradient), state, ImageMut::F32(&mut image));
        for (oracle, &g) in oracles.iter_mut().zip(&gradient) {
            oracle.step(rule, hyper, t, f64::from(g) * f64::from(multiplier));
        }
        assert_eq!(image, master);
    }
    let differences = oracles.iter().zip(&master).map(|(o, &w)| ((f64::from(w) - o.weight) / o.weight).abs());
    differences.fold(0.0, f64::max)
}

#[test]
fn rules_follow_the_formulas() {
    let hyper =
        Hyper { weight_decay: 0.1, momentum: 0.9, dampening: 0.3, lr_decay: 0.01, ..Hyper::default() };
    let plain = Hyper { momentum: 0.0, ..hyper };
    let nesterov = Hyper { dampening: 0.0, nesterov: true, ..hyper };
    for (rule, hyper) in [
        (Rule::AdamW, hyper),
        (Rule::Adam, hyper),
        (Rule::Sgd, hyper),
        (Rule::Sgd, plain),
        (Rule::Sgd, nesterov),
        (Rule::Lion, hyper),
        (Rule::Adagrad, hyper),
        (Rule::NAdam, hyper),
    ] {
        let difference = run(rule, &hyper, 1000);
        assert!(difference < 1e-5, "{rule:?} {hyper:?}: {difference}");
    }
}

/// This can be computed by hand. After the first step of AdamW, m / (1 - beta1) = g and v / (1 - beta2) =
/// g^2. So the weight moves by lr against the sign of g, whatever its size.
#[test]
fn the_first_adamw_step_moves_by_the_learning_rate() {
    let hyper = Hyper { lr: 0.01, weight_decay: 0.1, eps: 0.0, ..Hyper::default() };
    for isa in Isa::available() {
        let (mut master, mut first, mut second) = ([1.0f32, 1.0, -1.0], [0.0f32; 3], [0.0f32; 3]);
        let mut image = [0; 3];
        let state = State { master: &mut master, first: &mut first, second: &mut second };
        let scalars = Scalars::new(Rule::AdamW, &hyper, 1, 1.0);
        update(isa, &scalars, Gradient::f32(&[0.5, -300.0, 1e-3]), state, ImageMut::Bf16(&mut image));
        for (weight, expected) in master.iter().zip([0.999 - 0.01, 0.999 + 0.01, -0.999 - 0.01]) {
            assert!((weight - expected).abs() < 2e-7, "{isa}: {weight} {expected}");
        }
        assert!((first[0] - 0.05).abs() < 1e-8 && (second[0] - 2.5e-4).abs() < 1e-9, "{first:?} {second:?}");
    }
}

/// The test makes one number a rule out of weights, state and image after three steps. A changed constant means that
/// running jobs would change their weights' bits over an upgrade, and that servers of two builds disagree.
#[test]
fn bits_have_not_changed() {
    for isa in Isa::available() {
        let found: Vec<u64> = Rule::ALL.into_iter().map(|rule| golden(isa, rule)).collect();
        assert_eq!(found, GOLDEN, "{isa}: {found:#018x?}");
    }
}

const GOLDEN: [u64; 6] = [
    0x7613_7d26_2824_c117, // in the order of Rule::ALL
    0x90ae_2d45_f911_7f44,
    0x1384_6b67_df97_aabd,
    0xe16b_f844_c996_b0b9,
    0xe091_65d3_042c_fabf,
    0x7191_1f29_465c_22b8,
];

fn golden(isa: Isa, rule: Rule) -> u64 {
    let hyper =
        Hyper { weight_decay: 0.1, momentum: 0.9, dampening: 0.3, lr_decay: 0.01, ..Hyper::default() };
    let mut noise = Noise(11);
    let count = BLOCK / 16 + 5;
    let mut state = Owned::noisy(rule, count, &mut noise, false);
    let mut image = Array::blank(Kind::Bf16, count, &mut noise);
    for t in 1..=3 {
        let gradient = Array::noisy(Kind::F16, count, &mut noise, false);
        let scalars = Scalars::new(rule, &hyper, t, 1.0 / 3.0);
        update(isa, &scalars, gradient.gradient(), state.state(), image.image());
    }
    let state = state.state();
    let ImageMut::Bf16(image) = image.image() else { unreachable!() };
    let words = [&*state.master, state.first, state.second].into_iter().flatten().map(|x| x.to_bits());
    // This is FNV-1a over 32-bit words.
    words
        .chain(image.iter().map(|&bits| u32::from(bits)))
        .fold(0xCBF2_9CE4_8422_2325, |hash, word| (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01B3))
}
