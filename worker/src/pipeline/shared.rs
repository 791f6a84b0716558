//! What trainer, driver and watcher of a pipeline share.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use longshore_proto::Step;

use super::{board::Board, outcome::Outcomes};

pub(super) struct PipelineInner {
    pub(super) board: Board,
    /// The versions that rank 0 decided and that are not paused any more, with the loss scale to go on with. The
    /// watcher posts them, and the driver waits for one after a decision at the smallest loss scale.
    pub(super) resumed: Board,
    pub(super) outcomes: Outcomes,
    pub(super) amends: Amends,
}

/// What the gradients of the last decided steps are multiplied by to amend weights. It is noted before a version is
/// posted on the board.
#[derive(Default)]
pub(super) struct Amends(Mutex<BTreeMap<Step, f32>>);

impl Amends {
    /// How many steps are kept: the last decided one, and one for a trainer that is a step behind.
    const KEPT: usize = 2;

    pub(super) fn note(&self, step: Step, multiplier: Option<f32>) {
        let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(multiplier) = multiplier {
            steps.insert(step, multiplier);
        }
        while steps.len() > Amends::KEPT {
            steps.pop_first();
        }
    }

    /// None for a step that amends nothing.
    pub(super) fn of(&self, step: Step) -> Option<f32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&step).copied()
    }
}
