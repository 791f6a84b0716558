//! The first weights that servers make by themselves.

use crate::{
    fault::Fault,
    layout::Param,
    limits::{MAX_ELEMENTS, MAX_PARAMS},
};

/// The bounds of a truncated normal distribution lie no farther than this from its mean, on the side of it where all of the
/// weights would be. Beyond 37 standard deviations f64 has no number for what is left of the distribution.
const MAX_DEVIATIONS: f64 = 30.0;
/// No weight is farther from the mean of a normal distribution than so many standard deviations: one is drawn by a
/// number of 52 bits.
const FARTHEST_DEVIATIONS: f64 = 9.0;

/// What a job's first weights are made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Initialisation {
    pub seed: u64,
    /// Each ends where the next one begins. The first begins at parameter 0.
    pub runs: Vec<InitialRun>,
}

/// Consecutive parameters whose first weights are alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InitialRun {
    /// The index of its first parameter.
    pub first: u32,
    /// Where its first parameter's numbers are drawn. Those of the parameters behind it are the next parameters' from element 0 on.
    pub drawn: Drawn,
    pub weights: InitialWeights,
}

/// Which numbers of the seed are a parameter's: those of a parameter's elements, from one of them on. A parameter that is a part of
/// a larger one has the larger one's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawn {
    pub param: u32,
    pub element: u64,
}

impl InitialRun {
    /// Parameters that are whole, and have their own numbers.
    pub fn new(first: u32, weights: InitialWeights) -> InitialRun {
        InitialRun { first, drawn: Drawn { param: first, element: 0 }, weights }
    }

    /// Where the numbers of one of its parameters are drawn.
    pub fn drawn(&self, param: u32) -> Drawn {
        match param - self.first {
            0 => self.drawn,
            behind => Drawn { param: self.drawn.param + behind, element: 0 },
        }
    }
}

/// What the weights of a parameter are at first. The distributions are those of `torch.nn.init`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum InitialWeights {
    /// Rank 0 uploads them.
    Uploaded,
    Constant(f64),
    /// From `low` on, and below `high`.
    Uniform {
        low: f64,
        high: f64,
    },
    Normal {
        mean: f64,
        std: f64,
    },
    /// Normally distributed, given that they are from `low` to `high`.
    TruncatedNormal {
        mean: f64,
        std: f64,
        low: f64,
        high: f64,
    },
}

impl Initialisation {
    /// Puts parameters with the same weights into runs.
    pub fn by_param(seed: u64, params: impl IntoIterator<Item = InitialWeights>) -> Initialisation {
        let own = |(param, weights)| (weights, Drawn { param, element: 0 });
        Initialisation::by_part(seed, (0..).zip(params).map(own))
    }

    /// The same with parameters that may be parts of larger ones.
    pub fn by_part(seed: u64, params: impl IntoIterator<Item = (InitialWeights, Drawn)>) -> Initialisation {
        let mut runs: Vec<InitialRun> = Vec::new();
        for (first, (weights, drawn)) in (0..).zip(params) {
            if runs.last().is_none_or(|run| run.weights != weights || run.drawn(first) != drawn) {
                runs.push(InitialRun { first, drawn, weights });
            }
        }
        Initialisation { seed, runs }
    }

    /// Checks that the runs follow one another from the first parameter on, and every number against its limit.
    pub fn validate(&self, params: &[Param]) -> Result<(), Fault> {
        if self.runs.is_empty() {
            let remedy = "say of every parameter what its weights are; `uploaded` is one of the choices";
            return Err(Fault::invalid("initialisation.runs", "empty", "at least one", remedy));
        }
        let mut next = 0;
        for (index, run) in self.runs.iter().enumerate() {
            let first = run.first as usize;
            let right = if index == 0 { first == 0 } else { first >= next };
            let Some(param) = params.get(first).filter(|_| right) else {
                let limit = match index {
                    0 => "0".to_string(),
                    _ => format!("in {next}..{}, after the run before", params.len()),
                };
                let remedy = "list runs in the order of the job's parameters, and none beyond the last one";
                return Err(Fault::invalid(
                    format!("initialisation.runs[{index}].first"),
                    first,
                    limit,
                    remedy,
                ));
            };
            run.drawn.check(index)?;
            run.weights.check(index, param)?;
            next = first + 1;
        }
        Ok(())
    }

    /// What a parameter's weights are; `validate` must have passed.
    pub fn of(&self, param: usize) -> InitialWeights {
        let after = self.runs.partition_point(|run| run.first as usize <= param);
        after.checked_sub(1).map_or(InitialWeights::Uploaded, |index| self.runs[index].weights)
    }
}

impl Drawn {
    fn check(self, run: usize) -> Result<(), Fault> {
        let remedy = "name a parameter and an element that a model may have";
        let refused = |name: &str, value: u64, most: u64| {
            let field = format!("initialisation.runs[{run}].{name}");
            Err(Fault::invalid(field, value, format!("below {most}"), remedy))
        };
        if self.param as usize >= MAX_PARAMS {
            return refused("drawn_as", self.param.into(), MAX_PARAMS as u64);
        }
        if self.element >= MAX_ELEMENTS {
            return refused("drawn_from", self.element, MAX_ELEMENTS);
        }
        Ok(())
    }
}

impl InitialWeights {
    /// The smallest and the greatest weight. None where there is no fp32 number between the bounds.
    pub fn ends(self) -> Option<(f32, f32)> {
        let (low, high) = match self {
            InitialWeights::Uniform { low, high } => (at_least(low), below(high)),
            InitialWeights::TruncatedNormal { low, high, .. } => (at_least(low), at_most(high)),
            _ => (f32::MIN, f32::MAX),
        };
        (low <= high).then_some((low, high))
    }

    fn check(self, run: usize, param: &Param) -> Result<(), Fault> {
        let refused = |name: &str, value: f64, limit: String, remedy: &str| {
            let field = format!("initialisation.runs[{run}].{name}");
            Err(Fault::invalid(field, format!("{value} (of parameter {})", param.name), limit, remedy))
        };
        for (name, value) in self.numbers() {
            if !value.is_finite() || value.abs() > f64::from(f32::MAX) {
                let limit = format!("finite, and of a magnitude up to {:e}", f32::MAX);
                return refused(name, value, limit, "weights are fp32: give a number that fp32 has");
            }
        }
        if let InitialWeights::Normal { mean, std } | InitialWeights::TruncatedNormal { mean, std, .. } = self
        {
            let truncated = matches!(self, InitialWeights::TruncatedNormal { .. });
            if std < 0.0 || truncated && std == 0.0 {
                let limit = if truncated { "above 0" } else { "at least 0" };
                return refused(
                    "std",
                    std,
                    limit.to_string(),
                    "give the standard deviation; use `constant` where there is none",
                );
            }
            if !truncated && mean.abs() + FARTHEST_DEVIATIONS * std > f64::from(f32::MAX) {
                let limit = format!("small enough that fp32 has mean + {FARTHEST_DEVIATIONS} std");
                return refused("std", std, limit, "choose a smaller standard deviation");
            }
        }
        if let InitialWeights::Uniform { low, high } | InitialWeights::TruncatedNormal { low, high, .. } =
            self
            && (low >= high || self.ends().is_none())
        {
            let limit = format!("above low, {low}, with an fp32 number between them");
            return refused(
                "high",
                high,
                limit,
                "give the bounds in their order; use `constant` for a single value",
            );
        }
        match self {
            InitialWeights::TruncatedNormal { mean, std, low, .. } if (low - mean) / std > MAX_DEVIATIONS => {
                let limit = format!("at most mean + {MAX_DEVIATIONS} std, {}", mean + MAX_DEVIATIONS * std);
                refused("low", low, limit, "move the bounds towards the mean, or use `uniform`")
            }
            InitialWeights::TruncatedNormal { mean, std, high, .. }
                if (mean - high) / std > MAX_DEVIATIONS =>
            {
                let limit = format!("at least mean - {MAX_DEVIATIONS} std, {}", mean - MAX_DEVIATIONS * std);
                refused("high", high, limit, "move the bounds towards the mean, or use `uniform`")
            }
            _ => Ok(()),
        }
    }

    fn numbers(self) -> Vec<(&'static str, f64)> {
        match self {
            InitialWeights::Uploaded => Vec::new(),
            InitialWeights::Constant(value) => vec![("constant", value)],
            InitialWeights::Uniform { low, high } => vec![("low", low), ("high", high)],
            InitialWeights::Normal { mean, std } => vec![("mean", mean), ("std", std)],
            InitialWeights::TruncatedNormal { mean, std, low, high } => {
                vec![("mean", mean), ("std", std), ("low", low), ("high", high)]
            }
        }
    }
}

fn at_least(bound: f64) -> f32 {
    let near = bound as f32;
    if f64::from(near) < bound { near.next_up() } else { near }
}

fn at_most(bound: f64) -> f32 {
    let near = bound as f32;
    if f64::from(near) > bound { near.next_down() } else { near }
}

fn below(bound: f64) -> f32 {
    let near = bound as f32;
    if f64::from(near) >= bound { near.next_down() } else { near }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(count: usize) -> Vec<Param> {
        (0..count).map(|index| Param { name: format!("p{index}"), shape: vec![4], group: 0 }).collect()
    }

    fn only(weights: InitialWeights) -> Initialisation {
        Initialisation { seed: 0, runs: vec![InitialRun::new(0, weights)] }
    }

    #[test]
    fn runs_are_found_again_by_parameter() {
        let by_param =
            [InitialWeights::Constant(1.0), InitialWeights::Constant(1.0), InitialWeights::Uploaded];
        let initialisation = Initialisation::by_param(7, by_param);
        assert_eq!(initialisation.runs.iter().map(|run| run.first).collect::<Vec<_>>(), [0, 2]);
        assert_eq!([0, 1, 2].map(|param| initialisation.of(param)), by_param);
        initialisation.validate(&params(3)).expect("right");
    }

    #[test]
    fn wrong_runs_and_numbers_are_refused_by_field_value_and_limit() {
        use InitialWeights::{Constant, Normal, TruncatedNormal, Uniform};
        let far = |low, high| TruncatedNormal { mean: 0.0, std: 1.0, low, high };
        let cases = [
            (Constant(f64::NAN), "constant", "NaN (of parameter p0)", "finite"),
            (Constant(1e39), "constant", "p0", "magnitude"),
            (Normal { mean: 0.0, std: -1.0 }, "std", "-1 (of parameter p0)", "at least 0"),
            (Normal { mean: 0.0, std: 1e38 }, "std", "p0", "mean + 9 std"),
            (Uniform { low: 1.0, high: 1.0 }, "high", "1 (of parameter p0)", "above low, 1"),
            (Uniform { low: 1.00000001, high: 1.00000002 }, "high", "p0", "fp32 number between"),
            (Uniform { low: f64::NEG_INFINITY, high: 1.0 }, "low", "-inf", "finite"),
            (TruncatedNormal { mean: 0.0, std: 0.0, low: -1.0, high: 1.0 }, "std", "0 (of", "above 0"),
            (far(1.0, -1.0), "high", "-1 (of", "above low, 1"),
            (far(31.0, 32.0), "low", "31 (of", "at most mean + 30 std, 30"),
            (far(-32.0, -31.0), "high", "-31 (of", "at least mean - 30 std, -30"),
        ];
        for (weights, field, value, limit) in cases {
            let fault = only(weights).validate(&params(1)).expect_err("wrong");
            assert_eq!(fault.field, format!("initialisation.runs[0].{field}"), "{fault}");
            assert!(fault.value.contains(value) && fault.limit.contains(limit), "{fault}");
        }
        for (runs, field) in [
            (vec![], "initialisation.runs"),
            (vec![1], "initialisation.runs[0].first"),
            (vec![0, 0], "initialisation.runs[1].first"),
            (vec![0, 3], "initialisation.runs[1].first"),
        ] {
            let runs = runs.into_iter().map(|first| InitialRun::new(first, Constant(0.0))).collect();
            let fault = Initialisation { seed: 0, runs }.validate(&params(3)).expect_err("wrong runs");
            assert_eq!(fault.field, field, "{fault}");
        }
    }

    #[test]
    fn parts_are_found_again_by_parameter() {
        let ones = InitialWeights::Constant(1.0);
        let drawn = |param, element| Drawn { param, element };
        // Parameter 1 of four is in three parts.
        let parts = [drawn(0, 0), drawn(1, 0), drawn(1, 5), drawn(1, 9), drawn(2, 0), drawn(3, 0)];
        let initialisation = Initialisation::by_part(7, parts.map(|drawn| (ones, drawn)));
        let firsts: Vec<u32> = initialisation.runs.iter().map(|run| run.first).collect();
        assert_eq!(firsts, [0, 2, 3]);
        let runs = [0, 0, 1, 2, 2, 2].into_iter().zip(0..);
        let found: Vec<Drawn> = runs.map(|(run, param)| initialisation.runs[run].drawn(param)).collect();
        assert_eq!(found, parts);
        initialisation.validate(&params(6)).expect("right");
        for (beyond, field) in [(drawn(1 << 20, 0), "drawn_as"), (drawn(0, 1 << 44), "drawn_from")] {
            let fault = Initialisation::by_part(7, [(ones, beyond)]).validate(&params(1)).expect_err("wrong");
            assert_eq!(fault.field, format!("initialisation.runs[0].{field}"), "{fault}");
        }
    }

    #[test]
    fn the_ends_are_fp32_numbers_within_the_bounds() {
        let tenth = InitialWeights::Uniform { low: -0.1, high: 0.1 };
        let (low, high) = tenth.ends().expect("there are some");
        assert!(f64::from(low) >= -0.1 && f64::from(high) < 0.1, "{low} {high}");
        assert_eq!(InitialWeights::Uniform { low: 0.0, high: 1.0 }.ends(), Some((0.0, 1.0f32.next_down())));
        let truncated = InitialWeights::TruncatedNormal { mean: 0.0, std: 1.0, low: -2.0, high: 2.0 };
        assert_eq!(truncated.ends(), Some((-2.0, 2.0)));
    }
}
