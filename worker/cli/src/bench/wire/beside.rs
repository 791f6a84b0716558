//! An update beside the measurement: it updates a large array over and over, on a pool of the engine.

use std::{
    sync::mpsc::{self, TryRecvError},
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use longshore_proto::Formats;

use crate::bench::update::Bare;

/// This many parameters fit in no cache, and one thread passes over them in a tenth of a second.
pub(super) const PARAMS: usize = 32 << 20;
/// The longest wait for the begin of the first pass.
const PATIENCE: Duration = Duration::from_secs(60);

pub(super) struct Update {
    bare: Bare,
    params: usize,
    passes: u32,
    time: Duration,
}

impl Update {
    pub(super) fn new(params: usize, threads: usize) -> anyhow::Result<Update> {
        let bare = Bare::new(params as u64, threads, Formats::default())?;
        Ok(Update { bare, params, passes: 0, time: Duration::ZERO })
    }

    /// Does `work` while the update goes on.
    pub(super) fn during<T>(&mut self, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let Update { bare, passes, time, .. } = self;
        let (begin, begun) = mpsc::channel();
        thread::scope(|scope| {
            // The passes end when `works` is dropped, also by a panic.
            let (works, ended) = mpsc::channel::<()>();
            scope.spawn(move || {
                // A job's compute thread joins its pool in the same way.
                bare.adopt_caller();
                let started = Instant::now();
                let _ = begin.send(());
                loop {
                    bare.pass();
                    *passes += 1;
                    if ended.try_recv() != Err(TryRecvError::Empty) {
                        break;
                    }
                }
                *time += started.elapsed();
            });
            begun.recv_timeout(PATIENCE).context("the update beside it did not begin")?;
            let result = work();
            drop(works);
            result
        })
    }

    pub(super) fn ns_per_param(&self) -> f64 {
        self.time.as_secs_f64() * 1e9 / (f64::from(self.passes) * self.params as f64)
    }
}
