//! The target folder of an export, which appears complete or not at all.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use longshore_proto::{Fault, FaultKind};
use rustix::fs::{CWD, RenameFlags};

/// The index file beside weights in several files.
pub(super) const INDEX: &str = "model.safetensors.index.json";

pub(super) struct Target {
    pub(super) folder: PathBuf,
    /// True if the folder may hold an earlier export.
    pub(super) replace: bool,
}

/// The folder in which an export is written. A complete draft replaces the target, so a failed export leaves
/// nothing behind.
pub(super) struct Draft {
    target: Target,
    folder: tempfile::TempDir,
}

/// Folders of this process's drafts. A signal ends the process without dropping the drafts, so the handler removes them
/// by this list.
static DRAFTS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes the drafts of this process, which a signal ends.
pub(crate) fn remove_drafts() {
    for draft in DRAFTS.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        // A published draft has moved to its target, so no folder has the draft's name.
        let _ = fs::remove_dir_all(draft);
    }
}

impl Draft {
    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn publish(self) -> Result<(), Fault> {
        let parent = self.target.parent().to_path_buf();
        self.target.take(self.folder)?;
        sync(&parent)
    }
}

fn sync(path: &Path) -> Result<(), Fault> {
    File::open(path).and_then(|file| file.sync_all()).map_err(failed("sync", path))
}

pub(super) fn failed(call: &str, path: &Path) -> impl Fn(io::Error) -> Fault {
    let place = format!("{} ({call}", path.display());
    move |error| {
        let (kind, limit, remedy) = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => (
                FaultKind::Exhausted,
                "large enough for the weights",
                "free space there, or name another folder with --out",
            ),
            io::ErrorKind::ResourceBusy => {
                (FaultKind::Precondition, "no mount point", "name a folder below it with --out")
            }
            _ => (FaultKind::Precondition, "writable", "name a folder that can be written with --out"),
        };
        Fault::new(kind, "out", format!("{place}: {error})"), limit, remedy)
    }
}

impl Target {
    /// Makes a draft folder beside the target, of mode 0700. Fails if the target holds other files, or cannot be written.
    pub(super) fn draft(mut self) -> Result<Draft, Fault> {
        self.holds_export()?;
        if let Ok(folder) = fs::canonicalize(&self.folder) {
            // A rename cannot replace the path `.`, so the folder's own path is used.
            self.folder = folder;
        }
        let parent = self.parent();
        fs::create_dir_all(parent).map_err(failed("create", parent))?;
        let own = fs::Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix(".export-").permissions(own).tempdir_in(parent);
        let folder = folder.map_err(failed("create", parent))?;
        DRAFTS.lock().unwrap_or_else(PoisonError::into_inner).push(folder.path().to_path_buf());
        Ok(Draft { target: self, folder })
    }

    fn parent(&self) -> &Path {
        let parent = self.folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        parent.unwrap_or(Path::new("."))
    }

    /// Moves the draft to the target in one operation. At any time either the earlier or the new export is there,
    /// complete.
    fn take(&self, draft: tempfile::TempDir) -> Result<(), Fault> {
        if self.holds_export()? {
            // After the exchange the draft's name leads to the earlier export, which is removed with the draft.
            return rustix::fs::renameat_with(CWD, draft.path(), CWD, &self.folder, RenameFlags::EXCHANGE)
                .map_err(|error| failed("rename", &self.folder)(error.into()));
        }
        fs::rename(draft.path(), &self.folder).map_err(failed("rename", &self.folder))?;
        let _ = draft.keep();
        Ok(())
    }

    /// Returns true if an export is there. No other files may be overwritten: the target must be empty or hold an
    /// export.
    fn holds_export(&self) -> Result<bool, Fault> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(failed("read", &self.folder)(error)),
        };
        let mut holds = false;
        for entry in entries {
            let entry = entry.map_err(failed("read", &self.folder))?;
            if !self.replace || !is_exported(&entry.file_name().to_string_lossy()) {
                let value = entry.path().display().to_string();
                let (limit, remedy) = match self.replace {
                    false => {
                        ("an empty folder, or none yet", "name another folder with --out, or empty this one")
                    }
                    true => (
                        "an empty folder, an earlier export, or none yet",
                        "name another folder, or empty this one",
                    ),
                };
                return Err(Fault::new(FaultKind::Conflict, "out", value, limit, remedy));
            }
            holds = true;
        }
        Ok(holds)
    }
}

fn is_exported(name: &str) -> bool {
    name == INDEX || name.starts_with("model") && name.ends_with(".safetensors")
}
