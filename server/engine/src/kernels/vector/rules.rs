//! The update rules for 16 lanes, each written once for all instruction sets. They do what `scalar/rules.rs`
//! specifies, operation for operation; the comments there apply here.

use super::super::Code;
use super::super::scalars::{self, AdagradScalars, AdamScalars, LionScalars, SgdScalars};
use super::lanes::Lanes;

/// State of 16 elements; slots at `Rule::SLOTS` and beyond mean nothing.
pub(super) type Slots<V> = [V; 2];

/// An update rule for 16 elements, its constants splatted. Its methods are safe under the conditions of [`Lanes`].
pub(super) trait Rule<V: Lanes>: Copy {
    const SLOTS: usize;
    /// [`Code::of`] slot 0.
    const CODE: Code = Code::Signed;

    /// Whether the image looks ahead. It is constant over a loop, and the compiler moves its branches out of it.
    #[inline(always)]
    fn looks_ahead(self) -> bool {
        false
    }

    unsafe fn step(self, gradient: V, master: V, state: Slots<V>) -> (V, Slots<V>, V);
}

/// The factors of what is known of the next step; zeros where the image does not look ahead.
#[derive(Clone, Copy)]
struct Ahead<V> {
    is_on: bool,
    mean: V,
    gradient: V,
    weight: V,
}

impl<V: Lanes> Ahead<V> {
    #[inline(always)]
    unsafe fn new(ahead: Option<scalars::Ahead>) -> Self {
        let factor = |of: fn(scalars::Ahead) -> f32| ahead.map_or(0.0, of);
        Ahead {
            is_on: ahead.is_some(),
            mean: V::splat(factor(|ahead| ahead.mean)),
            gradient: V::splat(factor(|ahead| ahead.gradient)),
            weight: V::splat(factor(|ahead| ahead.weight)),
        }
    }

    #[inline(always)]
    unsafe fn known(self, mean: V, gradient: V) -> V {
        self.mean.mul(mean).add(self.gradient.mul(gradient))
    }
}

/// AdamW if `DECOUPLED`, else Adam.
#[derive(Clone, Copy)]
pub(super) struct Adam<V, const DECOUPLED: bool> {
    grad_multiplier: V,
    decay: V,
    mean_weight: V,
    beta2: V,
    square_weight: V,
    inverse_root_correction: V,
    eps: V,
    step_size: V,
    ahead: Ahead<V>,
}

impl<V: Lanes, const DECOUPLED: bool> Adam<V, DECOUPLED> {
    #[inline(always)]
    pub(super) unsafe fn new(scalars: &AdamScalars) -> Self {
        Adam {
            grad_multiplier: V::splat(scalars.grad_multiplier),
            decay: V::splat(scalars.decay),
            mean_weight: V::splat(scalars.mean_weight),
            beta2: V::splat(scalars.beta2),
            square_weight: V::splat(scalars.square_weight),
            inverse_root_correction: V::splat(scalars.inverse_root_correction),
            eps: V::splat(scalars.eps),
            step_size: V::splat(scalars.step_size),
            ahead: Ahead::new(scalars.ahead),
        }
    }
}

impl<V: Lanes, const DECOUPLED: bool> Rule<V> for Adam<V, DECOUPLED> {
    const SLOTS: usize = 2;

    #[inline(always)]
    fn looks_ahead(self) -> bool {
        self.ahead.is_on
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
        let ahead = if self.ahead.is_on {
            self.ahead.known(mean, gradient).div(denominator).add(self.ahead.weight.mul(master))
        } else {
            master
        };
        (master, [mean, square], ahead)
    }
}

#[derive(Clone, Copy)]
pub(super) struct PlainSgd<V> {
    grad_multiplier: V,
    weight_decay: V,
    lr: V,
}

impl<V: Lanes> PlainSgd<V> {
    #[inline(always)]
    pub(super) unsafe fn new(scalars: &SgdScalars) -> Self {
        PlainSgd {
            grad_multiplier: V::splat(scalars.grad_multiplier),
            weight_decay: V::splat(scalars.weight_decay),
            lr: V::splat(scalars.lr),
        }
    }
}

impl<V: Lanes> Rule<V> for PlainSgd<V> {
    const SLOTS: usize = 0;

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, state: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.grad_multiplier);
        let gradient = gradient.add(self.weight_decay.mul(master));
        let master = master.sub(self.lr.mul(gradient));
        (master, state, master)
    }
}

/// The two flags are constant over a loop, and the compiler moves their branches out of it.
#[derive(Clone, Copy)]
pub(super) struct MomentumSgd<V> {
    plain: PlainSgd<V>,
    momentum: V,
    grad_weight: V,
    nesterov: bool,
    first: bool,
    ahead: Ahead<V>,
}

impl<V: Lanes> MomentumSgd<V> {
    #[inline(always)]
    pub(super) unsafe fn new(scalars: &SgdScalars) -> Self {
        MomentumSgd {
            plain: PlainSgd::new(scalars),
            momentum: V::splat(scalars.momentum),
            grad_weight: V::splat(scalars.grad_weight),
            nesterov: scalars.nesterov,
            first: scalars.first,
            ahead: Ahead::new(scalars.ahead),
        }
    }
}

impl<V: Lanes> Rule<V> for MomentumSgd<V> {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn looks_ahead(self) -> bool {
        self.ahead.is_on
    }

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, [buffer, unused]: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.plain.grad_multiplier);
        let gradient = gradient.add(self.plain.weight_decay.mul(master));
        let buffer =
            if self.first { gradient } else { buffer.mul(self.momentum).add(gradient.mul(self.grad_weight)) };
        let direction = if self.nesterov { gradient.add(buffer.mul(self.momentum)) } else { buffer };
        let master = master.sub(self.plain.lr.mul(direction));
        let ahead = if self.ahead.is_on { self.ahead.known(buffer, gradient) } else { master };
        (master, [buffer, unused], ahead)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Lion<V> {
    grad_multiplier: V,
    lr: V,
    decay: V,
    beta1: V,
    sign_weight: V,
    beta2: V,
    mean_weight: V,
}

impl<V: Lanes> Lion<V> {
    #[inline(always)]
    pub(super) unsafe fn new(scalars: &LionScalars) -> Self {
        Lion {
            grad_multiplier: V::splat(scalars.grad_multiplier),
            lr: V::splat(scalars.lr),
            decay: V::splat(scalars.decay),
            beta1: V::splat(scalars.beta1),
            sign_weight: V::splat(scalars.sign_weight),
            beta2: V::splat(scalars.beta2),
            mean_weight: V::splat(scalars.mean_weight),
        }
    }
}

impl<V: Lanes> Rule<V> for Lion<V> {
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

#[derive(Clone, Copy)]
pub(super) struct Adagrad<V> {
    grad_multiplier: V,
    weight_decay: V,
    eps: V,
    step_size: V,
}

impl<V: Lanes> Adagrad<V> {
    #[inline(always)]
    pub(super) unsafe fn new(scalars: &AdagradScalars) -> Self {
        Adagrad {
            grad_multiplier: V::splat(scalars.grad_multiplier),
            weight_decay: V::splat(scalars.weight_decay),
            eps: V::splat(scalars.eps),
            step_size: V::splat(scalars.step_size),
        }
    }
}

impl<V: Lanes> Rule<V> for Adagrad<V> {
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
