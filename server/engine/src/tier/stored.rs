//! The jobs that earlier processes of a server have kept in its state directories.

use std::{fs, path::PathBuf};

use longshore_proto::{Fault, JobName, JobSpec, Placement, ServerId};

use super::folder::{FOLDER, Header, entries, headless, holds_files, name_of};

/// An empty file in the folders of a job that release 0.1 had closed because the job idled.
const CLOSED: &str = "evicted";

/// A job that was found in the state directories.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredJob {
    pub spec: JobSpec,
    pub placement: Placement,
    pub server: ServerId,
    /// See [`Header::owner`].
    pub owner: Option<String>,
}

/// Jobs that a starting server finds in the state directories.
#[derive(Default)]
pub struct Stored {
    /// Jobs that a server opens when it starts.
    pub jobs: Vec<StoredJob>,
    /// The jobs with an unreadable folder, and why. Such jobs are left alone.
    pub unreadable: Vec<(JobName, Fault)>,
}

/// The jobs that earlier processes of a server have kept.
pub fn stored_jobs(dirs: &[PathBuf]) -> Stored {
    let mut stored = Stored::default();
    for job in dirs.iter().flat_map(|dir| entries(dir)) {
        let name = job.file_name().and_then(|name| JobName::parse("job", &name.to_string_lossy()).ok());
        // Other entries do not belong to Longshore.
        let Some(name) = name else { continue };
        let ours = |folder: &PathBuf| name_of(folder).starts_with(FOLDER) && folder.is_dir();
        for folder in entries(&job).into_iter().filter(ours) {
            match Header::read(&folder) {
                Ok(Some(Header { spec, placement, server, owner, .. })) => {
                    let job = StoredJob { spec, placement, server, owner };
                    // A mark that stays does no harm, since no other code reads it.
                    let _ = fs::remove_file(folder.join(CLOSED));
                    if !stored.jobs.contains(&job) {
                        stored.jobs.push(job);
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
