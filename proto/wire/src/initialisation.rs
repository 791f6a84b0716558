//! What servers make first weights from, as a message and as the domain type.

use longshore_proto::{Drawn, Fault, InitialRun, InitialWeights, Initialisation};

use super::{
    Wire,
    v1::{self, initial_run::Weights},
};

impl Wire for Initialisation {
    type Message = v1::Initialisation;

    fn from_wire(message: Option<v1::Initialisation>) -> Result<Initialisation, Fault> {
        let absent = |field: String, limit| Fault::invalid(field, "absent", limit, "fill the field in");
        let message = message.ok_or_else(|| absent("initialisation".into(), "present"))?;
        let run = |(index, run): (usize, v1::InitialRun)| {
            let none = || absent(format!("initialisation.runs[{index}].weights"), "one of the choices");
            let weights = weights_from_wire(run.weights.ok_or_else(none)?);
            let drawn = Drawn { param: run.drawn_as.unwrap_or(run.first), element: run.drawn_from };
            Ok(InitialRun { first: run.first, drawn, weights })
        };
        let runs = message.runs.into_iter().enumerate().map(run).collect::<Result<_, Fault>>()?;
        Ok(Initialisation { seed: message.seed, runs })
    }

    fn to_wire(&self) -> v1::Initialisation {
        let run = |run: &InitialRun| v1::InitialRun {
            first: run.first,
            drawn_as: (run.drawn.param != run.first).then_some(run.drawn.param),
            drawn_from: run.drawn.element,
            weights: Some(weights_to_wire(run.weights)),
        };
        v1::Initialisation { seed: self.seed, runs: self.runs.iter().map(run).collect() }
    }
}

fn weights_from_wire(weights: Weights) -> InitialWeights {
    match weights {
        Weights::Uploaded(v1::Uploaded {}) => InitialWeights::Uploaded,
        Weights::Constant(value) => InitialWeights::Constant(value),
        Weights::Uniform(v1::Uniform { low, high }) => InitialWeights::Uniform { low, high },
        Weights::Normal(v1::Normal { mean, std }) => InitialWeights::Normal { mean, std },
        Weights::TruncatedNormal(v1::TruncatedNormal { mean, std, low, high }) => {
            InitialWeights::TruncatedNormal { mean, std, low, high }
        }
    }
}

fn weights_to_wire(weights: InitialWeights) -> Weights {
    match weights {
        InitialWeights::Uploaded => Weights::Uploaded(v1::Uploaded {}),
        InitialWeights::Constant(value) => Weights::Constant(value),
        InitialWeights::Uniform { low, high } => Weights::Uniform(v1::Uniform { low, high }),
        InitialWeights::Normal { mean, std } => Weights::Normal(v1::Normal { mean, std }),
        InitialWeights::TruncatedNormal { mean, std, low, high } => {
            Weights::TruncatedNormal(v1::TruncatedNormal { mean, std, low, high })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_comes_back_as_it_went() {
        let choices = [
            InitialWeights::Uploaded,
            InitialWeights::Constant(0.5),
            InitialWeights::Uniform { low: -1.0, high: 2.0 },
            InitialWeights::Normal { mean: 3.0, std: 4.0 },
            InitialWeights::TruncatedNormal { mean: 5.0, std: 6.0, low: 7.0, high: 8.0 },
        ];
        let sent = Initialisation::by_param(u64::MAX, choices);
        assert_eq!(Initialisation::from_wire(Some(sent.to_wire())).expect("whole"), sent);
        let parts = choices.map(|weights| (weights, Drawn { param: 7, element: 1 << 40 }));
        let sent = Initialisation::by_part(u64::MAX, parts);
        assert_eq!(Initialisation::from_wire(Some(sent.to_wire())).expect("whole"), sent);
    }

    #[test]
    fn what_is_absent_is_named() {
        let fault = Initialisation::from_wire(None).expect_err("absent");
        assert_eq!(fault.field, "initialisation");
        let runs = vec![v1::InitialRun::default()];
        let fault =
            Initialisation::from_wire(Some(v1::Initialisation { seed: 0, runs })).expect_err("absent");
        assert_eq!(fault.field, "initialisation.runs[0].weights");
    }
}
