//! Shows a run: a bar on a terminal, plain lines on a pipe, one JSON object a line for programs.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal},
    path::PathBuf,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};
use longshore_proto::{Formats, Step, legible, legible_lines};
use longshore_worker::pipeline::StepOutcome;
use serde_json::json;

use super::{plot::plot, settings::Settings, text::Summary};
use crate::{output::print, sizes::human};

/// The most plain lines of a whole run, so that a log stays readable.
const PLAIN_LINES: u64 = 40;

enum Output {
    Bar(ProgressBar),
    Plain,
    Json,
    /// Ranks other than 0 show nothing.
    Silent,
}

/// Shows a run's events, and keeps the data of its summary.
pub(super) struct Report {
    output: Output,
    steps: u64,
    tokens_per_step: u64,
    losses: BTreeMap<Step, f32>,
    started: Instant,
    done: u64,
    exposed: Duration,
    wall: Duration,
    pushed: u64,
    pulled: u64,
    skipped: u64,
    last_shown: Option<Instant>,
    curve: Vec<(u64, f32)>,
    settings: Settings,
    servers: Vec<String>,
    embedded: bool,
}

/// The subject of a run, shown before its first step.
pub(super) struct Opening<'a> {
    pub(super) parameters: u64,
    pub(super) shards: u32,
    pub(super) text: Summary,
    pub(super) first_step: u64,
    pub(super) device: &'a str,
}

/// The lasting results of a run.
pub(super) struct Kept {
    pub(super) export: Option<PathBuf>,
    pub(super) checkpoint: Option<String>,
    /// Places of the weights, a line each.
    pub(super) lines: Vec<String>,
    /// True if the weights are lost: an embedded server kept them in memory and ends now.
    pub(super) gone: bool,
    pub(super) failure: Option<anyhow::Error>,
}

pub(super) struct Ending {
    pub(super) first_loss: Option<f32>,
    pub(super) host_peak: u64,
    pub(super) version: u64,
    pub(super) state_hash: String,
    pub(super) validation_loss: f32,
    pub(super) device: String,
    pub(super) device_peak: u64,
    pub(super) server_bytes: u64,
}

impl Report {
    pub(super) fn new(
        rank: u32,
        settings: &Settings,
        tokens_per_step: u64,
        (servers, embedded): (&[String], bool),
    ) -> Report {
        let steps = settings.flags.steps;
        let output = match (rank, settings.out.is_json()) {
            (0, true) => Output::Json,
            (0, false) if io::stdout().is_terminal() && io::stderr().is_terminal() => Output::Bar(bar(steps)),
            (0, false) => Output::Plain,
            _ => Output::Silent,
        };
        Report {
            output,
            steps,
            tokens_per_step,
            losses: BTreeMap::new(),
            started: Instant::now(),
            done: 0,
            exposed: Duration::ZERO,
            wall: Duration::ZERO,
            pushed: 0,
            pulled: 0,
            skipped: 0,
            last_shown: None,
            curve: Vec::new(),
            settings: settings.clone(),
            servers: servers.to_vec(),
            embedded,
        }
    }

    pub(super) fn opening(&mut self, opening: &Opening<'_>) {
        let Opening { parameters, shards, text, first_step, device } = *opening;
        let job = &self.settings.job;
        if let Output::Json = self.output {
            self.json(&json!({
                "event": "start", "job": job.as_str(), "parameters": parameters, "shards": shards,
                "servers": self.servers, "embedded": self.embedded, "files": text.files,
                "train_bytes": text.train_bytes, "validation_bytes": text.validation_bytes,
                "first_step": first_step, "steps": self.steps, "device": device,
            }));
            return;
        }
        let place = if self.embedded { "an embedded server".to_string() } else { self.servers.join(", ") };
        self.line(&format!(
            "job {job}: {:.2} M parameters in {shards} shards on {place} ({device})",
            parameters as f64 / 1e6
        ));
        self.line(&format!(
            "text: {} files, {} to train on, {} to validate with",
            text.files,
            human(text.train_bytes as u64),
            human(text.validation_bytes as u64)
        ));
        if first_step > 1 {
            self.line(&format!("continuing at step {first_step} of {}", self.steps));
        }
        if let Output::Bar(bar) = &self.output {
            bar.set_position(first_step - 1);
        }
        self.started = Instant::now();
    }

    /// Notes the loss of a step. The loss is shown once the step is decided.
    pub(super) fn loss(&mut self, step: Step, loss: f32) {
        self.losses.insert(step, loss);
    }

    pub(super) fn decided(&mut self, outcomes: Vec<StepOutcome>) {
        for outcome in outcomes {
            let loss = self.losses.remove(&outcome.step).unwrap_or(f32::NAN);
            self.done += 1;
            self.skipped += u64::from(outcome.skip);
            self.exposed += outcome.timing.exposed;
            self.wall += outcome.timing.wall;
            self.pushed += outcome.timing.pushed_bytes;
            self.pulled += outcome.timing.pulled_bytes;
            self.curve.push((outcome.step.0, loss));
            self.step(&outcome, loss);
        }
    }

    fn step(&mut self, outcome: &StepOutcome, loss: f32) {
        let step = outcome.step.0;
        let seconds = outcome.timing.wall.as_secs_f64().max(1e-9);
        let tokens = self.tokens_per_step as f64 / seconds;
        let exposed = outcome.timing.exposed.as_secs_f64() * 1e3;
        let text = format!("loss {loss:.3}  {tokens:.0} tokens/s  exposed {exposed:.1} ms");
        if outcome.skip {
            let tensor = outcome.overflow.as_deref().unwrap_or("an unknown tensor");
            self.note(&format!(
                "step {step} skipped: overflow in {tensor}; loss scale now {}",
                outcome.loss_scale_next
            ));
        }
        match &self.output {
            Output::Bar(bar) => {
                bar.set_position(step);
                bar.set_message(text);
            }
            Output::Plain => {
                let every = self.steps.div_ceil(PLAIN_LINES).max(1);
                // Slow runs print at least a line in 10 s.
                let late = self.last_shown.is_none_or(|shown| shown.elapsed() > Duration::from_secs(10));
                if step.is_multiple_of(every) || step == self.steps || late {
                    self.last_shown = Some(Instant::now());
                    self.line(&format!("step {step:>5} of {}  {text}", self.steps));
                }
            }
            Output::Json => self.json(&json!({
                "event": "step", "step": step, "loss": loss, "tokens_per_s": tokens, "exposed_ms": exposed,
                "step_ms": seconds * 1e3, "norm": outcome.norm, "clip": outcome.clip_coefficient,
                "skip": outcome.skip, "overflow": outcome.overflow, "loss_scale": outcome.loss_scale,
                "read_version": outcome.read.0, "pushed_bytes": outcome.timing.pushed_bytes,
                "pulled_bytes": outcome.timing.pulled_bytes,
            })),
            Output::Silent => {}
        }
    }

    pub(super) fn validation(&mut self, version: u64, loss: f32) {
        match self.output {
            Output::Json => self.json(&json!({"event": "validation", "version": version, "loss": loss})),
            _ => self.line(&format!("validation loss at version {version}: {loss:.3} nats per byte")),
        }
    }

    pub(super) fn checkpoint(&mut self, name: &str, version: u64) {
        match self.output {
            Output::Json => self.json(&json!({"event": "checkpoint", "name": name, "version": version})),
            _ => self.line(&format!("checkpoint {name} of version {version}")),
        }
    }

    /// Shows a note to the user, on stderr if a program reads stdout.
    pub(super) fn note(&self, text: &str) {
        let text = &*legible(text);
        match &self.output {
            Output::Json | Output::Silent => say_aside!("longshore: {text}"),
            _ => self.line(text),
        }
    }

    pub(super) fn ending(&mut self, ending: &Ending, left: &Kept) {
        if let Output::Bar(bar) = &self.output {
            bar.finish_and_clear();
        }
        let (formats, device_budget) = (self.settings.flags.formats(), self.settings.flags.device_budget());
        let steps = self.done.max(1);
        let per_step = |bytes: u64| bytes / steps;
        let exposed_ms = self.exposed.as_secs_f64() * 1e3 / steps as f64;
        let step_ms = self.wall.as_secs_f64() * 1e3 / steps as f64;
        if let Output::Json = self.output {
            self.json(&json!({
                "event": "end", "version": ending.version, "state_hash": ending.state_hash,
                "validation_loss": ending.validation_loss, "first_validation_loss": ending.first_loss,
                "steps": self.done, "skipped": self.skipped,
                "seconds": self.started.elapsed().as_secs_f64(), "step_ms": step_ms, "exposed_ms": exposed_ms,
                "state_format": formats.state.name(), "master_format": formats.master.name(),
                "device": ending.device, "device_peak_bytes": ending.device_peak, "device_budget_bytes": device_budget,
                "server_bytes": ending.server_bytes, "host_peak_bytes": ending.host_peak,
                "pushed_bytes_per_step": per_step(self.pushed), "pulled_bytes_per_step": per_step(self.pulled),
                "export": left.export, "checkpoint": left.checkpoint, "weights_gone": left.gone,
            }));
            return;
        }
        let budget = match device_budget {
            Some(budget) => format!("of a budget of {}", human(budget)),
            None => "no budget set (--device-budget)".to_string(),
        };
        let before = ending.first_loss.map(|loss| format!("{loss:.3} -> ")).unwrap_or_default();
        let servers = match self.servers.len() {
            1 => "1 server".to_string(),
            several => format!("{several} servers"),
        };
        let percent = if step_ms > 0.0 { 100.0 * exposed_ms / step_ms } else { 0.0 };
        if self.settings.flags.plot || matches!(self.output, Output::Bar(_)) {
            self.line("");
            self.line("loss of each step");
            plot(&self.curve).iter().for_each(|line| self.line(line));
        }
        self.line("");
        self.line(&format!("validation loss   {before}{:.3} nats per byte", ending.validation_loss));
        let seconds = self.started.elapsed().as_secs_f64();
        if self.done == 0 {
            self.line(&format!("time              {seconds:.1} s, without a step"));
        } else {
            self.line(&format!(
                "time              {seconds:.1} s for {} steps, {:.0} tokens/s, {} skipped",
                self.done,
                self.tokens_per_step as f64 * 1e3 / step_ms.max(1e-9),
                self.skipped
            ));
            self.line(&format!(
                "a step            {step_ms:.1} ms, of which exposed {exposed_ms:.1} ms ({percent:.1}%)"
            ));
        }
        self.line("where the bytes lived");
        self.line(&format!(
            "  device          {}: peak {}, {budget}",
            ending.device,
            human(ending.device_peak)
        ));
        self.line(&format!(
            "  worker's host   peak {} of weights under way and gradients kept",
            human(ending.host_peak)
        ));
        self.line(&format!(
            "  servers         {} on {servers}: {}, images, gradients, transfers",
            human(ending.server_bytes),
            kept(formats)
        ));
        if self.done > 0 {
            self.line(&format!(
                "  on the wire     {} pushed and {} pulled a step",
                human(per_step(self.pushed)),
                human(per_step(self.pulled))
            ));
        }
        self.line(&format!("state hash        {} at version {}", ending.state_hash, ending.version));
        left.lines.iter().for_each(|line| self.line(line));
        if self.embedded {
            self.line("");
            self.line("next: start `longshored` on each node, and train with --servers HOST:PORT,... to keep the job when workers die");
        }
    }

    fn json(&self, value: &serde_json::Value) {
        print(&value.to_string());
    }

    fn line(&self, text: &str) {
        let text = legible_lines(text);
        match &self.output {
            Output::Bar(bar) if !bar.is_finished() => bar.println(text),
            Output::Bar(_) | Output::Plain => print(&text),
            Output::Json | Output::Silent => {}
        }
    }
}

fn kept(formats: Formats) -> String {
    match formats.is_fp32() {
        true => "master weights, Adam state".to_string(),
        false => format!("{} master weights, {} Adam state", formats.master, formats.state),
    }
}

fn bar(steps: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} step {pos} of {len}  {msg}  {eta} left");
    ProgressBar::new(steps).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
