//! Progress of long work on stderr: a bar on a terminal, and else a line now and then. Nothing is shown if results are JSON.

use std::{
    io::{self, IsTerminal},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::Output;

const TICK: Duration = Duration::from_millis(120);
/// The period at which servers are asked for their progress.
const LOOKS: Duration = Duration::from_millis(500);

/// The period of lines without a terminal: long, so that a log of hours stays readable.
const LINES: Duration = Duration::from_secs(30);

/// A bar, or a line with the elapsed time if the total is unknown. Dropping the value clears the bar or line.
pub(crate) struct Progress {
    bar: ProgressBar,
    /// Time at which the last line was printed, where lines replace the bar. None if no lines are printed.
    told: Option<Mutex<Instant>>,
}

impl Progress {
    pub(crate) fn bytes(what: &str, total: u64, out: Output) -> Progress {
        let progress = Progress::new(what, out);
        progress.set_style("{msg} {wide_bar} {bytes} of {total_bytes}  {bytes_per_sec}  {eta} left");
        progress.bar.set_length(total);
        progress
    }

    /// Makes a line with the elapsed time for `what`, which servers do without reporting progress.
    pub(crate) fn waiting(what: &str, out: Output) -> Progress {
        let progress = Progress::new(what, out);
        progress.set_style("{spinner} {msg}  {elapsed}");
        if !progress.bar.is_hidden() {
            progress.bar.enable_steady_tick(TICK);
        }
        progress
    }

    /// Makes a line for `what`, with a bar once `look` returns the done part and the total. `look` runs on a
    /// thread of its own, and only if progress is shown.
    pub(crate) fn followed(
        what: &str,
        out: Output,
        look: impl FnMut() -> Option<(u64, u64)> + Send + 'static,
    ) -> Followed {
        let progress = Arc::new(Progress::waiting(what, out));
        let (end, ended) = mpsc::channel();
        let followed = Arc::clone(&progress);
        let looking = (!out.is_json()).then(|| thread::spawn(move || follow(&followed, &ended, look)));
        Followed { end: Some(end), looking, _progress: progress }
    }

    fn new(what: &str, out: Output) -> Progress {
        let bar = ProgressBar::hidden().with_message(what.to_string());
        let (shown, is_terminal) = (!out.is_json(), io::stderr().is_terminal());
        if shown && is_terminal {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        Progress { bar, told: (shown && !is_terminal).then(|| Mutex::new(Instant::now())) }
    }

    fn set_style(&self, template: &str) {
        let style = ProgressStyle::with_template(template);
        self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.tell();
    }

    pub(crate) fn at(&self, bytes: u64, what: String) {
        self.bar.set_message(what);
        self.bar.set_position(bytes);
        self.tell();
    }

    fn tell(&self) {
        if let Some(line) = self.due() {
            say_aside!("{line}");
        }
    }

    /// Returns the line in place of a bar, once it is due.
    fn due(&self) -> Option<String> {
        let mut told = self.told.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        if told.elapsed() < LINES {
            return None;
        }
        *told = Instant::now();
        let done = match self.bar.length() {
            Some(all) if all > 0 => {
                format!("{} %, ", u128::from(self.bar.position()) * 100 / u128::from(all))
            }
            _ => String::new(),
        };
        Some(format!("{}: {done}{} s", self.bar.message(), self.bar.elapsed().as_secs()))
    }
}

/// A line and a bar of servers' work. Dropping the value clears both.
pub(crate) struct Followed {
    end: Option<mpsc::Sender<()>>,
    looking: Option<JoinHandle<()>>,
    _progress: Arc<Progress>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        drop(self.end.take());
        // A panic of `look` ends the bar alone.
        let _ = self.looking.take().map(JoinHandle::join);
    }
}

/// Shows the progress until the other end of `ended` is dropped.
fn follow(progress: &Progress, ended: &mpsc::Receiver<()>, mut look: impl FnMut() -> Option<(u64, u64)>) {
    let period = if progress.told.is_some() { LINES } else { LOOKS };
    while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
        match look() {
            Some((done, all)) => {
                progress.bar.set_length(all);
                progress.bar.set_position(done);
                progress.set_style("{spinner} {msg} {bar:30} {percent} %  {elapsed}");
            }
            None => progress.set_style("{spinner} {msg}  {elapsed}"),
        }
        progress.tell();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_stands_in_for_the_bar_now_and_then() {
        let bar = ProgressBar::hidden().with_message("default: 1 of 2 shards");
        let told = Instant::now().checked_sub(LINES).map(Mutex::new);
        let progress = Progress { bar, told };
        progress.bar.set_length(200);
        progress.bar.set_position(50);
        assert_eq!(progress.due().as_deref(), Some("default: 1 of 2 shards: 25 %, 0 s"));
        assert_eq!(progress.due(), None, "a line at once");
    }
}
