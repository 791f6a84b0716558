//! SGD: `torch.optim.SGD`, with L2 weight decay.

use longshore_proto::Hyper;

use super::{Ahead, Constants, Loop, NEWEST, Number, Rule, Slots};

/// The flags are constant over a loop, and the compiler moves their branches out of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd<V = f32> {
    plain: Plain<V>,
    momentum: V,
    /// `1 - dampening`
    grad_weight: V,
    nesterov: bool,
    /// True in the first applied step, in which the buffer becomes the gradient.
    first: bool,
    looks_ahead: bool,
    ahead: Ahead<V>,
}

/// SGD without momentum, which does not touch its buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Plain<V> {
    grad_multiplier: V,
    weight_decay: V,
    lr: V,
}

impl Constants for Sgd {
    fn new(hyper: &Hyper, applied: u64, grad_multiplier: f32) -> Self {
        Sgd {
            plain: Plain { grad_multiplier, weight_decay: hyper.weight_decay as f32, lr: hyper.lr as f32 },
            momentum: hyper.momentum as f32,
            grad_weight: (1.0 - hyper.dampening) as f32,
            nesterov: hyper.nesterov,
            first: applied == 1,
            looks_ahead: false,
            ahead: Ahead::NOTHING,
        }
    }

    /// Nesterov's direction `g + momentum * b` contains the next buffer, of which the share `momentum` is
    /// known.
    fn look_ahead(&mut self, hyper: &Hyper, _applied: u64, next_lr: f64) {
        let known = if hyper.nesterov { hyper.momentum * hyper.momentum } else { hyper.momentum };
        self.looks_ahead = true;
        if self.momentum != 0.0 {
            let gradient = (next_lr * NEWEST * (1.0 - hyper.dampening)) as f32;
            self.ahead = Ahead { mean: (next_lr * known) as f32, gradient, weight: 0.0 };
        }
    }

    fn looks_ahead(&self) -> bool {
        self.looks_ahead
    }

    fn writes_state(&self) -> bool {
        self.momentum != 0.0
    }

    #[inline(always)]
    unsafe fn run<V: Number>(&self, body: impl Loop<V>) {
        let plain = Plain {
            grad_multiplier: V::splat(self.plain.grad_multiplier),
            weight_decay: V::splat(self.plain.weight_decay),
            lr: V::splat(self.plain.lr),
        };
        if self.momentum == 0.0 {
            return body.run(plain);
        }
        body.run(Sgd {
            plain,
            momentum: V::splat(self.momentum),
            grad_weight: V::splat(self.grad_weight),
            nesterov: self.nesterov,
            first: self.first,
            looks_ahead: self.looks_ahead,
            ahead: self.ahead.splat(),
        });
    }
}

impl<V: Number> Rule<V> for Plain<V> {
    const SLOTS: usize = 0;

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, state: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.grad_multiplier);
        let gradient = gradient.add(self.weight_decay.mul(master));
        let master = master.sub(self.lr.mul(gradient));
        (master, state, master)
    }
}

/// As in torch, dampening does not apply to the first step.
impl<V: Number> Rule<V> for Sgd<V> {
    const SLOTS: usize = 1;

    #[inline(always)]
    fn looks_ahead(self) -> bool {
        self.looks_ahead
    }

    #[inline(always)]
    unsafe fn step(self, gradient: V, master: V, [buffer, unused]: Slots<V>) -> (V, Slots<V>, V) {
        let gradient = gradient.mul(self.plain.grad_multiplier);
        let gradient = gradient.add(self.plain.weight_decay.mul(master));
        let buffer =
            if self.first { gradient } else { buffer.mul(self.momentum).add(gradient.mul(self.grad_weight)) };
        let direction = if self.nesterov { gradient.add(buffer.mul(self.momentum)) } else { buffer };
        let master = master.sub(self.plain.lr.mul(direction));
        let ahead = if self.looks_ahead { self.ahead.known(buffer, gradient) } else { master };
        (master, [buffer, unused], ahead)
    }
}
