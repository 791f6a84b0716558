//! `longshore import`: a new job's weights, and an optimizer's state, from files that other programs wrote.

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
    /// Weights: a safetensors file, its index, or a folder with one of them; or a file of torch.save. Or a universal checkpoint of
    /// DeepSpeed, with the optimizer's state
    #[arg(long, value_name = "PATH")]
    from: PathBuf,
    /// A file of torch.save with the optimizer's state_dict(), by itself or in a checkpoint: moments and step counts
    #[arg(long, value_name = "FILE")]
    optimizer: Option<PathBuf>,
    /// How many updates made a universal checkpoint of ZeRO-3 that does not say it
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    step: Option<u64>,
    /// Leave tensors alone that are no parameter of the job, such as buffers
    #[arg(long)]
    ignore_extra: bool,
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let settings = import::Settings {
        job: args.job.clone(),
        like: args.like.clone(),
        from: args.from.clone(),
        optimizer: args.optimizer.clone(),
        step: args.step,
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
            "job": args.job, "params": imported.params, "elements": imported.elements, "applied": imported.applied,
            "seconds": seconds,
        });
        say!("{said}");
        return Ok(());
    }
    let state =
        imported.applied.map_or(String::new(), |applied| format!(" and their state after {applied} updates"));
    say!(
        "job {}: {} parameters, {} of fp32 weights{state} from {}, {:.1} s",
        args.job,
        imported.params,
        human(4 * imported.elements),
        args.from.display(),
        seconds
    );
    Ok(())
}
