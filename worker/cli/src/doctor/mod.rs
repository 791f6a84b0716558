//! Checks what Longshore needs of a host, of its drives and of its servers.

mod certificates;
mod cluster;
mod drives;
mod host;

use std::path::PathBuf;

use anyhow::ensure;
use longshore_proto::legible;
use serde_json::json;

use crate::{access::Access, output::Output};

#[derive(clap::Args)]
pub(crate) struct Look {
    /// Servers to check as well: name, port, trust, certificates, version, clock, round trip
    #[arg(long, env = "LONGSHORE_SERVERS", value_delimiter = ',', value_name = "HOST:PORT,...")]
    pub(crate) servers: Vec<String>,
    #[command(flatten)]
    pub(crate) access: Access,
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

impl Look {
    /// Prints the findings of every check, those of the host first. A slow result is no error.
    pub(crate) fn run(&self, out: Output) -> anyhow::Result<()> {
        let findings = self.findings()?;
        for Finding { what, grade, said, remedy } in &findings {
            out.result(
                || json!({"check": what, "state": grade.name(), "said": said, "remedy": remedy}),
                || {
                    let remedy =
                        if remedy.is_empty() { String::new() } else { format!(". Remedy: {remedy}") };
                    legible(&format!("{:<8} {what}: {said}{remedy}", grade.name())).into_owned()
                },
            );
        }
        let bad = findings.iter().filter(|found| found.grade == Grade::Bad).map(|found| found.what.as_str());
        let bad: Vec<&str> = bad.collect();
        ensure!(bad.is_empty(), "not in order: {}", bad.join(", "));
        Ok(())
    }

    fn findings(&self) -> anyhow::Result<Vec<Finding>> {
        let mut findings = host::all(&self.system);
        let dirs: Vec<Finding> = self.state_dir.iter().map(|dir| drives::state_dir(dir)).collect();
        let speeds = if self.speed { drives::speeds(&self.state_dir, &dirs) } else { Vec::new() };
        findings.extend(dirs.into_iter().chain(speeds));
        findings.extend(cluster::all(self)?);
        Ok(findings)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) what: String,
    pub(crate) grade: Grade,
    pub(crate) said: String,
    /// Empty if nothing needs to be done.
    pub(crate) remedy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grade {
    Good,
    /// Works, but slower, for fewer jobs, or not for long.
    Warning,
    Bad,
}

impl Grade {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Grade::Good => "ok",
            Grade::Warning => "warning",
            Grade::Bad => "bad",
        }
    }
}

fn good(what: impl Into<String>, said: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade: Grade::Good, said: said.into(), remedy: String::new() }
}

fn warning(what: impl Into<String>, said: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade: Grade::Warning, said: said.into(), remedy: remedy.into() }
}

fn bad(what: impl Into<String>, said: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade: Grade::Bad, said: said.into(), remedy: remedy.into() }
}
