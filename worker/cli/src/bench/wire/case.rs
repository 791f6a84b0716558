//! A case of the bench, measured again and again, with its samples.

use super::{beside::Update, meter::Sample};
use crate::bench::median;

/// A case, the case that is its limit, and its samples.
pub(super) struct Case {
    pub(super) name: &'static str,
    /// Name of the case that is this case's limit.
    pub(super) limit: Option<&'static str>,
    sample: Box<dyn FnMut() -> anyhow::Result<Sample>>,
    samples: Vec<Sample>,
    /// Samples beside an update. Each was taken right before or after the sample at the same index in `samples`.
    during_update: Vec<Sample>,
}

impl Case {
    pub(super) fn new(
        name: &'static str,
        limit: Option<&'static str>,
        sample: impl FnMut() -> anyhow::Result<Sample> + 'static,
    ) -> Case {
        Case { name, limit, sample: Box::new(sample), samples: Vec::new(), during_update: Vec::new() }
    }

    pub(super) fn median(&self, value: impl Fn(&Sample) -> f64) -> f64 {
        median(&self.samples.iter().map(value).collect::<Vec<f64>>())
    }

    /// Takes a round's samples: one, or two in turn.
    pub(super) fn round(&mut self, round: usize, update: Option<&Update>) -> anyhow::Result<()> {
        // The first round warms up: it touches memory, and lets windows and socket buffers grow.
        let keep = round > 0;
        for with_update in [round.is_multiple_of(2), !round.is_multiple_of(2)] {
            let sample = match update {
                None if with_update => continue,
                Some(update) if with_update => {
                    update.on()?;
                    let sample = (self.sample)();
                    update.off()?;
                    sample?
                }
                _ => (self.sample)()?,
            };
            if keep {
                if with_update { &mut self.during_update } else { &mut self.samples }.push(sample);
            }
        }
        Ok(())
    }

    /// Returns the median rate beside an update, and the median of the rounds' ratios to the rate without.
    pub(super) fn beside(&self) -> Option<(f64, f64)> {
        let rates: Vec<f64> = self.during_update.iter().map(Sample::gb_per_s).collect();
        let ratios: Vec<f64> = rates.iter().zip(&self.samples).map(|(rate, s)| rate / s.gb_per_s()).collect();
        (!rates.is_empty()).then(|| (median(&rates), median(&ratios)))
    }
}
