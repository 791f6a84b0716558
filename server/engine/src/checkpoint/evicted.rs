//! Which jobs idled, gave their memory back, and have their state in a checkpoint: a note beside it, for the servers' next
//! processes.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind, JobName, Version};
use serde::{Deserialize, Serialize};

use super::{
    Store,
    fault::{FIELD, defect, io},
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
    /// Notes that the job is evicted, and where its state is. Servers that share the folder write the same, perhaps at once.
    pub fn note_evicted(&self, job: &JobName, checkpoint: &str, version: Version) -> Result<(), Fault> {
        let note = Evicted { checkpoint: checkpoint.to_string(), version: version.0 };
        let path = self.dir().join(job.as_str()).join(FILE);
        let bytes = serde_json::to_vec(&note).map_err(|error| defect(&path, error))?;
        files::publish(path, &bytes)
    }

    /// The job is there again, or deleted. A missing note is no error.
    pub fn forget_evicted(&self, job: &JobName) -> Result<(), Fault> {
        let note = self.dir().join(job.as_str()).join(FILE);
        gone(fs::remove_file(&note)).map_err(io("remove", &note))
    }

    /// Where the job's state is, if there is a note of it and the checkpoint is still there.
    ///
    /// # Errors
    /// Where nobody can tell: the note cannot be read, or is none.
    pub fn evicted_job(&self, job: &JobName) -> Result<Option<Evicted>, Fault> {
        read(&self.dir().join(job.as_str()))
    }

    /// The jobs with a note whose checkpoint is still there: the `most` that were evicted last. Those whose note cannot be read are
    /// left out; they are looked for again when somebody brings them weights.
    pub fn evicted(&self, most: usize) -> Vec<(JobName, Evicted)> {
        let entries = fs::read_dir(self.dir()).into_iter().flatten().flatten();
        let written =
            |folder: PathBuf| Some((fs::metadata(folder.join(FILE)).ok()?.modified().ok()?, folder));
        let mut folders: Vec<_> = entries.filter_map(|entry| written(entry.path())).collect();
        folders.sort_unstable();
        let found = |folder: &PathBuf| {
            let job = JobName::parse("job", folder.file_name()?.to_str()?).ok()?;
            Some((job, read(folder).ok()??))
        };
        folders.iter().rev().filter_map(|(_, folder)| found(folder)).take(most).collect()
    }
}

fn read(folder: &Path) -> Result<Option<Evicted>, Fault> {
    let path = folder.join(FILE);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        bytes => bytes.map_err(io("read", &path))?,
    };
    let damaged = |why: String| {
        let value = format!("{} ({why})", path.display());
        let limit = "a note of where an evicted job's state is";
        let remedy = "see which checkpoints the job has (`longshore checkpoints`) and restore the newest; to begin anew, delete the \
                      job first (`longshore delete`)";
        Fault::new(FaultKind::Corrupt, FIELD, value, limit, remedy)
    };
    let note: Evicted = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    let checkpoint = JobName::parse("name", &note.checkpoint).map_err(|fault| damaged(fault.to_string()))?;
    let manifest = folder.join(checkpoint.as_str()).join(manifest::FILE);
    Ok(manifest.try_exists().map_err(io("look at", &manifest))?.then_some(note))
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

    #[test]
    fn a_note_that_cannot_be_read_is_not_taken_for_none() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path());
        let job = JobName::parse("job", "a").unwrap();
        assert_eq!(store.evicted_job(&job).unwrap(), None, "no folder");
        let note = root.path().join("a").join(FILE);
        // Reading a folder fails.
        fs::create_dir_all(&note).unwrap();
        let fault = store.evicted_job(&job).unwrap_err();
        assert!(fault.value.contains(FILE), "{fault}");
        fs::remove_dir(&note).unwrap();
        fs::write(&note, "{\"checkpoint\":").unwrap();
        let fault = store.evicted_job(&job).unwrap_err();
        assert!(fault.kind == FaultKind::Corrupt && fault.remedy.contains("longshore delete"), "{fault}");
        assert!(store.evicted(9).is_empty());
        store.forget_evicted(&job).unwrap();
        assert_eq!(store.evicted_job(&job).unwrap(), None);
    }
}
