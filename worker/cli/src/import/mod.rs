//! A new job's weights, and an optimizer's moments and step counts, from files of other programs, before any trainer runs. Memory
//! is bounded by the chunks under way.

mod found;
mod safetensors;
mod tensors;
mod torch;
mod universal;

use std::path::{Path, PathBuf};

use anyhow::Context;
use longshore_proto::{Dtype, Fault, FaultKind, Initialisation, JobName, JobSpec, LeftOut, Rank, StateArray};
use longshore_wire::{
    Wire,
    v1::{self, Phase},
};
use longshore_worker::{Filling, Options, Session, session::whole};

use self::{
    found::{Found, invalid},
    tensors::Files,
};
use crate::{
    access::Access,
    output::Output,
    progress::Progress,
    servers::{PROMPTLY, Servers},
    torch::moments,
};

pub(crate) struct Settings {
    pub(crate) servers: Vec<String>,
    pub(crate) access: Access,
    pub(crate) job: String,
    /// The job whose parameters and settings a new job has. Without it the job is open already, and waits for weights.
    pub(crate) like: Option<String>,
    pub(crate) from: PathBuf,
    /// The state of a torch optimizer that goes with the weights.
    pub(crate) optimizer: Option<PathBuf>,
    /// How many updates made the state, where no file says it.
    pub(crate) step: Option<u64>,
    /// Leave tensors alone that are no parameter of the job.
    pub(crate) ignore_extra: bool,
}

pub(crate) struct Imported {
    pub(crate) params: usize,
    pub(crate) elements: u64,
    /// How many updates made the state; None where there are weights alone.
    pub(crate) applied: Option<u64>,
}

/// Fills the job on all servers. An import that was cut off goes on where it is asked for again.
pub(crate) fn run(servers: &mut Servers, settings: &Settings, out: Output) -> anyhow::Result<Imported> {
    let spec = spec(servers, settings)?;
    let layout = spec.validate()?;
    let filling = find(settings)?.filling(&spec, &layout, settings.ignore_extra)?;
    let elements =
        (0..spec.params.len()).map(|param| layout.param_range(param)).map(|place| place.end - place.start);
    let (params, applied) = (spec.params.len(), filling.applied());
    let imported = Imported { params, elements: elements.sum(), applied };
    let options = Options::new(settings.servers.clone(), spec, Rank(0));
    let mut session = Session::connect(settings.access.of(options))?;
    let arrays = if applied.is_some() { 1 + moments(session.spec().rule).len() as u64 } else { 1 };
    let bytes = imported.elements * arrays * Dtype::F32.bytes();
    let filling = Shown { filling: &filling, progress: Progress::bytes("importing", bytes, out) };
    session.start_from(&filling)?;
    session.leave()?;
    Ok(imported)
}

/// A filling that moves a bar.
struct Shown<'a> {
    filling: &'a dyn Filling,
    progress: Progress,
}

impl Filling for Shown<'_> {
    fn applied(&self) -> Option<u64> {
        self.filling.applied()
    }

    fn left_out(&self) -> &[LeftOut] {
        self.filling.left_out()
    }

    fn initialisation(&self) -> Option<&Initialisation> {
        self.filling.initialisation()
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

/// What the files have, whoever wrote them.
fn find(settings: &Settings) -> anyhow::Result<Found> {
    let (from, optimizer) = (settings.from.as_path(), settings.optimizer.as_deref());
    if let Some(zero) = universal::folder(from) {
        if let Some(optimizer) = optimizer {
            let remedy = "leave it out: a universal checkpoint has the optimizer's state";
            return Err(invalid("--optimizer", optimizer.display(), "absent", remedy));
        }
        return universal::read(&zero, settings.step);
    }
    if let Some(step) = settings.step {
        return Err(invalid(
            "--step",
            step,
            "absent",
            "leave it out: it is for DeepSpeed's universal checkpoints",
        ));
    }
    let mut files = Files::new();
    let weights = match is_torch(from) {
        true => torch::weights(from, &mut files)?,
        false => safetensors::weights(from, &mut files)?,
    };
    let state = optimizer.map(|path| torch::state(path, &mut files)).transpose()?;
    Ok(Found { from: from.to_path_buf(), files, weights, state })
}

/// Whether torch.save wrote it, by its name.
fn is_torch(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("pt" | "pth" | "bin" | "ckpt"))
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
