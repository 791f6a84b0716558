//! Exports a job's master weights as Hugging Face style safetensors, while training goes on. Memory is bounded by
//! a few messages per server: every message is written to its place when it arrives.

mod files;
mod target;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    time::Duration,
};

use longshore_proto::{Dtype, Fault, JobSpec, Placement, ServerId, ShardId, Step, Version};
use longshore_wire::{Wire, v1};
use longshore_worker::{
    Error, Result,
    error::CallFailed,
    export::{Contents, Export, Part},
    session::{asked_version, export_by, whole},
};

pub(crate) use self::target::remove_drafts;
use self::{files::Files, target::Target};
use crate::{
    output::Output,
    progress::Progress,
    servers::{PROMPTLY, RECOVERY, Server, Servers, are_members},
};

/// The largest safetensors file, unless a single tensor is larger.
pub(crate) const MAX_FILE_BYTES: u64 = 5 << 30;

pub(crate) struct Settings {
    pub(crate) job: String,
    pub(crate) out: PathBuf,
    /// Element type to which the master weights are rounded. None means the type of the job's images.
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

pub(crate) fn run(servers: &Servers, settings: &Settings) -> anyhow::Result<Exported> {
    let answer = servers.described_whole(&settings.job)?;
    let spec = JobSpec::from_wire(answer.spec)?;
    let layout = spec.validate()?;
    check_whole(spec.params.iter().map(|param| param.name.as_str()))?;
    let draft = Target { folder: settings.out.clone(), replace: settings.replace }.draft()?;
    let dtype = settings.dtype.unwrap_or(spec.image_dtype);
    let files = Files::create(draft, &spec, &layout, dtype, settings.max_file_bytes)?;
    let request = v1::DescribeRequest { job: settings.job.clone(), ..Default::default() };
    // Includes the padding between parameters, which is sent too.
    let progress = Progress::bytes("exporting", layout.elements() * dtype.bytes(), settings.shown);
    let failed = |call, server: &str, fault| -> Error {
        CallFailed { server: server.into(), job: spec.name.clone(), call, step: None, fault }.into()
    };
    let plan = async |tried| {
        progress.at(0, "exporting".into());
        let found = servers.asked_within(PROMPTLY, async |admin| whole(admin, request.clone()).await).await;
        // A server may join the job or leave it during the export.
        let members = are_members(&found).into_iter().zip(servers.list()).zip(found);
        let answer = |((is_member, server), (_, answer)): ((bool, &Server), (_, Result<_, _>))| {
            let answer = answer.map_err(|fault| failed("Describe", &server.address, fault));
            is_member.then(|| answer.map(|answer| (server.clone(), answer)))
        };
        let mut answers =
            members.filter_map(answer).collect::<Result<Vec<(Server, v1::DescribeResponse)>>>()?;
        // A server may be named by two addresses.
        let mut numbers = BTreeSet::new();
        answers.retain(|(_, answer)| numbers.insert(answer.server));
        let version = Version(asked_version(answers.iter().map(|(_, answer)| answer), tried));
        let newest =
            answers.iter().filter_map(|(_, answer)| answer.placement.clone()).max_by_key(|of| of.epoch);
        let placement = Placement::from_wire(newest)?;
        placement.validate(layout.shards())?;
        let part = |(Server { address, admin }, answer): (Server, v1::DescribeResponse)| {
            let number = ServerId(answer.server);
            let shards = (0..layout.shards()).map(ShardId);
            let is_owned = |&shard: &ShardId| placement.owner_at(shard, Step(version.0)) == number;
            Part { server: number, address, admin, owned: shards.filter(is_owned).collect() }
        };
        Ok((version, answers.into_iter().map(part).collect()))
    };
    let explain = |part: &Part, fault| failed("Export", &part.address, fault);
    let write = |_, at, bytes: &[u8]| {
        progress.add(bytes.len() as u64);
        files.write(at, bytes)
    };
    let (job, contents, deadline) = (&*settings.job, Contents::Weights(dtype), settings.deadline);
    let export = Export { job, contents, layout: &layout, deadline };
    let exported = servers.handle().block_on(export_by(&export, RECOVERY, plan, explain, &write))?;
    drop(progress);
    let (version, bytes, names) = (exported.version, files.bytes(), files.names().to_vec());
    files.publish()?;
    Ok(Exported { version, dtype, bytes, files: names })
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
