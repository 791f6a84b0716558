//! `longshore bench`: what this machine gives, measured through the code that trains, beside what it could give.

mod wire;

use clap::Subcommand;

#[derive(Subcommand)]
pub enum Bench {
    /// Push and pull over TCP and a Unix socket, beside raw sockets with as many connections
    Wire(wire::Args),
}

pub fn run(bench: Bench) -> anyhow::Result<()> {
    match bench {
        Bench::Wire(args) => wire::run(&args),
    }
}
