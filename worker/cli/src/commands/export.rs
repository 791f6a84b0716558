//! `longshore export`: writes a job's weights as files that other programs load.

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use longshore_proto::Dtype;
use longshore_server::config::ByteSize;
use serde_json::json;

use crate::{
    access::JobArgs,
    export,
    output::Output,
    sizes::human,
    train::{LastWords, Part, Stop},
};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    pub(super) target: JobArgs,
    /// Folder to make: with model.safetensors, or several files and model.safetensors.index.json
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The format that the fp32 master weights are rounded to: bf16, f16 or f32 [default: that of the model]
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Largest safetensors file, as in 5GiB; a larger tensor has a file of its own [default: 5GiB]
    #[arg(long, value_name = "SIZE")]
    max_file_size: Option<ByteSize>,
    /// Longest wait, in seconds, for a version that all servers have
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86400))]
    deadline_s: u64,
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let said = "before the export was whole: nothing of it is left, and the same command begins it again";
    Stop::catch(Part::Exports, LastWords { said: said.into(), as_json: out.errors_are_json() })?;
    // Servers that the job is not on yet may get shards during the export.
    let (servers, job) = args.target.connect()?;
    let servers = servers.with_members(&job, &args.target.servers.access)?;
    let settings = export::Settings {
        job,
        out: args.out.clone(),
        dtype: args.dtype,
        max_file_bytes: args.max_file_size.map_or(export::MAX_FILE_BYTES, |size| size.0),
        deadline: Duration::from_secs(args.deadline_s),
        replace: false,
        shown: out,
    };
    let from = std::time::Instant::now();
    let exported = export::run(&servers, &settings)
        .with_context(|| format!("job {} was not exported to {}", settings.job, args.out.display()))?;
    let seconds = from.elapsed().as_secs_f64();
    let text = || {
        let job = &settings.job;
        let (version, dtype, bytes) = (exported.version.0, exported.dtype, human(exported.bytes));
        let head = format!(
            "version {version} of job {job}: {bytes} as {dtype} in {}, {seconds:.1} s",
            args.out.display()
        );
        let files = exported.files.iter().map(|name| format!("  {name}"));
        std::iter::once(head).chain(files).collect::<Vec<_>>().join("\n")
    };
    let object = || {
        json!({
            "job": settings.job, "version": exported.version.0, "dtype": exported.dtype.to_string(), "out": args.out,
            "bytes": exported.bytes, "files": exported.files, "seconds": seconds,
        })
    };
    out.result(object, text);
    Ok(())
}
