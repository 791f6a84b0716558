//! The gradients of the last steps as this worker sent them. They are kept where the worker amends weights with them.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use longshore_proto::{Amendment, Dtype, Layout, Step};

/// One step's gradient, by flat element of its pieces' starts.
type Pieces = BTreeMap<u64, Bytes>;

/// The gradients of the step in hand and of the one before. Clones of a payload share its memory, so keeping one costs
/// nothing but that its memory is free later.
#[derive(Default)]
pub(crate) struct OwnGradients(Mutex<BTreeMap<Step, Arc<Pieces>>>);

/// A whole gradient of this worker, and how it amends weights.
#[derive(Clone)]
pub(crate) struct Missing {
    pieces: Arc<Pieces>,
    pub(crate) dtype: Dtype,
    pub(crate) steps: Arc<Steps>,
}

/// What a gradient is multiplied by, beside the rates, and the most that it moves an element.
pub(crate) struct Steps {
    multiplier: f32,
    /// The limits of runs of parameters, each with its first flat element, in ascending order. The first begins at 0.
    limits: Vec<(u64, f32)>,
}

impl Steps {
    pub(crate) fn new(amendment: &Amendment, layout: &Layout, params: usize) -> Steps {
        let of_param = |param| {
            let limit = amendment.limits[layout.param_group(param) as usize];
            (layout.param_range(param).start, limit)
        };
        let mut limits: Vec<(u64, f32)> = (0..params).map(of_param).collect();
        limits.dedup_by(|(_, next), (_, limit)| next == limit);
        Steps { multiplier: amendment.multiplier, limits }
    }

    /// Hands the parts of a flat range that have one limit to `visit`: the part, multiplier and limit.
    pub(crate) fn parts(&self, range: Range<u64>, mut visit: impl FnMut(Range<u64>, (f32, f32))) {
        let first = self.limits.partition_point(|(start, _)| *start <= range.start).saturating_sub(1);
        let mut at = range.start;
        for (run, (_, limit)) in self.limits.iter().enumerate().skip(first) {
            let end = self.limits.get(run + 1).map_or(range.end, |(next, _)| range.end.min(*next));
            if at < end {
                visit(at..end, (self.multiplier, *limit));
                at = end;
            }
        }
    }
}

impl OwnGradients {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Step, Arc<Pieces>>> {
        // Every change is one call on a map.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a piece that begins at a flat element.
    pub(crate) fn keep(&self, step: Step, start: u64, bytes: Bytes) {
        let mut steps = self.lock();
        Arc::make_mut(steps.entry(step).or_default()).insert(start, bytes);
    }

    /// Forgets the gradients of the steps before this one.
    pub(crate) fn forget_before(&self, step: Step) {
        let mut steps = self.lock();
        let kept = steps.split_off(&step);
        let gone = std::mem::replace(&mut *steps, kept);
        drop(steps);
        drop(gone); // buffers go back to their pool outside the lock
    }

    /// The gradient of a step that was pushed to its end.
    pub(crate) fn missing(&self, step: Step, dtype: Dtype, steps: Arc<Steps>) -> Option<Missing> {
        let pieces = self.lock().get(&step)?.clone();
        Some(Missing { pieces, dtype, steps })
    }
}

impl Missing {
    /// Hands the pieces of a flat range to `visit`, each with its own range. Returns false if some of it is not there.
    pub(crate) fn pieces(&self, range: Range<u64>, mut visit: impl FnMut(Range<u64>, &[u8])) -> bool {
        let size = self.dtype.bytes();
        let mut at = range.start;
        while at < range.end {
            let Some((&start, bytes)) = self.pieces.range(..=at).next_back() else { return false };
            let end = range.end.min(start + bytes.len() as u64 / size);
            if end <= at {
                return false;
            }
            visit(at..end, &bytes[((at - start) * size) as usize..((end - start) * size) as usize]);
            at = end;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(limits: &[(u64, f32)]) -> Arc<Steps> {
        Arc::new(Steps { multiplier: 2.0, limits: limits.to_vec() })
    }

    #[test]
    fn parts_of_a_range_have_one_limit() {
        let steps = steps(&[(0, 0.1), (64, 0.2), (192, 0.3)]);
        let seen = |range: Range<u64>| {
            let mut seen = Vec::new();
            steps.parts(range, |part, (_, limit)| seen.push((part, limit)));
            seen
        };
        assert_eq!(seen(10..20), [(10..20, 0.1)]);
        assert_eq!(seen(60..300), [(60..64, 0.1), (64..192, 0.2), (192..300, 0.3)]);
        assert_eq!(seen(64..192), [(64..192, 0.2)]);
        assert_eq!(seen(250..300), [(250..300, 0.3)]);
    }

    #[test]
    fn pieces_cover_a_range_or_say_that_they_do_not() {
        let own = OwnGradients::default();
        for (step, start) in [(3, 0u64), (4, 0), (4, 10), (4, 30)] {
            own.keep(Step(step), start, Bytes::from(vec![start as u8; 20]));
        }
        own.forget_before(Step(4));
        assert!(own.missing(Step(3), Dtype::Bf16, steps(&[(0, 1.0)])).is_none());
        let missing = own.missing(Step(4), Dtype::Bf16, steps(&[(0, 1.0)])).unwrap();
        let seen = |range: Range<u64>| {
            let mut seen = Vec::new();
            let whole = missing.pieces(range, |range, bytes| seen.push((range, bytes[0], bytes.len())));
            (whole, seen)
        };
        assert_eq!(seen(5..13), (true, vec![(5..10, 0, 10), (10..13, 10, 6)]));
        assert_eq!(seen(18..32), (false, vec![(18..20, 10, 4)]), "20 to 30 are not there");
        assert_eq!(seen(30..40), (true, vec![(30..40, 30, 20)]));
    }
}
