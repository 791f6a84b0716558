//! The gradients that this worker amends weights with, and how.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use longshore_proto::{Amendment, Commit, Fault, FaultKind, JobSpec, ServerId, Step, Version, fault::READS};

use super::board::Board;
use crate::{
    error::{Misuse, Result},
    pull::{Missing, Steps},
    session::Session,
};

/// How the gradients of the last decided steps amend weights. A step's way is noted before its version is posted on the
/// board.
#[derive(Default)]
pub(super) struct Amends(Mutex<BTreeMap<Step, Option<Amendment>>>);

impl Amends {
    /// How many steps are kept: the last decided one, and one for a trainer that is a step behind.
    const KEPT: usize = 2;

    pub(super) fn note(&self, commit: &Commit, spec: &JobSpec) {
        // Where workers amend weights, each shard has one contributor.
        let share = 1.0 / f64::from(spec.world_size);
        let mut steps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        steps.insert(commit.step, commit.amendment(share));
        while steps.len() > Amends::KEPT {
            steps.pop_first();
        }
    }

    /// The way of a step. The outer None says that its commit was not heard of, the inner one that it amends nothing.
    pub(super) fn of(&self, step: Step) -> Option<Option<Amendment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&step).cloned()
    }
}

/// How the step before `step` amends the weights of `reads`, if the worker does that, once that step is decided. A process
/// that joined after it reads weights that a server has amended.
pub(super) fn amendment(
    session: &Session,
    (board, amends): (&Board, &Amends),
    joined: Step,
    (step, reads): (Step, Version),
) -> Result<Option<Amendment>> {
    let (before, spec, cluster) = (Step(step.0 - 1), session.spec(), &*session.cluster);
    if !spec.worker_local || reads.0 + 1 != before.0 || before <= joined {
        return Ok(None);
    }
    cluster.runtime.block_on(board.wait(cluster, before.version()))?;
    amends.of(before).ok_or_else(|| {
        let limit = "a step whose commit this rank has heard of";
        let remedy = "join again: a server has the amended weights";
        let fault = Fault::new(FaultKind::Conflict, READS, before, limit, remedy);
        cluster.explain(ServerId(0), "Watch", Some(before), fault)
    })
}

/// The step that the weights of `reads` lack, if the worker adds it. See [`amendment`].
pub(super) fn missing(
    session: &Session,
    ways: (&Board, &Amends),
    joined: Step,
    (step, reads): (Step, Version),
) -> Result<Option<Missing>> {
    let (before, spec) = (Step(step.0 - 1), session.spec());
    let Some(amendment) = amendment(session, ways, joined, (step, reads))? else { return Ok(None) };
    let steps = Arc::new(Steps::new(&amendment, session.layout(), spec.params.len()));
    let missing = session.gradients.own.missing(before, spec.gradient_dtype, steps);
    let lost = Misuse("the gradient of the step before is not held: finish each step before the next begin");
    missing.map(Some).ok_or_else(|| lost.into())
}
