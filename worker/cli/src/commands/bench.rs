//! `longshore bench`: speeds of this host, each with its limit.

use super::trace::{TraceFlag, Traced};
use crate::{
    access::Access,
    bench::{step, storage, update, wire},
    output::Output,
};

#[derive(clap::Subcommand)]
pub(super) enum Bench {
    /// The optimizer update against the memory traffic it must cause
    ///
    /// Every case runs beside a loop that moves the same bytes, in the same blocks and on the same threads, once with
    /// one thread and once with all. See docs/update.md.
    Update(update::Args),
    /// Push and pull over TCP and a Unix socket, beside raw sockets with as many connections
    Wire(wire::Args),
    /// Whole steps of a worker whose compute is a timed wait, beside what bounds them
    Step(Box<Traced<step::Args>>),
    /// The nvme tier beside a bare loop of the same reads and writes on the same drives
    Storage(storage::Args),
}

impl Bench {
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
            Bench::Update(args) => update::run(&args, out),
            Bench::Wire(args) => wire::run(&args, out),
            Bench::Step(step) => step::run(&step.args, out),
            Bench::Storage(args) => storage::run(&args, out),
        }
    }
}
