//! NAdam: `torch.optim.NAdam`, with L2 weight decay.

use longshore_proto::Hyper;

use super::{Constants, Loop, Number, Rule, Slots, exponential, power};

/// `ln(0.96)`: torch's momentum of step i is `mu(i) = beta1 * (1 - 0.5 * 0.96^(i * momentum_decay))`.
const LN_BASE: f64 = -0.040_821_994_520_255_166;
/// A product of momenta below this no longer changes `1 - product`.
const VANISHED: f64 = 1.0 / (1u128 << 64) as f64;

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NAdam<V = f32> {
    grad_multiplier: V,
    weight_decay: V,
    /// `1 - beta1`
    mean_weight: V,
    beta2: V,
    /// `1 - beta2`
    square_weight: V,
    /// `1 / sqrt(1 - beta2^t)`
    inverse_root_correction: V,
    eps: V,
    /// `lr * (1 - mu(t)) / (1 - product(t))`
    gradient_step: V,
    /// `lr * mu(t + 1) / (1 - product(t + 1))`
    mean_step: V,
}

/// `mu(t)`, `mu(t + 1)`, and the product of `mu(1)` to `mu(t)`, which torch keeps as state. Here this step's
/// hyperparameters decide the whole product, as they decide `beta1^t` of Adam.
fn momenta(hyper: &Hyper, t: u64) -> (f64, f64, f64) {
    let base = exponential(hyper.momentum_decay * LN_BASE);
    let mu = |power: f64| hyper.beta1 * (1.0 - 0.5 * power);
    let (mut product, mut decayed) = (1.0, 1.0);
    for _ in 0..t {
        decayed *= base;
        product *= mu(decayed);
        if product < VANISHED {
            break;
        }
    }
    let decayed = power(base, t);
    (mu(decayed), mu(decayed * base), product)
}

impl Constants for NAdam {
    fn new(hyper: &Hyper, applied: u64, grad_multiplier: f32) -> Self {
        let (mu, next, product) = momenta(hyper, applied);
        NAdam {
            grad_multiplier,
            weight_decay: hyper.weight_decay as f32,
            mean_weight: (1.0 - hyper.beta1) as f32,
            beta2: hyper.beta2 as f32,
            square_weight: (1.0 - hyper.beta2) as f32,
            inverse_root_correction: (1.0 / (1.0 - power(hyper.beta2, applied)).sqrt()) as f32,
            eps: hyper.eps as f32,
            gradient_step: (hyper.lr * (1.0 - mu) / (1.0 - product)) as f32,
            mean_step: (hyper.lr * next / (1.0 - product * next)) as f32,
        }
    }

    #[inline(always)]
    unsafe fn run<V: Number>(&self, body: impl Loop<V>) {
        body.run(NAdam {
            grad_multiplier: V::splat(self.grad_multiplier),
            weight_decay: V::splat(self.weight_decay),
            mean_weight: V::splat(self.mean_weight),
            beta2: V::splat(self.beta2),
            square_weight: V::splat(self.square_weight),
            inverse_root_correction: V::splat(self.inverse_root_correction),
            eps: V::splat(self.eps),
            gradient_step: V::splat(self.gradient_step),
            mean_step: V::splat(self.mean_step),
        });
    }
}

/// Moments are Adam's. The weight takes two steps, as in torch: by the gradient, then by the mean.
impl<V: Number> Rule<V> for NAdam<V> {
    const SLOTS: usize = 2;

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, [mean, square]: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.grad_multiplier);
        let gradient = gradient.add(self.weight_decay.mul(master));
        let mean = mean.add(gradient.sub(mean).mul(self.mean_weight));
        let square = square.mul(self.beta2).add(self.square_weight.mul(gradient).mul(gradient));
        let denominator = square.sqrt().mul(self.inverse_root_correction).add(self.eps);
        let master = master.sub(self.gradient_step.mul(gradient.div(denominator)));
        let master = master.sub(self.mean_step.mul(mean.div(denominator)));
        (master, [mean, square], master)
    }
}
