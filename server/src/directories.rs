//! The directories of stored jobs. The running server locks the directories, so a restart finds the server's own jobs
//! and no others.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use longshore_engine::tier::Claim;
use longshore_proto::Fault;
use rustix::fs::{FlockOperation, flock};

use crate::config::StorageConfig;

const TMPFS: &str = "/dev/shm";

/// Locks on the directories, held while the server runs.
pub(crate) struct Directories {
    pub(crate) shm: Option<PathBuf>,
    /// The default folder of the `shm` tier. Drop removes an empty folder.
    made: Option<PathBuf>,
    _claims: Vec<Claim>,
}

impl Drop for Directories {
    fn drop(&mut self) {
        // A folder with jobs stays: only an empty one can be removed.
        self.made.iter().for_each(|dir| drop(fs::remove_dir(dir)));
    }
}

impl Directories {
    /// Locks the directories. Named directories must exist. The default folder of the `shm` tier contains `port` in
    /// its path, so a restart finds it again. Without a fixed port there is no default.
    pub(crate) fn claim(config: &StorageConfig, port: Option<u16>) -> Result<Directories, Fault> {
        let state_dirs = config.state_dirs.iter().map(|dir| Claim::take_state_dir(dir));
        let named = state_dirs.chain(config.shm_dir.iter().map(|dir| Claim::take(dir, "shm_dir")));
        let mut claims = named.collect::<Result<Vec<_>, Fault>>()?;
        let Some(port) = port.filter(|&port| port != 0 && config.shm_dir.is_none()) else {
            return Ok(Directories { shm: config.shm_dir.clone(), made: None, _claims: claims });
        };
        let root = Path::new(TMPFS).join(format!("longshore-{}", rustix::process::getuid().as_raw()));
        let dir = root.join(port.to_string());
        match private(&root).and_then(|()| alone(&root)).and_then(|lock| private(&dir).map(|()| lock)) {
            Ok(_alone) => match Claim::take(&dir, "shm_dir") {
                Ok(claim) => {
                    claims.push(claim);
                    sweep(&root);
                    return Ok(Directories { made: Some(dir.clone()), shm: Some(dir), _claims: claims });
                }
                Err(fault) => {
                    tracing::info!(%fault, "no default folder for the shm tier: name one with --shm-dir")
                }
            },
            Err(error) => {
                tracing::info!(dir = %dir.display(), %error, "no default folder for the shm tier: name one with --shm-dir");
            }
        }
        Ok(Directories { shm: None, made: None, _claims: claims })
    }
}

/// Keeps other servers from making and removing default folders while the result lives.
fn alone(root: &Path) -> io::Result<File> {
    let root = File::open(root)?;
    flock(&root, FlockOperation::LockExclusive)?;
    Ok(root)
}

/// Removes the empty folders of servers that were killed. A living server holds a lock on its own folder.
fn sweep(root: &Path) {
    let folders = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    for folder in folders {
        if Claim::take(&folder, "shm_dir").is_ok() {
            drop(fs::remove_dir(&folder));
        }
    }
}

/// Creates a folder that only this user may enter. Its name is predictable and /dev/shm is world-writable, so an
/// existing folder is checked.
fn private(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let found = fs::symlink_metadata(dir)?;
    let mine =
        found.is_dir() && found.uid() == rustix::process::getuid().as_raw() && found.mode() & 0o077 == 0;
    if mine { Ok(()) } else { Err(io::Error::other("it is not a folder of this user alone")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_default_folder_goes_with_its_server_and_one_with_jobs_stays() {
        // No other process has this number.
        let port = std::process::id() as u16 | 1;
        let claim = || Directories::claim(&StorageConfig::default(), Some(port)).unwrap();
        let empty = claim();
        let Some(dir) = empty.shm.clone() else { return };
        assert!(dir.starts_with(TMPFS) && dir.is_dir());
        drop(empty);
        assert!(!dir.exists());
        // A server that was killed has left its empty folder.
        let killed = dir.with_file_name(format!("{}-killed", dir.file_name().unwrap().display()));
        fs::create_dir(&killed).unwrap();
        let used = claim();
        assert!(!killed.exists());
        fs::create_dir(dir.join("job")).unwrap();
        drop(used);
        assert!(dir.join("job").is_dir());
        fs::remove_dir_all(&dir).unwrap();
    }
}
