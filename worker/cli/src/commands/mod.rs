//! The command line: what each command takes, and where it goes.

mod admin;
mod bench;
mod doctor;
mod environment;
mod export;
mod import;
mod inspect;
mod plan;
mod restore;
mod status;
mod tls;
mod trace;
mod train;

use clap::{Parser, Subcommand};
use longshore_server::{log, otlp};

pub use self::environment::check_environment;
use self::trace::TraceFlag;

/// Trains models whose optimizer state lives on servers.
#[derive(Parser)]
#[command(name = "longshore", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What to log on stderr, as in info or longshore_worker=debug
    #[arg(long, global = true, env = "LONGSHORE_LOG", default_value = "warn", value_name = "FILTER")]
    log: String,
}

#[derive(Subcommand)]
enum Command {
    /// Train a byte-level GPT on the text files of a folder
    ///
    /// Without --servers an optimizer server is started inside this process, and spoken to over the same gRPC.
    Train(Box<train::Args>),
    /// Say what a job will take of its servers: DRAM, drives and their wear
    Plan(Box<plan::Args>),
    /// Show the jobs of servers: version, state hash, who waits for whom
    ///
    /// A server that does not answer is named, the others are shown, and the exit code is 1.
    Status(status::Args),
    /// Write a checkpoint of a running job
    Checkpoint(admin::CheckpointArgs),
    /// List the checkpoints of a job
    Checkpoints(admin::CheckpointsArgs),
    /// Fill a job from a checkpoint, and open it first where it is not open
    ///
    /// All servers or none: a job starts once every one has loaded its part. Asking again after an error or a lost connection
    /// goes on from there. State that servers hold is left alone unless --discard-state is given.
    Restore(restore::Args),
    /// Write a job's weights as Hugging Face style safetensors, while training goes on
    Export(export::Args),
    /// Fill a new job with the weights of safetensors files, before any trainer runs
    ///
    /// It takes rank 0, so that a trainer which is filling the job is fenced. Optimizer state of torch or DeepSpeed is read by
    /// the Python package: longshore.checkpoint.
    Import(import::Args),
    /// Let a paused job go on
    Resume(admin::ResumeArgs),
    /// Take back the last step on every server, as when a drive has lost a part of the newest version (tier nvme)
    StepBack(admin::StepBackArgs),
    /// Forget a job and free its memory; its checkpoints stay
    Delete(admin::DeleteArgs),
    /// Finish the step in hand on each server and stop it
    Drain(admin::ServersArgs),
    /// Show what a state directory holds, and verify all of it; no server may be using it
    Inspect(inspect::Args),
    /// Check this host and servers for what Longshore needs of them
    Doctor(doctor::Args),
    /// Make the certificates and tokens of a cluster
    #[command(subcommand)]
    Tls(tls::Tls),
    /// Measure this host
    #[command(subcommand)]
    Bench(bench::Bench),
}

impl Command {
    fn trace(&self) -> Option<&TraceFlag> {
        match self {
            Command::Train(args) => Some(args.trace()),
            Command::Bench(bench) => bench.trace(),
            _ => None,
        }
    }
}

impl Cli {
    pub fn run(self) -> anyhow::Result<()> {
        // The guards are kept to the end, when the trace is written out and the last spans are sent.
        let flags = self.command.trace();
        let (stages, _trace) =
            flags.and_then(|flags| flags.trace.as_deref()).map(trace::to).transpose()?.unzip();
        let collector = flags.and_then(|flags| flags.otlp.as_deref());
        let (spans, _export) = collector.map(|at| otlp::export(at, "longshore")).transpose()?.unzip();
        log::init(log::LogFormat::Text, &self.log, stages.into_iter().chain(spans).collect());
        match self.command {
            Command::Train(args) => train::run(*args),
            Command::Plan(args) => plan::run(&args),
            Command::Status(args) => status::run(&args),
            Command::Checkpoint(args) => admin::checkpoint(&args),
            Command::Checkpoints(args) => admin::checkpoints(&args),
            Command::Restore(args) => restore::run(&args),
            Command::Export(args) => export::run(&args),
            Command::Import(args) => import::run(&args),
            Command::Inspect(args) => inspect::run(&args),
            Command::Resume(args) => admin::resume(&args),
            Command::StepBack(args) => admin::step_back(&args),
            Command::Delete(args) => admin::delete(&args),
            Command::Drain(args) => admin::drain(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Tls(tls) => tls.run(),
            Command::Bench(bench) => bench.run(),
        }
    }
}
