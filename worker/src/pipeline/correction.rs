//! The correction of a delay of one step.

use std::{fmt, str::FromStr};

use longshore_proto::{Fault, JobSpec};

/// The difference between the images that delayed steps read and the master weights. docs/delay.md has the
/// measurements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DelayCorrection {
    /// Images are ahead of the master weights by the known part of the next step, for rules with momentum: AdamW,
    /// Adam, SGD.
    #[default]
    LookAhead,
    /// Images equal the master weights.
    None,
}

const LOOK_AHEAD: &str = "look-ahead";
const NONE: &str = "none";

impl DelayCorrection {
    pub(super) fn validate(self, spec: &JobSpec) -> Result<(), Fault> {
        if self == DelayCorrection::LookAhead && !spec.rule.can_look_ahead() {
            let limit = "a rule with momentum (adamw, adam, sgd) where delayed steps look ahead";
            let remedy = "train exactly, or turn the correction off (none); docs/delay.md says the cost";
            return Err(Fault::invalid("spec.rule", spec.rule, limit, remedy));
        }
        Ok(())
    }
}

impl fmt::Display for DelayCorrection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DelayCorrection::LookAhead => LOOK_AHEAD,
            DelayCorrection::None => NONE,
        })
    }
}

impl FromStr for DelayCorrection {
    type Err = Fault;

    fn from_str(text: &str) -> Result<DelayCorrection, Fault> {
        let retired = ["look-ahead-by-this-rate", "worker-local", "compensation"];
        match text {
            LOOK_AHEAD => Ok(DelayCorrection::LookAhead),
            NONE => Ok(DelayCorrection::None),
            _ => {
                let remedy = match retired.iter().any(|retired| text.starts_with(retired)) {
                    true => "choose look-ahead, which does its work now",
                    false => "name one of them",
                };
                Err(Fault::invalid("correction", text, "look-ahead or none", remedy))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correction_is_read_back_and_a_retired_one_names_look_ahead() {
        for correction in [DelayCorrection::LookAhead, DelayCorrection::None] {
            assert_eq!(correction.to_string().parse(), Ok(correction));
        }
        for retired in ["worker-local", "worker-local=1.5", "compensation=0.5", "look-ahead-by-this-rate"] {
            let fault = retired.parse::<DelayCorrection>().unwrap_err();
            assert!(fault.value == retired && fault.remedy.contains("look-ahead"), "{fault}");
        }
    }
}
