//! A terminal of a test's own: a program in it believes that somebody sits there, and the test sees its screen.

use std::{
    io::{Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::{conformance::cluster::eventually, process::DEADLINE};

/// The interval at which a screen is looked at.
const POLL: Duration = Duration::from_millis(2);

/// Rows and columns.
pub type Size = (usize, usize);

/// What the shell says before a program and after it: the terminal's name and settings, and how the program ended.
const SESSION: &str = "stty rows \"$HIGH\" cols \"$WIDE\"; echo \"at $(tty)\"; echo \"is $(stty -g | cksum)\"; \
     sh -c \"$PROGRAM\"; echo \"ended with $?\"; echo \"is $(stty -g | cksum)\"";

/// A program in a terminal, which is killed on drop.
pub struct Terminal {
    child: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<Screen>>,
    device: String,
}

impl Terminal {
    /// Starts a command in a terminal of this size. None where util-linux's `script` is not installed, which makes terminals.
    pub fn start(command: &Command, size: Size) -> Option<Terminal> {
        Command::new("script").arg("--version").output().ok()?;
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let quoted = words.map(|word| format!("'{}'", word.to_str().expect("words of text")));
        let mut script = Command::new("script");
        script.args(["--quiet", "--flush", "--return", "--command", SESSION, "/dev/null"]);
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => script.env(name, value),
                None => script.env_remove(name),
            };
        }
        script.envs([("SHELL", "/bin/sh"), ("TERM", "xterm-256color")]);
        script.env("PROGRAM", quoted.collect::<Vec<_>>().join(" "));
        script.env("HIGH", size.0.to_string()).env("WIDE", size.1.to_string());
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = script.spawn().expect("script starts");
        let (keys, mut output) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let screen = Arc::new(Mutex::new(Screen::new(size)));
        let drawn = Arc::clone(&screen);
        thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut part) {
                lock(&drawn).take(&part[..count]);
            }
        });
        let mut terminal = Terminal { child, keys, screen, device: String::new() };
        terminal.device = eventually("the terminal's name", || {
            let text = lock(&terminal.screen).ordinary.text();
            let (_, rest) = text.split_once("at ")?;
            // The line behind it is there, so that this one is whole.
            rest.split_once("\nis ").map(|(name, _)| name.to_string())
        });
        Some(terminal)
    }

    /// Presses keys, as the bytes that a terminal makes of them.
    pub fn keys(&mut self, keys: &str) {
        self.keys
            .write_all(keys.as_bytes())
            .and_then(|()| self.keys.flush())
            .expect("the terminal takes keys");
    }

    /// What is seen, a line for each row.
    pub fn text(&self) -> String {
        lock(&self.screen).seen().text()
    }

    /// Waits until what is seen is as wanted.
    #[track_caller]
    pub fn until(&self, what: &str, wanted: impl Fn(&str) -> bool) {
        let start = Instant::now();
        while !wanted(&self.text()) {
            assert!(start.elapsed() < DEADLINE, "{what} is not seen:\n{}", self.text());
            thread::sleep(POLL);
        }
    }

    /// Makes the window larger or smaller.
    pub fn resize(&self, size: Size) {
        let mut screen = lock(&self.screen);
        (screen.size, screen.ordinary.size) = (size, size);
        if let Some(other) = &mut screen.other {
            other.resize(size);
        }
        drop(screen);
        let (rows, columns) = (size.0.to_string(), size.1.to_string());
        let mut stty = Command::new("stty");
        stty.args(["-F", &self.device, "rows", &rows, "cols", &columns]);
        assert!(stty.status().expect("stty runs").success(), "{} takes no size", self.device);
    }

    /// Waits for the program's end. Returns its exit code, after checks that the terminal is as it was before.
    #[track_caller]
    pub fn ended(self) -> i32 {
        eventually("the program's end", || {
            let screen = lock(&self.screen);
            (screen.ordinary.text().matches("\nis ").count() == 2).then_some(())
        });
        let screen = lock(&self.screen);
        assert!(screen.other.is_none() && screen.has_cursor, "the screen is not given back");
        let text = screen.ordinary.text();
        let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        let [_, before, ended, after] = lines[..] else { panic!("something is left on the screen: {text}") };
        assert_eq!(before, after, "the terminal's settings");
        let code = ended.strip_prefix("ended with ").and_then(|code| code.parse().ok());
        code.unwrap_or_else(|| panic!("no exit code in {ended}"))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // The terminal goes with `script`, and hangs up on what runs in it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lock(screen: &Mutex<Screen>) -> MutexGuard<'_, Screen> {
    screen.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a terminal shows, as far as programs here draw: places, text, and the other screen that a program borrows.
struct Screen {
    size: Size,
    ordinary: Grid,
    /// While a program has borrowed it.
    other: Option<Grid>,
    has_cursor: bool,
    /// The beginning of what has not come whole.
    rest: Vec<u8>,
}

struct Grid {
    size: Size,
    rows: Vec<Vec<char>>,
    at: Size,
}

impl Screen {
    fn new(size: Size) -> Screen {
        Screen { size, ordinary: Grid::new(size), other: None, has_cursor: true, rest: Vec::new() }
    }

    fn seen(&self) -> &Grid {
        self.other.as_ref().unwrap_or(&self.ordinary)
    }

    fn take(&mut self, bytes: &[u8]) {
        self.rest.extend_from_slice(bytes);
        while let Some(length) = whole(&self.rest) {
            let piece: Vec<u8> = self.rest.drain(..length).collect();
            let piece = String::from_utf8_lossy(&piece).into_owned();
            match piece.strip_prefix("\x1b[") {
                Some(order) => self.obey(order),
                None if piece.starts_with('\x1b') => {}
                None => piece.chars().for_each(|one| self.grid().put(one)),
            }
        }
    }

    fn grid(&mut self) -> &mut Grid {
        self.other.as_mut().unwrap_or(&mut self.ordinary)
    }

    fn obey(&mut self, order: &str) {
        let number =
            |at: usize| order[..order.len() - 1].split(';').nth(at).and_then(|part| part.parse().ok());
        match order {
            "?1049h" => self.other = Some(Grid::new(self.size)),
            "?1049l" => self.other = None,
            "?25h" => self.has_cursor = true,
            "?25l" => self.has_cursor = false,
            "2J" => self.grid().rows.clear(),
            _ if order.ends_with('H') => {
                let [row, column] = [0, 1].map(|at| number(at).unwrap_or(1usize).saturating_sub(1));
                self.grid().at = (row, column);
            }
            // Colours, and what these programs do not need to be read.
            _ => {}
        }
    }
}

impl Grid {
    fn new(size: Size) -> Grid {
        Grid { size, rows: Vec::new(), at: (0, 0) }
    }

    /// As terminals do, it keeps what still has a place.
    fn resize(&mut self, size: Size) {
        self.size = size;
        self.rows.truncate(size.0);
        self.rows.iter_mut().for_each(|row| row.truncate(size.1));
    }

    fn put(&mut self, one: char) {
        let (row, column) = self.at;
        match one {
            '\r' => self.at = (row, 0),
            '\n' => self.at = (row + 1, column),
            _ if one.is_control() => {}
            _ if column >= self.size.1 => {
                self.at = (row + 1, 0);
                self.put(one);
            }
            _ => {
                self.rows.resize(self.rows.len().max(row + 1), Vec::new());
                let cells = &mut self.rows[row];
                cells.resize(cells.len().max(column + 1), ' ');
                cells[column] = one;
                self.at = (row, column + 1);
            }
        }
    }

    fn text(&self) -> String {
        let line = |row: &Vec<char>| row.iter().collect::<String>().trim_end().to_string();
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// How long the first order or character is; None where more of it has to come.
fn whole(bytes: &[u8]) -> Option<usize> {
    match bytes {
        [] | [0x1B] => None,
        [0x1B, b'[', rest @ ..] => {
            rest.iter().position(|byte| (0x40..=0x7E).contains(byte)).map(|end| end + 3)
        }
        [0x1B, b'(', ..] => (bytes.len() > 2).then_some(3),
        [0x1B, ..] => Some(2),
        [first, ..] => {
            let length = [1, 2, 3, 4]
                [usize::from(*first >= 0xC0) + usize::from(*first >= 0xE0) + usize::from(*first >= 0xF0)];
            (bytes.len() >= length).then_some(length)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_shows_what_was_drawn_on_it() {
        let mut screen = Screen::new((3, 10));
        // Orders and a character come in two parts each.
        let parts: [&[u8]; 4] =
            [b"first\r\nsec", b"ond\x1b", b"[?1049h\x1b[?25l\x1b[2;3H\x1b[1mh\xE2", b"\xA3\xBF\x1b[0m"];
        parts.iter().for_each(|part| screen.take(part));
        assert_eq!(screen.ordinary.text(), "first\nsecond");
        assert_eq!((screen.seen().text().as_str(), screen.has_cursor), ("\n  h\u{28FF}", false));
        screen.take(b"\x1b[2J\x1b[1;9Habc\x1b[?1049l");
        assert_eq!(screen.seen().text(), "first\nsecond");
        screen.take("\x1b[1;1H\u{28FF}".as_bytes());
        assert_eq!(screen.seen().text(), "\u{28FF}irst\nsecond");
    }
}
