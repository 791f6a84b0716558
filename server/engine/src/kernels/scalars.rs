//! What one step needs to know of the hyperparameters. It is formed in f64 once per step and cast to f32 once, so
//! that the loops read constants and every server forms the same ones.

use longshore_proto::{Hyper, Rule};

/// The f32 constants of one step of one param group, ready for the loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalars {
    AdamW(AdamScalars),
    Adam(AdamScalars),
    Sgd(SgdScalars),
    Lion(LionScalars),
    Adagrad(AdagradScalars),
}

/// AdamW's and Adam's constants; they differ in the meaning of `decay`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamScalars {
    pub grad_multiplier: f32,
    /// AdamW: `1 - lr * weight_decay`, a factor on the weight. Adam: `weight_decay`, L2.
    pub decay: f32,
    /// `1 - beta1`
    pub mean_weight: f32,
    pub beta2: f32,
    /// `1 - beta2`
    pub square_weight: f32,
    /// `1 / sqrt(1 - beta2^t)`
    pub inverse_root_correction: f32,
    pub eps: f32,
    /// `lr / (1 - beta1^t)`
    pub step_size: f32,
    pub ahead: Option<Ahead>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdScalars {
    pub grad_multiplier: f32,
    pub lr: f32,
    pub weight_decay: f32,
    /// 0 means that there is no momentum and the buffer is not touched.
    pub momentum: f32,
    /// `1 - dampening`
    pub grad_weight: f32,
    pub nesterov: bool,
    /// This is the first applied step, in which the buffer becomes the gradient.
    pub first: bool,
    pub ahead: Option<Ahead>,
}

/// Look-ahead: the image is ahead of the new master weight by the known part of the next step. The fields are the factors
/// of that part. All of them contain the learning rate of [`Scalars::looking_ahead`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ahead {
    /// Adam: of the first moment. SGD: of the momentum buffer.
    pub mean: f32,
    /// The factor of the newest gradient, which stands in for the one that is missing.
    pub gradient: f32,
    /// AdamW: of the new master weight, for decay.
    pub weight: f32,
}

impl Ahead {
    /// SGD without momentum knows nothing of its next step.
    const NOTHING: Ahead = Ahead { mean: 0.0, gradient: 0.0, weight: 0.0 };
}

/// The newest gradient is weighed twice: once for itself, and once for the gradient that is missing. Measured on the
/// default job, and by how large a learning rate stays stable (docs/delay.md).
const NEWEST: f64 = 2.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionScalars {
    pub grad_multiplier: f32,
    pub lr: f32,
    /// `1 - lr * weight_decay`
    pub decay: f32,
    pub beta1: f32,
    /// `1 - beta1`
    pub sign_weight: f32,
    pub beta2: f32,
    /// `1 - beta2`
    pub mean_weight: f32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdagradScalars {
    pub grad_multiplier: f32,
    pub weight_decay: f32,
    pub eps: f32,
    /// `lr / (1 + (t - 1) * lr_decay)`
    pub step_size: f32,
}

impl Scalars {
    /// The constants of applied step `applied`, counted from 1. Gradients are multiplied by `grad_multiplier`
    /// (loss scale, number of contributions and clipping, all in one) before anything else.
    ///
    /// # Panics
    /// If `applied` is 0.
    pub fn new(rule: Rule, hyper: &Hyper, applied: u64, grad_multiplier: f32) -> Scalars {
        assert!(applied >= 1, "applied steps are counted from 1");
        match rule {
            Rule::AdamW => Scalars::AdamW(AdamScalars::new(
                hyper,
                1.0 - hyper.lr * hyper.weight_decay,
                applied,
                grad_multiplier,
            )),
            Rule::Adam => {
                Scalars::Adam(AdamScalars::new(hyper, hyper.weight_decay, applied, grad_multiplier))
            }
            Rule::Sgd => Scalars::Sgd(SgdScalars {
                grad_multiplier,
                lr: hyper.lr as f32,
                weight_decay: hyper.weight_decay as f32,
                momentum: hyper.momentum as f32,
                grad_weight: (1.0 - hyper.dampening) as f32,
                nesterov: hyper.nesterov,
                first: applied == 1,
                ahead: None,
            }),
            Rule::Lion => Scalars::Lion(LionScalars {
                grad_multiplier,
                lr: hyper.lr as f32,
                decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
                beta1: hyper.beta1 as f32,
                sign_weight: (1.0 - hyper.beta1) as f32,
                beta2: hyper.beta2 as f32,
                mean_weight: (1.0 - hyper.beta2) as f32,
            }),
            Rule::Adagrad => Scalars::Adagrad(AdagradScalars {
                grad_multiplier,
                weight_decay: hyper.weight_decay as f32,
                eps: hyper.eps as f32,
                step_size: (hyper.lr / (1.0 + (applied - 1) as f64 * hyper.lr_decay)) as f32,
            }),
        }
    }

    /// The same step, with images that look ahead by a step of learning rate `next_lr`. `hyper` and `applied` are those
    /// of [`new`](Scalars::new).
    ///
    /// # Panics
    /// If the rule [cannot](Rule::can_look_ahead).
    pub fn looking_ahead(mut self, hyper: &Hyper, applied: u64, next_lr: f64) -> Scalars {
        let adam = |decay: f64| Ahead {
            mean: (next_lr * hyper.beta1 / (1.0 - power(hyper.beta1, applied))) as f32,
            gradient: (next_lr * NEWEST * (1.0 - hyper.beta1)) as f32,
            weight: (next_lr * hyper.beta1 * decay) as f32,
        };
        match &mut self {
            Scalars::AdamW(scalars) => scalars.ahead = Some(adam(hyper.weight_decay)),
            Scalars::Adam(scalars) => scalars.ahead = Some(adam(0.0)),
            Scalars::Sgd(scalars) if scalars.momentum == 0.0 => scalars.ahead = Some(Ahead::NOTHING),
            // Nesterov's direction g + momentum * b contains the next buffer, of which the share `momentum` is known.
            Scalars::Sgd(scalars) => {
                let known = if hyper.nesterov { hyper.momentum * hyper.momentum } else { hyper.momentum };
                scalars.ahead = Some(Ahead {
                    mean: (next_lr * known) as f32,
                    gradient: (next_lr * NEWEST * (1.0 - hyper.dampening)) as f32,
                    weight: 0.0,
                });
            }
            Scalars::Lion(_) | Scalars::Adagrad(_) => {
                panic!("{:?} cannot look ahead", self.rule());
            }
        }
        self
    }

    /// Whether images look ahead. It is the same for all param groups of a step.
    pub(super) fn looks_ahead(&self) -> bool {
        match self {
            Scalars::AdamW(scalars) | Scalars::Adam(scalars) => scalars.ahead.is_some(),
            Scalars::Sgd(scalars) => scalars.ahead.is_some(),
            Scalars::Lion(_) | Scalars::Adagrad(_) => false,
        }
    }

    /// Whether a step with these constants changes the state. SGD without momentum leaves it as it is.
    pub(super) fn writes_state(&self) -> bool {
        !matches!(self, Scalars::Sgd(scalars) if scalars.momentum == 0.0)
    }

    pub fn rule(&self) -> Rule {
        match self {
            Scalars::AdamW(_) => Rule::AdamW,
            Scalars::Adam(_) => Rule::Adam,
            Scalars::Sgd(_) => Rule::Sgd,
            Scalars::Lion(_) => Rule::Lion,
            Scalars::Adagrad(_) => Rule::Adagrad,
        }
    }
}

impl AdamScalars {
    fn new(hyper: &Hyper, decay: f64, applied: u64, grad_multiplier: f32) -> AdamScalars {
        AdamScalars {
            grad_multiplier,
            decay: decay as f32,
            mean_weight: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            square_weight: (1.0 - hyper.beta2) as f32,
            inverse_root_correction: (1.0 / (1.0 - power(hyper.beta2, applied)).sqrt()) as f32,
            eps: hyper.eps as f32,
            step_size: (hyper.lr / (1.0 - power(hyper.beta1, applied))) as f32,
            ahead: None,
        }
    }
}

/// `base^exponent` by squaring. Multiplication rounds alike everywhere, whereas `powf` and `powi` may differ in
/// the last bit between C libraries, and with it the weights of two servers. The relative error stays below
/// `exponent * 2^-52`, and where that is large `base^exponent` has long vanished beside 1.
fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn power_is_powf_to_the_f32_it_ends_as() {
        for base in [0.5, 0.9, 0.95, 0.999, 0.9999] {
            for exponent in [1, 2, 3, 10, 999, 12_345, 1_000_000] {
                let (ours, libm) = (1.0 - power(base, exponent), 1.0 - f64::powf(base, exponent as f64));
                assert!((ours - libm).abs() <= 1e-12 * libm, "{base}^{exponent}: {ours} {libm}");
            }
        }
    }

    #[test]
    fn constants_of_the_first_adamw_step() {
        let Scalars::AdamW(scalars) = Scalars::new(Rule::AdamW, &Hyper::default(), 1, 0.5) else {
            unreachable!()
        };
        // The step size is not exactly lr: 1 - 0.9 is 0.09999999999999998 in f64.
        assert_eq!(scalars.step_size, (1e-3_f64 / (1.0 - 0.9)) as f32);
        assert_eq!(scalars.inverse_root_correction, (1.0 / (1.0_f64 - 0.999).sqrt()) as f32);
        assert_eq!(scalars.decay, (1.0 - 1e-3 * 1e-2) as f32);
        assert_eq!(scalars.grad_multiplier, 0.5);
    }
}
