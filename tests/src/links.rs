//! Hosts of their own on one machine: network namespaces, and links between them with a rate, a delay and random loss.
//! A test cuts a link one way and mends it.
//!
//! `links.py` carries the packets. The relay needs root, /dev/net/tun, and the programs `ip` and `nsenter`.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use crate::{
    binaries,
    command::{self, Output},
    server::{Longshored, ServerOptions},
};

const RELAY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/links.py");
const PORT: u16 = 7070;

/// Hosts and their links. Drop ends both, and processes on the hosts lose their network.
pub struct Links {
    relay: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    namespaces: Vec<String>,
}

impl Links {
    /// Makes hosts. `seed` decides which packets are lost.
    ///
    /// # Errors
    /// The reason why this machine has no such hosts.
    pub fn between(hosts: usize, seed: u64) -> Result<Links, String> {
        let is_there = Command::new("nsenter").arg("--version").output().is_ok();
        if !is_there {
            return Err("there is no nsenter".to_string());
        }
        let mut relay = Command::new("python3");
        relay.args([RELAY, &hosts.to_string(), &seed.to_string()]);
        relay.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
        let mut relay = relay.spawn().map_err(|error| format!("python3: {error}"))?;
        let commands = relay.stdin.take().expect("stdin is a pipe");
        let answers = BufReader::new(relay.stdout.take().expect("stdout is a pipe"));
        let mut links = Links { relay, commands, answers, namespaces: Vec::new() };
        let first = links.answer();
        match first.strip_prefix("cannot ") {
            Some(reason) => Err(format!("no links between namespaces: {reason}")),
            None => {
                links.namespaces = first.split_whitespace().map(str::to_string).collect();
                Ok(links)
            }
        }
    }

    /// Sets each link's rate in bytes a second, its delay one way in seconds, and the fraction of packets lost.
    pub fn set(&mut self, rate: f64, delay: f64, loss: f64) {
        for (name, value) in [("rate", rate), ("delay", delay), ("loss", loss)] {
            self.ask(&format!("{name} {value}"));
        }
    }

    /// Drops every packet from one host to another, until [`Links::mend`].
    pub fn cut(&mut self, from: usize, to: usize) {
        self.ask(&format!("cut {from} {to}"));
    }

    pub fn mend(&mut self, from: usize, to: usize) {
        self.ask(&format!("mend {from} {to}"));
    }

    fn ask(&mut self, command: &str) -> String {
        // A single write, so that the relay never reads half a line.
        self.commands.write_all(format!("{command}\n").as_bytes()).expect("the relay takes commands");
        self.answer()
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.answers.read_line(&mut line).expect("the relay answers");
        line.trim().to_string()
    }

    /// Returns a program with a flag. Its further arguments are a command, which runs on the host.
    pub fn on(&self, host: usize) -> [String; 2] {
        ["nsenter".to_string(), format!("--net={}", self.namespaces[host])]
    }

    /// Starts a server on a host.
    pub fn serve(&self, host: usize, options: ServerOptions) -> Longshored {
        let [program, flag] = self.on(host);
        options
            .under(&[&program, &flag])
            .args(["--insecure"])
            .start_at(&format!("10.77.0.{}:{PORT}", host + 1))
    }

    /// Runs `longshore` on a host to its end.
    pub fn longshore(&self, host: usize, arguments: &[&str]) -> Output {
        let [program, flag] = self.on(host);
        command::run("longshore", binaries::under("longshore", &program, &[flag]).args(arguments))
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let _ = self.relay.kill();
        let _ = self.relay.wait();
    }
}
