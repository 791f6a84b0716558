//! The terminal: a frame where the view or the size has changed, keys, and a single frame for a pipe.

use std::{
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    panic,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use console::{Key, Term, strip_ansi_codes};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
    termios::{OptionalActions, Termios, tcgetattr, tcsetattr},
};

use super::{
    draw::{Chosen, draw},
    gather::Poller,
    view::View,
};
use crate::train::{LastWords, Part, Stop};

/// The period of looks at the servers.
const PERIOD: Duration = Duration::from_secs(1);
/// The longest wait for keys before the next frame. So a change of the window's size shows after 50 ms at most.
const KEYS: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Width and height of a frame without a terminal.
const SIZE: (usize, usize) = (80, 24);
/// Begins the alternate screen and hides the cursor.
const TAKE: &str = "\x1b[?1049h\x1b[?25l";
const GIVE_BACK: &str = "\x1b[?1049l\x1b[?25h";

pub(crate) fn once(view: &View) -> String {
    frame_of(view, Chosen::default(), size().unwrap_or(SIZE))
}

fn size() -> Option<(usize, usize)> {
    Term::stdout().size_checked().map(|(rows, columns)| (columns.into(), rows.into()))
}

pub(super) fn frame_of(view: &View, chosen: Chosen, size: (usize, usize)) -> String {
    let lines = draw(view, chosen, None, size);
    let plain = lines.iter().map(|line| strip_ansi_codes(line).trim_end().to_string());
    plain.collect::<Vec<_>>().join("\n")
}

/// Draws until a key or a signal ends the program.
///
/// # Errors
/// If there is no terminal, or the first look fails.
pub(crate) fn watch(mut poller: Poller) -> anyhow::Result<()> {
    anyhow::ensure!(io::stdout().is_terminal(), "stdout is no terminal: --once prints one frame");
    let mut view = poller.look()?;
    let (looked, looks) = mpsc::channel();
    let (_wanted, wants) = mpsc::channel::<()>();
    // A silent server blocks this thread, and not the keys. The thread ends with `_wanted`, and is not joined.
    thread::Builder::new().name("top".into()).spawn(move || {
        while let Err(RecvTimeoutError::Timeout) = wants.recv_timeout(PERIOD) {
            if looked.send(poller.look()).is_err() {
                return;
            }
        }
    })?;
    let stop = Stop::catch(Part::Follows, LastWords::default())?;
    let screen = Screen::take()?;
    let (mut chosen, mut failed, mut shown) = (Chosen::default(), None, None);
    while stop.asked().is_none() {
        for look in looks.try_iter() {
            match look {
                Ok(new) => (view, failed) = (new, None),
                Err(error) => failed = Some(format!("{error:#}")),
            }
        }
        let size = size().unwrap_or(SIZE);
        let frame = Some((size, draw(&view, chosen, failed.as_deref(), size)));
        if frame != shown {
            show(frame.iter().flat_map(|(_, lines)| lines))?;
            shown = frame;
        }
        if screen.key()?.is_some_and(|key| !chosen.take(&key, view.jobs.len())) {
            break;
        }
    }
    Ok(())
}

/// Writes a frame. Each line is cleared before its text is written. If it were cleared afterwards, a full line would
/// lose its last letter.
fn show<'a>(lines: impl Iterator<Item = &'a String>) -> io::Result<()> {
    let lines: Vec<String> = lines.map(|line| format!("\x1b[2K{line}")).collect();
    let mut out = io::stdout().lock();
    write!(out, "\x1b[H{}", lines.join("\r\n"))?;
    out.flush()
}

/// The terminal in raw mode, on its alternate screen. Dropping the value restores the terminal.
struct Screen(Termios);

impl Screen {
    fn take() -> anyhow::Result<Screen> {
        let screen = Screen(tcgetattr(io::stdout())?);
        let mut raw = screen.0.clone();
        raw.make_raw();
        tcsetattr(io::stdout(), OptionalActions::Now, &raw)?;
        write!(io::stdout(), "{TAKE}")?;
        // On the alternate screen the message of a panic would be lost.
        let (settings, before) = (screen.0.clone(), panic::take_hook());
        panic::set_hook(Box::new(move |panic| {
            give_back(&settings);
            before(panic);
        }));
        Ok(screen)
    }

    /// Waits for a key, for at most `KEYS`.
    ///
    /// # Errors
    /// If the terminal is gone. A program that ignores SIGHUP, as under `nohup`, does not end with its terminal.
    fn key(&self) -> anyhow::Result<Option<Key>> {
        // Keys come from the terminal also where stdin is another file.
        let (stdin, stdout) = (io::stdin(), io::stdout());
        let keys = if stdin.is_terminal() { stdin.as_fd() } else { stdout.as_fd() };
        let mut fds = [PollFd::new(&keys, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&KEYS)) {
            Ok(0) | Err(Errno::INTR) => return Ok(None),
            other => other?,
        };
        let is_gone = fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR);
        anyhow::ensure!(!is_gone, "the terminal is gone: start it again in another one");
        Ok(Some(Term::stdout().read_key_raw()?))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back(&self.0);
    }
}

/// Restores the terminal. Errors are ignored, since a terminal that is gone needs no restoring.
fn give_back(settings: &Termios) {
    let _ = write!(io::stdout(), "{GIVE_BACK}").and_then(|()| io::stdout().flush());
    let _ = tcsetattr(io::stdout(), OptionalActions::Now, settings);
}

impl Chosen {
    fn take(&mut self, key: &Key, jobs: usize) -> bool {
        let jobs = jobs.max(1);
        match key {
            Key::CtrlC | Key::Char('q') => return false,
            Key::Escape if !self.help => return false,
            Key::Escape => self.help = false,
            Key::Char('?') => self.help = !self.help,
            Key::Tab | Key::ArrowRight => *self = Chosen { job: (self.job + 1) % jobs, ..Chosen::default() },
            Key::BackTab | Key::ArrowLeft => {
                *self = Chosen { job: (self.job + jobs - 1) % jobs, ..Chosen::default() };
            }
            Key::ArrowDown => self.scrolled += 1,
            Key::ArrowUp => self.scrolled = self.scrolled.saturating_sub(1),
            _ => {}
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_what_the_help_says() {
        let mut chosen = Chosen::default();
        for (key, job, scrolled, help) in [
            (Key::Tab, 1, 0, false),
            (Key::ArrowDown, 1, 1, false),
            (Key::ArrowLeft, 0, 0, false),
            (Key::ArrowLeft, 2, 0, false),
            (Key::ArrowRight, 0, 0, false),
            (Key::Char('?'), 0, 0, true),
            (Key::Escape, 0, 0, false),
            (Key::ArrowUp, 0, 0, false),
        ] {
            assert!(chosen.take(&key, 3), "{key:?} ends");
            assert_eq!((chosen.job, chosen.scrolled, chosen.help), (job, scrolled, help), "{key:?}");
        }
        assert!([Key::Escape, Key::Char('q'), Key::CtrlC].iter().all(|key| !chosen.take(key, 3)));
    }
}
