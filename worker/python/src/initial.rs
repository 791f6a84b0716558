//! What servers make first weights from, as Python hands it over.

use longshore_proto::{Drawn, Fault, InitialWeights, Initialisation, StateArray};
use longshore_worker::{Filling, Result};

use crate::filling::Weights;

/// The seed, and for each parameter the name of a distribution with its numbers, and of which parameter it has the drawn ones, from
/// which element on.
pub(crate) type Given = (u64, Vec<(String, Vec<f64>, u32, u64)>);

/// Weights that servers make, and those of the other parameters, one tensor each.
pub(crate) struct Made {
    initialisation: Initialisation,
    rest: Weights,
}

impl Made {
    pub(crate) fn new((seed, by_param): Given, rest: Weights) -> Result<Made> {
        let part = |(kind, numbers, param, element): (String, Vec<f64>, u32, u64)| {
            Ok((weights(&kind, &numbers)?, Drawn { param, element }))
        };
        let parts = by_param.into_iter().map(part).collect::<Result<Vec<_>, Fault>>()?;
        Ok(Made { initialisation: Initialisation::by_part(seed, parts), rest })
    }
}

impl Filling for Made {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn initialisation(&self) -> Option<&Initialisation> {
        Some(&self.initialisation)
    }

    fn write(&self, array: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()> {
        self.rest.write(array, param, at, target)
    }
}

fn weights(kind: &str, numbers: &[f64]) -> Result<InitialWeights, Fault> {
    Ok(match (kind, numbers) {
        ("uploaded", &[]) => InitialWeights::Uploaded,
        ("constant", &[value]) => InitialWeights::Constant(value),
        ("uniform", &[low, high]) => InitialWeights::Uniform { low, high },
        ("normal", &[mean, std]) => InitialWeights::Normal { mean, std },
        ("trunc_normal", &[mean, std, low, high]) => InitialWeights::TruncatedNormal { mean, std, low, high },
        _ => {
            let value = format!("{kind} of {} numbers", numbers.len());
            let limit = "what a function of longshore.init returns";
            return Err(Fault::invalid("initial", value, limit, "call normal, uniform, constant and so on"));
        }
    })
}
