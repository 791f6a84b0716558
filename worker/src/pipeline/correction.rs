//! What makes up for a delay of one step.

use std::{fmt, str::FromStr};

use longshore_proto::{Fault, JobSpec, limits::MAX_GAMMA};

/// How the images that delayed steps read differ from the master weights. docs/delay.md compares the kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum DelayCorrection {
    /// Images are ahead of the master weights by what the server knows of the next step. `hyper` is asked for that
    /// step's learning rate. It is for rules with momentum: AdamW, Adam, SGD.
    #[default]
    LookAhead,
    /// Does as `LookAhead` does, with this step's learning rate, for callers who do not know the next one.
    LookAheadByThisRate,
    /// Images are ahead by all of the next step but its gradient. The worker adds that part, times this gamma, as it reads
    /// the weights: it holds the gradient before the servers' answer comes. A step then begins only once the step before is
    /// decided. This is for jobs opened with [`JobSpec::worker_local`], which says what they must be.
    WorkerLocal(f64),
    /// A number c in (0, 1]: images are ahead by the last displacement, times c.
    Compensation(f64),
    /// Images are the master weights.
    None,
}

const LOOK_AHEAD: &str = "look-ahead";
const LOOK_AHEAD_BY_THIS_RATE: &str = "look-ahead-by-this-rate";
const WORKER_LOCAL: &str = "worker-local";
const COMPENSATION: &str = "compensation=";
const NONE: &str = "none";

impl DelayCorrection {
    /// The gamma of amended weights. It is 1 for any other correction: the first step with it may still have to amend what
    /// an earlier process left to amend.
    pub(super) fn gamma(self) -> f64 {
        if let DelayCorrection::WorkerLocal(gamma) = self { gamma } else { 1.0 }
    }

    pub(super) fn validate(self, spec: &JobSpec) -> Result<(), Fault> {
        match self {
            DelayCorrection::Compensation(c) if !(c > 0.0 && c <= 1.0) => {
                let remedy = "choose a number in it, or no correction";
                Err(Fault::invalid("pipeline.correction", c, "a compensation in (0, 1]", remedy))
            }
            DelayCorrection::WorkerLocal(gamma) if !(gamma > 0.0 && gamma <= MAX_GAMMA) => {
                let limit = format!("a gamma in (0, {MAX_GAMMA}]");
                Err(Fault::invalid("pipeline.correction", gamma, limit, "choose 1, or up to 1.5"))
            }
            DelayCorrection::WorkerLocal(_) if !spec.worker_local => {
                let remedy = "open the job with worker_local";
                Err(Fault::invalid(
                    "spec.worker_local",
                    false,
                    "true where the worker amends weights",
                    remedy,
                ))
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
            DelayCorrection::WorkerLocal(1.0) => f.write_str(WORKER_LOCAL),
            DelayCorrection::WorkerLocal(gamma) => write!(f, "{WORKER_LOCAL}={gamma}"),
            DelayCorrection::Compensation(c) => write!(f, "{COMPENSATION}{c}"),
            DelayCorrection::None => f.write_str(NONE),
        }
    }
}

impl FromStr for DelayCorrection {
    type Err = Fault;

    fn from_str(text: &str) -> Result<DelayCorrection, Fault> {
        let of = |c: &str, most: f64| c.parse().ok().filter(|c| *c > 0.0 && *c <= most);
        let gamma = text.strip_prefix(WORKER_LOCAL).and_then(|rest| rest.strip_prefix('='));
        let found = match text {
            LOOK_AHEAD => Some(DelayCorrection::LookAhead),
            LOOK_AHEAD_BY_THIS_RATE => Some(DelayCorrection::LookAheadByThisRate),
            NONE => Some(DelayCorrection::None),
            WORKER_LOCAL => Some(DelayCorrection::WorkerLocal(1.0)),
            _ => match (text.strip_prefix(COMPENSATION), gamma) {
                (Some(c), _) => of(c, 1.0).map(DelayCorrection::Compensation),
                (None, Some(gamma)) => of(gamma, MAX_GAMMA).map(DelayCorrection::WorkerLocal),
                (None, None) => None,
            },
        };
        found.ok_or_else(|| {
            let limit = format!(
                "look-ahead, look-ahead-by-this-rate, worker-local, worker-local=GAMMA with GAMMA in (0, {MAX_GAMMA}], \
                 none, or compensation=C with C in (0, 1]"
            );
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
            DelayCorrection::WorkerLocal(1.0),
            DelayCorrection::WorkerLocal(1.5),
            DelayCorrection::Compensation(0.5),
            DelayCorrection::None,
        ] {
            assert_eq!(correction.to_string().parse(), Ok(correction));
        }
        for wrong in [
            "",
            "compensation",
            "compensation=",
            "compensation=0",
            "compensation=1.5",
            "compensation=nan",
            "worker-local=",
            "worker-local=0",
            "worker-local=4.5",
            "worker-locally",
        ] {
            assert!(wrong.parse::<DelayCorrection>().is_err(), "{wrong}");
        }
    }
}
