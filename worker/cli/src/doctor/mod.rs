//! What Longshore needs of a host, of its drives and of its servers, and what is missing.

mod certificates;
mod cluster;
mod drives;
mod finding;
mod host;
mod look;

pub(crate) use self::{
    finding::{Finding, Grade},
    look::Look,
};

impl Look<'_> {
    /// Makes every check, those of the host first.
    pub(crate) fn findings(&self) -> anyhow::Result<Vec<Finding>> {
        let mut findings = host::all(&self.system);
        findings.extend(self.state_dirs.iter().map(|dir| drives::state_dir(dir)));
        findings.extend(cluster::all(self)?);
        Ok(findings)
    }
}
