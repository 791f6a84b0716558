//! Real files: alignment, direct I/O, reserved space, and the choice of engine.

use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fs::{AtFlags, FallocateFlags, OFlags, StatxFlags, fallocate, statx},
    io::Errno,
};

use super::{Disk, Engine, FILE_ALIGN, OpenDisk, Request, threads::Threads, uring::Uring};

#[derive(Clone, Copy, Debug, Default)]
pub struct OpenFile {
    pub engine: Engine,
}

struct FileDisk {
    path: PathBuf,
    file: Arc<File>,
    queue: Queue,
}

enum Queue {
    Uring(Uring),
    Threads(Threads),
}

impl OpenDisk for OpenFile {
    fn create(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        let made = self.open(path);
        if made.is_err() {
            fs::remove_file(path)?;
        }
        made
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Disk>> {
        let (file, direct) = open_direct(path)?;
        let file = Arc::new(file);
        let queue = start(self.engine, &file)?;
        let (engine, why) = match &queue {
            Queue::Uring(uring) => (uring.how, String::new()),
            Queue::Threads(threads) => ("pread and pwrite threads", threads.why.clone()),
        };
        let direct = direct.as_ref().map_or("direct".to_string(), |refused| format!("buffered ({refused})"));
        tracing::info!(path = %path.display(), engine, why, io = direct, align = FILE_ALIGN, "disk opened");
        Ok(Arc::new(FileDisk { path: path.to_path_buf(), file, queue }))
    }
}

fn allocate(file: &File, flags: FallocateFlags, range: Range<u64>) -> io::Result<()> {
    match fallocate(file, flags, range.start, range.end - range.start) {
        Ok(()) => Ok(()),
        // Without fallocate the file would be sparse, and a later write could find the disk full.
        Err(Errno::OPNOTSUPP) => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this file system cannot reserve space (fallocate): use ext4, xfs or tmpfs",
        )),
        Err(error) => Err(error.into()),
    }
}

/// Opens the file. Also returns why direct I/O is off, if it is.
fn open_direct(path: &Path) -> io::Result<(File, Option<String>)> {
    let open = |flags: OFlags| {
        OpenOptions::new().read(true).write(true).custom_flags(flags.bits() as i32).open(path)
    };
    let direct = match open(OFlags::DIRECT) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Ok((open(OFlags::empty())?, Some("O_DIRECT is refused here".to_string())));
        }
        Err(error) => return Err(error),
    };
    let asked = statx(&direct, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    let align = match asked {
        Ok(found) if found.stx_mask & StatxFlags::DIOALIGN.bits() != 0 => {
            u64::from(found.stx_dio_offset_align.max(found.stx_dio_mem_align))
        }
        // Before Linux 6.1 the kernel does not report the alignment.
        _ => FILE_ALIGN,
    };
    if align == 0 || !FILE_ALIGN.is_multiple_of(align) {
        let refused = format!("direct I/O would need an alignment of {align}");
        return Ok((open(OFlags::empty())?, Some(refused)));
    }
    Ok((direct, None))
}

fn start(engine: Engine, file: &Arc<File>) -> io::Result<Queue> {
    let threads = |why: String| Ok(Queue::Threads(Threads::start(file, why)?));
    match engine {
        Engine::Threads => threads("as configured".to_string()),
        Engine::Uring => Ok(Queue::Uring(Uring::start(file)?)),
        Engine::Auto => match Uring::start(file) {
            Ok(uring) => Ok(Queue::Uring(uring)),
            Err(error) => threads(refusal(&error)),
        },
    }
}

/// Returns an operator's remedy for a refused io_uring.
fn refusal(error: &io::Error) -> String {
    let cause = match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM) => "refused by seccomp or kernel.io_uring_disabled",
        // podman's seccomp profile answers ENOSYS; Docker's answers EPERM.
        Some(Errno::NOSYS) => "refused by seccomp, or this kernel has none",
        Some(Errno::ACCESS) => "refused by a security module",
        Some(Errno::NOMEM) => "RLIMIT_MEMLOCK is too low for its rings",
        _ => "its probe failed",
    };
    format!("io_uring: {cause} ({error})")
}

impl Disk for FileDisk {
    fn path(&self) -> &Path {
        &self.path
    }

    fn reserve(&self, range: Range<u64>) -> io::Result<()> {
        allocate(&self.file, FallocateFlags::empty(), range)
    }

    fn give_back(&self, range: Range<u64>) -> io::Result<()> {
        allocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, range)
    }

    fn submit(&self, request: Request) {
        match &self.queue {
            Queue::Uring(uring) => uring.submit(request),
            Queue::Threads(threads) => threads.submit(request),
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}
