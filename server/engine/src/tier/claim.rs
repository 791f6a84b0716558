//! Claims on state directories. A lock keeps other servers out while a server runs. A note beside a directory names the
//! jobs that are stored there. So a server does not take the empty folder below a mount point for the directory. The
//! server takes claims when it starts.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Mutex,
    time::UNIX_EPOCH,
};

use longshore_proto::{Fault, FaultKind, JobName};
use rustix::fs::{Access, FlockOperation, OFlags, access, flock};

use super::{
    fault::{FIELD, conflict, io, named},
    folder::{FOLDER, entries, name_of},
};
use crate::lock;

/// A state directory that no other server may use during the claim's life. After a crash each server must find only its
/// own jobs.
pub struct Claim {
    _lock: File,
}

impl Claim {
    /// `field` is the setting that names the directory.
    pub fn take(dir: &Path, field: &'static str) -> Result<Claim, Fault> {
        Claim::lock(dir).map_err(named(field))
    }

    /// Claims a directory whose jobs outlive the host, and notes the jobs that are stored there.
    pub fn take_state_dir(dir: &Path) -> Result<Claim, Fault> {
        let claim = Claim::lock(dir)?;
        let jobs = jobs_in(dir);
        if !jobs.is_empty() || Note::read(dir).is_some_and(|note| note.is_of(dir)) {
            Note::change(dir, |noted| *noted = jobs);
        } else if let Some(Note { jobs, .. }) = Note::read(dir) {
            tracing::info!(dir = %dir.display(), ?jobs, "empty, and jobs were stored in another folder of this path");
        }
        Ok(claim)
    }

    fn lock(dir: &Path) -> Result<Claim, Fault> {
        let file = File::open(dir).map_err(io("open", dir))?;
        if !dir.is_dir() {
            return Err(io("open", dir)(ErrorKind::NotADirectory.into()));
        }
        let needed = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
        access(dir, needed).map_err(|error| io("write to", dir)(error.into()))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Claim { _lock: file }),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let value = format!("{} (in use by another server)", dir.display());
                Err(conflict(
                    value,
                    "one server's own",
                    "give each server of this host a directory of its own",
                ))
            }
            Err(error) => Err(io("lock", dir)(error.into())),
        }
    }
}

/// Jobs that are stored in a directory, beside it: `/mnt/.a.longshore-claim` for `/mnt/a`. The first line is the
/// directory's identity, and each further line is a job.
struct Note {
    identity: String,
    jobs: BTreeSet<String>,
}

impl Note {
    fn path(dir: &Path) -> Option<PathBuf> {
        let dir = dir.canonicalize().ok()?;
        Some(dir.parent()?.join(format!(".{}.longshore-claim", dir.file_name()?.to_str()?)))
    }

    fn read(dir: &Path) -> Option<Note> {
        let text = fs::read_to_string(Note::path(dir)?).ok()?;
        let mut lines = text.lines().map(str::to_string);
        Some(Note { identity: lines.next()?, jobs: lines.collect() })
    }

    fn is_of(&self, dir: &Path) -> bool {
        identity(dir).is_some_and(|identity| identity == self.identity)
    }

    /// Changes the jobs of the note, and makes it the note of the present folder. A note without jobs is removed. An
    /// unprivileged server that cannot write in the parent could not write below an unused mount point either, and
    /// needs no note.
    fn change(dir: &Path, change: impl FnOnce(&mut BTreeSet<String>)) {
        static CHANGING: Mutex<()> = Mutex::new(());
        let _one_at_a_time = lock(&CHANGING);
        let (Some(path), Some(identity)) = (Note::path(dir), identity(dir)) else { return };
        let found = Note::read(dir);
        let mut jobs = found.as_ref().map(|note| note.jobs.clone()).unwrap_or_default();
        change(&mut jobs);
        if found.is_some_and(|found| found.jobs == jobs && found.identity == identity) {
            return;
        }
        let text: String = std::iter::once(&identity).chain(&jobs).map(|line| format!("{line}\n")).collect();
        let write = || {
            if jobs.is_empty() {
                return fs::remove_file(&path);
            }
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o644);
            let mut file = options.custom_flags(OFlags::NOFOLLOW.bits() as i32).open(&path)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        match write() {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::info!(note = %path.display(), %error, "no note beside the state directory: name a folder below the mount point");
            }
            _ => {}
        }
    }
}

/// Refuses to store a job in an empty folder that is in the place of a folder with jobs.
pub(super) fn check(dir: &Path) -> Result<(), Fault> {
    let Some(Note { jobs, .. }) = missing(dir) else { return Ok(()) };
    let jobs = Vec::from_iter(jobs).join(", ");
    let value = format!("{} (empty, and another folder of this path had jobs: {jobs})", dir.display());
    let remedy = "mount its drive and start the server again; or give up what was stored there, job by job, with `longshore \
                  delete --job NAME --discard-unreadable`, or go back to a checkpoint with --resume --discard-state";
    Err(Fault::new(FaultKind::Precondition, FIELD, value, "the folder with these jobs", remedy))
}

pub(super) fn note(dir: &Path, job: &JobName) {
    Note::change(dir, |jobs| _ = jobs.insert(job.to_string()));
}

/// Notes that a job is not stored in `dir` any more. A note of another folder at this path stays.
pub(super) fn forget(dir: &Path, job: &JobName) {
    if Note::read(dir).is_some_and(|note| note.is_of(dir)) && !jobs_in(dir).contains(job.as_str()) {
        Note::change(dir, |jobs| _ = jobs.remove(job.as_str()));
    }
}

/// Gives up a job whose folder is missing with its drive. Returns false if no job of the name is missing.
pub fn give_up_missing(dirs: &[PathBuf], job: &JobName) -> bool {
    let is_missing = |dir: &&PathBuf| missing(dir).is_some_and(|note| note.jobs.contains(job.as_str()));
    let lacking: Vec<&PathBuf> = dirs.iter().filter(is_missing).collect();
    lacking.iter().for_each(|dir| Note::change(dir, |jobs| _ = jobs.remove(job.as_str())));
    !lacking.is_empty()
}

/// Returns the note of another folder of this path, if the present folder holds none of the noted jobs.
fn missing(dir: &Path) -> Option<Note> {
    Note::read(dir).filter(|note| !note.is_of(dir) && jobs_in(dir).is_disjoint(&note.jobs))
}

fn jobs_in(dir: &Path) -> BTreeSet<String> {
    let is_job = |job: &PathBuf| entries(job).iter().any(|folder| name_of(folder).starts_with(FOLDER));
    entries(dir).into_iter().filter(is_job).map(|job| name_of(&job)).collect()
}

/// Names a folder through restarts of the host: device numbers may change, but inode and time of birth do not.
fn identity(dir: &Path) -> Option<String> {
    let found = fs::metadata(dir).ok()?;
    let born = found.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    Some(format!("inode {} born {}", found.ino(), born.map_or(0, |born| born.as_nanos())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_cannot_be_written_is_refused() {
        // No process may create files there, not even root's.
        let refused = Claim::take(Path::new("/proc/sys"), "shm_dir").err().unwrap();
        assert_eq!((refused.kind, refused.field.as_str()), (FaultKind::Precondition, "shm_dir"));
        assert!(refused.value.contains("/proc/sys (write to"), "{refused}");
    }

    #[test]
    fn an_empty_folder_in_the_place_of_one_with_jobs_is_refused_until_told() {
        let root = tempfile::tempdir().unwrap();
        let (dir, away, note) =
            (root.path().join("a"), root.path().join("away"), root.path().join(".a.longshore-claim"));
        let (run, dirs) = (JobName::parse("job", "run").unwrap(), [dir.clone()]);
        fs::create_dir_all(dir.join("run/server-0-of-1")).unwrap();
        drop(Claim::take_state_dir(&dir).unwrap());
        check(&dir).unwrap();
        fs::rename(&dir, &away).unwrap();
        fs::create_dir(&dir).unwrap();
        drop(Claim::take_state_dir(&dir).unwrap());
        let refused = check(&dir).unwrap_err();
        assert!(
            refused.value.ends_with("had jobs: run)") && refused.remedy.starts_with("mount"),
            "{refused}"
        );
        // The drive is back.
        fs::remove_dir(&dir).unwrap();
        fs::rename(dir.with_file_name("away"), &dir).unwrap();
        check(&dir).unwrap();
        // The same folder, emptied by hand.
        fs::remove_dir_all(dir.join("run")).unwrap();
        check(&dir).unwrap();
        drop(Claim::take_state_dir(&dir).unwrap());
        assert!(!note.exists());
        super::note(&dir, &run);
        fs::rename(&dir, &away).unwrap();
        fs::create_dir(&dir).unwrap();
        assert!(check(&dir).is_err());
        assert!(give_up_missing(&dirs, &run) && !give_up_missing(&dirs, &run) && !note.exists());
        check(&dir).unwrap();
    }
}
