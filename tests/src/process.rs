//! A process under test: lines of stdout as they come, and stderr for messages of a failing test. Drop kills
//! the process.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Longer than any wait on a busy machine: a test that exceeds it has found a hang.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// The interval at which a silent process is checked.
const POLL: Duration = Duration::from_millis(2);

/// A process that drop kills.
pub struct Process {
    name: String,
    child: Child,
    lines: mpsc::Receiver<String>,
    stderr: PathBuf,
    _folder: TempDir,
}

impl Process {
    /// Starts `command`. Messages call it `name`.
    pub fn start(name: &str, command: &mut Command) -> Process {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let stderr = folder.path().join("stderr");
        let file = File::create(&stderr).expect("a file for stderr");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(file);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("starting {name}: {error}"));
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { return };
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Process { name: name.to_string(), child, lines, stderr, _folder: folder }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the next line of stdout, or None at its end.
    ///
    /// # Panics If no line comes within the deadline.
    pub fn line(&self) -> Option<String> {
        match self.lines.recv_timeout(DEADLINE) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("{} has said nothing for {DEADLINE:?}", self.name),
        }
    }

    /// Returns all of stderr so far.
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.stderr).unwrap_or_default()).into_owned()
    }

    /// Kills the process with SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Stops the process with SIGSTOP, until [`Process::go_on`].
    pub fn stop(&self) {
        self.signal(Signal::STOP);
    }

    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    /// Sends SIGHUP.
    pub fn hang_up(&self) {
        self.signal(Signal::HUP);
    }

    pub fn signal(&self, signal: Signal) {
        let id = Pid::from_child(&self.child);
        kill_process(id, signal).unwrap_or_else(|error| panic!("{signal:?} to {}: {error}", self.name));
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the state of a child").is_none()
    }

    /// Waits for the process's end.
    ///
    /// # Panics If the process still runs after `deadline`.
    pub fn wait(&mut self, deadline: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("the state of a child") {
                return status;
            }
            assert!(start.elapsed() < deadline, "{} still runs after {deadline:?}", self.name);
            thread::sleep(POLL);
        }
    }

    /// Waits for the process's end. Returns its exit code.
    pub fn code(&mut self) -> i32 {
        let status = self.wait(DEADLINE);
        status.code().unwrap_or_else(|| panic!("{} ended with {status}", self.name))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            let said: Vec<String> = self.lines.try_iter().collect();
            eprintln!(
                "--- {} ---\nstdout not read:\n{}\nstderr:\n{}",
                self.name,
                said.join("\n"),
                self.stderr()
            );
        }
    }
}

/// Returns the children of `parent` from /proc, oldest first. Needs Linux.
pub fn children(parent: u32) -> Vec<u32> {
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    let ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let mut found: Vec<u32> = ids.filter(|&id| parent_of(id) == Some(parent)).collect();
    found.sort_unstable();
    found
}

/// Returns whether a process runs. A zombie does not run.
pub fn exists(id: u32) -> bool {
    state(id).is_some_and(|fields| !fields.starts_with('Z'))
}

/// Returns a process's resident bytes now, and their peak since its start or the last [`forget_peak`].
pub fn memory_of(process: u32) -> (u64, u64) {
    (field(process, "VmRSS:") << 10, field(process, "VmHWM:") << 10)
}

pub fn threads_of(process: u32) -> u64 {
    field(process, "Threads:")
}

fn field(process: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("a live process");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a field of the kernel's");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// Resets a process's peak of resident bytes to the present value.
pub fn forget_peak(process: u32) {
    fs::write(format!("/proc/{process}/clear_refs"), "5").expect("a process of this user's");
}

fn parent_of(id: u32) -> Option<u32> {
    state(id)?.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the fields of /proc/PID/stat from the state on. The name before them may hold any character; its
/// end is the last parenthesis.
fn state(id: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    stat.rsplit_once(')').map(|(_, fields)| fields.trim_start().to_string())
}
