//! Runs `longshore train` with a model small enough for a test and large enough for several shards.

use std::{
    ffi::OsStr,
    fs,
    hash::{Hash, Hasher},
    process::Command,
    sync::Arc,
    time::Duration,
};

use tempfile::TempDir;

use crate::{
    binaries, corpus,
    event::{End, Event, Start, Step},
    process::Process,
    undisturbed::Undisturbed,
};

/// A model of one layer of width 128 has 268160 parameters. They fill five blocks, so five shards of the smallest size.
const MODEL: [&str; 10] =
    ["--layers", "1", "--width", "128", "--heads", "2", "--context", "32", "--batch", "4"];

/// A command that can run many times.
#[derive(Clone)]
pub struct Train {
    corpus: Arc<TempDir>,
    servers: Vec<String>,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    allowed: Vec<String>,
    /// The program and first arguments of the command that runs the trainer, such as `nsenter`. The trainer's path and
    /// flags follow.
    under: Vec<String>,
}

impl Train {
    /// Trains on an embedded server, unless `servers` names others.
    pub fn new(steps: u64) -> Train {
        let corpus = Arc::new(tempfile::tempdir().expect("a temporary folder"));
        corpus::write(corpus.path());
        let (servers, arguments, environment) = (Vec::new(), Vec::new(), Vec::new());
        let train = Train { corpus, servers, arguments, environment, allowed: Vec::new(), under: Vec::new() };
        train.args(MODEL).args(["--steps", &steps.to_string(), "--shard-elements", "65536"]).args([
            "--eval-batches",
            "1",
            "--deadline-s",
            "30",
        ])
    }

    /// Adds flags. A repeated flag replaces the earlier one.
    pub fn args<Text: AsRef<str>>(mut self, arguments: impl IntoIterator<Item = Text>) -> Train {
        let mut arguments = arguments.into_iter().map(|argument| argument.as_ref().to_string()).peekable();
        while let Some(flag) = arguments.next() {
            let value = arguments.next_if(|next| !next.starts_with("--"));
            if let Some(at) = self.arguments.iter().position(|known| *known == flag) {
                let end = at + 1 + usize::from(value.is_some());
                self.arguments.drain(at..end);
            }
            self.arguments.push(flag);
            self.arguments.extend(value);
        }
        self
    }

    /// Trains until [`Running::stop`]. The learning rate is constant, so the weights do not depend on the number of
    /// steps to come.
    pub fn endless(self) -> Train {
        self.args(["--steps", "1000000", "--lr-floor", "1"])
    }

    pub fn servers(mut self, servers: &[String]) -> Train {
        self.servers = servers.to_vec();
        self
    }

    /// Sets an environment variable of the process.
    pub fn env(mut self, name: &str, value: &str) -> Train {
        self.environment.push((name.to_string(), value.to_string()));
        self
    }

    /// Allows lines of level WARN that contain `text`.
    pub fn allow(mut self, text: &str) -> Train {
        self.allowed.push(text.to_string());
        self
    }

    /// Sets a program with its arguments, which replaces itself with the trainer.
    pub fn under(mut self, command: &[String]) -> Train {
        self.under = command.to_vec();
        self
    }

    /// Returns the command without `--json`.
    pub fn command(&self) -> Command {
        let mut command = match self.under.split_first() {
            Some((program, rest)) => binaries::under("longshore", program, rest),
            None => binaries::command("longshore"),
        };
        command.arg("train").args(&self.arguments).arg("--data").arg(self.corpus.path());
        if !self.servers.is_empty() {
            command.args(["--servers", &self.servers.join(",")]);
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    pub fn start(&self) -> Running {
        self.start_with::<&str>([])
    }

    /// Starts the command with further flags, such as `--rank` or `--resume`.
    pub fn start_with<Text: AsRef<OsStr>>(&self, more: impl IntoIterator<Item = Text>) -> Running {
        let mut command = self.command();
        command.arg("--json").args(more);
        let process = Process::start("longshore train", &mut command);
        let allowed = self.allowed.clone();
        Running { process, events: Vec::new(), allowed, _corpus: self.corpus.clone() }
    }

    /// Starts all ranks of a job. Rank 0 comes first.
    pub fn start_ranks(&self, ranks: usize) -> Vec<Running> {
        (0..ranks).map(|rank| self.start_with(["--rank", &rank.to_string()])).collect()
    }

    /// Runs to the end of training.
    pub fn run(&self) -> Run {
        self.start().finish()
    }

    /// Returns the result of a run with the same settings that nothing disturbs. All tests share that run.
    ///
    /// # Panics With servers: a remembered run has an embedded server.
    pub fn undisturbed(&self) -> Undisturbed {
        assert!(self.servers.is_empty(), "an undisturbed run is on an embedded server");
        Undisturbed::of(self)
    }

    /// Returns the state hash after `steps` steps of an undisturbed run on an embedded server.
    pub fn hash_after(&self, steps: u64) -> String {
        assert!(self.servers.is_empty(), "an undisturbed run is on an embedded server");
        self.clone().args(["--steps", &steps.to_string()]).run().end.state_hash
    }

    /// Hashes all that decides the bits: flags, variables and text.
    pub(crate) fn hash_into(&self, hasher: &mut impl Hasher) {
        (&self.arguments, &self.environment).hash(hasher);
        let mut files: Vec<_> = fs::read_dir(self.corpus.path()).expect("the corpus").flatten().collect();
        files.sort_by_key(|file| file.file_name());
        for file in files {
            fs::read(file.path()).expect("a text").hash(hasher);
        }
    }
}

/// A training process.
pub struct Running {
    pub process: Process,
    events: Vec<Event>,
    allowed: Vec<String>,
    /// The text to train on. The process reads it at its start, which may be after the drop of its `Train`.
    _corpus: Arc<TempDir>,
}

impl Running {
    /// Returns the next event, or None after the end of stdout.
    pub fn event(&mut self) -> Option<&Event> {
        let line = self.process.line()?;
        let event = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in {line}"));
        self.events.push(event);
        self.events.last()
    }

    /// Reads events until `wanted` returns true.
    ///
    /// # Panics If the process ends before.
    pub fn until(&mut self, what: &str, mut wanted: impl FnMut(&Event) -> bool) -> &Event {
        loop {
            match self.event() {
                Some(event) if wanted(event) => break,
                Some(_) => {}
                None => panic!("the worker ended before {what}"),
            }
        }
        &self.events[self.events.len() - 1]
    }

    pub fn until_started(&mut self) -> &Event {
        self.until("its first event", |event| matches!(event, Event::Start(_)))
    }

    /// Returns the step that the process begins with.
    pub fn until_started_at(&mut self) -> u64 {
        match self.until_started() {
            Event::Start(start) => start.first_step,
            _ => unreachable!("what was waited for"),
        }
    }

    /// Reads events until the decision on step `least` or a later step.
    pub fn until_step(&mut self, least: u64) {
        self.until(
            &format!("step {least}"),
            |event| matches!(event, Event::Step(step) if step.step >= least),
        );
    }

    /// Reads events until `count` more steps are decided.
    pub fn until_steps(&mut self, count: u64) {
        for _ in 0..count {
            self.until("its next step", |event| matches!(event, Event::Step(_)));
        }
    }

    /// Kills the process with SIGKILL. Returns its output so far.
    pub fn kill(mut self) -> Said {
        self.process.kill();
        while self.event().is_some() {}
        Said { events: std::mem::take(&mut self.events) }
    }

    /// Waits for the end of a successful run.
    pub fn finish(self) -> Run {
        Run::from(self.done())
    }

    /// Waits for the successful end of a rank that prints no end event, as ranks other than 0.
    pub fn done(self) -> Said {
        self.ended(0)
    }

    /// Sends SIGTERM, upon which the run finishes its current step. Returns the event of its end.
    pub fn stop(self) -> End {
        self.process.terminate();
        let mut said = self.ended(143);
        match said.events.pop() {
            Some(Event::End(end)) => end,
            last => panic!("a stopped run ends with its results, and not with {last:?}"),
        }
    }

    fn ended(mut self, wanted: i32) -> Said {
        while self.event().is_some() {}
        let (code, stderr) = (self.process.code(), self.process.stderr());
        assert_eq!(code, wanted, "the worker failed: {stderr}");
        let loud = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
        // A busy machine may make a worker report a slow wait, which must not fail the test.
        let slow = |line: &&str| line.contains("still waiting");
        let allowed = |line: &&str| slow(line) || self.allowed.iter().any(|text| line.contains(text));
        let unexpected = stderr.lines().filter(loud).any(|line| !allowed(&line));
        assert!(!unexpected, "unexpected of a worker: {stderr}");
        Said { events: std::mem::take(&mut self.events) }
    }

    /// Waits for the end of a run that must fail with code 1. Returns its stderr and its events.
    pub fn fails(mut self, deadline: Duration) -> (String, Said) {
        let code = self.process.wait(deadline).code();
        assert_eq!(code, Some(1), "the worker should have failed with code 1");
        while self.event().is_some() {}
        (self.process.stderr(), Said { events: std::mem::take(&mut self.events) })
    }
}

/// All output of a process.
pub struct Said {
    pub events: Vec<Event>,
}

impl Said {
    pub fn start(&self) -> Option<&Start> {
        self.events.iter().find_map(|event| if let Event::Start(start) = event { Some(start) } else { None })
    }

    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.events.iter().filter_map(|event| if let Event::Step(step) = event { Some(step) } else { None })
    }

    /// Returns the number of the last decided step that the process printed; 0 without one.
    pub fn last_step(&self) -> u64 {
        self.steps().last().map_or(0, |step| step.step)
    }

    /// Checks that step numbers are consecutive, from the first step of `start`. A run that joins again prints another
    /// start event.
    pub fn check_steps(&self) {
        let mut expected = None;
        for event in &self.events {
            match (event, expected) {
                (Event::Start(start), _) => expected = Some(start.first_step),
                (Event::Step(step), Some(next)) => {
                    assert_eq!(step.step, next, "steps must follow one another");
                    expected = Some(next + 1);
                }
                _ => {}
            }
        }
    }
}

/// A finished run.
pub struct Run {
    pub said: Said,
    pub start: Start,
    pub end: End,
}

impl Run {
    /// Waits for the end of all ranks, and returns rank 0's run.
    pub fn of_ranks(ranks: Vec<Running>) -> Run {
        let mut said = ranks.into_iter().map(Running::done);
        let first = said.next().expect("rank 0");
        said.for_each(drop);
        Run::from(first)
    }
}

impl From<Said> for Run {
    /// # Panics If a step is missing.
    fn from(said: Said) -> Run {
        let start = said.start().cloned().expect("a start event");
        let end =
            said.events.iter().find_map(|event| if let Event::End(end) = event { Some(end) } else { None });
        let end = end.cloned().expect("an end event");
        said.check_steps();
        let last = if start.first_step > start.steps { 0 } else { start.steps };
        assert_eq!(said.last_step(), last, "the last step must be said too");
        assert_eq!(end.version, start.steps);
        Run { said, start, end }
    }
}
