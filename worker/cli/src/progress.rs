//! Progress bars of long work, drawn on stderr if that is a terminal and results are not JSON.

use std::{
    io::{self, IsTerminal},
    sync::mpsc::{self, RecvTimeoutError},
    thread::{self, JoinHandle},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

const TICK: Duration = Duration::from_millis(120);
/// The period at which servers are asked for their progress.
const LOOKS: Duration = Duration::from_millis(500);

/// A bar, or a line with the elapsed time if the total is unknown. Dropping it clears it.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn bytes(what: &str, total: u64, out: Output) -> Progress {
        let template = "{msg} {wide_bar} {bytes} of {total_bytes}  {bytes_per_sec}  {eta} left";
        Progress::with(ProgressBar::hidden(), template, what, Some(total), out)
    }

    /// Makes a line with the elapsed time for `what`, which servers do without reporting progress.
    pub(crate) fn waiting(what: &str, out: Output) -> Progress {
        let progress = Progress::with(ProgressBar::hidden(), "{spinner} {msg}  {elapsed}", what, None, out);
        if !progress.0.is_hidden() {
            progress.0.enable_steady_tick(TICK);
        }
        progress
    }

    /// Makes a line for `what`, with a bar once `look` returns the done part and the total. `look` runs on a
    /// thread of its own, and only if the bar is drawn.
    pub(crate) fn followed(
        what: &str,
        out: Output,
        look: impl FnMut() -> Option<(u64, u64)> + Send + 'static,
    ) -> Followed {
        let progress = Progress::waiting(what, out);
        let (end, ended) = mpsc::channel();
        let bar = progress.0.clone();
        let looking = (!bar.is_hidden()).then(|| thread::spawn(move || follow(&bar, &ended, look)));
        Followed { end: Some(end), looking, _progress: progress }
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

    pub(crate) fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    pub(crate) fn at(&self, bytes: u64, what: String) {
        self.0.set_message(what);
        self.0.set_position(bytes);
    }
}

/// A line and a bar of servers' work. Dropping it clears both.
pub(crate) struct Followed {
    end: Option<mpsc::Sender<()>>,
    looking: Option<JoinHandle<()>>,
    _progress: Progress,
}

impl Drop for Followed {
    fn drop(&mut self) {
        drop(self.end.take());
        // A panic of `look` ends the bar alone.
        let _ = self.looking.take().map(JoinHandle::join);
    }
}

/// Draws the progress until the other end of `ended` is dropped.
fn follow(bar: &ProgressBar, ended: &mpsc::Receiver<()>, mut look: impl FnMut() -> Option<(u64, u64)>) {
    while ended.recv_timeout(LOOKS) == Err(RecvTimeoutError::Timeout) {
        let template = match look() {
            Some((done, all)) => {
                bar.set_length(all);
                bar.set_position(done);
                "{spinner} {msg} {bar:30} {percent} %  {elapsed}"
            }
            None => "{spinner} {msg}  {elapsed}",
        };
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
