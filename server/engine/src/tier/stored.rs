//! The jobs that earlier processes of a server have kept in its state directories, and the removal of stores. An
//! interrupted creation or removal is finished by the next process. The server calls this when it starts, opens or
//! deletes a job.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, JobName, JobSpec, Placement, ServerId};

use super::{
    claim,
    fault::io,
    folder::{
        DELETED, FOLDER, Folder, Header, NEW, beside, entries, headless, holds_files, name_of, settle, sync,
    },
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

/// Jobs that a starting server finds in the state directories.
#[derive(Default)]
pub struct Stored {
    /// Jobs that a server opens when it starts.
    pub jobs: Vec<StoredJob>,
    /// The jobs with an unreadable folder, and why. Such jobs are left alone.
    pub unreadable: Vec<(JobName, Fault)>,
}

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

/// A folder that was renamed to be removed.
struct Grave {
    path: PathBuf,
    store: u64,
    name: String,
}

impl Grave {
    fn parse(path: &Path) -> Option<Grave> {
        let name = name_of(path);
        let (store, name) = name.strip_prefix(DELETED)?.split_once('-')?;
        let store = u64::from_str_radix(store, 16).ok()?;
        Some(Grave { path: path.to_path_buf(), store, name: name.to_string() })
    }

    fn is_of(&self, home: &Path) -> bool {
        let store = Header::read(home).ok().flatten().map(|header| header.store);
        name_of(home) == self.name && store == Some(self.store)
    }
}

/// Removes folders of one store with all their files. The first rename already deletes the store; after an interruption
/// [`finish_job`] does the rest.
pub(super) fn remove_all(folders: &[PathBuf]) -> Result<(), Fault> {
    let store = folders.iter().find_map(|folder| Header::read(folder).ok().flatten());
    let store = store.map_or_else(Header::unique_store, |header| header.store);
    let graves = folders.iter().map(|folder| bury(folder, store)).collect::<Result<Vec<_>, Fault>>()?;
    graves.iter().try_for_each(|grave| remove(grave))
}

/// Renames a folder, which then belongs to no job.
fn bury(folder: &Path, store: u64) -> Result<PathBuf, Fault> {
    let grave = beside(folder, &format!("{DELETED}{store:016x}-"));
    let buried = fs::rename(folder, &grave).and_then(|()| folder.parent().map_or(Ok(()), sync));
    match buried {
        // An operator may have removed the folder by hand.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(grave),
        buried => buried.map_err(io("rename", folder)).map(|()| grave),
    }
}

/// Removes a folder, and the job's folder above it if that is then empty.
fn remove(folder: &Path) -> Result<(), Fault> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(io("remove", folder)(error)),
        _ => {}
    }
    let _ = folder.parent().map(fs::remove_dir);
    let job = folder.parent().and_then(|job| JobName::parse("job", &name_of(job)).ok());
    if let (Some(dir), Some(job)) = (folder.ancestors().nth(2), job) {
        claim::forget(dir, &job);
    }
    Ok(())
}

/// Deletes all files that these directories keep of a job that is not open, readable or not.
///
/// # Errors
/// `Conflict` while another process uses one of its folders.
pub fn delete_stored(dirs: &[PathBuf], job: &JobName) -> Result<(), Fault> {
    let homes: Vec<PathBuf> =
        folders_of(dirs, job).filter(|path| name_of(path).starts_with(FOLDER)).collect();
    let _taken =
        homes.iter().map(|home| Folder::take_existing(home.clone())).collect::<Result<Vec<_>, Fault>>()?;
    let mut stores = BTreeMap::<String, Vec<PathBuf>>::new();
    for home in &homes {
        stores.entry(name_of(home)).or_default().push(home.clone());
    }
    stores.values().try_for_each(|homes| remove_all(homes))?;
    finish_job(dirs, job);
    Ok(())
}

/// Finishes creations and deletions that an earlier process had begun.
pub fn finish_interrupted(dirs: &[PathBuf]) {
    let names = dirs.iter().flat_map(|dir| entries(dir)).map(|job| name_of(&job));
    let jobs: BTreeSet<JobName> = names.filter_map(|name| JobName::parse("job", &name).ok()).collect();
    jobs.iter().for_each(|job| finish_job(dirs, job));
}

/// Runs [`finish_interrupted`] for one job. Work that fails now is left for a later call.
pub(super) fn finish_job(dirs: &[PathBuf], job: &JobName) {
    let folders: Vec<PathBuf> = folders_of(dirs, job).collect();
    let mut graves: Vec<Grave> = folders.iter().filter_map(|path| Grave::parse(path)).collect();
    let homes = folders.iter().filter(|path| name_of(path).starts_with(FOLDER));
    let (deleted, kept): (Vec<&PathBuf>, Vec<&PathBuf>) =
        homes.partition(|home| graves.iter().any(|grave| grave.is_of(home)));
    for home in deleted {
        let of = graves.iter().find(|grave| grave.is_of(home)).map(|grave| (grave.store, grave.name.clone()));
        if let Some((store, name)) = of
            && let Some(path) = said(bury(home, store))
        {
            graves.push(Grave { path, store, name });
        }
    }
    let stores: Vec<u64> =
        kept.iter().filter_map(|home| Header::read(home).ok().flatten()).map(|header| header.store).collect();
    for new in folders.iter().filter(|path| name_of(path).starts_with(NEW)) {
        said(finish_creation(new, &stores));
    }
    for grave in graves {
        tracing::info!(%job, folder = %grave.path.display(), "removing a deleted job's folder");
        said(remove(&grave.path));
    }
    // An empty folder of a job's name stays: another program, or another server, may have made it.
    dirs.iter().for_each(|dir| claim::forget(dir, job));
}

/// Settles a complete folder, if another folder of its store is settled already. Removes any other folder.
fn finish_creation(new: &Path, settled: &[u64]) -> Result<(), Fault> {
    // A folder in use is being made by another process.
    let Ok(_lock) = Folder::take_existing(new.to_path_buf()) else { return Ok(()) };
    let home = new.with_file_name(name_of(new).trim_start_matches(NEW));
    match Header::read(new) {
        Ok(Some(header)) if settled.contains(&header.store) && !holds_files(&home)? => settle(new, &home),
        _ => remove(new),
    }
}

fn folders_of(dirs: &[PathBuf], job: &JobName) -> impl Iterator<Item = PathBuf> {
    let folders = dirs.iter().flat_map(|dir| entries(&dir.join(job.as_str())));
    folders.filter(|path| path.is_dir()).collect::<Vec<_>>().into_iter()
}

/// Returns the result, or logs that files stay behind.
pub(super) fn said<T>(result: Result<T, Fault>) -> Option<T> {
    result.inspect_err(|fault| tracing::warn!(%fault, "left behind")).ok()
}
