//! Inspection of a job's folder in a tmpfs: would a server go on from it? Files, records and words are read
//! as recovery reads them.
//!
//! Blocks of the state are compared with their checksums, as a server does when it recovers them.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::FileExt,
    path::Path,
};

use longshore_proto::{Fault, Version};

use super::{
    super::{
        fault::io,
        folder::{Folder, Header},
        record::RECORD_BYTES,
        report::{Report, VersionReport},
    },
    SHARD_WORDS, SUM_WORDS, UNDO_SLOTS, UNDO_WORDS,
    records::{check_words, records_of},
    sizes::Sizes,
    sum,
};
use crate::{ids::OwnedShards, memory::Slab};

const WORD: usize = size_of::<u64>();

pub(in crate::tier) fn inspect(folder: &Folder, header: Header) -> Result<Report, Fault> {
    let layout = header.spec.validate()?;
    header.placement.validate(layout.shards())?;
    let owned = header.placement.owned(header.server);
    let sizes = Sizes::new(&header.spec, &layout, &owned, 0);
    let progress = sizes.least_progress();
    let mut report = Report {
        folder: folder.path.clone(),
        header,
        records: 0,
        broken_records: Vec::new(),
        versions: Vec::new(),
        damage: Vec::new(),
        buffers: length(&folder.path.join("buffers"))?,
    };
    for (name, needed) in [("state", sizes.state), ("progress", progress)] {
        let found = length(&folder.path.join(name))?;
        report.damage.extend(too_short(&folder.path.join(name), found, needed as u64));
    }
    if length(&folder.path.join("progress"))?.is_none_or(|found| found < progress as u64) {
        return Ok(report);
    }
    let path = folder.path.join("progress");
    let file = File::open(&path).map_err(io("open", &path))?;
    take_records(&mut report, &file, &path)?;
    if !report.versions.is_empty() {
        let words = read_words(&file, &path, &sizes)?;
        let versions: Vec<Version> = report.versions.iter().map(|version| version.version).collect();
        let why = check_words(&words, &sizes, &versions);
        report.damage.extend(why.map(|why| format!("{} ({why})", path.display())));
        if report.damage.is_empty() {
            report.damage.extend(damaged_block(&folder.path.join("state"), &file, &sizes, &words)?);
        }
    }
    Ok(report)
}

/// Returns the length of a file, or None if it does not exist.
fn length(path: &Path) -> Result<Option<u64>, Fault> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some(found.len())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(io("look at", path)(error)),
    }
}

/// Returns the damage of a file that should have at least `needed` bytes.
pub fn too_short(path: &Path, found: Option<u64>, needed: u64) -> Option<String> {
    match found {
        None => Some(format!("{} (not there, of {needed} bytes)", path.display())),
        Some(found) if found < needed => Some(format!("{} ({found} of {needed} bytes)", path.display())),
        Some(_) => None,
    }
}

fn take_records(report: &mut Report, file: &File, path: &Path) -> Result<(), Fault> {
    for found in records_of(file, path)? {
        match found {
            Ok(record) => {
                report.records += 1;
                report.versions.push(VersionReport {
                    version: record.version,
                    applied: record.applied,
                    epoch: 0,
                    state_slot: 0,
                    blocks: 0,
                    damaged: Vec::new(),
                });
            }
            Err(why) => report.broken_records.push(format!("{} ({why})", path.display())),
        }
    }
    report.versions.sort_by_key(|version| version.version);
    Ok(())
}

/// The words follow the two records.
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
) -> Result<Option<String>, Fault> {
    let (shards, blocks) = (sizes.lengths.len(), sizes.blocks[sizes.lengths.len()]);
    let (versions, undo) = words[shards * SHARD_WORDS..].split_at(blocks);
    let copied =
        |block: usize| undo.chunks_exact(UNDO_WORDS).take(UNDO_SLOTS).any(|slot| slot[0] == block as u64 + 1);
    let start = Slab::bytes_for(sizes.progress[..sizes.progress.len() - 1].iter().copied()) as u64;
    let mut sums = vec![0; blocks * SUM_WORDS * WORD];
    if progress.read_exact_at(&mut sums, start).is_err() {
        // Release 0.1 kept no checksums.
        return Ok(None);
    }
    let state = File::open(path).map_err(io("open", path))?;
    let mut at = 0;
    for (owned, shape) in OwnedShards::all(shards).zip(&sizes.shapes) {
        let range = sizes.blocks[owned.index()]..sizes.blocks[owned.next().index()];
        let arrays = shape.arrays(sizes.lengths[owned.index()]);
        let starts = arrays.map(|bytes| {
            at += Slab::bytes_for([bytes]);
            (at - Slab::bytes_for([bytes])) as u64
        });
        for (index, block) in range.enumerate() {
            let word = block * SUM_WORDS + (versions[block] % 2) as usize;
            let kept = u64::from_ne_bytes(sums.as_chunks::<WORD>().0[word]);
            let mut parts = shape.block().map(|bytes| vec![0; bytes]);
            for (part, start) in parts.iter_mut().zip(starts) {
                let offset = start + (index * part.len()) as u64;
                state.read_exact_at(part, offset).map_err(io("read", path))?;
            }
            if kept != 0 && !copied(block) && kept != sum(parts.iter().map(Vec::as_slice)) {
                return Ok(Some(format!("{} (block {block} of it)", path.display())));
            }
        }
    }
    Ok(None)
}
