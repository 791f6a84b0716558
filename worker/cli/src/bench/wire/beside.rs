//! An update beside the measurement: it updates a large array over and over, on a pool of the engine.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::ensure;
use longshore_proto::Formats;

use crate::bench::update::Bare;

/// This many parameters fit in no cache, and one thread passes over them in a tenth of a second.
pub(super) const PARAMS: usize = 32 << 20;
/// The longest wait for the begin or the end of a pass.
const PATIENCE: Duration = Duration::from_secs(60);

/// A background thread that updates while it is [on](Update::on).
pub(super) struct Update {
    params: usize,
    shared: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Control {
    state: Mutex<ControlState>,
    changed: Condvar,
}

#[derive(Default)]
struct ControlState {
    wanted: bool,
    running: bool,
    stop: bool,
    passes: u32,
    time: Duration,
}

impl Update {
    pub(super) fn new(params: usize, threads: usize) -> anyhow::Result<Update> {
        let (mut bare, shared) =
            (Bare::new(params as u64, threads, Formats::default())?, Arc::new(Control::default()));
        let theirs = Arc::clone(&shared);
        let run = move || {
            // A job's compute thread joins its pool in the same way.
            bare.adopt_caller();
            theirs.serve(&mut bare);
        };
        let thread = Some(thread::Builder::new().name("compute".into()).spawn(run)?);
        Ok(Update { params, shared, thread })
    }

    /// Starts the update. The update is running once this returns.
    pub(super) fn on(&self) -> anyhow::Result<()> {
        self.set(true)
    }

    /// Stops the update. No pass is running once this returns.
    pub(super) fn off(&self) -> anyhow::Result<()> {
        self.set(false)
    }

    fn set(&self, wanted: bool) -> anyhow::Result<()> {
        let mut state = self.shared.lock();
        state.wanted = wanted;
        self.shared.changed.notify_all();
        let (state, waited) = self
            .shared
            .changed
            .wait_timeout_while(state, PATIENCE, |state| state.running != wanted)
            .unwrap_or_else(PoisonError::into_inner);
        drop(state);
        ensure!(!waited.timed_out(), "the update beside it did not begin or end within {PATIENCE:?}");
        Ok(())
    }

    /// Nanoseconds a parameter took while the update was on.
    pub(super) fn ns_per_param(&self) -> f64 {
        let state = self.shared.lock();
        state.time.as_secs_f64() * 1e9 / (f64::from(state.passes) * self.params as f64)
    }
}

impl Drop for Update {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic has shown as a pass that did not end.
            let _ = thread.join();
        }
    }
}

impl Control {
    fn lock(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, bare: &mut Bare) {
        loop {
            let mut state = self.lock();
            if state.stop {
                return;
            }
            state.running = state.wanted;
            self.changed.notify_all();
            if !state.running {
                // The thread is idle until told otherwise: the telling thread waits with a deadline.
                drop(self.changed.wait(state));
                continue;
            }
            drop(state);
            let begun = Instant::now();
            bare.pass();
            let mut state = self.lock();
            state.passes += 1;
            state.time += begun.elapsed();
        }
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::limits::BLOCK_ELEMENTS;

    use super::*;

    #[test]
    fn updates_go_on_only_while_they_are_asked_for() {
        let update = Update::new(2 * BLOCK_ELEMENTS as usize, 2).unwrap();
        let passes = || update.shared.lock().passes;
        assert_eq!(passes(), 0);
        for _ in 0..3 {
            let before = passes();
            update.on().unwrap();
            update.off().unwrap();
            let after = passes();
            assert!(after > before, "nothing was updated");
            assert!(!update.shared.lock().running);
        }
        assert!(update.ns_per_param() > 0.0);
    }
}
