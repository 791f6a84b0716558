//! `longshore top`: the status page in a terminal.

use crate::{
    access::ServersArgs,
    output::Output,
    servers::{Silent, Unanswered},
    top::{Poller, once, watch},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) servers: ServersArgs,
    /// Print one frame and end; needs no terminal. With --output json it is what the frame is drawn from
    #[arg(long)]
    once: bool,
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let mut poller = Poller::new(args.servers.servers.clone(), args.servers.access.clone());
    if !args.once && !out.is_json() {
        return watch(poller);
    }
    let view = poller.look()?;
    // A frame without any server would say that there are no jobs.
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
    Ok(())
}
