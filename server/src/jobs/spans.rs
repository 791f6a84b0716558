//! The spans of a job's updates, as children of the worker's span of the step.

use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

use longshore_engine::step::Work;
use longshore_proto::Step;
use longshore_wire::spans::Parent;
use tracing::{debug_span, span::EnteredSpan};

/// How many steps' spans are known: a delayed job updates one while the next is decided.
const KEPT: usize = 3;

/// Rank 0's spans of the newest steps.
#[derive(Default)]
pub(crate) struct Spans(Mutex<VecDeque<(Step, Parent)>>);

impl Spans {
    /// Notes the span that a step's commit came with.
    pub(crate) fn note(&self, step: Step, parent: Parent) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.push_back((step, parent));
        let surplus = known.len().saturating_sub(KEPT);
        known.drain(..surplus);
    }

    /// The span of work that begins with `next`, if it is an update.
    pub(super) fn of(&self, job: &str, next: Option<&Work>) -> Option<EnteredSpan> {
        let Some(Work::Update { step, .. }) = next else { return None };
        let span = debug_span!(target: "step", parent: None, "perform", job, step = step.0);
        if !span.is_disabled() {
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            known.iter().filter(|(of, _)| of == step).for_each(|(_, parent)| parent.adopt(&span));
        }
        Some(span.entered())
    }
}
