//! Starts a `longshored` for each test, at its own loopback address. A warning in its log fails the test.

use std::{
    fmt::Write,
    fs,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use serde_json::Value;

use crate::{binaries, process::Process};

/// Options of a server to start.
#[derive(Clone, Default)]
pub struct ServerOptions {
    memory: Option<String>,
    isa: Option<String>,
    checkpoint_dir: Option<PathBuf>,
    arguments: Vec<String>,
    /// The program and first arguments of the command that runs the server, such as `nsenter`. The server's path and
    /// flags follow.
    under: Vec<String>,
    /// Flags of state folders. Each has a root, in which each server gets a folder of its own.
    state_roots: Vec<(&'static str, PathBuf)>,
    allowed: Vec<String>,
}

impl ServerOptions {
    pub fn new() -> ServerOptions {
        ServerOptions::default()
    }

    /// Sets the memory. The default is 1GiB.
    pub fn memory(mut self, memory: &str) -> ServerOptions {
        self.memory = Some(memory.to_string());
        self
    }

    pub fn isa(mut self, isa: &str) -> ServerOptions {
        self.isa = Some(isa.to_string());
        self
    }

    pub fn checkpoint_dir(mut self, dir: &Path) -> ServerOptions {
        self.checkpoint_dir = Some(dir.to_owned());
        self
    }

    /// Gives each server a folder inside `root` for jobs with tier `nvme`.
    pub fn state_root(mut self, root: &Path) -> ServerOptions {
        self.state_roots.push(("--state-dir", root.to_owned()));
        self
    }

    /// Gives each server a folder inside `root`, on a tmpfs, for jobs with tier `shm`.
    pub fn shm_root(mut self, root: &Path) -> ServerOptions {
        self.state_roots.push(("--shm-dir", root.to_owned()));
        self
    }

    /// Adds flags.
    pub fn args<Text: AsRef<str>>(mut self, arguments: impl IntoIterator<Item = Text>) -> ServerOptions {
        self.arguments.extend(arguments.into_iter().map(|argument| argument.as_ref().to_string()));
        self
    }

    /// Sets a program with its arguments, which replaces itself with the server. Its last arguments are the server's
    /// path and flags.
    pub fn under(mut self, command: &[&str]) -> ServerOptions {
        self.under = command.iter().map(ToString::to_string).collect();
        self
    }

    /// Encrypts TCP, with the certificate and the identities of this folder.
    pub fn tls(self, dir: &Path) -> ServerOptions {
        self.args(["--tls-dir", &dir.display().to_string()])
    }

    /// Allows log lines of level WARN or ERROR that contain `text`.
    pub fn allow(mut self, text: &str) -> ServerOptions {
        self.allowed.push(text.to_string());
        self
    }

    /// Starts a server and waits until it listens.
    pub fn start(self) -> Longshored {
        let (mut options, address) = (self, own_address());
        for (flag, root) in std::mem::take(&mut options.state_roots) {
            let dir = root.join(address.to_string());
            fs::create_dir_all(&dir).expect("a folder for a server's state");
            options = options.args([flag, &dir.display().to_string()]);
        }
        Longshored::start(options, &format!("{address}:0"))
    }

    /// Starts a server at this address and port.
    pub fn start_at(self, listen: &str) -> Longshored {
        Longshored::start(self, listen)
    }
}

/// A server process, killed on drop. Drop also fails the test if the log has a warning that was not allowed.
pub struct Longshored {
    options: ServerOptions,
    address: String,
    pub process: Process,
}

impl Longshored {
    fn start(options: ServerOptions, listen: &str) -> Longshored {
        let mut command = match options.under.split_first() {
            Some((program, rest)) => binaries::under("longshored", program, rest),
            None => binaries::command("longshored"),
        };
        let memory = options.memory.as_deref().unwrap_or("1GiB");
        command.args(["--listen", listen, "--log-format", "json", "--memory", memory]);
        if let Some(isa) = &options.isa {
            command.env("LONGSHORE_ISA", isa);
        }
        if let Some(dir) = &options.checkpoint_dir {
            command.arg("--checkpoint-dir").arg(dir);
        }
        command.args(&options.arguments);
        let process = Process::start(&format!("longshored on {listen}"), &mut command);
        let line = process.line().unwrap_or_default();
        let address = line.strip_prefix("longshored listening on ");
        let address = address.unwrap_or_else(|| panic!("longshored did not say where it listens: {line:?}"));
        Longshored { address: address.to_string(), options, process }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Kills the server with SIGKILL, and starts a new process with the same options at the same address.
    pub fn kill_and_restart(&mut self) {
        self.process.kill();
        self.restart();
    }

    /// Starts a new process with the same options at the same address, after the old one has ended.
    pub fn restart(&mut self) {
        self.check_log();
        let address = self.address.clone();
        *self = Longshored::start(self.options.clone(), &address);
    }

    /// Returns the log's messages with their fields, one for each line.
    pub fn log(&self) -> Vec<Value> {
        self.process.stderr().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    fn check_log(&self) {
        let mut unexpected = String::new();
        for line in self.process.stderr().lines() {
            let level = serde_json::from_str::<Value>(line).map(|value| value["level"].clone());
            let loud = level.map_or(true, |level| level == "WARN" || level == "ERROR");
            // A machine that refuses huge pages must not fail the test.
            let allowed =
                ["huge pages refused"].into_iter().chain(self.options.allowed.iter().map(String::as_str));
            if loud && !allowed.into_iter().any(|text| line.contains(text)) {
                let _ = writeln!(unexpected, "{line}");
            }
        }
        assert!(unexpected.is_empty(), "unexpected in the log of {}:\n{unexpected}", self.address);
    }
}

impl Drop for Longshored {
    fn drop(&mut self) {
        self.process.kill();
        if !thread::panicking() {
            self.check_log();
        }
    }
}

/// Starts `count` servers with the same options.
pub fn servers(count: usize, options: &ServerOptions) -> Vec<Longshored> {
    (0..count).map(|_| options.clone().start()).collect()
}

/// Returns the servers' addresses, in order.
pub fn addresses(servers: &[Longshored]) -> Vec<String> {
    servers.iter().map(|server| server.address().to_string()).collect()
}

/// Returns a loopback address of its own for each server, so that its port is still free at a restart.
/// Outside Linux only 127.0.0.1 answers.
fn own_address() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let all = own_addresses();
    all[NEXT.fetch_add(1, Ordering::Relaxed) as usize % all.len()]
}

/// Returns all addresses that servers of this process's tests listen on.
pub fn own_addresses() -> Vec<Ipv4Addr> {
    if !cfg!(target_os = "linux") {
        return vec![Ipv4Addr::LOCALHOST];
    }
    let [.., high, low] = process::id().to_be_bytes();
    (1..=254).map(|last| Ipv4Addr::new(127, high, low, last)).collect()
}
