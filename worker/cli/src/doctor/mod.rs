//! What Longshore needs of a host, of its drives and of its servers, and what is missing.

mod cluster;
mod drives;
mod host;

use std::path::PathBuf;

use crate::access::Access;

/// What is to be looked at.
pub(crate) struct Look<'a> {
    /// Where the kernel's own files are: `/`, or a copy of them.
    pub(crate) system: PathBuf,
    pub(crate) state_dirs: &'a [PathBuf],
    pub(crate) servers: &'a [String],
    pub(crate) access: &'a Access,
    /// Also how fast the links to servers are, for which a job is opened there and deleted again.
    pub(crate) speed: bool,
}

/// One check, and what it found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) what: String,
    pub(crate) grade: Grade,
    pub(crate) said: String,
    /// Empty where nothing is to be done.
    pub(crate) remedy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grade {
    Good,
    /// It works, but slower or for less.
    Warning,
    /// It does not work.
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

impl Look<'_> {
    /// Makes every check, those of the host first.
    pub(crate) fn findings(&self) -> anyhow::Result<Vec<Finding>> {
        let mut findings = host::all(&self.system);
        findings.extend(self.state_dirs.iter().map(|dir| drives::state_dir(dir)));
        findings.extend(cluster::all(self)?);
        Ok(findings)
    }
}
