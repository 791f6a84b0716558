//! First weights that a server makes by itself. A weight depends on the job's seed, its parameter's index and its element's
//! index in the parameter alone, those of the whole parameter where the job has it in parts: not on shards, servers, threads or instruction sets. docs/protocol.md has the arithmetic.

mod draw;
mod philox;
mod quantile;
#[cfg(test)]
mod tests;

use std::ops::Range;

use longshore_proto::{InitialWeights, Initialisation, Layout};

use self::draw::Draw;

/// A job's initialisation, ready to be drawn from.
#[derive(Debug)]
pub(crate) struct Made {
    initialisation: Initialisation,
    /// By run.
    draws: Vec<Draw>,
}

impl Made {
    /// `initialisation` was validated.
    pub(crate) fn new(initialisation: Initialisation) -> Made {
        let draws = initialisation.runs.iter().map(|run| Draw::of(run.weights)).collect();
        Made { initialisation, draws }
    }

    pub(crate) fn is(&self, initialisation: &Initialisation) -> bool {
        self.initialisation == *initialisation
    }

    /// Whether rank 0 uploads any of these elements of the flat space.
    pub(crate) fn is_uploaded(&self, layout: &Layout, flat: Range<u64>) -> bool {
        layout.params_in(flat).any(|param| self.initialisation.of(param) == InitialWeights::Uploaded)
    }

    /// The parameters that are made here and have elements in this part of the flat space, with these elements.
    pub(crate) fn made(
        &self,
        layout: &Layout,
        flat: Range<u64>,
    ) -> impl Iterator<Item = (usize, Range<u64>)> {
        let made = |param: &usize| self.initialisation.of(*param) != InitialWeights::Uploaded;
        layout.params_in(flat.clone()).filter(made).map(move |param| {
            let range = layout.param_range(param);
            (param, range.start.max(flat.start)..range.end.min(flat.end))
        })
    }

    /// Writes the weights that are made here to `values`, which begin at element `start` of the flat space. The others, and
    /// padding, are left as they are.
    pub(crate) fn write(&self, layout: &Layout, start: u64, values: &mut [f32]) {
        for (param, part) in self.made(layout, start..start + values.len() as u64) {
            let after = self.initialisation.runs.partition_point(|run| run.first as usize <= param);
            let at = part.start - layout.param_range(param).start;
            let target = &mut values[(part.start - start) as usize..(part.end - start) as usize];
            let drawn = self.initialisation.runs[after - 1].drawn(param as u32);
            self.draws[after - 1].write(self.initialisation.seed, drawn.param, drawn.element + at, target);
        }
    }
}
