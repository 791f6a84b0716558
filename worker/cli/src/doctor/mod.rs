//! Checks what Longshore needs of a host, of its drives and of its servers.

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
    /// Runs every check, those of the host first.
    pub(crate) fn findings(&self) -> anyhow::Result<Vec<Finding>> {
        let mut findings = host::all(&self.system);
        let dirs: Vec<Finding> = self.state_dirs.iter().map(|dir| drives::state_dir(dir)).collect();
        let speeds = if self.speed { drives::speeds(self.state_dirs, &dirs) } else { Vec::new() };
        findings.extend(dirs.into_iter().chain(speeds));
        findings.extend(cluster::all(self)?);
        Ok(findings)
    }
}
