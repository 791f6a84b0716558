//! The terminal: a frame a second, keys, and a single frame for a pipe.

use std::{
    io::{self, IsTerminal},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::{
        event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
        terminal,
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};

use super::{
    draw::{Chosen, draw},
    gather::Poller,
    view::View,
};

/// The period of looks at the servers.
const PERIOD: Duration = Duration::from_secs(1);
/// The longest wait for keys before the next frame. A change of the window's size shows that late at most.
const KEYS: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// Size of a frame without a terminal.
const SIZE: (u16, u16) = (80, 24);

/// Returns one frame as text.
pub(crate) fn once(view: &View) -> anyhow::Result<String> {
    let size = if io::stdout().is_terminal() { terminal::size().unwrap_or(SIZE) } else { SIZE };
    frame_of(view, Chosen::default(), size)
}

pub(super) fn frame_of(view: &View, chosen: Chosen, (width, height): (u16, u16)) -> anyhow::Result<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height))?;
    terminal.draw(|frame| draw(frame, view, chosen, None))?;
    let buffer = terminal.backend().buffer();
    let line = |row: &[ratatui::buffer::Cell]| {
        let text: String = row.iter().map(ratatui::buffer::Cell::symbol).collect();
        text.trim_end().to_string()
    };
    Ok(buffer.content().chunks(usize::from(width)).map(line).collect::<Vec<_>>().join("\n"))
}

/// Draws until a key ends the program.
///
/// # Errors
/// If there is no terminal, or the first look fails.
pub(crate) fn watch(mut poller: Poller) -> anyhow::Result<()> {
    anyhow::ensure!(io::stdout().is_terminal(), "stdout is no terminal: --once prints one frame");
    let mut view = poller.look()?;
    let (looked, looks) = mpsc::channel();
    let (wanted, wants) = mpsc::channel::<()>();
    // A silent server blocks this thread, and not the keys. The thread ends with the sender of `wanted`.
    let asking = thread::Builder::new().name("top".into()).spawn(move || {
        while let Err(RecvTimeoutError::Timeout) = wants.recv_timeout(PERIOD) {
            if looked.send(poller.look()).is_err() {
                return;
            }
        }
    })?;
    let mut terminal = ratatui::try_init()?;
    let mut chosen = Chosen::default();
    let mut failed = None;
    let drawn = (|| -> anyhow::Result<()> {
        loop {
            for look in looks.try_iter() {
                match look {
                    Ok(new) => (view, failed) = (new, None),
                    Err(error) => failed = Some(format!("{error:#}")),
                }
            }
            terminal.draw(|frame| draw(frame, &view, chosen, failed.as_deref()))?;
            wait_for_keys()?;
            if event::poll(Duration::ZERO)?
                && let Event::Key(key) = event::read()?
                && key.kind != KeyEventKind::Release
                && !chosen.take(key, view.jobs.len())
            {
                return Ok(());
            }
        }
    })();
    ratatui::restore();
    drop(wanted);
    // The thread may be waiting for a silent server, so it is not joined.
    drop(asking);
    drawn
}

/// Waits for keys, for at most `KEYS`.
///
/// # Errors
/// If the terminal is gone. crossterm would then read the end of its input for ever: a program that ignores
/// SIGHUP, as under `nohup`, is not ended with its terminal.
fn wait_for_keys() -> anyhow::Result<()> {
    let (keys, screen) = (io::stdin(), io::stdout());
    // poll reports a hang-up of the terminal for any flags.
    let mut fds = vec![PollFd::new(&screen, PollFlags::empty())];
    if keys.is_terminal() {
        fds.push(PollFd::new(&keys, PollFlags::IN));
    }
    match rustix::event::poll(&mut fds, Some(&KEYS)) {
        // The window's size has changed, which crossterm reports.
        Err(Errno::INTR) => return Ok(()),
        other => other?,
    };
    let is_gone = fds.iter().any(|fd| fd.revents().intersects(PollFlags::HUP | PollFlags::ERR));
    anyhow::ensure!(!is_gone, "the terminal is gone: start it again in another one");
    Ok(())
}

impl Chosen {
    /// Handles a key. Returns false if the key ends the program.
    fn take(&mut self, key: KeyEvent, jobs: usize) -> bool {
        let jobs = jobs.max(1);
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return false,
            KeyCode::Char('q') => return false,
            KeyCode::Esc if !self.help => return false,
            KeyCode::Esc => self.help = false,
            KeyCode::Char('?') => self.help = !self.help,
            KeyCode::Tab | KeyCode::Right => {
                *self = Chosen { job: (self.job + 1) % jobs, ..Chosen::default() }
            }
            KeyCode::BackTab | KeyCode::Left => {
                *self = Chosen { job: (self.job + jobs - 1) % jobs, ..Chosen::default() };
            }
            KeyCode::Down => self.scrolled += 1,
            KeyCode::Up => self.scrolled = self.scrolled.saturating_sub(1),
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
        let mut press = |code| {
            chosen.take(KeyEvent::new(code, KeyModifiers::NONE), 3).then_some((
                chosen.job,
                chosen.scrolled,
                chosen.help,
            ))
        };
        assert_eq!(press(KeyCode::Tab), Some((1, 0, false)));
        assert_eq!(press(KeyCode::Down), Some((1, 1, false)));
        assert_eq!(press(KeyCode::Left), Some((0, 0, false)));
        assert_eq!(press(KeyCode::Left), Some((2, 0, false)));
        assert_eq!(press(KeyCode::Right), Some((0, 0, false)));
        assert_eq!(press(KeyCode::Char('?')), Some((0, 0, true)));
        assert_eq!(press(KeyCode::Esc), Some((0, 0, false)));
        assert_eq!(press(KeyCode::Up), Some((0, 0, false)));
        assert_eq!((press(KeyCode::Esc), press(KeyCode::Char('q'))), (None, None));
        assert!(!chosen.take(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), 1));
    }
}
