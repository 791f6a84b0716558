//! The directories of stored jobs. They belong to this server alone while it runs, so that a restart finds its own
//! jobs and no other's.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

use longshore_engine::tier::Claim;
use longshore_proto::Fault;

use crate::config::StorageConfig;

const TMPFS: &str = "/dev/shm";

/// The claims on the directories, held for as long as the server runs.
pub(crate) struct Directories {
    pub(crate) shm: Option<PathBuf>,
    _claims: Vec<Claim>,
}

impl Directories {
    /// Claims them. Directories that were named must exist. The default folder for the `shm` tier needs a `port`, by
    /// which it is found again.
    pub(crate) fn claim(config: &StorageConfig, port: u16) -> Result<Directories, Fault> {
        let state_dirs = config.state_dirs.iter().map(|dir| (dir, "state_dir"));
        let named = state_dirs.chain(config.shm_dir.iter().map(|dir| (dir, "shm_dir")));
        let mut claims =
            named.map(|(dir, field)| Claim::take(dir, field)).collect::<Result<Vec<_>, Fault>>()?;
        if config.shm_dir.is_some() || port == 0 {
            return Ok(Directories { shm: config.shm_dir.clone(), _claims: claims });
        }
        let root = Path::new(TMPFS).join(format!("longshore-{}", rustix::process::getuid().as_raw()));
        let dir = root.join(port.to_string());
        match private(&root).and_then(|()| private(&dir)) {
            Ok(()) => match Claim::take(&dir, "shm_dir") {
                Ok(claim) => {
                    claims.push(claim);
                    return Ok(Directories { shm: Some(dir), _claims: claims });
                }
                Err(fault) => {
                    tracing::info!(%fault, "no default folder for the shm tier: name one with --shm-dir")
                }
            },
            Err(error) => {
                tracing::info!(dir = %dir.display(), %error, "no default folder for the shm tier: name one with --shm-dir");
            }
        }
        Ok(Directories { shm: None, _claims: claims })
    }
}

/// Makes a folder that only this user may enter. Its name can be guessed and everybody may write to /dev/shm, so a
/// folder that exists already is checked.
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
