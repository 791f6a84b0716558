//! `longshore import`: fills a new job with weights from safetensors of other programs.

use std::path::PathBuf;

use anyhow::Context;
use serde_json::json;

use super::admin::ServersArgs;
use crate::{import, output::Output, sizes::human};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) servers: ServersArgs,
    /// The job to fill: a new one, or one that is open and waits for its weights
    #[arg(long)]
    job: String,
    /// The job whose parameters and settings the new job gets; its own weights stay
    #[arg(long, value_name = "JOB")]
    like: Option<String>,
    /// Weights: a safetensors file, its index, or a folder with one of them
    #[arg(long, value_name = "PATH")]
    from: PathBuf,
    /// Leave tensors alone that are no parameter of the job, such as buffers
    #[arg(long)]
    ignore_extra: bool,
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let settings = import::Settings {
        job: args.job.clone(),
        like: args.like.clone(),
        from: args.from.clone(),
        ignore_extra: args.ignore_extra,
        servers: args.servers.servers.clone(),
        access: args.servers.access.clone(),
    };
    let begun = std::time::Instant::now();
    let imported = import::run(&mut args.servers.connect()?, &settings, out)
        .with_context(|| format!("job {} was not filled from {}", args.job, args.from.display()))?;
    let seconds = begun.elapsed().as_secs_f64();
    if out.is_json() {
        let said = json!({
            "job": args.job, "params": imported.params, "elements": imported.elements, "seconds": seconds,
        });
        say!("{said}");
        return Ok(());
    }
    say!(
        "job {}: {} parameters, {} of fp32 weights from {}, {:.1} s",
        args.job,
        imported.params,
        human(4 * imported.elements),
        args.from.display(),
        seconds
    );
    Ok(())
}
