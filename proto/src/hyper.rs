//! Update rules and the hyperparameters of a param group.

use crate::{fault::Fault, named::named};

macro_rules! rules {
    ($($rule:ident = $number:literal, $name:literal, $arrays:expr, $look_ahead:expr;)*) => {
        /// An update rule. Its arithmetic is in a file of the engine's `kernels/rules`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(rename_all = "lowercase")]
        pub enum Rule {
            $($rule = $number,)*
        }

        named!(Rule, "rule"; $($rule = $name),*);

        impl Rule {
            /// Returns the number in messages: `Rule` of common.proto.
            pub fn number(self) -> i32 {
                self as i32
            }

            pub fn moments(self) -> &'static [Moment] {
                match self {
                    $(Rule::$rule => &$arrays,)*
                }
            }

            /// Returns whether images can look ahead of the master weights by the known part of the next step. See
            /// [`Correction`](crate::Correction).
            pub fn can_look_ahead(self) -> bool {
                match self {
                    $(Rule::$rule => $look_ahead,)*
                }
            }
        }
    };
}

// Look-ahead needs momentum, which Adagrad lacks. Lion's steps all have one size, so its state does not show which
// element is about to change sign. NAdam's update already contains the next step's momentum.
rules! {
    AdamW = 1, "adamw", [Moment::Signed, Moment::Squares], true;
    Adam = 2, "adam", [Moment::Signed, Moment::Squares], true;
    Sgd = 3, "sgd", [Moment::Signed], true;
    Lion = 4, "lion", [Moment::Signed], false;
    Adagrad = 5, "adagrad", [Moment::Squares], false;
    NAdam = 6, "nadam", [Moment::Signed, Moment::Squares], false;
}

/// Content of a state array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    Signed,
    /// Sums of squares, never below 0.
    Squares,
}

impl Rule {
    /// Returns the number of fp32 state arrays beside the master weights.
    pub fn state_slots(self) -> usize {
        self.moments().len()
    }

    pub fn from_number(number: i32) -> Option<Rule> {
        Rule::ALL.into_iter().find(|rule| rule.number() == number)
    }
}

/// Hyperparameters of one param group for one step, with PyTorch's meanings.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Hyper {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub momentum: f64,
    pub dampening: f64,
    pub nesterov: bool,
    pub lr_decay: f64,
    pub momentum_decay: f64,
}

impl Default for Hyper {
    /// The defaults of torch.optim.AdamW and NAdam, without momentum or learning rate decay.
    fn default() -> Self {
        Hyper {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            lr_decay: 0.0,
            momentum_decay: 4e-3,
        }
    }
}

impl Hyper {
    /// Refuses NaN, infinities and values outside the rule's domain. The error's field contains the index `group`.
    pub fn validate(&self, group: usize) -> Result<(), Fault> {
        let check = |name: &str, value: f64, ok: bool, limit: &str| {
            if ok && value.is_finite() {
                return Ok(());
            }
            let field = format!("commit.groups[{group}].{name}");
            Err(Fault::invalid(field, value, limit, "correct the hyperparameter and commit again"))
        };
        check("lr", self.lr, self.lr >= 0.0, "finite and at least 0")?;
        check("beta1", self.beta1, (0.0..1.0).contains(&self.beta1), "in [0, 1)")?;
        check("beta2", self.beta2, (0.0..1.0).contains(&self.beta2), "in [0, 1)")?;
        check("eps", self.eps, self.eps >= 0.0, "finite and at least 0")?;
        check("weight_decay", self.weight_decay, self.weight_decay >= 0.0, "finite and at least 0")?;
        check("momentum", self.momentum, self.momentum >= 0.0, "finite and at least 0")?;
        check("dampening", self.dampening, true, "finite")?;
        check("lr_decay", self.lr_decay, self.lr_decay >= 0.0, "finite and at least 0")?;
        check("momentum_decay", self.momentum_decay, self.momentum_decay >= 0.0, "finite and at least 0")
    }
}
