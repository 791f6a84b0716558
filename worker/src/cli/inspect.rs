//! `longshore inspect`: what a state directory holds, and whether it is whole.

use std::path::PathBuf;

use anyhow::ensure;
use longshore_engine::tier::inspect::{Report, VersionReport, folders, inspect};
use longshore_proto::{Fault, TierKind};
use serde_json::json;

#[derive(clap::Args)]
pub(super) struct Args {
    /// A state directory (--state-dir or --shm-dir of a server), or one folder in it
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// One JSON object a folder
    #[arg(long)]
    json: bool,
}

/// Reads and verifies everything. An error when a folder has no version that is whole.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mut lost = Vec::new();
    for folder in folders(&args.dir)? {
        match inspect(&folder) {
            Ok(report) => {
                if report.recoverable().is_none() {
                    lost.push(folder.display().to_string());
                }
                let report = if args.json { json(&report).to_string() } else { text(&report) };
                say!("{report}");
            }
            Err(fault) => {
                let name = folder.display().to_string();
                let said =
                    if args.json { refused(&name, &fault).to_string() } else { format!("{name}\n  {fault}") };
                say!("{said}");
                lost.push(name);
            }
        }
    }
    ensure!(lost.is_empty(), "nothing that a server can go on from in {}", lost.join(", "));
    Ok(())
}

fn refused(folder: &str, fault: &Fault) -> serde_json::Value {
    json!({"folder": folder, "error": fault.to_string()})
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
        "directories": header.directories, "durable": header.durable,
        "spilled_images": header.spilled_images, "records": report.records,
        "broken_records": report.broken_records, "versions": report.versions.iter().map(version).collect::<Vec<_>>(),
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
        lines.push("  images live here too: its server runs with --spill images or all".to_string());
    }
    lines.extend(report.broken_records.iter().map(|why| format!("  record not whole: {why}")));
    let newest = report.versions.last().map(|version| version.version);
    for version in &report.versions {
        lines.push(format!("  {}", of_version(version, header.tier, Some(version.version) == newest)));
    }
    lines.push(match report.recoverable() {
        Some(version) if header.durable => format!("  a server goes on from version {}", version.0),
        Some(_) => "  started with --durability nothing: a server starts anew from a checkpoint".to_string(),
        None => "  a server cannot go on: restore a checkpoint into another folder".to_string(),
    });
    lines.join("\n")
}

fn of_version(version: &VersionReport, tier: TierKind, newest: bool) -> String {
    const SHOWN: usize = 5;
    let name = format!("version {}, {} applied: ", version.version.0, version.applied);
    let blocks = match tier {
        TierKind::Nvme => format!("{} blocks read, ", version.blocks),
        _ => String::new(),
    };
    if version.damaged.is_empty() {
        return format!("{name}{blocks}whole");
    }
    // Its slot serves the version after next, which may have begun.
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
