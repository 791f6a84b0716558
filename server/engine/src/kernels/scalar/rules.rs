//! The update rules, one element at a time: **this file is the specification**. Every `+ - * / sqrt` below is one
//! IEEE-754 f32 operation, rounded to nearest, in the order written; nothing is contracted into a fused
//! multiply-add and denormals are kept. `vector/rules.rs` says the same for 16 lanes and must give the same bits.

use super::super::scalars::{AdagradScalars, AdamScalars, Ahead, LionScalars, SgdScalars};
use super::convert::CANONICAL_NAN;

/// State of one element; slots at `Rule::SLOTS` and beyond mean nothing.
pub(super) type Slots = [f32; 2];

/// An update rule for one element.
pub(super) trait Rule: Copy {
    const SLOTS: usize;

    /// Whether the image looks ahead.
    #[inline(always)]
    fn looks_ahead(self) -> bool {
        false
    }

    /// New master weight and state from the raw gradient, the old master weight and the old state.
    ///
    /// The last number is how far the image is ahead, that is what is subtracted from the new master weight. It means
    /// nothing unless the rule [looks ahead](Rule::looks_ahead).
    fn step(self, gradient: f32, master: f32, state: Slots) -> (f32, Slots, f32);
}

#[derive(Clone, Copy)]
pub(super) struct AdamW(pub(super) AdamScalars);
#[derive(Clone, Copy)]
pub(super) struct Adam(pub(super) AdamScalars);
/// SGD without momentum. It does not touch the buffer, though there is one.
#[derive(Clone, Copy)]
pub(super) struct PlainSgd(pub(super) SgdScalars);
#[derive(Clone, Copy)]
pub(super) struct MomentumSgd(pub(super) SgdScalars);
#[derive(Clone, Copy)]
pub(super) struct Lion(pub(super) LionScalars);
#[derive(Clone, Copy)]
pub(super) struct Adagrad(pub(super) AdagradScalars);

/// `torch.optim.AdamW`'s single-tensor path: decay first, then `lerp_`, `addcmul_` (whose order is `(value * g) *
/// g`), and eps added after the bias-corrected root. torch has two forms of `lerp_`, and this is the one for `1 -
/// beta1 < 0.5`.
impl Rule for AdamW {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn looks_ahead(self) -> bool {
        self.0.ahead.is_some()
    }

    #[inline(always)]
    fn step(self, gradient: f32, master: f32, state: Slots) -> (f32, Slots, f32) {
        let gradient = gradient * self.0.grad_multiplier;
        let master = master * self.0.decay;
        adam(&self.0, gradient, master, state)
    }
}

/// `torch.optim.Adam`: weight decay is L2, a part of the gradient.
impl Rule for Adam {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn looks_ahead(self) -> bool {
        self.0.ahead.is_some()
    }

    #[inline(always)]
    fn step(self, gradient: f32, master: f32, state: Slots) -> (f32, Slots, f32) {
        let gradient = gradient * self.0.grad_multiplier;
        let gradient = gradient + self.0.decay * master;
        adam(&self.0, gradient, master, state)
    }
}

/// Ahead lies the next step as far as it is known: with the moments after this step, with a part of the newest gradient
/// in place of the one that is missing, and with the decay of the new weight. Adam's decay is in its gradient.
#[inline(always)]
fn adam(scalars: &AdamScalars, gradient: f32, master: f32, [mean, square]: Slots) -> (f32, Slots, f32) {
    let mean = mean + (gradient - mean) * scalars.mean_weight;
    let square = square * scalars.beta2 + (scalars.square_weight * gradient) * gradient;
    let denominator = square.sqrt() * scalars.inverse_root_correction + scalars.eps;
    let master = master - scalars.step_size * (mean / denominator);
    let ahead = match scalars.ahead {
        Some(ahead) => (known(ahead, mean, gradient) / denominator) + ahead.weight * master,
        None => 0.0,
    };
    (master, [mean, square], ahead)
}

#[inline(always)]
fn known(ahead: Ahead, mean: f32, gradient: f32) -> f32 {
    ahead.mean * mean + ahead.gradient * gradient
}

/// `torch.optim.SGD`, weight decay L2.
impl Rule for PlainSgd {
    const SLOTS: usize = 0;

    #[inline(always)]
    fn step(self, gradient: f32, master: f32, state: Slots) -> (f32, Slots, f32) {
        let gradient = gradient * self.0.grad_multiplier;
        let gradient = gradient + self.0.weight_decay * master;
        (master - self.0.lr * gradient, state, 0.0)
    }
}

/// As in torch, dampening does not apply to the first step.
impl Rule for MomentumSgd {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn looks_ahead(self) -> bool {
        self.0.ahead.is_some()
    }

    #[inline(always)]
    fn step(self, gradient: f32, master: f32, [buffer, unused]: Slots) -> (f32, Slots, f32) {
        let gradient = gradient * self.0.grad_multiplier;
        let gradient = gradient + self.0.weight_decay * master;
        let buffer =
            if self.0.first { gradient } else { buffer * self.0.momentum + gradient * self.0.grad_weight };
        let direction = if self.0.nesterov { gradient + buffer * self.0.momentum } else { buffer };
        let ahead = self.0.ahead.map_or(0.0, |ahead| known(ahead, buffer, gradient));
        (master - self.0.lr * direction, [buffer, unused], ahead)
    }
}

/// Lion as its paper's Algorithm 2 and DeepSpeed have it: decoupled decay, the sign of one interpolation, then the
/// other interpolation as state.
impl Rule for Lion {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step(self, gradient: f32, master: f32, [mean, unused]: Slots) -> (f32, Slots, f32) {
        let gradient = gradient * self.0.grad_multiplier;
        let master = master * self.0.decay;
        let direction = mean * self.0.beta1 + gradient * self.0.sign_weight;
        let master = master - self.0.lr * sign(direction);
        let mean = mean * self.0.beta2 + gradient * self.0.mean_weight;
        (master, [mean, unused], 0.0)
    }
}

/// `torch.optim.Adagrad`, weight decay L2.
impl Rule for Adagrad {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn step(self, gradient: f32, master: f32, [sum, unused]: Slots) -> (f32, Slots, f32) {
        let gradient = gradient * self.0.grad_multiplier;
        let gradient = gradient + self.0.weight_decay * master;
        let sum = sum + gradient * gradient;
        let denominator = sum.sqrt() + self.0.eps;
        (master - self.0.step_size * (gradient / denominator), [sum, unused], 0.0)
    }
}

/// -1, 0 or 1, and +0 for both zeros; NaN stays NaN.
#[inline(always)]
fn sign(x: f32) -> f32 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else if x == 0.0 {
        0.0
    } else {
        CANONICAL_NAN
    }
}
