//! `longshore doctor`: checks the needs of Longshore on a host and its servers, and names missing ones.

use std::path::PathBuf;

use anyhow::ensure;
use serde_json::json;

use crate::{
    access::Access,
    doctor::{Finding, Grade, Look},
    output::Output,
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Servers to check as well: name, port, trust, certificates, version, clock, round trip
    #[arg(long, env = "LONGSHORE_SERVERS", value_delimiter = ',', value_name = "HOST:PORT,...")]
    servers: Vec<String>,
    #[command(flatten)]
    access: Access,
    /// Folders that a server's --state-dir will name
    #[arg(long, value_delimiter = ',', value_name = "DIR,...")]
    state_dir: Vec<PathBuf>,
    /// Also measure the drives of --state-dir, with 600 MB in each for a moment, and the links to servers: each gets a job of 64 MiB for a moment,
    /// which takes twelve times as much of its memory
    #[arg(long)]
    speed: bool,
    /// Where the kernel's files are
    #[arg(long, hide = true, default_value = "/", value_name = "DIR")]
    system: PathBuf,
}

impl Args {
    pub(super) fn elsewhere(&mut self) -> (&mut Vec<String>, &mut Access) {
        (&mut self.servers, &mut self.access)
    }
}

/// Prints the findings. Returns an error if a check fails; a slow result is no error.
pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let look = Look {
        system: args.system.clone(),
        state_dirs: &args.state_dir,
        servers: &args.servers,
        access: &args.access,
        speed: args.speed,
    };
    let findings = look.findings()?;
    for Finding { what, grade, said, remedy } in &findings {
        out.result(
            || json!({"check": what, "state": grade.name(), "said": said, "remedy": remedy}),
            || {
                let remedy = if remedy.is_empty() { String::new() } else { format!(". Remedy: {remedy}") };
                format!("{:<8} {what}: {said}{remedy}", grade.name())
            },
        );
    }
    let bad = findings.iter().filter(|found| found.grade == Grade::Bad).map(|found| found.what.as_str());
    let bad: Vec<&str> = bad.collect();
    ensure!(bad.is_empty(), "not in order: {}", bad.join(", "));
    Ok(())
}
