//! A job's folder in a state directory: header, lock, creation, and a watch over its files.

use std::{
    fs::{self, File, OpenOptions},
    hash::{BuildHasher, RandomState},
    io::{ErrorKind, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind, JobName, JobSpec, Layout, Placement, ServerId, ShardId, TierKind};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::{
    fault::{FIELD, conflict, corrupt, internal, io},
    record::newer,
    storage::Inputs,
};
use crate::retired;

pub(super) const HEADER_FILE: &str = "header.json";
pub(super) const FOLDER: &str = "server-";
pub(super) const NEW: &str = "~new-";
/// Prefix of the name of a folder that is being removed. The store and the old name follow.
pub(super) const DELETED: &str = "~deleted-";
const FORMAT: &str = "longshore-state";
pub(super) const FORMAT_VERSION: u32 = 1;
/// Format of a store in which every shard of the job has a place.
pub(super) const ALL_PLACES: u32 = 2;
const WHOLE: &str = "restore a checkpoint into a fresh state directory; this folder can only be removed";

/// `header.json`: two lines of JSON. The first has the format and the BLAKE3 of the second, the header proper, so that
/// a reader can check both first. The file is written once, when the folder's files are complete and their space is
/// reserved. Only then does the folder get its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Format of the folder, as the first line of the file has it.
    #[serde(skip)]
    pub(crate) format: u32,
    /// Number of the store, the same in all its folders and records. Files of other stores have another number.
    pub store: u64,
    pub tier: TierKind,
    /// The index of this folder among the folders that the shards are striped over.
    pub directory: usize,
    pub directories: usize,
    /// Always true. The stored format keeps the field.
    pub(super) durable: bool,
    /// True if images live here alone. A header without this field means no.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub spilled_images: bool,
    pub server: ServerId,
    pub placement: Placement,
    /// The identity that opened the job, if callers had to show one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    pub spec: JobSpec,
}

#[derive(PartialEq, Serialize, Deserialize)]
struct Envelope {
    format: String,
    format_version: u32,
    blake3: String,
}

/// The shards for which a server has a place, in forward order. A place is address space, or part of a sparse file.
/// Files of format 1 have places only for the shards that they were made with.
pub(crate) fn places(layout: &Layout, placement: &Placement, server: ServerId, format: u32) -> Vec<ShardId> {
    match format {
        ALL_PLACES.. => (0..layout.shards()).map(ShardId).collect(),
        _ => placement.owned(server),
    }
}

/// A folder under lock.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    home: PathBuf,
    _lock: File,
}

impl Header {
    /// Returns the header of a store's first folder, of `directories`.
    pub(super) fn new(inputs: &Inputs<'_>, format: u32, store: u64, directories: usize) -> Header {
        Header {
            format,
            store,
            tier: inputs.spec.tier,
            directory: 0,
            directories,
            durable: true,
            spilled_images: inputs.storage.spills(inputs.spec),
            server: inputs.server,
            placement: inputs.placement.clone(),
            owner: inputs.storage.owner.clone(),
            spec: inputs.spec.clone(),
        }
    }

    pub(super) fn read(folder: &Path) -> Result<Option<Header>, Fault> {
        let path = folder.join(HEADER_FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io("read", &path)(error)),
        };
        if let Some(format) = Header::newer_format(&text) {
            let fault = newer("header", format, ALL_PLACES);
            return Err(Fault { value: format!("{} ({})", path.display(), fault.value), ..fault });
        }
        let (header, body) = Header::decode(&text).map_err(|why| {
            corrupt(format!("{} ({why})", path.display()), "a header of format 1 or 2, as written", WHOLE)
        })?;
        retired::check(body)?;
        retired::check_header(body)?;
        Ok(Some(header))
    }

    /// Returns the format of a header that a newer version of this program wrote. Later formats keep these two fields.
    fn newer_format(text: &[u8]) -> Option<u32> {
        #[derive(Deserialize)]
        struct Format {
            format: String,
            format_version: u32,
        }
        let first = text.split(|&byte| byte == b'\n').next()?;
        let found: Format = serde_json::from_slice(first).ok()?;
        (found.format == FORMAT && found.format_version > ALL_PLACES).then_some(found.format_version)
    }

    fn decode(text: &[u8]) -> Result<(Header, &[u8]), String> {
        let line = text.iter().position(|&byte| byte == b'\n').ok_or("no first line")?;
        let (first, body) = (&text[..line], &text[line + 1..]);
        let envelope: Envelope = serde_json::from_slice(first).map_err(|error| error.to_string())?;
        if envelope.format != FORMAT {
            return Err(format!("format {:?}", envelope.format));
        }
        let found = blake3::hash(body).to_hex().to_string();
        let known =
            Envelope { format: FORMAT.into(), format_version: envelope.format_version, blake3: found };
        // The first line is compared byte for byte, so that no damage hides in the spelling.
        if serde_json::to_vec(&known).map_err(|error| error.to_string())? != first {
            return Err(format!("its BLAKE3 is {}", known.blake3));
        }
        let format = envelope.format_version;
        if !(FORMAT_VERSION..=ALL_PLACES).contains(&format) {
            return Err(format!("format_version {format}"));
        }
        let header: Header = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        Ok((Header { format, ..header }, body))
    }

    fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let body = serde_json::to_vec(self)?;
        let blake3 = blake3::hash(&body).to_hex().to_string();
        let envelope = Envelope { format: FORMAT.into(), format_version: self.format, blake3 };
        Ok([serde_json::to_vec(&envelope)?, body].join(&b'\n'))
    }

    /// Returns a number that no store has had before.
    pub(super) fn unique_store() -> u64 {
        RandomState::new().hash_one((std::process::id(), std::time::SystemTime::now()))
    }

    /// Refuses a folder of another job, of other servers, or of other settings.
    pub(super) fn check_same(&self, wanted: &Header, folder: &Path) -> Result<(), Fault> {
        let place = folder.display();
        let remedy = "open the job as it was, or remove the folder to start over";
        self.spec
            .same_as(&wanted.spec)
            .map_err(|fault| conflict(format!("{place} (of another job: {fault})"), "this job's", remedy))?;
        self.placement.same_owners(&wanted.placement).map_err(|fault| {
            conflict(format!("{place} (of another placement: {fault})"), "this placement's", remedy)
        })?;
        let settings = |header: &Header| {
            let spill = if header.spilled_images { "all" } else { "state" };
            [
                format!("of server {} of the job", header.server.0),
                format!("of tier {}", header.tier),
                format!("one of {} directories", header.directories),
                format!("made with --spill {spill}"),
            ]
        };
        let differs = settings(self).into_iter().zip(settings(wanted)).find(|(ours, theirs)| ours != theirs);
        match differs {
            Some((ours, theirs)) => Err(conflict(format!("{place} ({ours})"), theirs, remedy)),
            None => Ok(()),
        }
    }
}

impl Folder {
    /// Returns the folder `<dir>/<job>/server-<i>-of-<n>`. The server is in its name, since servers of one host may
    /// share a directory.
    pub(super) fn path(dir: &Path, job: &JobName, server: ServerId, servers: usize) -> PathBuf {
        dir.join(job.as_str()).join(format!("{FOLDER}{}-of-{servers}", server.0))
    }

    /// Locks the job's folder and returns it. If there is none, creates a folder with a temporary name, which readers
    /// ignore until it is [settled](Folder::settle).
    ///
    /// # Errors
    /// `Corrupt` where there are files and no header: such files belong to another program.
    pub(super) fn take(home: PathBuf) -> Result<Folder, Fault> {
        // The state directory itself is never created: if missing, its disk is not mounted.
        let root = home.parent().and_then(Path::parent).unwrap_or(Path::new("."));
        if !root.is_dir() {
            return Err(io("open", root)(ErrorKind::NotFound.into()));
        }
        if holds_files(&home)? {
            let folder = Folder::take_existing(home)?;
            return if folder.path.join(HEADER_FILE).exists() {
                Ok(folder)
            } else {
                Err(headless(&folder.path))
            };
        }
        let path = beside(&home, NEW);
        let made = fs::create_dir_all(&path);
        made.map_err(io("create folder", &path))?;
        Ok(Folder { home, ..Folder::take_existing(path)? })
    }

    pub(super) fn take_existing(path: PathBuf) -> Result<Folder, Fault> {
        let file = File::open(&path).map_err(io("open", &path))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Folder { home: path.clone(), path, _lock: file }),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let value = format!("{} (in use by another process)", path.display());
                Err(conflict(value, "used by one server at a time", "stop the other server first"))
            }
            Err(error) => Err(io("lock", &path)(error.into())),
        }
    }

    /// Takes a shared lock on the folder, for reading. Returns None if a server uses the folder.
    pub(super) fn take_to_read(path: PathBuf) -> Result<Option<Folder>, Fault> {
        let file = File::open(&path).map_err(io("open", &path))?;
        match flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(Some(Folder { home: path.clone(), path, _lock: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(io("lock", &path)(error.into())),
        }
    }

    /// Returns true while the folder is being made.
    pub(super) fn is_new(&self) -> bool {
        self.path != self.home
    }

    /// Path that the job's folder has once it is settled.
    pub(super) fn home(&self) -> &Path {
        &self.home
    }

    /// Writes the header of a folder whose files are complete.
    pub(super) fn publish(&self, header: &Header) -> Result<(), Fault> {
        let bytes = header.encode().map_err(|error| internal(error, "encodable"))?;
        let target = self.path.join(HEADER_FILE);
        let written = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&target)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            sync(&self.path)
        };
        written().map_err(io("write", &target))
    }

    /// Renames a complete folder to its own path, where readers find it from then on.
    pub(super) fn settle(&mut self) -> Result<(), Fault> {
        settle(&self.path, &self.home)?;
        self.path = self.home.clone();
        Ok(())
    }

    pub(super) fn clear(&self) -> Result<(), Fault> {
        for entry in fs::read_dir(&self.path).map_err(io("list", &self.path))?.flatten() {
            fs::remove_file(entry.path()).map_err(io("remove", &entry.path()))?;
        }
        Ok(())
    }
}

pub(super) fn paths(folders: &[Folder]) -> Vec<PathBuf> {
    folders.iter().map(|folder| folder.path.clone()).collect()
}

/// Returns the path of a folder of the same job, with a name that no server and no job has.
pub(super) fn beside(home: &Path, mark: &str) -> PathBuf {
    home.with_file_name(format!("{mark}{}", name_of(home)))
}

pub(super) fn sync(folder: &Path) -> std::io::Result<()> {
    File::open(folder)?.sync_all()
}

pub(super) fn holds_files(folder: &Path) -> Result<bool, Fault> {
    match fs::read_dir(folder) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io("list", folder)(error)),
    }
}

pub(super) fn headless(folder: &Path) -> Fault {
    let value = format!("{} (files without {HEADER_FILE})", folder.display());
    let remedy = format!(
        "put {HEADER_FILE} back; or give up what lies there, with `longshore delete --job NAME --discard-unreadable`"
    );
    corrupt(value, "a job's folder with its header", remedy)
}

pub(super) fn settle(path: &Path, home: &Path) -> Result<(), Fault> {
    let settled = || {
        fs::rename(path, home)?;
        // The names of the folder and of its parent are flushed.
        home.ancestors().skip(1).take(2).try_for_each(sync)
    };
    settled().map_err(io("rename", path))
}

/// Returns the entries of a folder, or none if it cannot be listed.
pub(super) fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the fault of a job with some of its folders missing.
pub(super) fn vanished(folder: &Path) -> Fault {
    let remedy =
        "mount the disk again; or, to start over, remove the job's folders from the other state directories";
    let limit = "there, as the job's other folders are";
    Fault::new(FaultKind::NotFound, FIELD, folder.display(), limit, remedy)
}

/// Files of a running job by name, as they were opened. Later writes to a deleted, moved or replaced file would be
/// lost.
pub(super) struct Watch(Vec<(PathBuf, Identity)>);

/// Device and inode.
type Identity = (u64, u64);

impl Watch {
    /// Watches the files of `names` that exist in the folders.
    pub(super) fn over<'a>(folders: impl Iterator<Item = &'a Path>, names: &[&str]) -> Watch {
        let paths = folders.flat_map(|folder| names.iter().map(|name| folder.join(name)));
        Watch(paths.filter_map(|path| identity(&path).ok().map(|found| (path, found))).collect())
    }

    /// Checks the files, with one system call for each.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let gone = self.0.iter().find(|(path, known)| identity(path).ok() != Some(*known));
        gone.map_or(Ok(()), |(path, _)| Err(removed(path)))
    }
}

fn identity(path: &Path) -> std::io::Result<Identity> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

fn removed(path: &Path) -> Fault {
    let value = format!("{} (deleted or moved under the running server)", path.display());
    let remedy = "what is decided from here on would be lost: restart the server with the job's folder as it was, or restore a \
                  checkpoint";
    Fault::new(FaultKind::Internal, FIELD, value, "left alone", remedy)
}
