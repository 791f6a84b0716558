//! Exports a job's master weights as Hugging Face style safetensors, while training goes on. Memory is bounded by
//! a few messages per server: every message is written to its place when it arrives.

mod files;
mod target;

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use longshore_proto::{Dtype, Fault, JobSpec, Layout, Placement, ServerId, Version};
use longshore_wire::{Wire, v1};
use longshore_worker::{
    export::{Contents, Export},
    session::{TRIES, asked_version, has_passed, whole},
};

use self::{files::Files, target::Target};
use crate::{output::Output, progress::Progress, servers::Servers};

/// The largest safetensors file, unless a single tensor is larger.
pub(crate) const MAX_FILE_BYTES: u64 = 5 << 30;

pub(crate) struct Settings {
    pub(crate) job: String,
    pub(crate) out: PathBuf,
    /// Element type to which the master weights are rounded. None: that of the images, which the model has.
    pub(crate) dtype: Option<Dtype>,
    pub(crate) max_file_bytes: u64,
    /// The longest wait for a version that all servers can export.
    pub(crate) deadline: Duration,
    /// True if the export may replace an earlier one.
    pub(crate) replace: bool,
    pub(crate) shown: Output,
}

pub(crate) struct Exported {
    pub(crate) version: Version,
    pub(crate) dtype: Dtype,
    pub(crate) bytes: u64,
    pub(crate) files: Vec<String>,
}

struct Described {
    spec: JobSpec,
    layout: Layout,
    placement: Placement,
    /// By which each connected server takes part.
    numbers: Vec<ServerId>,
}

pub(crate) fn run(servers: &Servers, settings: &Settings) -> anyhow::Result<Exported> {
    let described = describe(servers, &settings.job)?;
    let Described { spec, layout, .. } = &described;
    check_whole(spec.params.iter().map(|param| param.name.as_str()))?;
    let draft = Target { folder: settings.out.clone(), replace: settings.replace }.draft()?;
    let dtype = settings.dtype.unwrap_or(spec.image_dtype);
    let files = Files::create(draft, spec, layout, dtype, settings.max_file_bytes)?;
    let mut tried = 0;
    let version = loop {
        let version = Version(asked_version(&servers.described(&settings.job)?, tried));
        match receive(servers, settings, (version, dtype), &described, &files) {
            Ok(()) => break version,
            Err(fault) if has_passed(&fault) && tried < TRIES => tried += 1,
            Err(fault) => return Err(fault.into()),
        }
    };
    let (bytes, names) = (files.bytes(), files.names().to_vec());
    files.publish()?;
    Ok(Exported { version, dtype, bytes, files: names })
}

/// Reads one version of all servers' shards at once, and writes each message when it arrives.
fn receive(
    servers: &Servers,
    settings: &Settings,
    (version, dtype): (Version, Dtype),
    Described { layout, placement, numbers, .. }: &Described,
    files: &Files,
) -> Result<(), Fault> {
    let contents = Contents::Weights(dtype);
    let export = Export { job: &settings.job, version, contents, layout, deadline: settings.deadline };
    let received = Mutex::new(Ok(()));
    // Includes the padding between parameters, which is sent too.
    let bytes = layout.elements() * dtype.bytes();
    let progress = Progress::bytes("exporting", bytes, settings.shown);
    let progress = &progress;
    thread::scope(|scope| {
        for (server, &number) in servers.list().iter().zip(numbers) {
            let (export, all) = (&export, &received);
            let owned = placement.owned(number);
            scope.spawn(move || {
                let write = |_, at, bytes: &[u8]| {
                    progress.add(bytes.len() as u64);
                    files.write(at, bytes)
                };
                let received = export.receive(&server.address, server.admin.clone(), &owned, &write);
                let received = servers.handle().block_on(received);
                // The first fault is the cause; others may be its consequences.
                let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
                if all.is_ok() {
                    *all = received.map(drop);
                }
            });
        }
    });
    received.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Refuses a job whose Python ranks have a part of each tensor. Only those ranks know the tensors' shapes, and no
/// loader knows names of parts.
fn check_whole<'a>(mut names: impl Iterator<Item = &'a str>) -> Result<(), Fault> {
    let Some(part) = names.find(|name| is_part(name)) else { return Ok(()) };
    let remedy = "have a rank write it, which has the model: longshore.checkpoint.save_safetensors in Python";
    Err(Fault::invalid("job", format!("cut into parts of tensors ({part})"), "of whole tensors", remedy))
}

/// Returns true for the Python package's name of rank r's part of a tensor among n ranks: `name#r/n`.
fn is_part(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let part = name.rsplit_once('#').and_then(|(_, part)| part.split_once('/'));
    part.is_some_and(|(rank, of)| number(rank) && number(of))
}

/// Checks that an export that replaces an earlier one could be written to `out` now.
pub(crate) fn check_target(out: &Path) -> Result<(), Fault> {
    Target { folder: out.to_path_buf(), replace: true }.draft().map(drop)
}

fn describe(servers: &Servers, job: &str) -> anyhow::Result<Described> {
    let request = v1::DescribeRequest { job: job.to_string(), ..Default::default() };
    let answers = servers.each_promptly(async |admin| whole(admin, request.clone()).await)?;
    let numbers = answers.iter().map(|(_, answer)| ServerId(answer.server)).collect();
    let epoch = |answer: &v1::DescribeResponse| answer.placement.as_ref().map_or(0, |of| of.epoch);
    let newest = answers.into_iter().map(|(_, answer)| answer).max_by_key(epoch);
    let Some(answer) = newest else { anyhow::bail!("--servers names no server") };
    let spec = JobSpec::from_wire(answer.spec)?;
    let layout = spec.validate()?;
    let placement = Placement::from_wire(answer.placement)?;
    placement.validate(layout.shards())?;
    Ok(Described { spec, layout, placement, numbers })
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
