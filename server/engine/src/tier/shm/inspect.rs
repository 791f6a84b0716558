//! Inspection of a job's folder in a tmpfs, with the reads and checks of a recovery.
//!
//! Blocks of the state are compared with their checksums.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::FileExt,
    path::Path,
};

use longshore_proto::Fault;

use super::{
    super::{
        fault::io,
        folder::{Folder, Header, places},
        inspect::{KeptBuffers, Report, VersionReport},
        record::{Found, RECORD_BYTES, nonzero_crc64},
    },
    SHARD_WORDS, SUM_WORDS, UNDO_SLOTS, UNDO_WORDS,
    open::Sizes,
    records::{kept, read_frame},
};
use crate::{
    ids::OwnedShard,
    memory::Slab,
    record::{KeptShard, Record},
};

const WORD: usize = size_of::<u64>();

pub(in crate::tier) fn inspect(
    folder: &Folder,
    header: Header,
    buffers: KeptBuffers,
) -> Result<Report, Fault> {
    let layout = header.spec.validate()?;
    header.placement.validate(layout.shards())?;
    let owned = places(&layout, &header.placement, header.server, header.format);
    let sizes = Sizes::new(&header.spec, &layout, &owned, 0);
    let files = [
        ("state", sizes.state as u64),
        ("buffers", buffers(&header)?),
        ("progress", sizes.progress_bytes() as u64),
    ];
    let mut report = Report {
        folder: folder.path.clone(),
        header,
        records: 0,
        broken_records: Vec::new(),
        versions: Vec::new(),
        damage: Vec::new(),
    };
    for (name, needed) in files {
        report.damage.extend(too_short(&folder.path.join(name), needed)?);
    }
    if !report.damage.is_empty() {
        return Ok(report);
    }
    let path = folder.path.join("progress");
    let file = File::open(&path).map_err(io("open", &path))?;
    let records = take_records(&mut report, &file, &path)?;
    let words = read_words(&file, &path, &sizes)?;
    match kept(&words, &sizes, &report.header, &records) {
        Ok(kept) => {
            let damage = damaged_block(&folder.path.join("state"), &file, &sizes, &words, &kept)?;
            report.damage.extend(damage);
        }
        Err(why) => report.damage.push(format!("{} ({why})", path.display())),
    }
    Ok(report)
}

/// Returns the damage of a file that should have at least `needed` bytes.
fn too_short(path: &Path, needed: u64) -> Result<Option<String>, Fault> {
    match fs::metadata(path) {
        Ok(found) if found.len() >= needed => Ok(None),
        Ok(found) => Ok(Some(format!("{} ({} of {needed} bytes)", path.display(), found.len()))),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Ok(Some(format!("{} (not there, of {needed} bytes)", path.display())))
        }
        Err(error) => Err(io("look at", path)(error)),
    }
}

/// Returns the whole records, oldest first.
fn take_records(report: &mut Report, file: &File, path: &Path) -> Result<Vec<Record>, Fault> {
    let mut records = Vec::<Record>::new();
    let mut area = vec![0; RECORD_BYTES];
    for parity in 0..2 {
        file.read_exact_at(&mut area, parity * RECORD_BYTES as u64).map_err(io("read", path))?;
        match read_frame(&area) {
            Found::Blank => {}
            Found::Valid(record) => records.push(record),
            Found::Broken(why) => report.broken_records.push(format!("{} ({why})", path.display())),
            Found::Refused(fault) => return Err(fault),
        }
    }
    records.sort_by_key(|record| record.version);
    report.records = records.len();
    let version = |&Record { version, applied, .. }: &Record| VersionReport {
        version,
        applied,
        state_slot: 0,
        blocks: 0,
        damaged: Vec::new(),
    };
    report.versions = records.iter().map(version).collect();
    Ok(records)
}

/// Reads the words, which follow the two records in the file.
fn read_words(file: &File, path: &Path, sizes: &Sizes) -> Result<Vec<u64>, Fault> {
    let mut bytes = vec![0; sizes.progress[1]];
    let start = Slab::bytes_for([2 * RECORD_BYTES]) as u64;
    file.read_exact_at(&mut bytes, start).map_err(io("read", path))?;
    Ok(bytes.as_chunks::<WORD>().0.iter().map(|&word| u64::from_ne_bytes(word)).collect())
}

/// Returns the first block of the state that differs from its checksum. Blocks in the middle of an update have a copy.
fn damaged_block(
    path: &Path,
    progress: &File,
    sizes: &Sizes,
    words: &[u64],
    kept: &[Option<KeptShard>],
) -> Result<Option<String>, Fault> {
    let (shards, blocks) = (sizes.lengths.len(), sizes.blocks[sizes.lengths.len()]);
    let (versions, undo) = words[shards * SHARD_WORDS..].split_at(blocks);
    let copied =
        |block: usize| undo.chunks_exact(UNDO_WORDS).take(UNDO_SLOTS).any(|slot| slot[0] == block as u64 + 1);
    let start = Slab::bytes_for(sizes.progress[..sizes.progress.len() - 1].iter().copied()) as u64;
    let mut sums = vec![0; blocks * SUM_WORDS * WORD];
    progress.read_exact_at(&mut sums, start).map_err(io("read", path))?;
    let state = File::open(path).map_err(io("open", path))?;
    let mut at = 0;
    for (owned, shape) in OwnedShard::all(shards).zip(&sizes.shapes) {
        let range = sizes.blocks[owned.index()]..sizes.blocks[owned.next().index()];
        let arrays = shape.arrays(sizes.lengths[owned.index()]);
        let starts = arrays.map(|bytes| {
            at += Slab::bytes_for([bytes]);
            (at - Slab::bytes_for([bytes])) as u64
        });
        let is_here = kept.get(owned.index()).copied().flatten().is_some_and(|kept| !kept.awaited);
        for (index, block) in range.enumerate().filter(|_| is_here) {
            let word = block * SUM_WORDS + (versions[block] % 2) as usize;
            let kept = u64::from_ne_bytes(sums.as_chunks::<WORD>().0[word]);
            let mut parts = shape.block().map(|bytes| vec![0; bytes]);
            for (part, start) in parts.iter_mut().zip(starts) {
                let offset = start + (index * part.len()) as u64;
                state.read_exact_at(part, offset).map_err(io("read", path))?;
            }
            if kept != 0 && !copied(block) && kept != nonzero_crc64(parts.iter().map(Vec::as_slice)) {
                return Ok(Some(format!("{} (block {block} of it)", path.display())));
            }
        }
    }
    Ok(None)
}
