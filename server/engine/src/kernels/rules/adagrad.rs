//! Adagrad: `torch.optim.Adagrad`, with L2 weight decay.

use longshore_proto::Hyper;

use super::{Constants, Loop, Number, Rule, Slots};
use crate::kernels::Code;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad<V = f32> {
    grad_multiplier: V,
    weight_decay: V,
    eps: V,
    /// `lr / (1 + (t - 1) * lr_decay)`
    step_size: V,
}

impl Constants for Adagrad {
    fn new(hyper: &Hyper, applied: u64, grad_multiplier: f32) -> Self {
        Adagrad {
            grad_multiplier,
            weight_decay: hyper.weight_decay as f32,
            eps: hyper.eps as f32,
            step_size: (hyper.lr / (1.0 + (applied - 1) as f64 * hyper.lr_decay)) as f32,
        }
    }

    #[inline(always)]
    unsafe fn run<V: Number>(&self, body: impl Loop<V>) {
        body.run(Adagrad {
            grad_multiplier: V::splat(self.grad_multiplier),
            weight_decay: V::splat(self.weight_decay),
            eps: V::splat(self.eps),
            step_size: V::splat(self.step_size),
        });
    }
}

impl<V: Number> Rule<V> for Adagrad<V> {
    const SLOTS: usize = 1;
    const CODE: Code = Code::Unsigned;

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, [sum, unused]: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.grad_multiplier);
        let gradient = gradient.add(self.weight_decay.mul(master));
        let sum = sum.add(gradient.mul(gradient));
        let denominator = sum.sqrt().add(self.eps);
        let master = master.sub(self.step_size.mul(gradient.div(denominator)));
        (master, [sum, unused], master)
    }
}
