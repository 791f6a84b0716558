//! `longshore bench`: speeds of this host, beside their limits.

use super::trace::TraceFlag;
use crate::{
    access::Access,
    bench::{self, step, storage, update, wire},
    output::Output,
    sizes::parse_count,
};

#[derive(clap::Subcommand)]
pub(super) enum Bench {
    /// The optimizer update against the memory traffic it must cause
    ///
    /// Every case runs beside a loop that moves the same bytes, in the same blocks and on the same threads, once with
    /// one thread and once with all. See docs/update.md.
    Update(UpdateArgs),
    /// Push and pull over TCP and a Unix socket, beside raw sockets with as many connections
    Wire(wire::Args),
    /// Whole steps of a worker whose compute is a timed wait, beside what bounds them
    Step(Box<Traced<step::Args>>),
    /// The nvme tier beside a bare loop of the same reads and writes on the same drives
    Storage(storage::Args),
}

#[derive(clap::Args)]
pub(super) struct UpdateArgs {
    /// Parameters, as in 200M [default: 200M, or what half of the available memory holds]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    params: Option<u64>,
    /// Passes over all parameters; medians are shown
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Only cases whose name contains this, as in adamw/bf16
    #[arg(long, default_value = "", value_name = "TEXT", hide_default_value = true)]
    filter: String,
    /// Every rule in every format on every instruction set, not AdamW alone
    #[arg(long)]
    all: bool,
}

#[derive(clap::Args)]
pub(super) struct Traced<T: clap::Args> {
    #[command(flatten)]
    args: T,
    #[command(flatten)]
    trace: TraceFlag,
}

impl Bench {
    /// Returns the flags of servers elsewhere, for a bench that takes them.
    pub(super) fn elsewhere(&mut self) -> Option<(&mut Vec<String>, &mut Access)> {
        match self {
            Bench::Step(step) => Some(step.args.elsewhere()),
            _ => None,
        }
    }

    pub(super) fn trace(&self) -> Option<&TraceFlag> {
        match self {
            Bench::Step(step) => Some(&step.trace),
            _ => None,
        }
    }

    pub(super) fn run(self, out: Output) -> anyhow::Result<()> {
        match self {
            Bench::Update(args) => {
                let settings = update::Settings {
                    params: args.params,
                    rounds: args.rounds.into(),
                    filter: args.filter,
                    all: args.all,
                };
                let names = update::names(&settings)?;
                let rows = bench::Rows::begin(names.iter().map(String::as_str), out);
                update::run(&settings, |measured| rows.say(measured))
            }
            Bench::Wire(args) => wire::run(&args, out),
            Bench::Step(step) => step::run(&step.args, out),
            Bench::Storage(args) => storage::run(&args, out),
        }
    }
}
