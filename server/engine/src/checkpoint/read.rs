//! A part opened for reading, with header and tail verified and tensors found by name.
//!
//! A length in a file is a claim: a sparse file of a few bytes can claim any. So memory is allocated only for the
//! header, up to its limit, and for bytes that were read.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader, Read},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind, JobSpec, ShardId, checksum::BlockHash, limits::BLOCK_ELEMENTS};
use safetensors::tensor::Metadata;

use super::{
    fault::{FIELD, corrupt, io as io_error},
    part::{Array, COMMIT, HASH_BYTES, Part, SPEC, Table},
    plan::MAX_HEADER_BYTES,
};

/// The largest single read. At this size a reader of many parts can be interrupted soon, and the page cache does not
/// fill far ahead.
const PIECE: usize = 8 * 1024 * 1024;
const TAIL_PIECE: usize = 1024 * 1024;

pub(super) struct PartReader {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    data_start: u64,
    rows: HashMap<ShardId, u64>,
}

impl PartReader {
    pub(super) fn open(folder: &Path, part: &Part) -> Result<PartReader, Fault> {
        let path = folder.join(&part.file);
        let file = open(&path, part)?;
        let (prefix, metadata) = read_header(&file, &path, part)?;
        let reader = PartReader { data_start: prefix, rows: rows(part), path, file, metadata };
        if reader.data_start + reader.metadata.data_len() as u64 != part.bytes {
            return Err(reader.corrupt("header", "as long as the file"));
        }
        reader.check_tail(part)?;
        Ok(reader)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn check_tail(&self, part: &Part) -> Result<(), Fault> {
        let blocks =
            part.shards.iter().map(|shard| u128::from(shard.elements / BLOCK_ELEMENTS)).sum::<u128>();
        for table in Table::stored(part.images) {
            let range = self.range(table.name())?;
            if u128::from(range.end - range.start) != blocks * u128::from(HASH_BYTES) {
                return Err(self.corrupt(table.name(), "one row for each block"));
            }
        }
        let start = self.range(Table::State.name())?.start;
        let mut hasher = blake3::Hasher::new();
        let tail = self.reader(start..part.bytes - self.data_start);
        io::copy(&mut BufReader::with_capacity(TAIL_PIECE, tail), &mut hasher)
            .map_err(io_error("read", &self.path))?;
        let found = hasher.finalize().to_hex().to_string();
        if found != part.tail {
            return Err(self.corrupt(format_args!("block hashes and job, BLAKE3 {found}"), &part.tail));
        }
        Ok(())
    }

    pub(super) fn spec(&self) -> Result<impl Read, Fault> {
        Ok(BufReader::new(self.reader(self.range(SPEC)?)))
    }

    pub(super) fn commit(&self) -> Result<impl Read, Fault> {
        Ok(BufReader::new(self.reader(self.range(COMMIT)?)))
    }

    /// The hash that a block of a shard was written with.
    pub(super) fn hash(&self, table: Table, shard: ShardId, block: u64) -> Result<BlockHash, Fault> {
        let table = self.range(table.name())?;
        let row = self.rows.get(&shard).map(|first| table.start + (first + block) * HASH_BYTES);
        let Some(row) = row.filter(|row| row + HASH_BYTES <= table.end) else {
            return Err(self.corrupt(format_args!("{shard}, its block {block}"), "with a hash"));
        };
        let mut hash = [0; HASH_BYTES as usize];
        self.read_at(row, &mut hash)?;
        Ok(hash)
    }

    /// Checks that an array is there with the type and length that the spec gives it.
    pub(super) fn check(
        &self,
        spec: &JobSpec,
        shard: ShardId,
        array: Array,
        elements: u64,
    ) -> Result<(), Fault> {
        let name = array.of(shard);
        let info = self.metadata.info(&name);
        let (dtype, dimensions) = array.tensor(spec, elements);
        let fits = |shape: &[usize]| shape.iter().map(|&side| side as u64).eq(dimensions.iter().copied());
        match info {
            Some(info) if info.dtype == dtype && fits(&info.shape) => Ok(()),
            _ => Err(self.corrupt(name, format_args!("there, {dimensions:?} of {dtype}"))),
        }
    }

    /// Reads bytes of an array from byte `from` on, straight into `target`.
    pub(super) fn read(
        &self,
        array: Array,
        shard: ShardId,
        from: u64,
        target: &mut [u8],
    ) -> Result<(), Fault> {
        let name = array.of(shard);
        let range = self.range(&name)?;
        if from + target.len() as u64 > range.end - range.start {
            return Err(self.corrupt(name, "long enough"));
        }
        self.read_at(range.start + from, target)
    }

    fn read_at(&self, data_offset: u64, target: &mut [u8]) -> Result<(), Fault> {
        let mut at = self.data_start + data_offset;
        for piece in target.chunks_mut(PIECE) {
            self.file.read_exact_at(piece, at).map_err(io_error("read", &self.path))?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn range(&self, name: &str) -> Result<Range<u64>, Fault> {
        let info = self.metadata.info(name).ok_or_else(|| self.corrupt(name, "there"))?;
        Ok(info.data_offsets.0 as u64..info.data_offsets.1 as u64)
    }

    fn reader(&self, range: Range<u64>) -> Bytes<'_> {
        Bytes { file: &self.file, at: self.data_start + range.start, end: self.data_start + range.end }
    }

    fn corrupt(&self, what: impl std::fmt::Display, limit: impl std::fmt::Display) -> Fault {
        corrupt(format!("{} ({what})", self.path.display()), limit)
    }
}

struct Bytes<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for Bytes<'_> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(target.len());
        let read = self.file.read_at(&mut target[..most], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

fn open(path: &Path, part: &Part) -> Result<File, Fault> {
    let opened = File::open(path).and_then(|file| file.metadata().map(|metadata| (file, metadata.len())));
    let (file, length) = opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let value =
                format!("{} (the part of server {} of {})", path.display(), part.server + 1, part.servers);
            let remedy = "this server needs it: restore onto the servers that wrote the checkpoint, in their order, or copy \
                          their parts into this folder, or let the servers share one";
            Fault::new(FaultKind::NotFound, FIELD, value, "beside the manifest", remedy)
        }
        _ => io_error("open", path)(error),
    })?;
    if length != part.bytes {
        return Err(corrupt(format!("{} ({length} bytes)", path.display()), format!("{} bytes", part.bytes)));
    }
    Ok(file)
}

/// Reads the header. Returns the offset of the data, and their description.
fn read_header(file: &File, path: &Path, part: &Part) -> Result<(u64, Metadata), Fault> {
    let bad = |what: String, limit: String| Err(corrupt(format!("{} ({what})", path.display()), limit));
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(io_error("read", path))?;
    let length = u64::from_le_bytes(prefix);
    if length > MAX_HEADER_BYTES.min(part.bytes) {
        return bad(format!("a header of {length} bytes"), "inside the file".to_string());
    }
    let mut bytes = vec![0; 8 + length as usize];
    file.read_exact_at(&mut bytes, 0).map_err(io_error("read", path))?;
    let found = blake3::hash(&bytes).to_hex().to_string();
    if found != part.header {
        return bad(format!("header, BLAKE3 {found}"), part.header.clone());
    }
    match serde_json::from_slice(&bytes[8..]) {
        Ok(metadata) => Ok((bytes.len() as u64, metadata)),
        Err(error) => bad(format!("header: {error}"), "a safetensors header".to_string()),
    }
}

fn rows(part: &Part) -> HashMap<ShardId, u64> {
    let mut row = 0;
    let shards = part.shards.iter().map(|shard| {
        let first = row;
        row += shard.elements / BLOCK_ELEMENTS;
        (shard.shard, first)
    });
    shards.collect()
}
