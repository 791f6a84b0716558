//! Training text: a folder is read once, and cut into batches. A batch depends on seed, step, micro-step and rank
//! alone, so a restarted worker gets the same batch.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// The largest file that is read. Larger files are seldom written by people.
pub const FILE_BYTES_MAX: u64 = 1 << 20;
/// The most text that a worker holds in memory; a byte-level demo never gets through this much.
pub const CORPUS_BYTES_MAX: usize = 1 << 30;
/// Unit of the split. A validation chunk is long enough for the longest preset's context.
const CHUNK_BYTES: usize = 4096;
/// The last of this many consecutive chunks is for validation.
const CHUNKS_PER_SPLIT: usize = 10;
/// The byte after each file's text. Text cannot contain this byte: files with it are skipped.
const END_OF_FILE: u8 = 0;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} does not exist; give a folder of text files, or one file", path.display())]
    NotFound { path: PathBuf },
    #[error("cannot read {}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
    #[error(
        "{} holds no text: {files_seen} files seen, of which {binary} are not UTF-8, {too_large} larger than \
         {FILE_BYTES_MAX} bytes and {lock_files} lock files (hidden and ignored files are not looked at); \
         give a folder with source code or prose",
        path.display()
    )]
    NoText { path: PathBuf, files_seen: usize, binary: usize, too_large: usize, lock_files: usize },
    #[error("{} holds more than {limit} bytes of text; give a smaller folder", path.display())]
    TooMuchText { path: PathBuf, limit: usize },
    #[error(
        "context is {context} bytes, but the text's longest piece allows {available}; give more text{}",
        if *available == 0 { String::new() } else { format!(", or a context of {available} or less") }
    )]
    SequenceTooLong { context: usize, available: usize },
}

/// Sequences of bytes, one after the other (`inputs`), and the byte after each of them (`targets`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
    pub sequences: usize,
    pub context: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    pub files: usize,
    pub bytes: usize,
    pub train_bytes: usize,
    pub validation_bytes: usize,
}

#[derive(Debug, Clone)]
pub struct Corpus {
    bytes: Vec<u8>,
    files: usize,
    /// Unbroken pieces of text. A sequence lies within one piece.
    train: Vec<Range<usize>>,
    validation: Vec<Range<usize>>,
}

impl Corpus {
    /// Reads the text files at or below `path`, in the order of their paths.
    ///
    /// Ignore files inside the folder are respected. Ignore files around it, and the user's own, are not: the same
    /// folder is the same corpus on every machine. Hidden files, `target` folders, lock files and files over
    /// [`FILE_BYTES_MAX`] are skipped. Files that are not UTF-8 or hold a NUL are skipped too.
    pub fn load(path: &Path) -> Result<Corpus, Error> {
        let mut found = Found::default();
        for file in list(path)? {
            found.read(&file)?;
            if found.bytes.len() > CORPUS_BYTES_MAX {
                return Err(Error::TooMuchText { path: path.to_owned(), limit: CORPUS_BYTES_MAX });
            }
        }
        let Found { bytes, files, files_seen, binary, too_large, lock_files } = found;
        if bytes.is_empty() {
            return Err(Error::NoText { path: path.to_owned(), files_seen, binary, too_large, lock_files });
        }
        Ok(Corpus::split(bytes, files))
    }

    /// Splits the text into training and validation text. A text too short for ten whole chunks is cut into ten
    /// shorter ones.
    fn split(bytes: Vec<u8>, files: usize) -> Corpus {
        let chunk = CHUNK_BYTES.min(bytes.len() / CHUNKS_PER_SPLIT).max(1);
        let period = chunk * CHUNKS_PER_SPLIT;
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        for start in (0..bytes.len()).step_by(period) {
            let boundary = (start + period - chunk).min(bytes.len());
            let end = (start + period).min(bytes.len());
            train.push(start..boundary);
            if boundary < end {
                validation.push(boundary..end);
            }
        }
        Corpus { bytes, files, train, validation }
    }

    pub fn summary(&self) -> Summary {
        let total = |pieces: &[Range<usize>]| pieces.iter().map(Range::len).sum();
        let (train_bytes, validation_bytes) = (total(&self.train), total(&self.validation));
        Summary { files: self.files, bytes: self.bytes.len(), train_bytes, validation_bytes }
    }

    /// Returns the text's length and checksum, as in "1768532 bytes of CRC-64 84f0c1d2e3a4b596".
    pub fn digest(&self) -> String {
        let checksum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &self.bytes);
        format!("{} bytes of CRC-64 {checksum:016x}", self.bytes.len())
    }

    /// Checks that both parts of the split hold a sequence of `context` bytes, and the byte after it.
    pub fn check_context(&self, context: usize) -> Result<(), Error> {
        let longest = |pieces: &[Range<usize>]| pieces.iter().map(Range::len).max().unwrap_or(0);
        let available = longest(&self.train).min(longest(&self.validation)).saturating_sub(1);
        if context > available {
            return Err(Error::SequenceTooLong { context, available });
        }
        Ok(())
    }

    /// Returns the training batch for these arguments, which depends on them and on the text alone.
    ///
    /// # Panics
    /// If [`check_context`](Corpus::check_context) refuses `context`.
    pub fn batch(
        &self,
        seed: u64,
        step: u64,
        micro_step: u32,
        rank: u32,
        sequences: usize,
        context: usize,
    ) -> Batch {
        // The arguments are the generator's key, so no two batches of any run share random numbers.
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&step.to_le_bytes());
        key[16..20].copy_from_slice(&micro_step.to_le_bytes());
        key[20..24].copy_from_slice(&rank.to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(key);
        let windows = Windows::new(&self.train, context);
        let places = (0..sequences).map(|_| {
            // The high half of a 64 x 64 bit product is uniform, but for one part in 2^64 / windows.
            let scaled = random.next_u64() as u128 * windows.count as u128;
            windows.start((scaled >> 64) as usize)
        });
        self.gather(places, sequences, context)
    }

    /// Returns batches evenly spaced over the validation text, the same at every call.
    ///
    /// # Panics
    /// If [`check_context`](Corpus::check_context) refuses `context`.
    pub fn validation(&self, batches: usize, sequences: usize, context: usize) -> Vec<Batch> {
        let windows = Windows::new(&self.validation, context);
        let total = (batches * sequences) as u128;
        let place = |index: usize| windows.start((index as u128 * windows.count as u128 / total) as usize);
        let batch = |batch: usize| {
            let places = (batch * sequences..(batch + 1) * sequences).map(place);
            self.gather(places, sequences, context)
        };
        (0..batches).map(batch).collect()
    }

    fn gather(&self, starts: impl Iterator<Item = usize>, sequences: usize, context: usize) -> Batch {
        let mut inputs = Vec::with_capacity(sequences * context);
        let mut targets = Vec::with_capacity(sequences * context);
        for start in starts {
            let text = &self.bytes[start..][..context + 1];
            inputs.extend(text[..context].iter().map(|byte| *byte as u32));
            targets.extend(text[1..].iter().map(|byte| *byte as u32));
        }
        Batch { inputs, targets, sequences, context }
    }
}

/// Places where a sequence and the byte after it fit, numbered from 0.
struct Windows<'a> {
    pieces: &'a [Range<usize>],
    ends: Vec<usize>,
    count: usize,
}

impl Windows<'_> {
    fn new(pieces: &[Range<usize>], context: usize) -> Windows<'_> {
        let mut count = 0;
        let windows = |piece: &Range<usize>| {
            count += piece.len().saturating_sub(context);
            count
        };
        let ends: Vec<usize> = pieces.iter().map(windows).collect();
        assert!(count > 0, "a context of {context} was not checked against the text");
        Windows { pieces, ends, count }
    }

    fn start(&self, window: usize) -> usize {
        let piece = self.ends.partition_point(|end| *end <= window);
        let before = if piece == 0 { 0 } else { self.ends[piece - 1] };
        self.pieces[piece].start + (window - before)
    }
}

#[derive(Default)]
struct Found {
    bytes: Vec<u8>,
    files: usize,
    files_seen: usize,
    binary: usize,
    too_large: usize,
    lock_files: usize,
}

impl Found {
    fn read(&mut self, path: &Path) -> Result<(), Error> {
        let failed = |source| Error::Io { path: path.to_owned(), source };
        self.files_seen += 1;
        if is_lock_file(path) {
            self.lock_files += 1;
            return Ok(());
        }
        if std::fs::metadata(path).map_err(failed)?.len() > FILE_BYTES_MAX {
            self.too_large += 1;
            return Ok(());
        }
        let bytes = std::fs::read(path).map_err(failed)?;
        if bytes.contains(&END_OF_FILE) || std::str::from_utf8(&bytes).is_err() {
            self.binary += 1;
            return Ok(());
        }
        if !bytes.is_empty() {
            self.bytes.extend(bytes);
            self.bytes.push(END_OF_FILE);
            self.files += 1;
        }
        Ok(())
    }
}

/// Returns true for a lock file, which is generated, large, and repetitive.
fn is_lock_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    name.ends_with(".lock") || ["package-lock.json", "pnpm-lock.yaml", "go.sum"].contains(&name.as_ref())
}

/// Returns the regular files at or below `path`, sorted. So a folder is the same corpus in whatever order its file
/// system lists the files. Hidden files, links and cache folders are skipped.
fn list(path: &Path) -> Result<Vec<PathBuf>, Error> {
    match std::fs::metadata(path) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::NotFound { path: path.to_owned() });
        }
        Err(source) => return Err(Error::Io { path: path.to_owned(), source }),
    }
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let (mut files, mut folders) = (Vec::new(), vec![path.to_owned()]);
    while let Some(folder) = folders.pop() {
        let failed = |source| Error::Io { path: folder.clone(), source };
        for entry in std::fs::read_dir(&folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let kind = entry.file_type().map_err(failed)?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if kind.is_file() {
                files.push(entry.path());
            } else if kind.is_dir() && !is_cache(&entry.path()) {
                folders.push(entry.path());
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Returns true for a folder tagged as a cache, as cargo's `target` is: <https://bford.info/cachedir/>.
fn is_cache(folder: &Path) -> bool {
    folder.join("CACHEDIR.TAG").is_file()
}

#[cfg(test)]
mod tests;
