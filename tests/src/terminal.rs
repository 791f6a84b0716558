//! A pseudo-terminal made by util-linux's `script`. A program in it takes it for an interactive terminal.
//! Tests search the drawn text.

use std::{
    io::{Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use crate::conformance::cluster::eventually;

/// Shell commands around the program, which print the terminal's settings and the program's exit code.
const SESSION: &str = "stty rows 30 cols 100; echo \"is $(stty -g | cksum).\"; sh -c \"$PROGRAM\"; \
     echo \"ended with $?.\"; echo \"is $(stty -g | cksum).\"";
const BORROWED: &str = "\x1b[?1049h";
const GIVEN_BACK: &str = "\x1b[?1049l";
const CURSOR: &str = "\x1b[?25h";

/// A program in a terminal. Drop kills it.
pub struct Terminal {
    child: Child,
    keys: ChildStdin,
    output: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    /// Starts a command in a terminal of 30 rows and 100 columns. Returns None where `script` is not
    /// installed.
    pub fn start(command: &Command) -> Option<Terminal> {
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
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = script.spawn().expect("script starts");
        let (keys, mut drawn) = (child.stdin.take().expect("a pipe"), child.stdout.take().expect("a pipe"));
        let output = Arc::new(Mutex::new(Vec::new()));
        let taken = Arc::clone(&output);
        thread::spawn(move || {
            let mut part = [0; 4096];
            while let Ok(count @ 1..) = drawn.read(&mut part) {
                taken.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(&part[..count]);
            }
        });
        Some(Terminal { child, keys, output })
    }

    /// Sends key presses, as the bytes that a terminal sends for them.
    pub fn keys(&mut self, keys: &str) {
        self.keys
            .write_all(keys.as_bytes())
            .and_then(|()| self.keys.flush())
            .expect("the terminal takes keys");
    }

    /// Waits until the program has drawn these words. Spaces do not count, because a program does not draw
    /// blank cells.
    #[track_caller]
    pub fn until(&self, words: &str) {
        let words = without_spaces(words);
        eventually(&words, || without_spaces(&drawn(&self.output())).contains(&words).then_some(()));
    }

    /// Waits for the program's end. Checks that the terminal's settings are restored, and returns the exit
    /// code.
    #[track_caller]
    pub fn ended(self) -> i32 {
        let end = eventually("the program's end", || {
            let output = self.output();
            let (_, end) = output.split_once("ended with ")?;
            let (code, after) = end.split_once(".\r\nis ")?;
            Some((code.to_string(), after.split_once('.')?.0.to_string()))
        });
        let output = self.output();
        let before = output.strip_prefix("is ").and_then(|output| output.split_once('.'));
        assert_eq!(before.map(|(before, _)| before), Some(end.1.as_str()), "the terminal's settings");
        let [borrowed, given_back, cursor] = [BORROWED, GIVEN_BACK, CURSOR].map(|order| output.rfind(order));
        assert!(borrowed < given_back, "the screen is not given back");
        assert!(borrowed < cursor, "the cursor is not given back");
        end.0.parse().expect("an exit code")
    }

    fn output(&self) -> String {
        let output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&output).into_owned()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // `script` owns the terminal, so the end of `script` sends the program a SIGHUP.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the text of a terminal's output, without control sequences.
fn drawn(output: &str) -> String {
    let mut text = String::new();
    let mut parts = output.split('\x1b');
    text.extend(parts.next());
    for part in parts {
        let order_end = part.find(|letter: char| letter.is_ascii_alphabetic());
        text.push_str(order_end.and_then(|end| part.get(end + 1..)).unwrap_or_default());
    }
    text
}

fn without_spaces(text: &str) -> String {
    text.split_whitespace().collect()
}
