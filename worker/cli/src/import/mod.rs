//! Fills a new job with weights from safetensors of other programs, before any trainer runs. Memory is bounded by
//! the chunks under way.

mod found;
mod safetensors;
mod tensors;

use std::path::{Path, PathBuf};

use anyhow::Context;
use longshore_proto::{Dtype, Fault, FaultKind, JobName, JobSpec, Rank, StateArray};
use longshore_wire::{
    Wire,
    v1::{self, Phase},
};
use longshore_worker::{Filling, Options, Session, session::whole};

use self::{
    found::{Found, Weights},
    tensors::Files,
};
use crate::{
    access::Access,
    output::Output,
    progress::Progress,
    servers::{PROMPTLY, Servers},
};

pub(crate) struct Settings {
    pub(crate) servers: Vec<String>,
    pub(crate) access: Access,
    pub(crate) job: String,
    /// The job whose parameters and settings a new job gets. None for a job that is open and waits for weights.
    pub(crate) like: Option<String>,
    pub(crate) from: PathBuf,
    /// True to ignore tensors that are no parameter of the job.
    pub(crate) ignore_extra: bool,
}

pub(crate) struct Imported {
    pub(crate) params: usize,
    pub(crate) elements: u64,
}

/// Fills the job on all servers. A repeated call continues an import that was cut off.
pub(crate) fn run(servers: &mut Servers, settings: &Settings, out: Output) -> anyhow::Result<Imported> {
    check_kind(&settings.from)?;
    let spec = spec(servers, settings)?;
    let layout = spec.validate()?;
    let mut files = Files::default();
    let weights = safetensors::weights(&settings.from, &mut files)?;
    let found = Found { from: settings.from.clone(), files, weights };
    let filling = found.filling(&spec, settings.ignore_extra)?;
    let elements =
        (0..spec.params.len()).map(|param| layout.param_range(param)).map(|place| place.end - place.start);
    let imported = Imported { params: spec.params.len(), elements: elements.sum() };
    let options = Options::new(settings.servers.clone(), spec, Rank(0));
    let mut session = Session::connect(settings.access.of(options))?;
    let bytes = imported.elements * Dtype::F32.bytes();
    let filling = Shown { filling: &filling, progress: Progress::bytes("importing", bytes, out) };
    session.start_from(&filling)?;
    session.leave()?;
    Ok(imported)
}

/// Weights whose upload moves a progress bar.
struct Shown<'a> {
    filling: &'a Weights,
    progress: Progress,
}

impl Filling for Shown<'_> {
    fn applied(&self) -> Option<u64> {
        self.filling.applied()
    }

    fn write(
        &self,
        array: StateArray,
        param: usize,
        at: u64,
        target: &mut [u8],
    ) -> longshore_worker::Result<()> {
        self.progress.add(target.len() as u64);
        self.filling.write(array, param, at, target)
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

/// Returns the spec of the job, if it may be filled.
fn spec(servers: &mut Servers, settings: &Settings) -> anyhow::Result<JobSpec> {
    let known = settings.like.as_ref().unwrap_or(&settings.job);
    servers.check_job(known)?;
    let mut spec = described(servers, known)?.0;
    if settings.like.is_some() {
        spec.name = JobName::parse("job", &settings.job)?;
        if !servers.has_job(&settings.job)? {
            return Ok(spec);
        }
    }
    let (found, phases) = described(servers, &settings.job)?;
    if phases.iter().all(|&phase| phase != Phase::Loading) {
        let remedy = "name a new job with --job and the one it is like with --like, or delete this one first";
        let limit = "new, or waiting for its weights";
        return Err(Fault::new(
            FaultKind::Conflict,
            "job",
            format!("{}, which has its weights", settings.job),
            limit,
            remedy,
        )
        .into());
    }
    Ok(found)
}

/// Returns a job's spec, and its phase on each server. A server without the job counts as `Loading`.
fn described(servers: &mut Servers, job: &str) -> anyhow::Result<(JobSpec, Vec<Phase>)> {
    let request = v1::DescribeRequest { job: job.to_string(), ..Default::default() };
    let (mut spec, mut phases) = (None, Vec::new());
    for (address, answer) in servers.answers_within(PROMPTLY, |admin| whole(admin, request.clone())) {
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
