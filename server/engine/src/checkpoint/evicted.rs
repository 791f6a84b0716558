//! Which jobs idled, gave their memory back, and have their state in a checkpoint: a note beside it, for the servers' next
//! processes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, JobName, Version};
use serde::{Deserialize, Serialize};

use super::{
    Store,
    fault::{defect, io},
    files, manifest,
    prune::gone,
};

/// No checkpoint has this name.
const FILE: &str = "~evicted.json";

/// Which checkpoint has an evicted job's state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evicted {
    pub checkpoint: String,
    pub version: u64,
}

impl Store {
    /// Notes that the job is evicted, and where its state is. Servers that share the folder write the same.
    pub fn note_evicted(&self, job: &JobName, checkpoint: &str, version: Version) -> Result<(), Fault> {
        let note = Evicted { checkpoint: checkpoint.to_string(), version: version.0 };
        let path = self.dir().join(job.as_str()).join(FILE);
        files::remove_drafts(&path);
        let bytes = serde_json::to_vec(&note).map_err(|error| defect(&path, error))?;
        files::publish(path, &bytes)
    }

    /// The job is there again, or deleted. A missing note is no error.
    pub fn forget_evicted(&self, job: &JobName) -> Result<(), Fault> {
        let note = self.dir().join(job.as_str()).join(FILE);
        gone(fs::remove_file(&note)).map_err(io("remove", &note))
    }

    /// Where the job's state is, if there is a note of it and the checkpoint is still there.
    pub fn evicted_job(&self, job: &JobName) -> Option<Evicted> {
        read(&self.dir().join(job.as_str())).map(|(_, evicted)| evicted)
    }

    /// The jobs with a note whose checkpoint is still there: the `most` that were evicted last.
    pub fn evicted(&self, most: usize) -> Vec<(JobName, Evicted)> {
        let entries = fs::read_dir(self.dir()).into_iter().flatten().flatten();
        let written =
            |folder: PathBuf| Some((fs::metadata(folder.join(FILE)).ok()?.modified().ok()?, folder));
        let mut folders: Vec<_> = entries.filter_map(|entry| written(entry.path())).collect();
        folders.sort_unstable();
        folders.iter().rev().filter_map(|(_, folder)| read(folder)).take(most).collect()
    }
}

fn read(folder: &Path) -> Option<(JobName, Evicted)> {
    let job = JobName::parse("job", folder.file_name()?.to_str()?).ok()?;
    let note: Evicted = serde_json::from_slice(&fs::read(folder.join(FILE)).ok()?).ok()?;
    let checkpoint = JobName::parse("name", &note.checkpoint).ok()?;
    folder.join(checkpoint.as_str()).join(manifest::FILE).exists().then_some((job, note))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        time::{Duration, SystemTime},
    };

    use super::*;

    #[test]
    fn the_jobs_evicted_last_are_found() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path());
        for (age, name) in [(1, "b"), (3, "a"), (2, "c"), (0, "without its checkpoint")] {
            let name = name.replace(' ', "-");
            store.note_evicted(&JobName::parse("job", &name).unwrap(), "kept", Version(7)).unwrap();
            let folder = root.path().join(&name);
            if age > 0 {
                fs::create_dir(folder.join("kept")).unwrap();
                fs::write(folder.join("kept").join(manifest::FILE), "").unwrap();
            }
            let note = File::options().write(true).open(folder.join(FILE)).unwrap();
            note.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        }
        let names = |most| store.evicted(most).into_iter().map(|(name, _)| name.to_string());
        assert_eq!(names(2).collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(names(9).collect::<Vec<_>>(), ["b", "c", "a"]);
    }
}
