//! AdamW and Adam.

use longshore_proto::Hyper;

use super::{Ahead, Constants, Loop, NEWEST, Number, Rule, Slots, power};

/// Constants of AdamW if `DECOUPLED`, else of Adam.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam<V, const DECOUPLED: bool> {
    grad_multiplier: V,
    /// AdamW: `1 - lr * weight_decay`, a factor on the weight. Adam: `weight_decay`, L2.
    decay: V,
    /// `1 - beta1`
    mean_weight: V,
    beta2: V,
    /// `1 - beta2`
    square_weight: V,
    /// `1 / sqrt(1 - beta2^t)`
    inverse_root_correction: V,
    eps: V,
    /// `lr / (1 - beta1^t)`
    step_size: V,
    looks_ahead: bool,
    ahead: Ahead<V>,
}

impl<const DECOUPLED: bool> Constants for Adam<f32, DECOUPLED> {
    fn new(hyper: &Hyper, applied: u64, grad_multiplier: f32) -> Self {
        let decay = if DECOUPLED { 1.0 - hyper.lr * hyper.weight_decay } else { hyper.weight_decay };
        Adam {
            grad_multiplier,
            decay: decay as f32,
            mean_weight: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            square_weight: (1.0 - hyper.beta2) as f32,
            inverse_root_correction: (1.0 / (1.0 - power(hyper.beta2, applied)).sqrt()) as f32,
            eps: hyper.eps as f32,
            step_size: (hyper.lr / (1.0 - power(hyper.beta1, applied))) as f32,
            looks_ahead: false,
            ahead: Ahead::NOTHING,
        }
    }

    /// Looks ahead by the known part of the next step: the moments after this step, and AdamW's decay of the new
    /// weight. Adam's decay is part of its gradient, which is not known yet. A part of the newest gradient stands for
    /// that gradient.
    fn look_ahead(&mut self, hyper: &Hyper, applied: u64, next_lr: f64) {
        let decay = if DECOUPLED { hyper.weight_decay } else { 0.0 };
        self.looks_ahead = true;
        self.ahead = Ahead {
            mean: (next_lr * hyper.beta1 / (1.0 - power(hyper.beta1, applied))) as f32,
            gradient: (next_lr * NEWEST * (1.0 - hyper.beta1)) as f32,
            weight: (next_lr * hyper.beta1 * decay) as f32,
        };
    }

    fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    #[inline(always)]
    unsafe fn run<V: Number>(&self, body: impl Loop<V>) {
        body.run(Adam::<V, DECOUPLED> {
            grad_multiplier: V::splat(self.grad_multiplier),
            decay: V::splat(self.decay),
            mean_weight: V::splat(self.mean_weight),
            beta2: V::splat(self.beta2),
            square_weight: V::splat(self.square_weight),
            inverse_root_correction: V::splat(self.inverse_root_correction),
            eps: V::splat(self.eps),
            step_size: V::splat(self.step_size),
            looks_ahead: self.looks_ahead,
            ahead: self.ahead.splat(),
        });
    }
}

/// `torch.optim.AdamW`'s single-tensor path: decay first, then `lerp_`, then `addcmul_` in the order `(value
/// * g) * g`. eps is added after the bias-corrected root. torch has two forms of `lerp_`; this is the form
/// for `1 - beta1 < 0.5`. `torch.optim.Adam` differs in weight decay: L2, a part of the gradient.
impl<V: Number, const DECOUPLED: bool> Rule<V> for Adam<V, DECOUPLED> {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn looks_ahead(self) -> bool {
        self.looks_ahead
    }

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, [mean, square]: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.grad_multiplier);
        let (gradient, master) = if DECOUPLED {
            (gradient, master.mul(self.decay))
        } else {
            (gradient.add(self.decay.mul(master)), master)
        };
        let mean = mean.add(gradient.sub(mean).mul(self.mean_weight));
        let square = square.mul(self.beta2).add(self.square_weight.mul(gradient).mul(gradient));
        let denominator = square.sqrt().mul(self.inverse_root_correction).add(self.eps);
        let master = master.sub(self.step_size.mul(mean.div(denominator)));
        let ahead = if self.looks_ahead {
            self.ahead.known(mean, gradient).div(denominator).add(self.ahead.weight.mul(master))
        } else {
            master
        };
        (master, [mean, square], ahead)
    }
}
