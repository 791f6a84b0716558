//! A job's weights as Hugging Face style safetensors, from its servers' master weights, while training goes on.
//! Memory is bounded by a few messages of each server, since every message is written where it belongs as it comes.

mod files;
mod receive;
mod settings;

use std::path::Path;

use longshore_proto::{Fault, JobSpec, Layout, Placement, Version};
use longshore_wire::{Wire, v1};
use longshore_worker::session::{TRIES, has_passed, lead, whole};

pub(crate) use self::settings::Settings;
use self::{
    files::{Files, Target},
    receive::receive,
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
    let target = Target { folder: settings.out.clone(), replace: settings.replace };
    let files = Files::create(target, &spec, &layout, settings.dtype, settings.max_file_bytes)?;
    let mut tried = 0;
    let version = loop {
        let version = Version(newest(servers, &settings.job)?.0 + lead(tried));
        match receive(servers, settings, version, &layout, &placement, &files) {
            Ok(()) => break version,
            Err(fault) if has_passed(&fault) && tried < TRIES => tried += 1,
            Err(fault) => return Err(fault.into()),
        }
    };
    let (bytes, names) = (files.bytes(), files.names().to_vec());
    files.publish()?;
    Ok(Exported { version, bytes, files: names })
}

/// Whether an export that replaces an earlier one could be written to `out` now.
pub(crate) fn check_target(out: &Path) -> Result<(), Fault> {
    Target { folder: out.to_path_buf(), replace: true }.check()
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

/// The newest version that any server has.
fn newest(servers: &mut Servers, job: &str) -> anyhow::Result<Version> {
    let request = v1::DescribeRequest { job: job.to_string(), brief: true, ..Default::default() };
    let answers = servers.each_promptly(|mut admin| {
        let request = request.clone();
        async move { admin.describe(request).await }
    })?;
    let version = answers.iter().filter_map(|(_, answer)| Some(answer.progress.as_ref()?.version)).max();
    Ok(Version(version.unwrap_or(0)))
}
