//! The cost of a flood to a job beside it, compared with the runs before and after without the flood.

use longshore_tests::{process::processor_time_of, train::Run};

/// Means over a run's steps, in milliseconds.
#[derive(Clone, Copy)]
pub(crate) struct Steps {
    mean: f64,
    pub(crate) longest: f64,
    /// The server's processor time, with the opening of the job.
    served: f64,
}

impl Steps {
    /// Measures a run by `train` on the server of this process. Mean and longest leave out the first five
    /// steps.
    pub(crate) fn of(server: u32, train: impl FnOnce() -> Run) -> (Run, Steps) {
        let before = processor_time_of(server);
        let run = train();
        let worked = (processor_time_of(server) - before).as_secs_f64() * 1e3;
        let times: Vec<f64> = run.said.steps().skip(5).map(|step| step.step_ms).collect();
        let steps = Steps {
            mean: times.iter().sum::<f64>() / times.len() as f64,
            longest: times.iter().copied().fold(0.0, f64::max),
            served: worked / run.said.steps().count() as f64,
        };
        (run, steps)
    }
}

/// A run beside a flood.
pub(crate) struct Flooded {
    pub(crate) steps: Steps,
    /// Number of strangers.
    pub(crate) came: usize,
    /// Their thread's share of a core.
    pub(crate) took: f64,
    /// Growth of the server's memory beyond the run before, in MiB.
    pub(crate) grown: f64,
}

/// Runs without a flood, and a flooded run between each two.
pub(crate) struct Rounds {
    without: Vec<Steps>,
    with: Vec<Flooded>,
}

impl Rounds {
    pub(crate) const TITLES: &str = "strangers | of a core | step without, ms | with, ms | of it | its server's work without, ms | \
                                     with, ms | longest, ms | MiB |";

    pub(crate) fn new(first: Steps) -> Rounds {
        Rounds { without: vec![first], with: Vec::new() }
    }

    pub(crate) fn add(&mut self, flooded: Flooded, after: Steps) {
        self.with.push(flooded);
        self.without.push(after);
    }

    /// Returns medians, as a row of the table.
    pub(crate) fn row(&self) -> String {
        // A shared host becomes faster and slower: the runs on both sides estimate best the same run without
        // a flood.
        let around =
            |of: fn(&Steps) -> f64| self.without.windows(2).map(move |two| (of(&two[0]) + of(&two[1])) / 2.0);
        let ratios =
            self.with.iter().zip(around(|steps| steps.mean)).map(|(with, without)| with.steps.mean / without);
        let with = |of: fn(&Flooded) -> f64| median(self.with.iter().map(of));
        format!(
            "{} | {:.2} | {:.1} | {:.1} | {:.2} | {:.2} | {:.2} | {:.0} | {:.0} |",
            with(|flooded| flooded.came as f64),
            with(|flooded| flooded.took),
            median(around(|steps| steps.mean)),
            with(|flooded| flooded.steps.mean),
            median(ratios),
            median(around(|steps| steps.served)),
            with(|flooded| flooded.steps.served),
            with(|flooded| flooded.steps.longest),
            with(|flooded| flooded.grown),
        )
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
