//! Checks that a server can keep state in a folder and, on request, how fast the folder is.

use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open, statvfs};

use super::{Finding, Grade, bad, good, warning};
use crate::{bench::storage, sizes::human};

/// A folder with fewer free bytes takes no job.
const LEAST_BYTES: u64 = 256 << 20;
/// The free part below which a drive counts as nearly full.
const LITTLE: f64 = 0.05;
/// Size of the measurement: 24 bytes a parameter are 600 MB. Each round reads and writes all but the slots at
/// rest.
const PARAMS: u64 = 25_000_000;
const TAKEN_BYTES: u64 = 24 * PARAMS;
const ROUNDS: u64 = 3;
/// GB/s, reads and writes together, below which a drive is slower than a SATA SSD.
const SLOW: f64 = 0.4;
/// Part of the fastest drive's speed below which a drive gets a warning. Shards are dealt to all directories alike, so
/// faster drives wait for a slow one.
const BEHIND: f64 = 0.5;

pub(super) fn free_bytes(dir: &Path) -> rustix::io::Result<u64> {
    let found = statvfs(dir)?;
    Ok(found.f_bavail * found.f_frsize)
}

/// Checks that a server could keep jobs of tier nvme in this folder.
pub(super) fn state_dir(dir: &Path) -> Finding {
    let what = format!("state directory {}", dir.display());
    let found = match statvfs(dir) {
        Ok(found) => found,
        Err(error) => return bad(what, error.to_string(), "mount its drive, or correct the path"),
    };
    let free = found.f_bavail * found.f_frsize;
    let share = found.f_bavail as f64 / found.f_blocks.max(1) as f64;
    // Some file systems do not count files, and have no limit for them. A file system without a size, such as
    // ramfs, reports no free room either.
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

pub(super) fn speeds(dirs: &[PathBuf], found: &[Finding]) -> Vec<Finding> {
    let usable = dirs.iter().zip(found).filter(|(_, found)| found.grade != Grade::Bad);
    let measured: Vec<_> = usable.map(|(dir, _)| (dir, speed(dir))).collect();
    let fastest = measured.iter().filter_map(|(_, speed)| speed.as_ref().ok()).copied().fold(0.0, f64::max);
    measured.into_iter().map(|(dir, speed)| graded(dir, speed, fastest)).collect()
}

fn speed(dir: &Path) -> Result<f64, String> {
    match free_bytes(dir) {
        Ok(free) if free < 2 * TAKEN_BYTES => {
            Err(format!("not measured: that takes {} of {} free", human(TAKEN_BYTES), human(free)))
        }
        Ok(_) => {
            storage::gb_per_s(&[dir.to_path_buf()], PARAMS, ROUNDS).map_err(|error| format!("{error:#}"))
        }
        Err(error) => Err(error.to_string()),
    }
}

fn graded(dir: &Path, speed: Result<f64, String>, fastest: f64) -> Finding {
    let what = format!("state directory {} speed", dir.display());
    match speed {
        Err(why) => {
            warning(what, why, "make room there, or run `longshore bench storage` with fewer --params")
        }
        Ok(speed) if speed < SLOW => {
            let said =
                format!("{speed:.2} GB/s read and written together, and an NVMe drive does more than {SLOW}");
            warning(what, said, "see whether others use the drive, or name one that is faster")
        }
        Ok(speed) if speed < BEHIND * fastest => {
            let said = format!(
                "{speed:.2} GB/s read and written together, where the fastest directory does {fastest:.2}"
            );
            warning(what, said, "leave it out: shards are dealt to all alike, so that the others wait for it")
        }
        Ok(speed) => good(what, format!("{speed:.2} GB/s, read and written together")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_is_slow_by_itself_or_beside_another() {
        let of = |speed: f64, fastest: f64| {
            let found = graded(Path::new("/a"), Ok(speed), fastest);
            (found.grade, found.said)
        };
        assert_eq!(of(1.0, 1.9), (Grade::Good, "1.00 GB/s, read and written together".into()));
        let (grade, said) = of(1.0, 2.1);
        assert!(grade == Grade::Warning && said.ends_with("the fastest directory does 2.10"), "{said}");
        let (grade, said) = of(0.3, 0.3);
        assert!(grade == Grade::Warning && said.ends_with("more than 0.4"), "{said}");
    }
}
