//! Bars of what takes long. They are drawn on stderr, only where that is a terminal and nobody reads JSON.

use std::{
    io::{self, IsTerminal},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

/// How often a line without a length moves.
const TICK: Duration = Duration::from_millis(120);

/// A bar, or a line with the time that has passed where nobody knows how much there is. It is gone once it is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar for `what`, which has so many bytes in all.
    pub(crate) fn bytes(what: &str, total: u64, out: Output) -> Progress {
        let template = "{msg} {bar:30} {bytes} of {total_bytes}  {bytes_per_sec}  {eta} left";
        Progress::with(ProgressBar::hidden(), template, what, Some(total), out)
    }

    /// A line with the time for `what`, which others do without saying how far they are.
    pub(crate) fn waiting(what: &str, out: Output) -> Progress {
        let progress = Progress::with(ProgressBar::hidden(), "{spinner} {msg}  {elapsed}", what, None, out);
        if !progress.0.is_hidden() {
            progress.0.enable_steady_tick(TICK);
        }
        progress
    }

    fn with(bar: ProgressBar, template: &str, what: &str, total: Option<u64>, out: Output) -> Progress {
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = bar.with_style(style).with_message(what.to_string());
        if let Some(total) = total {
            bar.set_length(total);
        }
        if !out.is_json() && io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        Progress(bar)
    }

    /// Says that so many bytes more are done.
    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
