//! The update rules. A rule is one file here and one row of the table below. [`longshore_proto::Rule`] has its name,
//! number and state arrays.
//!
//! **The files of rules are the specification.** Every operation of [`Number`] is one IEEE-754 f32 operation, rounded
//! to nearest, in the order written. Fused multiply-add is not used, and denormals are kept. The same text is compiled
//! for one element and for 16 lanes of each instruction set.

#![allow(unsafe_code, unsafe_op_in_unsafe_fn)] // The contract of every function here is that of `Number`.

mod adagrad;
mod adam;
mod lion;
mod nadam;
mod sgd;

use longshore_proto::{Hyper, Rule as Kind};

use super::{Code, scalar::convert::CANONICAL_NAN};
use crate::memory::float::standard;

/// The arithmetic of rules: one f32, or 16 lanes of an instruction set that do the same in every lane. A NaN may be any
/// NaN until the caller makes it the canonical one.
///
/// # Safety
/// For all methods: this CPU has the instruction set of the implementing type.
pub(super) trait Number: Copy {
    unsafe fn splat(x: f32) -> Self;
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    unsafe fn sqrt(self) -> Self;
    /// Gives -1, 0 or 1: +0 for both zeros, NaN for NaN.
    unsafe fn sign(self) -> Self;
}

/// State of as many elements as a number has. Slots at `Rule::SLOTS` and beyond are unused.
pub(super) type Slots<V> = [V; 2];

/// An update rule with the constants of one step. The conditions of [`Number`] hold for its methods too.
pub(super) trait Rule<V: Number>: Copy {
    const SLOTS: usize;
    /// Code of state slot 0, as [`Code::of`] gives it.
    const CODE: Code = Code::Signed;

    /// Returns true if the image looks ahead. The answer is constant over a loop, and the compiler moves its
    /// branches out of the loop.
    #[inline(always)]
    fn looks_ahead(self) -> bool {
        false
    }

    /// New master weight and state from the raw gradient, the old master weight and the old state.
    ///
    /// The last number is subtracted from the new master weight to make the image. Only a rule that [looks
    /// ahead](Rule::looks_ahead) uses it.
    unsafe fn step(self, gradient: V, master: V, state: Slots<V>) -> (V, Slots<V>, V);
}

/// A loop that runs with any rule.
pub(super) trait Loop<V: Number> {
    /// # Safety
    /// As [`Number`].
    unsafe fn run<R: Rule<V>>(self, rule: R);
}

/// A [`Loop`] over single elements, which need no instruction set.
pub(super) trait ScalarLoop {
    fn run<R: Rule<f32>>(self, rule: R);
}

struct Scalar<L>(L);

impl<L: ScalarLoop> Loop<f32> for Scalar<L> {
    unsafe fn run<R: Rule<f32>>(self, rule: R) {
        self.0.run(rule);
    }
}

/// The f32 constants of one step of one rule. All are computed in f64 once a step and rounded once, so that
/// every server has the same ones.
trait Constants: Copy {
    /// The constants of applied step `applied`, counted from 1.
    fn new(hyper: &Hyper, applied: u64, grad_multiplier: f32) -> Self;

    /// Makes images look ahead by a step of learning rate `next_lr`.
    fn look_ahead(&mut self, _hyper: &Hyper, _applied: u64, _next_lr: f64) {
        panic!("the rule cannot look ahead");
    }

    fn looks_ahead(&self) -> bool {
        false
    }

    /// Returns true if a step with these constants changes the state.
    fn writes_state(&self) -> bool {
        true
    }

    /// # Safety
    /// As [`Number`].
    unsafe fn run<V: Number>(&self, body: impl Loop<V>);
}

macro_rules! rules {
    ($($rule:ident: $constants:ty,)*) => {
        /// The f32 constants of one step of one param group, ready for the loop.
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub enum Scalars {
            $($rule($constants),)*
        }

        impl Scalars {
            /// The constants of applied step `applied`, counted from 1. Gradients are multiplied by `grad_multiplier`
            /// (loss scale, number of contributions and clipping, all in one) before anything else.
            ///
            /// # Panics
            /// If `applied` is 0.
            pub fn new(rule: Kind, hyper: &Hyper, applied: u64, grad_multiplier: f32) -> Scalars {
                assert!(applied >= 1, "applied steps are counted from 1");
                standard(|| match rule {
                    $(Kind::$rule => Scalars::$rule(Constants::new(hyper, applied, grad_multiplier)),)*
                })
            }

            /// Returns the constants of the same step, for images that look ahead by a step of learning rate `next_lr`.
            /// `hyper` and `applied` are the arguments of [`new`](Scalars::new).
            ///
            /// # Panics
            /// If the rule [cannot](Kind::can_look_ahead).
            pub fn looking_ahead(mut self, hyper: &Hyper, applied: u64, next_lr: f64) -> Scalars {
                standard(|| match &mut self {
                    $(Scalars::$rule(constants) => constants.look_ahead(hyper, applied, next_lr),)*
                });
                self
            }

            /// Returns true if images look ahead. All param groups of a step have the same answer.
            pub(super) fn looks_ahead(&self) -> bool {
                match self {
                    $(Scalars::$rule(constants) => constants.looks_ahead(),)*
                }
            }

            /// Returns true if a step with these constants changes the state. SGD without momentum leaves the
            /// state unchanged.
            pub(super) fn writes_state(&self) -> bool {
                match self {
                    $(Scalars::$rule(constants) => constants.writes_state(),)*
                }
            }

            pub fn rule(&self) -> Kind {
                match self {
                    $(Scalars::$rule(_) => Kind::$rule,)*
                }
            }

            /// Runs a loop with the rule of these constants.
            ///
            /// # Safety
            /// As [`Number`].
            #[inline(always)]
            pub(super) unsafe fn run<V: Number>(&self, body: impl Loop<V>) {
                match self {
                    $(Scalars::$rule(constants) => constants.run(body),)*
                }
            }

            /// Runs a loop over single elements.
            pub(super) fn run_scalar(&self, body: impl ScalarLoop) {
                // SAFETY: an f32 needs no instruction set.
                unsafe { self.run(Scalar(body)) }
            }
        }
    };
}

rules! {
    AdamW: adam::Adam<f32, true>,
    Adam: adam::Adam<f32, false>,
    Sgd: sgd::Sgd,
    Lion: lion::Lion,
    Adagrad: adagrad::Adagrad,
    NAdam: nadam::NAdam,
}

/// Makes one step of one element. See [`Rule::step`].
#[inline(always)]
pub(super) fn step_scalar<R: Rule<f32>>(
    rule: R,
    gradient: f32,
    master: f32,
    state: Slots<f32>,
) -> (f32, Slots<f32>, f32) {
    // SAFETY: an f32 needs no instruction set.
    unsafe { rule.step(gradient, master, state) }
}

impl Number for f32 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> f32 {
        x
    }

    #[inline(always)]
    unsafe fn add(self, other: f32) -> f32 {
        self + other
    }

    #[inline(always)]
    unsafe fn sub(self, other: f32) -> f32 {
        self - other
    }

    #[inline(always)]
    unsafe fn mul(self, other: f32) -> f32 {
        self * other
    }

    #[inline(always)]
    unsafe fn div(self, other: f32) -> f32 {
        self / other
    }

    #[inline(always)]
    unsafe fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }

    #[inline(always)]
    unsafe fn sign(self) -> f32 {
        if self > 0.0 {
            1.0
        } else if self < 0.0 {
            -1.0
        } else if self == 0.0 {
            0.0
        } else {
            CANONICAL_NAN
        }
    }
}

/// Look-ahead: the image is ahead of the new master weight by the known part of the next step. The fields are the factors
/// of that part. All of them contain the learning rate of [`Scalars::looking_ahead`].
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ahead<V> {
    /// Factor of Adam's first moment, or of SGD's momentum buffer.
    mean: V,
    /// The factor of the newest gradient, which stands for the next one.
    gradient: V,
    /// Factor of AdamW's new master weight, for decay.
    weight: V,
}

/// Weight of the newest gradient: once for itself, and once for the next gradient, which is missing. Chosen by
/// measurements of the default job, and by the largest learning rate that stays stable (docs/delay.md).
const NEWEST: f64 = 2.0;

impl Ahead<f32> {
    /// The factors of an image that does not look ahead, as with SGD without momentum.
    const NOTHING: Ahead<f32> = Ahead { mean: 0.0, gradient: 0.0, weight: 0.0 };

    #[inline(always)]
    unsafe fn splat<V: Number>(self) -> Ahead<V> {
        Ahead { mean: V::splat(self.mean), gradient: V::splat(self.gradient), weight: V::splat(self.weight) }
    }
}

impl<V: Number> Ahead<V> {
    #[inline(always)]
    unsafe fn known(self, mean: V, gradient: V) -> V {
        self.mean.mul(mean).add(self.gradient.mul(gradient))
    }
}

/// `base^exponent` by squaring. Multiplication rounds alike everywhere. `powf` and `powi` may differ in the last bit
/// between C libraries, and so would the weights of two servers. The relative error stays below `exponent * 2^-52`.
/// Where this error is large, `base^exponent` is negligible beside 1.
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

/// `e^x` for x up to 0, by a series, with the same bits everywhere.
fn exponential(x: f64) -> f64 {
    let (mut x, mut times) = (x.max(-1024.0), 1);
    while x < -1.0 {
        (x, times) = (x / 2.0, 2 * times);
    }
    let (mut sum, mut term) = (1.0, 1.0);
    for index in 1..20 {
        term *= x / f64::from(index);
        sum += term;
    }
    power(sum, times)
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
    fn the_table_and_the_domain_type_agree() {
        for rule in Kind::ALL {
            let scalars = Scalars::new(rule, &Hyper { momentum: 0.9, ..Hyper::default() }, 1, 1.0);
            assert_eq!(scalars.rule(), rule);
            scalars.run_scalar(Compare(rule));
            if rule.can_look_ahead() {
                assert!(scalars.looking_ahead(&Hyper::default(), 1, 1e-3).looks_ahead(), "{rule}");
            }
        }

        struct Compare(Kind);
        impl ScalarLoop for Compare {
            fn run<R: Rule<f32>>(self, _: R) {
                assert_eq!((R::SLOTS, R::CODE), (self.0.state_slots(), Code::of(self.0, 0)), "{}", self.0);
            }
        }
    }
}
