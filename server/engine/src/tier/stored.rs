//! The jobs that earlier processes of a server have kept in its state directories.

use std::path::PathBuf;

use longshore_proto::{Fault, JobName, JobSpec, Placement, ServerId};

use super::{
    evicted,
    folder::{FOLDER, Folder, Header, entries, headless, holds_files, name_of},
};

/// A job that was found in the state directories.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredJob {
    pub spec: JobSpec,
    pub placement: Placement,
    pub server: ServerId,
    /// See [`Header::owner`].
    pub owner: Option<String>,
}

impl StoredJob {
    /// Marks its folders as those of a job that idled and gave its memory back.
    pub fn mark_evicted(&self, dirs: &[PathBuf]) -> Result<(), Fault> {
        self.folders(dirs).try_for_each(|folder| evicted::mark(&folder))
    }

    /// Takes the marks away, if there are any. They must be gone before the job is opened: its workers would find it closed
    /// after a restart, and end.
    pub fn unmark_evicted(&self, dirs: &[PathBuf]) -> Result<(), Fault> {
        self.folders(dirs).try_for_each(|folder| evicted::unmark(&folder))
    }

    fn folders(&self, dirs: &[PathBuf]) -> impl Iterator<Item = PathBuf> {
        let servers = self.placement.servers.len();
        let folder = move |dir: &PathBuf| Folder::path(dir, &self.spec.name, self.server, servers);
        dirs.iter().map(folder).filter(|folder| folder.is_dir())
    }
}

/// What the state directories hold for a server that starts.
#[derive(Default)]
pub struct Stored {
    /// Those that a server opens when it starts.
    pub jobs: Vec<StoredJob>,
    /// Those that were evicted: their workers open them.
    pub evicted: Vec<StoredJob>,
    /// The jobs of which a folder cannot be read, and why. They are left alone.
    pub unreadable: Vec<(JobName, Fault)>,
}

/// The jobs that earlier processes of a server have kept.
pub fn stored_jobs(dirs: &[PathBuf]) -> Stored {
    let mut stored = Stored::default();
    for job in dirs.iter().flat_map(|dir| entries(dir)) {
        let name = job.file_name().and_then(|name| JobName::parse("job", &name.to_string_lossy()).ok());
        // Anything else does not belong to Longshore.
        let Some(name) = name else { continue };
        let ours = |folder: &PathBuf| name_of(folder).starts_with(FOLDER) && folder.is_dir();
        for folder in entries(&job).into_iter().filter(ours) {
            match Header::read(&folder) {
                Ok(Some(Header { spec, placement, server, owner, durable: true, .. })) => {
                    let job = StoredJob { spec, placement, server, owner };
                    let kind =
                        if evicted::is_marked(&folder) { &mut stored.evicted } else { &mut stored.jobs };
                    if !kind.contains(&job) {
                        kind.push(job);
                    }
                }
                Ok(None) if holds_files(&folder).unwrap_or(true) => {
                    stored.unreadable.push((name.clone(), headless(&folder)));
                }
                Ok(_) => {}
                Err(fault) => stored.unreadable.push((name.clone(), fault)),
            }
        }
    }
    stored
}
