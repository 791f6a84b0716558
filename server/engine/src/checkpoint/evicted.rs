//! Notes of release 0.1, which closed idle jobs once a checkpoint had their state. A note names that checkpoint. A job
//! begun anew would silently lose its training, so a server reads the notes for one more release.

use std::{fs, io::ErrorKind};

use longshore_proto::{Fault, FaultKind, JobName};
use serde::Deserialize;

use super::{
    Store,
    fault::{FIELD, io},
    manifest,
};

/// Name of the note's file. No checkpoint can have the same name.
const FILE: &str = "~evicted.json";

#[derive(Deserialize)]
struct Note {
    checkpoint: String,
}

impl Store {
    /// Refuses a new job if a checkpoint has the state of an earlier job of the same name.
    ///
    /// # Errors
    /// Fails also where the note cannot be read, since the earlier job's state is then unknown. A note whose checkpoint
    /// is gone has no effect.
    pub fn check_not_evicted(&self, job: &JobName) -> Result<(), Fault> {
        let folder = self.dir().join(job.as_str());
        let path = folder.join(FILE);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            bytes => bytes.map_err(io("read", &path))?,
        };
        let note = serde_json::from_slice::<Note>(&bytes).ok();
        let checkpoint = note.and_then(|note| JobName::parse("name", &note.checkpoint).ok());
        let has = match &checkpoint {
            Some(name) => {
                let manifest = folder.join(name.as_str()).join(manifest::FILE);
                if !manifest.try_exists().map_err(io("look at", &manifest))? {
                    return Ok(());
                }
                format!("checkpoint {name}")
            }
            None => "one of its checkpoints (`longshore checkpoints`)".to_string(),
        };
        let remedy = format!(
            "delete the note {}; then run the job with --resume, or `longshore restore`, to go on, and without to begin anew",
            path.display()
        );
        let value = format!("{job}, which an earlier release closed because it idled: {has} has its state");
        Err(Fault::new(FaultKind::Precondition, FIELD, value, "a job without such a note", remedy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_refuses_the_job_while_its_checkpoint_is_there() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::new(root.path());
        let job = JobName::parse("job", "a").unwrap();
        store.check_not_evicted(&job).expect("no folder");
        let (folder, note) = (root.path().join("a"), root.path().join("a").join(FILE));
        fs::create_dir_all(folder.join("idle-00000006")).unwrap();
        fs::write(&note, br#"{"checkpoint":"idle-00000006","version":6}"#).unwrap();
        store.check_not_evicted(&job).expect("a checkpoint that was pruned");
        fs::write(folder.join("idle-00000006").join(manifest::FILE), "").unwrap();
        let fault = store.check_not_evicted(&job).unwrap_err();
        assert!(fault.value.contains("idle-00000006") && fault.remedy.contains("--resume"), "{fault}");
        fs::write(&note, b"{\"checkpoint\":").unwrap();
        let fault = store.check_not_evicted(&job).unwrap_err();
        assert!(fault.value.contains("longshore checkpoints") && fault.remedy.contains(FILE), "{fault}");
        fs::remove_file(&note).unwrap();
        // A folder in the note's place cannot be read as a file.
        fs::create_dir(&note).unwrap();
        store.check_not_evicted(&job).unwrap_err();
    }
}
