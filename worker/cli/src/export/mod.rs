//! A job's weights as Hugging Face style safetensors, from its servers' master weights, while training goes on; and the state of
//! its optimizer, as torch saves it. Or both as DeepSpeed's universal checkpoint.
//! Memory is bounded by a few messages of each server, since every message is written where it belongs as it comes.

mod archive;
mod extents;
mod files;
mod optimizer;
mod pickle;
mod receive;
mod settings;
mod target;
mod universal;

use std::path::Path;

use longshore_proto::{Fault, FaultKind, Hyper, JobSpec, Layout, LeftOut, Placement, Version};
use longshore_wire::{Wire, hyper_from_wire, left_outs_from_wire, v1};
use longshore_worker::session::{TRIES, has_passed, lead, whole};

pub(crate) use self::settings::{Format, MAX_FILE_BYTES, Settings};
use self::{
    files::Files,
    optimizer::Optimizer,
    receive::{Sinks, receive},
    target::{OPTIMIZER, Target},
    universal::Universal,
};
use crate::servers::Servers;

pub(crate) struct Exported {
    pub(crate) version: Version,
    pub(crate) bytes: u64,
    pub(crate) files: Vec<String>,
}

/// What does not change in a job.
struct Described {
    spec: JobSpec,
    layout: Layout,
    placement: Placement,
}

pub(crate) fn run(servers: &mut Servers, settings: &Settings) -> anyhow::Result<Exported> {
    let Described { spec, layout, placement } = describe(servers, &settings.job)?;
    check_whole(spec.params.iter().map(|param| param.name.as_str()))?;
    let draft = Target { folder: settings.out.clone(), replace: settings.replace }.draft()?;
    let mut groups = || hyperparameters(&standing(servers, &settings.job)?);
    let sinks = match settings.format {
        Format::Safetensors { dtype, max_file_bytes, optimizer } => {
            let files = Files::create(draft, &spec, &layout, dtype, max_file_bytes)?;
            let optimizer = match optimizer {
                true => Some(Optimizer::create(files.folder(), &spec, &layout, &groups()?)?),
                false => None,
            };
            Sinks::Safetensors { files, optimizer }
        }
        Format::Universal => Sinks::Universal(Universal::create(draft, &spec, &layout, groups()?)?),
    };
    let mut tried = 0;
    let (version, applied, left_out) = loop {
        let version = Version(standing(servers, &settings.job)?.version + lead(tried));
        let received = receive(servers, settings, version, (&spec, &layout, &placement), &sinks);
        let received = received.map(|applied| (applied, standing(servers, &settings.job)));
        match received {
            Ok((applied, standing)) => match left_out(&standing?, version) {
                Some(left_out) => break (version, applied, left_out),
                None if tried < TRIES => tried += 1,
                None => return Err(too_fast(version).into()),
            },
            Err(fault) if has_passed(&fault) && tried < TRIES => tried += 1,
            Err(fault) => return Err(fault.into()),
        }
    };
    let (bytes, files) = publish(sinks, applied, &left_out)?;
    Ok(Exported { version, bytes, files })
}

/// Makes all of it whole and puts it in its place. Returns its bytes, and its files' names.
fn publish(sinks: Sinks, applied: u64, left_out: &[LeftOut]) -> Result<(u64, Vec<String>), Fault> {
    let (files, optimizer) = match sinks {
        Sinks::Safetensors { files, optimizer } => (files, optimizer),
        Sinks::Universal(universal) => return universal.publish(applied, left_out),
    };
    let (mut bytes, mut names) = (files.bytes(), files.names().to_vec());
    if let Some(optimizer) = optimizer {
        bytes += optimizer.seal(applied, left_out)?;
        names.push(OPTIMIZER.to_string());
    }
    files.publish()?;
    Ok((bytes, names))
}

/// Refuses a job whose ranks in Python have a part of each tensor: how its shape was is known to them alone, and no loader knows the
/// names of parts.
fn check_whole<'a>(mut names: impl Iterator<Item = &'a str>) -> Result<(), Fault> {
    let Some(part) = names.find(|name| is_part(name)) else { return Ok(()) };
    let remedy = "have a rank write it, which has the model: longshore.checkpoint.save_safetensors, save_torch or \
                  save_deepspeed in Python";
    Err(Fault::invalid("job", format!("cut into parts of tensors ({part})"), "of whole tensors", remedy))
}

/// Whether it is named as the Python package names rank r's part of a tensor among n ranks: `name#r/n`.
fn is_part(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let part = name.rsplit_once('#').and_then(|(_, part)| part.split_once('/'));
    part.is_some_and(|(rank, of)| number(rank) && number(of))
}

/// What the last step had of each param group.
fn hyperparameters(standing: &v1::JobProgress) -> anyhow::Result<Vec<Hyper>> {
    let groups = standing.last_commit.iter().flat_map(|commit| &commit.groups);
    let groups: Vec<Hyper> = groups.cloned().map(hyper_from_wire).collect();
    if groups.is_empty() {
        let remedy = "export the weights alone, or after the first step";
        let limit = "at least 1, where the optimizer's state is exported";
        return Err(Fault::new(FaultKind::Precondition, "version", 0, limit, remedy).into());
    }
    Ok(groups)
}

/// The parameters that had missed updates of a version, as a commit says it that came at most one step later. None where it
/// came later still.
fn left_out(standing: &v1::JobProgress, version: Version) -> Option<Vec<LeftOut>> {
    let Some(commit) = &standing.last_commit else {
        return Some(left_outs_from_wire(standing.left_out.clone()));
    };
    let mut left_out = left_outs_from_wire(commit.left_out.clone());
    match commit.step.checked_sub(version.0) {
        Some(0) => {}
        Some(1) => {
            for left_out in left_out.iter_mut().filter(|left_out| left_out.now && !commit.skip) {
                left_out.steps -= 1;
            }
        }
        // Nothing was ever left out.
        _ if left_out.is_empty() => {}
        _ => return None,
    }
    Some(left_out)
}

fn too_fast(version: Version) -> Fault {
    let limit = "the newest one, or that before, once all of it has come";
    let remedy = "pause the job first: its step counts differ by parameter, and servers keep those of the newest version";
    Fault::new(FaultKind::Unavailable, "version", version, limit, remedy)
}

/// Whether an export that replaces an earlier one could be written to `out` now.
pub(crate) fn check_target(out: &Path) -> Result<(), Fault> {
    Target { folder: out.to_path_buf(), replace: true }.draft().map(drop)
}

fn describe(servers: &mut Servers, job: &str) -> anyhow::Result<Described> {
    let request = v1::DescribeRequest { job: job.to_string(), ..Default::default() };
    let answers = servers.each_promptly(|admin| whole(admin, request.clone()))?;
    let Some((_, answer)) = answers.into_iter().next() else { anyhow::bail!("--servers names no server") };
    let spec = JobSpec::from_wire(answer.spec)?;
    let layout = spec.validate()?;
    let placement = Placement::from_wire(answer.placement)?;
    placement.validate(layout.shards())?;
    Ok(Described { spec, layout, placement })
}

/// Where the server stands that has the newest version.
fn standing(servers: &mut Servers, job: &str) -> anyhow::Result<v1::JobProgress> {
    let request = v1::DescribeRequest { job: job.to_string(), brief: true, ..Default::default() };
    let answers = servers.each_promptly(|mut admin| {
        let request = request.clone();
        async move { admin.describe(request).await }
    })?;
    let standings = answers.into_iter().filter_map(|(_, answer)| answer.progress);
    Ok(standings.max_by_key(|progress| progress.version).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_tensors_are_not_exported_as_tensors() {
        for whole in ["x.weight", "x#1", "x#1/", "a/b", "x#one/2"] {
            assert!(check_whole([whole].into_iter()).is_ok(), "{whole}");
        }
        let fault = check_whole(["x", "layers.0.weight#1/4"].into_iter()).unwrap_err();
        assert!(fault.value.contains("layers.0.weight#1/4"), "{fault}");
    }
}
