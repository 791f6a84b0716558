//! Whether servers could keep state in a folder, and how fast.

use std::path::Path;

use rustix::fs::{Mode, OFlags, open, statvfs};

use super::finding::{Finding, bad, good, warning};
use crate::sizes::human;

/// A folder with less room takes no job.
const LEAST_BYTES: u64 = 256 << 20;
/// From here on a drive is called nearly full.
const LITTLE: f64 = 0.05;

pub(super) fn free_bytes(dir: &Path) -> rustix::io::Result<u64> {
    let found = statvfs(dir)?;
    Ok(found.f_bavail * found.f_frsize)
}

/// Whether a server could keep jobs of tier nvme there, and how fast.
pub(super) fn state_dir(dir: &Path) -> Finding {
    let what = format!("state directory {}", dir.display());
    let found = match statvfs(dir) {
        Ok(found) => found,
        Err(error) => return bad(what, error.to_string(), "mount its drive, or correct the path"),
    };
    let free = found.f_bavail * found.f_frsize;
    let share = found.f_bavail as f64 / found.f_blocks.max(1) as f64;
    // Some file systems count no files, and have no limit of them.
    // A file system that says no size, such as ramfs, says no room either.
    let is_full = found.f_blocks > 0 && free < LEAST_BYTES || found.f_files > 0 && found.f_favail == 0;
    if is_full {
        let said = format!("{} and {} files free: it is full", human(free), found.f_favail);
        return bad(what, said, "delete jobs or checkpoints that nobody needs, or name another drive");
    }
    let direct = tempfile::NamedTempFile::new_in(dir)
        .map(|file| open(file.path(), OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()));
    match direct {
        Err(error) => bad(what, error.to_string(), "give the server's user the right to write there"),
        Ok(Err(error)) => warning(
            what,
            format!("{} free, no direct I/O ({error}): every block is copied once more", human(free)),
            "choose a file system with O_DIRECT, such as ext4 or XFS",
        ),
        Ok(Ok(_)) if found.f_blocks > 0 && share < LITTLE => warning(
            what,
            format!("{} free, {:.0}% of it: the next job may not fit", human(free), share * 100.0),
            "see what `longshore plan --tier nvme` says of the next job, and make room for it",
        ),
        Ok(Ok(_)) => good(what, format!("{} free, direct I/O", human(free))),
    }
}
