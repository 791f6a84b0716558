//! The command line: subcommands with their flags, and the dispatch to their code.

mod admin;
mod bench;
mod export;
mod inspect;
mod manual;
mod plan;
mod restore;
mod scale;
mod status;
mod tls;
mod trace;

use std::path::PathBuf;

use clap::{ArgMatches, CommandFactory, Parser, Subcommand};
use longshore_proto::Fault;
use longshore_server::{
    config::{
        ConfigError, check_variables, parse_log_filter,
        retired::{DURABILITY, Retired},
    },
    log,
};
use tracing_subscriber::filter::Targets;

use self::trace::{TraceFlag, Traced};
use crate::{
    access::{Access, JobArgs, ServersArgs},
    clusters::{self, Given, Wanted, choose},
    doctor::Look,
    import,
    output::{Output, wrong_use},
    top,
    train::{self, Flags, Settings},
};

/// Exit codes, shown after every command's help. tests/tests/output.rs checks that docs/cli.md says the same.
const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  an error, which the last line on stderr explains; of doctor, inspect and plan also: something is not as it should be
  2  wrong arguments, variables or config file: nothing was tried
  130, 143  `train` or `export` was stopped by SIGINT or SIGTERM, and the last line on stderr says how to go on";

const HYPER: &str = "leave it out: the trainer has betas of 0.9 and 0.95 and an eps of 1e-8; PyTorch's optimizers take others";
const SCALER: &str =
    "leave it out: a dynamic scale begins at 65536, and doubles after 1000 steps without overflow";
const SAMPLE: &str = "write the weights with --export, and generate text with a library that reads them";

/// Flags of earlier releases, each with its replacement. Rows stay for one release.
pub const RETIRED: [Retired; 25] = [
    ("beta1", HYPER),
    ("beta2", HYPER),
    ("compute-of-transfer", "give the compute of a step with --compute-ms"),
    ("correction", "leave it out of `plan`: a server takes the same memory with and without it"),
    ("device-budget", "measure a model cut into units with longshore.shard in PyTorch"),
    ("durability", DURABILITY),
    ("during-update", "measure transfers and updates together with `longshore bench step`"),
    ("eps", HYPER),
    ("loss-scale-hysteresis", SCALER),
    ("loss-scale-initial", SCALER),
    ("loss-scale-min", SCALER),
    ("loss-scale-window", SCALER),
    ("pause-deadline-s", "leave it out: a paused job waits an hour for `longshore resume`"),
    ("newer-from", "leave it out: all micro-steps of a delayed step compute with the same weights"),
    (
        "format",
        "leave it out for safetensors, or call longshore.checkpoint.save_deepspeed(optimizer, FOLDER) in Python",
    ),
    ("init-on-servers", "leave it out: rank 0 makes and uploads the weights parameter by parameter"),
    (
        "optimizer",
        "call optimizer.load_state_dict(torch.load(FILE)) or longshore.checkpoint.save_torch(optimizer, FILE) in Python",
    ),
    ("otlp", "write one process's stages with --trace FILE, and scrape the metrics of `longshored --http`"),
    ("stage", "train a model larger than the device with longshore.shard in PyTorch"),
    ("prompt", SAMPLE),
    ("sample-bytes", SAMPLE),
    (
        "step",
        "count with --steps in `train`, and pass step= to longshore.checkpoint.load_deepspeed(optimizer, FOLDER) in Python",
    ),
    ("tensorboard", "print the losses with --plot, or write the events of --json with the tool you use"),
    ("temperature", SAMPLE),
    ("unchecked", "leave it out: gradients are always checked, and a step that overflows is skipped"),
];

/// Trains models whose optimizer state lives on servers.
#[derive(Parser)]
#[command(name = "longshore", version, propagate_version = true, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    output: Output,
    /// The client's config file, with clusters by name [default: longshore/config.toml in ~/.config]
    #[arg(long, global = true, env = "LONGSHORE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Messages to log on stderr, as in info or longshore_worker=debug
    #[arg(long, global = true, env = "LONGSHORE_LOG", default_value = "warn", value_name = "FILTER", value_parser = parse_log_filter)]
    log: Targets,
}

#[derive(Subcommand)]
enum Command {
    /// Train a byte-level GPT on the text files of a folder
    ///
    /// Without --servers an optimizer server is started inside this process, and spoken to over the same gRPC.
    Train(Box<Traced<Flags>>),
    /// Say what a job will take of its servers: DRAM, drives and their wear
    Plan(Box<plan::Args>),
    /// Show the jobs of servers: version, state hash, who waits for whom
    ///
    /// A server that does not answer is named, the others are shown, and the exit code is 1.
    Status(status::Args),
    /// Watch the jobs of servers in this terminal: speed, loss, who waits for whom, what is wrong and what to do
    Top(top::Args),
    /// Write a checkpoint of a running job
    Checkpoint(admin::CheckpointArgs),
    /// List the checkpoints of a job
    Checkpoints(JobArgs),
    /// Fill a job from a checkpoint, and open it first where it is not open
    ///
    /// All servers or none: a job starts once every one has loaded its part. Asking again after an error or a lost connection
    /// goes on from there. State that servers hold is left alone unless --discard-state is given.
    Restore(restore::Args),
    /// Write a job's weights as Hugging Face style safetensors, while training goes on
    Export(export::Args),
    /// Fill a new job with weights from files, before any trainer runs
    ///
    /// The command takes rank 0, so that a trainer which is filling the job is fenced.
    Import(import::Args),
    /// Train on other servers: shards move while training goes on, or after all ranks have ended
    Scale(scale::Args),
    /// Let a paused job go on
    Resume(admin::ResumeArgs),
    /// Take back the last step on every server, as when a drive has lost a part of the newest version (tier nvme)
    StepBack(admin::StepBackArgs),
    /// Forget a job and free its memory; its checkpoints stay
    Delete(admin::DeleteArgs),
    /// Finish the step in hand on each server and stop it; returns once that is done
    Drain(ServersArgs),
    /// Show what a state directory holds, and verify all of it; no server may be using it
    Inspect(inspect::Args),
    /// Check this host and servers for what Longshore needs of them
    Doctor(Look),
    /// Make the certificates and tokens of a cluster
    #[command(subcommand)]
    Tls(tls::Tls),
    /// List the clusters of the config file
    Clusters,
    /// Print a script that completes commands and flags in a shell
    Completions(manual::CompletionsArgs),
    /// Write the manual pages of longshore and longshored
    Man(manual::ManArgs),
    /// Measure this host
    #[command(subcommand)]
    Bench(bench::Bench),
}

impl Command {
    fn trace(&self) -> Option<&TraceFlag> {
        match self {
            Command::Train(args) => Some(&args.trace),
            Command::Bench(bench) => bench.trace(),
            _ => None,
        }
    }

    /// Returns the command's flags of servers and access, and its need of servers. None for commands without
    /// servers.
    fn servers(&mut self) -> Option<((&mut Vec<String>, &mut Access), Wanted)> {
        let needed = match self {
            Command::Status(args) => &mut args.servers,
            Command::Top(args) => &mut args.servers,
            Command::Checkpoint(args) => &mut args.target.servers,
            Command::Checkpoints(target) => &mut target.servers,
            Command::Restore(args) => &mut args.target.servers,
            Command::Export(args) => &mut args.target.servers,
            Command::Import(args) => &mut args.servers,
            Command::Resume(args) => &mut args.target.servers,
            Command::Scale(args) => &mut args.target.servers,
            Command::StepBack(args) => &mut args.target.servers,
            Command::Delete(args) => &mut args.servers,
            Command::Drain(args) => args,
            Command::Train(args) => return Some((args.args.elsewhere(), Wanted::Optional)),
            Command::Doctor(look) => {
                return Some(((&mut look.servers, &mut look.access), Wanted::Optional));
            }
            Command::Plan(args) => return Some((args.elsewhere(), Wanted::ByFlag)),
            Command::Bench(bench) => return Some((bench.elsewhere()?, Wanted::ByFlag)),
            Command::Inspect(_) | Command::Tls(_) | Command::Clusters => return None,
            Command::Completions(_) | Command::Man(_) => return None,
        };
        Some(((&mut needed.servers, &mut needed.access), Wanted::Needed))
    }
}

impl Cli {
    pub(crate) fn output(&self) -> Output {
        self.output
    }

    /// Replaces a cluster's name by its servers.
    ///
    /// # Errors
    /// If the name or the config file cannot be used, or if no servers are named at all.
    pub(crate) fn settle(&mut self, matches: &ArgMatches) -> Result<(), Fault> {
        let given = given(matches);
        let Some(((servers, access), wanted)) = self.command.servers() else { return Ok(()) };
        choose(servers, access, (given, wanted), self.config.as_deref())
    }

    pub fn run(self) -> anyhow::Result<()> {
        // Dropping the guard writes the trace.
        let flags = self.command.trace();
        let (stages, _trace) =
            flags.and_then(|flags| flags.trace.as_deref()).map(trace::to).transpose()?.unzip();
        log::init(log::LogFormat::Text, self.log, stages);
        let out = self.output;
        match self.command {
            Command::Train(args) => train::run(&Settings::new(args.args, out).map_err(wrong_use)?),
            Command::Plan(args) => plan::run(&args, out),
            Command::Status(args) => status::run(&args, out),
            Command::Top(args) => top::run(&args, out),
            Command::Checkpoint(args) => admin::checkpoint(&args, out),
            Command::Checkpoints(target) => admin::checkpoints(&target, out),
            Command::Restore(args) => restore::run(&args, out),
            Command::Export(args) => export::run(&args, out),
            Command::Import(args) => import::run(&args, out),
            Command::Inspect(args) => inspect::run(&args, out),
            Command::Resume(args) => admin::resume(&args, out),
            Command::Scale(args) => scale::run(&args, out),
            Command::StepBack(args) => admin::step_back(&args, out),
            Command::Delete(args) => admin::delete(&args, out),
            Command::Drain(args) => admin::drain(&args, out),
            Command::Doctor(look) => look.run(out),
            Command::Tls(tls) => tls.run(out),
            Command::Clusters => clusters::list(self.config.as_deref(), out),
            Command::Completions(args) => {
                manual::completions(&Cli::command(), &args, out);
                Ok(())
            }
            Command::Man(args) => manual::man(&Cli::command(), &args, out),
            Command::Bench(bench) => bench.run(out),
        }
    }
}

fn given(matches: &ArgMatches) -> Given {
    let mut leaf = matches;
    while let Some((_, below)) = leaf.subcommand() {
        leaf = below;
    }
    let source = |name: &str| {
        let is_there = leaf.ids().any(|id| id.as_str() == name);
        is_there.then(|| leaf.value_source(name)).flatten()
    };
    // `plan --servers` is a number. The servers to which a plan measures the link have another flag.
    let servers = source("probe_servers").or_else(|| source("servers"));
    Given { servers, cluster: source("cluster") }
}

const PREFIX: &str = "LONGSHORE_";
/// Variables without a flag: those that the update kernels of an embedded server read, and those of tests.
const NO_FLAGS: [&str; 8] = [
    "LONGSHORE_ISA",
    "LONGSHORE_BIN_DIR",
    "LONGSHORE_TEST_PYTHON",
    "LONGSHORE_TEST_SKIPPED",
    "LONGSHORE_SOAK",
    "LONGSHORE_SEED",
    "LONGSHORE_CACHE",
    "LONGSHORE_SKIP_PACKAGE",
];

/// Checks the process's environment variables.
///
/// # Errors
/// `UnknownVariable` for the first variable that starts with `LONGSHORE_` and belongs to no flag.
pub fn check_environment() -> Result<(), ConfigError> {
    let command = Cli::command();
    let mut known = NO_FLAGS.to_vec();
    collect(&command, &mut known);
    let names = std::env::vars_os().map(|(name, _)| name.to_string_lossy().into_owned());
    check_variables(PREFIX, (&known, &RETIRED), names)
}

fn collect<'a>(command: &'a clap::Command, known: &mut Vec<&'a str>) {
    known.extend(command.get_arguments().filter_map(|flag| flag.get_env()?.to_str()));
    command.get_subcommands().for_each(|command| collect(command, known));
}
