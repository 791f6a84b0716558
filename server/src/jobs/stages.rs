//! Time of a job's steps by stage, as this server sees it.

use std::{
    mem,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use longshore_proto::{Step, Version};

use crate::lock::lock;

/// Stages of a step in their order. In a delayed job stages of different steps overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepStage {
    /// First to last chunk of gradients, including workers' backward passes.
    Receive,
    /// Last chunk to decision: the last sums, statistics to rank 0, and its commit.
    Decide,
    /// Decision to last update.
    Update,
    /// First to last slice of the version's weights, over all ranks.
    Pull,
}

impl StepStage {
    pub(crate) const ALL: [StepStage; 4] =
        [StepStage::Receive, StepStage::Decide, StepStage::Update, StepStage::Pull];

    pub(crate) fn name(self) -> &'static str {
        match self {
            StepStage::Receive => "receive",
            StepStage::Decide => "decide",
            StepStage::Update => "update",
            StepStage::Pull => "pull",
        }
    }
}

/// Number of steps tracked at once. A delayed job receives step t, decides step t - 1, and sends the weights of version
/// t - 2.
const WATCHED: usize = 4;

/// Total time of each stage since the job was opened here. Each chunk or slice, mostly 1 MiB, pays one clock read and
/// an almost uncontended lock. Callers read the clock before they lock, so times may arrive out of order; no interval
/// counts twice.
#[derive(Default)]
pub(crate) struct Stages {
    steps: Mutex<[Marks; WATCHED]>,
    nanos: [AtomicU64; StepStage::ALL.len()],
}

/// Start and progress of a step's stages.
#[derive(Clone, Copy, Default)]
struct Marks {
    step: u64,
    /// Arrival of the first and of the latest chunk.
    received: Option<(Instant, Instant)>,
    decided: bool,
    updated: Option<Instant>,
    pulled: Option<Instant>,
}

impl Stages {
    /// Records that a chunk of the step's gradients is stored.
    pub(crate) fn stored(&self, step: Step, now: Instant) {
        self.mark(step.0, |marks| {
            if marks.decided {
                // The step was taken back, and is repeated.
                *marks = Marks { step: step.0, ..Marks::default() };
            }
            let (first, last) = marks.received.unwrap_or((now, now));
            marks.received = Some((first, last.max(now)));
        });
    }

    pub(crate) fn decided(&self, step: Step, now: Instant) {
        self.mark(step.0, |marks| {
            if let Some((first, last)) = marks.received {
                self.add(StepStage::Receive, last - first);
                self.add(StepStage::Decide, now - last);
            }
            (marks.decided, marks.updated) = (true, Some(now));
        });
    }

    pub(crate) fn updated(&self, step: Step, now: Instant) {
        self.mark(step.0, |marks| self.go_on(StepStage::Update, &mut marks.updated, now));
    }

    /// Records that a slice of the version's weights is sent.
    pub(crate) fn pulled(&self, version: Version, now: Instant) {
        self.mark(version.0, |marks| match marks.pulled.is_some() {
            true => self.go_on(StepStage::Pull, &mut marks.pulled, now),
            false if marks.decided => marks.pulled = Some(now),
            // The step was decided before this process started, or the version is the initial weights.
            false => {}
        });
    }

    /// Forgets all tracked steps when a process joins. The joining process pulls weights for its own start, outside any
    /// stage.
    pub(crate) fn joined(&self) {
        lock(&self.steps).iter_mut().for_each(|marks| *marks = Marks::default());
    }

    pub(crate) fn seconds(&self, stage: StepStage) -> f64 {
        Duration::from_nanos(self.nanos[stage as usize].load(Relaxed)).as_secs_f64()
    }

    /// Applies `note` to a step's marks. A newer step takes over the entry of an older one.
    fn mark(&self, step: u64, note: impl FnOnce(&mut Marks)) {
        let marks = &mut lock(&self.steps)[step as usize % WATCHED];
        if marks.step < step {
            *marks = Marks { step, ..Marks::default() };
        }
        if marks.step == step {
            note(marks);
        }
    }

    /// Adds the time since the stage's last event, if the stage has begun.
    fn go_on(&self, stage: StepStage, last: &mut Option<Instant>, now: Instant) {
        if let Some(last) = last {
            self.add(stage, now - mem::replace(last, now.max(*last)));
        }
    }

    fn add(&self, stage: StepStage, time: Duration) {
        self.nanos[stage as usize].fetch_add(time.as_nanos() as u64, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Runs a step whose stages take 1, 2, 3 and 4 seconds. Returns the time counted for each.
    fn step(stages: &Stages, step: u64, begins: Instant) -> [f64; 4] {
        let before = StepStage::ALL.map(|stage| stages.seconds(stage));
        stages.stored(Step(step), begins);
        stages.stored(Step(step), begins + SECOND);
        stages.decided(Step(step), begins + 3 * SECOND);
        stages.updated(Step(step), begins + 4 * SECOND);
        stages.pulled(Version(step), begins + 5 * SECOND);
        stages.updated(Step(step), begins + 6 * SECOND);
        stages.pulled(Version(step), begins + 9 * SECOND);
        let after = StepStage::ALL.map(|stage| stages.seconds(stage));
        std::array::from_fn(|stage| after[stage] - before[stage])
    }

    #[test]
    fn each_stage_has_its_time_also_where_steps_overlap() {
        let (stages, now) = (Stages::default(), Instant::now());
        (1..=9).for_each(|number| assert_eq!(step(&stages, number, now), [1.0, 2.0, 3.0, 4.0], "{number}"));
        stages.stored(Step(10), now);
        stages.stored(Step(11), now + SECOND);
        stages.decided(Step(10), now + 2 * SECOND);
        stages.stored(Step(11), now + 3 * SECOND);
        stages.decided(Step(11), now + 3 * SECOND);
        assert_eq!((stages.seconds(StepStage::Receive), stages.seconds(StepStage::Decide)), (11.0, 20.0));
    }

    #[test]
    fn a_step_that_is_made_again_is_measured_again() {
        let (stages, now) = (Stages::default(), Instant::now());
        step(&stages, 1, now);
        assert_eq!(step(&stages, 1, now + 100 * SECOND), [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn what_no_step_here_explains_is_not_counted() {
        let (stages, now) = (Stages::default(), Instant::now());
        let pull = |version, at| stages.pulled(Version(version), at);
        // Pulls of versions that were decided before this process began.
        [0, 7].into_iter().for_each(|version| {
            pull(version, now);
            pull(version, now + SECOND);
        });
        // A step without contributions, as after a restart of this server, and a late repeat of an older step.
        stages.decided(Step(8), now);
        stages.stored(Step(4), now);
        assert_eq!(StepStage::ALL.map(|stage| stages.seconds(stage)), [0.0; 4]);
        // A new process pulls weights long after their step.
        step(&stages, 9, now);
        stages.joined();
        pull(9, now + 1000 * SECOND);
        pull(9, now + 1001 * SECOND);
        assert_eq!(stages.seconds(StepStage::Pull), 4.0);
    }

    #[test]
    fn clocks_that_are_read_in_another_order_count_nothing_twice() {
        let (stages, now) = (Stages::default(), Instant::now() + 10 * SECOND);
        stages.stored(Step(1), now);
        stages.stored(Step(1), now - SECOND);
        stages.decided(Step(1), now);
        [2, 1, 3].into_iter().for_each(|second| stages.updated(Step(1), now + second * SECOND));
        assert_eq!(StepStage::ALL.map(|stage| stages.seconds(stage)), [0.0, 0.0, 3.0, 0.0]);
    }
}
