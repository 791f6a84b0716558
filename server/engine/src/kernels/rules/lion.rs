//! Lion, as its paper's Algorithm 2 and DeepSpeed have it. Decay is decoupled. The update is the sign of one
//! interpolation, and the other interpolation is the state.

use longshore_proto::Hyper;

use super::{Constants, Loop, Number, Rule, Slots};

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion<V = f32> {
    grad_multiplier: V,
    lr: V,
    /// `1 - lr * weight_decay`
    decay: V,
    beta1: V,
    /// `1 - beta1`
    sign_weight: V,
    beta2: V,
    /// `1 - beta2`
    mean_weight: V,
}

impl Constants for Lion {
    fn new(hyper: &Hyper, _applied: u64, grad_multiplier: f32) -> Self {
        Lion {
            grad_multiplier,
            lr: hyper.lr as f32,
            decay: (1.0 - hyper.lr * hyper.weight_decay) as f32,
            beta1: hyper.beta1 as f32,
            sign_weight: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            mean_weight: (1.0 - hyper.beta2) as f32,
        }
    }

    #[inline(always)]
    unsafe fn run<V: Number>(&self, body: impl Loop<V>) {
        body.run(Lion {
            grad_multiplier: V::splat(self.grad_multiplier),
            lr: V::splat(self.lr),
            decay: V::splat(self.decay),
            beta1: V::splat(self.beta1),
            sign_weight: V::splat(self.sign_weight),
            beta2: V::splat(self.beta2),
            mean_weight: V::splat(self.mean_weight),
        });
    }
}

impl<V: Number> Rule<V> for Lion<V> {
    const SLOTS: usize = 1;

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, [mean, unused]: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.grad_multiplier);
        let master = master.mul(self.decay);
        let direction = mean.mul(self.beta1).add(gradient.mul(self.sign_weight));
        let master = master.sub(self.lr.mul(direction.sign()));
        let mean = mean.mul(self.beta2).add(gradient.mul(self.mean_weight));
        (master, [mean, unused], master)
    }
}
