//! `longshore top`: the status page in a terminal.

mod draw;
mod gather;
mod job;
mod screen;
mod troubles;
mod view;

use self::{
    gather::Poller,
    screen::{once, watch},
};
use crate::{
    access::ServersArgs,
    output::Output,
    servers::{Silent, Unanswered},
};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) servers: ServersArgs,
    /// Print one frame and end; needs no terminal. With --output json it is what the frame is drawn from
    #[arg(long)]
    once: bool,
}

pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let mut poller = Poller::new(args.servers.servers.clone(), args.servers.access.clone());
    if !args.once && !out.is_json() {
        return watch(poller);
    }
    let view = poller.look()?;
    // If no server answers, a frame would claim that there are no jobs, so the command fails.
    let silent: Silent = view
        .servers
        .iter()
        .filter_map(|server| Some((server.address.clone(), server.silent.clone()?)))
        .collect();
    if !silent.is_empty() && silent.len() == view.servers.len() {
        return Err(Unanswered::new("no server answers: ", &silent).into());
    }
    let object = serde_json::to_value(&view)?;
    out.result(|| object, || once(&view));
    if !silent.is_empty() {
        let lead = format!("{} of {} servers did not answer: ", silent.len(), view.servers.len());
        return Err(Unanswered::new(&lead, &silent).into());
    }
    Ok(())
}
