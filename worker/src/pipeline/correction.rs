//! What makes up for a delay of one step.

use std::{fmt, str::FromStr};

use longshore_proto::{Fault, JobSpec};

/// How the images that delayed steps read differ from the master weights. docs/delay.md compares the kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum DelayCorrection {
    /// Images are ahead of the master weights by what the server knows of the next step. `hyper` is asked for that
    /// step's learning rate. It is for rules with momentum: AdamW, Adam, SGD.
    #[default]
    LookAhead,
    /// Does as `LookAhead` does, with this step's learning rate, for callers who do not know the next one.
    LookAheadByThisRate,
    /// A number c in (0, 1]: images are ahead by the last displacement, times c.
    Compensation(f64),
    /// Images are the master weights.
    None,
}

const LOOK_AHEAD: &str = "look-ahead";
const LOOK_AHEAD_BY_THIS_RATE: &str = "look-ahead-by-this-rate";
const COMPENSATION: &str = "compensation=";
const NONE: &str = "none";

impl DelayCorrection {
    pub(super) fn validate(self, spec: &JobSpec) -> Result<(), Fault> {
        match self {
            DelayCorrection::Compensation(c) if !(c > 0.0 && c <= 1.0) => {
                let remedy = "choose a number in it, or no correction";
                Err(Fault::invalid("pipeline.correction", c, "a compensation in (0, 1]", remedy))
            }
            DelayCorrection::LookAhead | DelayCorrection::LookAheadByThisRate
                if !spec.rule.can_look_ahead() =>
            {
                let limit = "a rule with momentum (adamw, adam, sgd) where delayed steps look ahead";
                let remedy =
                    "train exactly, or choose none or a compensation; docs/delay.md says what that costs";
                Err(Fault::invalid("spec.rule", spec.rule, limit, remedy))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for DelayCorrection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DelayCorrection::LookAhead => f.write_str(LOOK_AHEAD),
            DelayCorrection::LookAheadByThisRate => f.write_str(LOOK_AHEAD_BY_THIS_RATE),
            DelayCorrection::Compensation(c) => write!(f, "{COMPENSATION}{c}"),
            DelayCorrection::None => f.write_str(NONE),
        }
    }
}

impl FromStr for DelayCorrection {
    type Err = Fault;

    fn from_str(text: &str) -> Result<DelayCorrection, Fault> {
        let of = |c: &str| c.parse().ok().filter(|c| *c > 0.0 && *c <= 1.0);
        let found = match text {
            LOOK_AHEAD => Some(DelayCorrection::LookAhead),
            LOOK_AHEAD_BY_THIS_RATE => Some(DelayCorrection::LookAheadByThisRate),
            NONE => Some(DelayCorrection::None),
            _ => text.strip_prefix(COMPENSATION).and_then(of).map(DelayCorrection::Compensation),
        };
        found.ok_or_else(|| {
            let limit = "look-ahead, look-ahead-by-this-rate, none, or compensation=C with C in (0, 1]";
            Fault::invalid("correction", text, limit, "name one of them")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_can_be_read() {
        for correction in [
            DelayCorrection::LookAhead,
            DelayCorrection::LookAheadByThisRate,
            DelayCorrection::Compensation(0.5),
            DelayCorrection::None,
        ] {
            assert_eq!(correction.to_string().parse(), Ok(correction));
        }
        for wrong in
            ["", "compensation", "compensation=", "compensation=0", "compensation=1.5", "compensation=nan"]
        {
            assert!(wrong.parse::<DelayCorrection>().is_err(), "{wrong}");
        }
    }
}
