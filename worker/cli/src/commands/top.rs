//! `longshore top`: the status page in a terminal.

use super::admin::ServersArgs;
use crate::{
    output::Output,
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
    let (object, frame) = (serde_json::to_value(&view)?, once(&view)?);
    out.result(|| object, || frame);
    Ok(())
}
