//! Signals that end a run. The first signal lets the current step finish and the results be written. A second signal
//! ends the process at once. Before the first step, and during an export by command, the first signal ends the process
//! at once.

use std::{
    fmt,
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering},
    },
    thread,
};

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::{export::remove_drafts, output::fail};

/// Shells report a process that a signal ended by this number plus the signal's.
pub(super) const SIGNALLED: i32 = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Rank 0, which decides and so ends the run. A second signal ends the process at once. Before the first step, the
    /// first signal does.
    Decides,
    /// The process that started the ranks' processes, and ends once they have ended.
    Starts,
    /// A rank other than 0, started with the others and ended with them after rank 0. The current step needs this
    /// process until then.
    Follows,
    /// An export by command. The first signal ends the process, and removes the unfinished files.
    Exports,
}

/// The message of a process that a signal ends at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastWords {
    /// State of the run, and how to continue.
    pub(crate) said: String,
    pub(crate) as_json: bool,
}

/// Message of a run that ends before its first step.
const BEFORE_STEPS: &str = "before its first step: run the same command again";

#[derive(Clone, Debug, Default)]
pub(crate) struct Stop(Arc<Heard>);

#[derive(Debug, Default)]
struct Heard {
    /// The first signal; 0 before it.
    first: AtomicI32,
    times: AtomicU32,
    /// True from the run's first step on: its results are written before it ends.
    makes_steps: AtomicBool,
}

impl Stop {
    /// Catches SIGINT and SIGTERM from here on. The process that starts the ranks tells rank 0 by SIGUSR1. A terminal sends
    /// SIGINT to both processes, so SIGUSR1 does not count as a second signal.
    pub(crate) fn catch(part: Part, words: LastWords) -> io::Result<Stop> {
        let stop = Stop::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let entered = runtime.enter();
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut told = (part == Part::Decides).then(|| signal(SignalKind::user_defined1())).transpose()?;
        drop(entered);
        let heard = stop.clone();
        let listen = async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => heard.hear(part, &words, SignalKind::interrupt(), true),
                    _ = terminate.recv() => heard.hear(part, &words, SignalKind::terminate(), true),
                    () = next(&mut told) => heard.hear(part, &words, SignalKind::interrupt(), false),
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(move || runtime.block_on(listen))?;
        Ok(stop)
    }

    pub(super) fn hear(&self, part: Part, words: &LastWords, kind: SignalKind, counts: bool) {
        let number = kind.as_raw_value();
        let is_first = self.0.first.compare_exchange(0, number, Ordering::AcqRel, Ordering::Acquire).is_ok();
        let times = self.0.times.fetch_add(u32::from(counts), Ordering::AcqRel) + u32::from(counts);
        let is_early = part == Part::Decides && !self.0.makes_steps.load(Ordering::Acquire);
        let ends = match part {
            Part::Starts => false,
            Part::Exports => true,
            Part::Decides | Part::Follows => times > 1 || is_early,
        };
        if ends {
            let said = if is_early { BEFORE_STEPS.to_string() } else { words.said.clone() };
            let stopped = Stopped { signal: number, said };
            let mut code = stopped.exit_code();
            remove_drafts();
            if part != Part::Follows {
                code = fail(&stopped.into(), code, words.as_json);
            }
            std::process::exit(code.into());
        }
        if is_first && part == Part::Decides {
            // If the terminal is gone, the message is lost.
            let _ = writeln!(
                io::stderr(),
                "longshore: {}: the step in hand is finished first; a second signal ends this at once",
                name(number)
            );
        }
    }

    /// Notes that the run makes steps from now on.
    pub(super) fn steps_begin(&self) {
        self.0.makes_steps.store(true, Ordering::Release);
    }

    pub(crate) fn asked(&self) -> Option<i32> {
        Some(self.0.first.load(Ordering::Acquire)).filter(|signal| *signal != 0)
    }

    pub(super) fn is_urgent(&self) -> bool {
        self.0.times.load(Ordering::Acquire) > 1
    }
}

/// Awaits the next signal of a kind; never returns for a kind that is not caught.
async fn next(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

fn name(signal: i32) -> &'static str {
    if signal == SignalKind::terminate().as_raw_value() { "SIGTERM" } else { "SIGINT" }
}

#[derive(Debug)]
pub(crate) struct Stopped {
    pub(super) signal: i32,
    /// State of the run, and how to continue.
    pub(super) said: String,
}

impl Stopped {
    pub(crate) fn exit_code(&self) -> u8 {
        u8::try_from(SIGNALLED + self.signal).unwrap_or(1)
    }
}

impl fmt::Display for Stopped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "stopped by {} {}", name(self.signal), self.said)
    }
}

impl std::error::Error for Stopped {}
