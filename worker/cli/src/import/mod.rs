//! Fills a new job with weights from safetensors of other programs, before any trainer runs. Memory is bounded by
//! the chunks under way.

mod tensors;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use longshore_proto::{Dtype, Fault, FaultKind, JobName, JobSpec, Param, Rank, StateArray};
use longshore_wire::{
    Wire,
    v1::{self, Phase},
};
use longshore_worker::{Filling, Options, Session};
use serde_json::json;

use self::tensors::{Files, Kind, Place, Tensor};
use crate::{access::ServersArgs, output::Output, progress::Progress, servers::Servers, sizes::human};

/// Largest number of misfits that an error lists.
const LISTED: usize = 5;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) servers: ServersArgs,
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

struct Imported {
    params: usize,
    elements: u64,
}

pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let begun = std::time::Instant::now();
    let imported = fill(&args.servers.connect()?, args, out)
        .with_context(|| format!("job {} was not filled from {}", args.job, args.from.display()))?;
    let seconds = begun.elapsed().as_secs_f64();
    let Imported { params, elements } = imported;
    out.result(
        || json!({"job": args.job, "params": params, "elements": elements, "seconds": seconds}),
        || {
            let (bytes, from) = (human(4 * elements), args.from.display());
            format!(
                "job {}: {params} parameters, {bytes} of fp32 weights from {from}, {seconds:.1} s",
                args.job
            )
        },
    );
    Ok(())
}

/// Fills the job on all servers. A repeated call continues an import that was cut off.
fn fill(servers: &Servers, args: &Args, out: Output) -> anyhow::Result<Imported> {
    check_kind(&args.from)?;
    let spec = spec(servers, args)?;
    let layout = spec.validate()?;
    let mut files = Files::default();
    let tensors = tensors::weights(&args.from, &mut files)?;
    let places = places(&tensors, args, &spec)?;
    let elements =
        (0..spec.params.len()).map(|param| layout.param_range(param)).map(|place| place.end - place.start);
    let imported = Imported { params: spec.params.len(), elements: elements.sum() };
    let options = Options::new(args.servers.servers.clone(), spec, Rank(0));
    let mut session = Session::connect(args.servers.access.of(options))?;
    let bytes = imported.elements * Dtype::F32.bytes();
    session.start_from(&Weights { files, places, progress: Progress::bytes("importing", bytes, out) })?;
    session.leave()?;
    Ok(imported)
}

/// Weights in files, as the filling of a new job.
struct Weights {
    files: Files,
    /// The place of each parameter's values.
    places: Vec<Place>,
    progress: Progress,
}

impl Filling for Weights {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn write(
        &self,
        array: StateArray,
        param: usize,
        at: u64,
        target: &mut [u8],
    ) -> longshore_worker::Result<()> {
        self.progress.add(target.len() as u64);
        match self.places.get(param) {
            Some(&place) if array == StateArray::Master => Ok(self.files.write(place, at, target)?),
            _ => {
                let value = format!("{array} of parameter {param}");
                let remedy = "report this as a defect of Longshore";
                Err(Fault::invalid("from", value, "weights of a parameter", remedy).into())
            }
        }
    }
}

/// Returns the place of each parameter's values.
///
/// # Errors
/// Names tensors that are missing, that have another shape or type, or that are no parameter.
fn places(tensors: &BTreeMap<String, Tensor>, args: &Args, spec: &JobSpec) -> anyhow::Result<Vec<Place>> {
    let (mut misfits, mut places) = (Vec::new(), Vec::new());
    for param in &spec.params {
        match tensors.get(&param.name).map(|tensor| fit(param, tensor)) {
            None => misfits.push(format!("{} is missing", param.name)),
            Some(Err(why)) => misfits.push(why),
            Some(Ok(place)) => places.push(place),
        }
    }
    if !args.ignore_extra {
        let known: BTreeSet<&String> = spec.params.iter().map(|param| &param.name).collect();
        let extra = tensors.keys().filter(|name| !known.contains(name));
        misfits.extend(
            extra.map(|name| format!("{name} is no parameter of the job (--ignore-extra leaves it alone)")),
        );
    }
    if misfits.is_empty() {
        return Ok(places);
    }
    let more = misfits.len().saturating_sub(LISTED);
    misfits.truncate(LISTED);
    let more = if more == 0 { String::new() } else { format!("; and {more} more") };
    bail!("{} does not fit job {}: {}{more}", args.from.display(), spec.name, misfits.join("; "))
}

/// Returns the place of a tensor's values, or why the tensor does not fit.
fn fit(param: &Param, tensor: &Tensor) -> Result<Place, String> {
    let name = &param.name;
    if tensor.shape != param.shape {
        return Err(format!("{name} has shape {:?}, but must have {:?}", tensor.shape, param.shape));
    }
    match &tensor.kind {
        Kind::Float(dtype) => Ok(Place { file: tensor.file, start: tensor.start, dtype: *dtype }),
        Kind::Other(other) => Err(format!("{name} is of type {other}, but must be of F32, F16 or BF16")),
    }
}

/// Refuses files of torch.save, by their names, and universal checkpoints of DeepSpeed.
fn check_kind(from: &Path) -> Result<(), Fault> {
    let extension = from.extension().and_then(|extension| extension.to_str());
    let value = from.display();
    if matches!(extension, Some("pt" | "pth" | "bin" | "ckpt")) {
        let remedy = format!(
            "convert the weights: python -c 'import torch, safetensors.torch as s; s.save_file(torch.load(\"{value}\", \
             weights_only=True), \"model.safetensors\")'"
        );
        return Err(Fault::invalid("--from", value, "safetensors", remedy));
    }
    if from.join("zero").is_dir() || from.join("latest_universal").is_file() {
        let remedy = "call longshore.checkpoint.load_deepspeed(optimizer, folder) in the trainer, before its first step";
        return Err(Fault::invalid(
            "--from",
            format!("{value}, a universal checkpoint"),
            "safetensors",
            remedy,
        ));
    }
    Ok(())
}

fn spec(servers: &Servers, args: &Args) -> anyhow::Result<JobSpec> {
    let known = args.like.as_ref().unwrap_or(&args.job);
    servers.check_job(known)?;
    let mut spec = described(servers, known)?.0;
    if args.like.is_some() {
        spec.name = JobName::parse("job", &args.job)?;
        if !servers.has_job(&args.job)? {
            return Ok(spec);
        }
    }
    let (found, phases) = described(servers, &args.job)?;
    if phases.iter().all(|&phase| phase != Phase::Loading) {
        let remedy = "name a new job with --job and the one it is like with --like, or delete this one first";
        let limit = "new, or waiting for its weights";
        return Err(Fault::new(
            FaultKind::Conflict,
            "job",
            format!("{}, which has its weights", args.job),
            limit,
            remedy,
        )
        .into());
    }
    Ok(found)
}

/// Returns a job's spec, and its phase on each server. A server without the job counts as `Loading`.
fn described(servers: &Servers, job: &str) -> anyhow::Result<(JobSpec, Vec<Phase>)> {
    let (mut spec, mut phases) = (None, Vec::new());
    for (address, answer) in servers.wholes(job) {
        match answer {
            Ok(answer) => {
                phases.push(answer.progress.as_ref().map_or(Phase::Loading, v1::JobProgress::phase));
                spec = spec.or(answer.spec);
            }
            Err(fault) if fault.kind == FaultKind::NotFound => phases.push(Phase::Loading),
            Err(fault) => return Err(fault).context(address),
        }
    }
    Ok((JobSpec::from_wire(spec)?, phases))
}
