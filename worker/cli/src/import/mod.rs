//! A new job's weights from Hugging Face style safetensors, before any trainer runs. Memory is bounded by the chunks under way.

mod files;

use std::path::PathBuf;

use anyhow::Context;
use longshore_proto::{Fault, FaultKind, JobName, JobSpec, Rank};
use longshore_wire::{
    Wire,
    v1::{self, Phase},
};
use longshore_worker::{Options, Session, session::whole};

use self::files::Tensors;
use crate::servers::{PROMPTLY, Servers};

pub(crate) struct Settings {
    pub(crate) servers: Vec<String>,
    /// As of the worker's options.
    pub(crate) tls_dir: Option<PathBuf>,
    pub(crate) job: String,
    /// The job whose parameters and settings a new job has. Without it the job is open already, and waits for weights.
    pub(crate) like: Option<String>,
    pub(crate) from: PathBuf,
    /// Leave tensors alone that are no parameter of the job.
    pub(crate) ignore_extra: bool,
}

pub(crate) struct Imported {
    pub(crate) params: usize,
    pub(crate) elements: u64,
}

/// Fills the job on all servers. An import that was cut off goes on where it is asked for again.
pub(crate) fn run(servers: &mut Servers, settings: &Settings) -> anyhow::Result<Imported> {
    let spec = spec(servers, settings)?;
    let layout = spec.validate()?;
    let tensors = Tensors::open(&settings.from)?;
    let filling = tensors.filling(&spec, settings.ignore_extra)?;
    let elements =
        (0..spec.params.len()).map(|param| layout.param_range(param)).map(|place| place.end - place.start);
    let imported = Imported { params: spec.params.len(), elements: elements.sum() };
    let tls_dir = settings.tls_dir.clone();
    let options = Options { tls_dir, ..Options::new(settings.servers.clone(), spec, Rank(0)) };
    let mut session = Session::connect(options)?;
    session.start_from(&filling)?;
    session.leave()?;
    Ok(imported)
}

/// What the job is, if it may be filled.
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

/// A job's spec, and its phase on each server. One that has nothing of it waits for its weights, too.
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
