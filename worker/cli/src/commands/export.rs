//! `longshore export`: a job's weights as files that other programs load.

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use clap::ValueEnum;
use longshore_proto::{Dtype, Fault};
use longshore_server::config::ByteSize;
use serde_json::json;

use super::admin::JobArgs;
use crate::{
    export::{self, Format},
    output::Output,
    sizes::human,
    wrong_use::wrong_use,
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// Folder to make: with model.safetensors, or several files and model.safetensors.index.json; or with a universal checkpoint
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// For whom: Hugging Face style safetensors; or DeepSpeed's universal checkpoint, with fp32 weights, moments and step count
    #[arg(long, value_enum, default_value_t = FormatName::Safetensors)]
    format: FormatName,
    /// Write optimizer.pt, too: moments, step counts and hyperparameters, as torch's optimizer of the job's rule saves them
    #[arg(long)]
    optimizer: bool,
    /// What the fp32 master weights are rounded to in safetensors: bf16, f16 or f32 [default: bf16]
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Largest safetensors file, as in 5GiB; a larger tensor has a file of its own [default: 5GiB]
    #[arg(long, value_name = "SIZE")]
    max_file_size: Option<ByteSize>,
    /// Longest wait, in seconds, for a version that all servers have
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    deadline_s: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum FormatName {
    Safetensors,
    Deepspeed,
}

impl Args {
    fn format(&self) -> anyhow::Result<Format> {
        if self.format == FormatName::Safetensors {
            return Ok(Format::Safetensors {
                dtype: self.dtype.unwrap_or(Dtype::Bf16),
                max_file_bytes: self.max_file_size.map_or(export::MAX_FILE_BYTES, |size| size.0),
                optimizer: self.optimizer,
            });
        }
        let only_here = [
            ("--optimizer", self.optimizer),
            ("--dtype", self.dtype.is_some()),
            ("--max-file-size", self.max_file_size.is_some()),
        ];
        match only_here.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(Format::Universal),
            Some((flag, _)) => {
                let limit = "only with --format safetensors";
                let remedy =
                    "leave it out: a universal checkpoint has all state in fp32, with a file for each array";
                Err(wrong_use(Fault::invalid(flag, "given", limit, remedy)))
            }
        }
    }
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let format = args.format()?;
    let mut servers = args.target.servers.connect()?;
    let job = servers.job(args.target.job.as_ref())?;
    let settings = export::Settings {
        job,
        out: args.out.clone(),
        format,
        deadline: Duration::from_secs(args.deadline_s),
        replace: false,
        shown: out,
    };
    let from = std::time::Instant::now();
    let exported = export::run(&mut servers, &settings)
        .with_context(|| format!("job {} was not exported to {}", settings.job, args.out.display()))?;
    let seconds = from.elapsed().as_secs_f64();
    let dtype = match format {
        Format::Safetensors { dtype, .. } => dtype,
        Format::Universal => Dtype::F32,
    };
    if out.is_json() {
        let said = json!({
            "job": settings.job, "version": exported.version.0, "dtype": dtype.to_string(),
            "format": args.format.to_possible_value().map(|name| name.get_name().to_string()), "out": args.out, "bytes": exported.bytes, "files": exported.files, "seconds": seconds,
        });
        say!("{said}");
        return Ok(());
    }
    say!(
        "version {} of job {}: {} as {} in {}, {:.1} s",
        exported.version.0,
        settings.job,
        human(exported.bytes),
        dtype,
        args.out.display(),
        seconds
    );
    for name in &exported.files {
        say!("  {name}");
    }
    Ok(())
}
