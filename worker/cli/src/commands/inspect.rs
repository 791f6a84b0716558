//! `longshore inspect`: shows the contents of a state directory, and verifies them.

use std::path::PathBuf;

use anyhow::ensure;
use longshore_engine::{
    job::inspect,
    tier::inspect::{Report, VersionReport, folders},
};
use longshore_proto::FaultKind;
use serde_json::json;

use crate::output::Output;

#[derive(clap::Args)]
pub(super) struct Args {
    /// A state directory (--state-dir or --shm-dir of a server), or one folder in it
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Reasons for which a server could not recover from a folder as it is.
const LOST: &str = "nothing that a server can go on from in";
const DAMAGED: &str = "damage in the newest version, which a server refuses, in";
const IN_USE: &str = "a server uses, so that it was not verified,";

/// Reads and verifies everything.
///
/// # Errors
/// If a folder has no whole version, if its newest version is damaged, or if a server uses it.
pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let mut amiss = Vec::new();
    for folder in folders(&args.dir)? {
        let name = folder.display().to_string();
        let why = match inspect(&folder) {
            Ok(report) => {
                out.result(|| json(&report), || text(&report));
                let why = if report.recoverable().is_some() { DAMAGED } else { LOST };
                (!report.is_whole()).then_some(why)
            }
            Err(fault) => {
                let in_use = fault.kind == FaultKind::Conflict;
                out.result(
                    || json!({"folder": name, "error": fault.to_string(), "in_use": in_use}),
                    || format!("{name}\n  {fault}"),
                );
                Some(if in_use { IN_USE } else { LOST })
            }
        };
        amiss.extend(why.map(|why| (why, name)));
    }
    let folders = |reason| amiss.iter().filter(move |(why, _)| *why == reason).map(|(_, name)| name.as_str());
    let reasons: Vec<String> = [LOST, DAMAGED, IN_USE]
        .into_iter()
        .filter(|&reason| folders(reason).next().is_some())
        .map(|reason| format!("{reason} {}", folders(reason).collect::<Vec<_>>().join(", ")))
        .collect();
    ensure!(reasons.is_empty(), "{}", reasons.join("; "));
    Ok(())
}

fn json(report: &Report) -> serde_json::Value {
    let header = &report.header;
    let version = |version: &VersionReport| {
        json!({
            "version": version.version.0, "applied": version.applied, "blocks": version.blocks,
            "whole": version.damaged.is_empty(), "damaged": version.damaged,
        })
    };
    json!({
        "folder": report.folder, "job": header.spec.name.as_str(), "tier": header.tier.to_string(),
        "server": header.server.0, "servers": header.placement.servers, "directory": header.directory,
        "directories": header.directories,
        "spilled_images": header.spilled_images, "records": report.records,
        "broken_records": report.broken_records, "versions": report.versions.iter().map(version).collect::<Vec<_>>(),
        "whole": report.is_whole(), "damage": report.damage,
        "recoverable": report.recoverable().map(|version| version.0),
    })
}

fn text(report: &Report) -> String {
    let header = &report.header;
    let parameters: u64 = header.spec.params.iter().filter_map(longshore_proto::Param::elements).sum();
    let mut lines = vec![
        report.folder.display().to_string(),
        format!(
            "  job {}: tier {}, server {} of {}, directory {} of {}, {:.2} M parameters, {}",
            header.spec.name.as_str(),
            header.tier,
            header.server.0 + 1,
            header.placement.servers.len(),
            header.directory + 1,
            header.directories,
            parameters as f64 / 1e6,
            header.spec.rule.name(),
        ),
    ];
    if header.spilled_images {
        lines.push("  images live here too: its server runs with --spill all".to_string());
    }
    lines.extend(report.broken_records.iter().map(|why| format!("  record not whole: {why}")));
    let newest = report.versions.last().map(|version| version.version);
    for version in &report.versions {
        lines.push(format!("  {}", of_version(version, Some(version.version) == newest)));
    }
    lines.extend(report.damage.iter().map(|why| format!("  not as a server needs it: {why}")));
    lines.push(format!("  {}", outlook(report)));
    lines.join("\n")
}

fn outlook(report: &Report) -> String {
    match (report.recoverable(), report.versions.last()) {
        _ if report.is_blank() && report.damage.is_empty() => {
            "nothing was loaded yet: a server waits for the job's weights".to_string()
        }
        (Some(version), Some(newest)) if version != newest.version => format!(
            "a server refuses {}: `longshore step-back --version {}` goes on from {version}, or restore a checkpoint",
            newest.version, version.0
        ),
        (Some(version), _) => format!("a server goes on from version {}", version.0),
        (None, _) => "a server cannot go on: restore a checkpoint into another folder".to_string(),
    }
}

fn of_version(version: &VersionReport, newest: bool) -> String {
    const SHOWN: usize = 5;
    let name = format!("version {}, {} applied: ", version.version.0, version.applied);
    let blocks = match version.blocks {
        0 => String::new(),
        blocks => format!("{blocks} blocks read, "),
    };
    if version.damaged.is_empty() {
        return format!("{name}{blocks}whole");
    }
    // The version's slot serves the version after next, whose write may have begun.
    if !newest {
        return format!("{name}overwritten by a later one");
    }
    let mut text = format!("{name}{blocks}{} damaged", version.damaged.len());
    for place in version.damaged.iter().take(SHOWN) {
        text += &format!("\n    {place}");
    }
    if version.damaged.len() > SHOWN {
        text += &format!("\n    and {} more", version.damaged.len() - SHOWN);
    }
    text
}
