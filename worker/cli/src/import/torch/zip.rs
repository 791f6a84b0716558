//! The directory of a zip archive whose entries are stored as they are, as `torch.save` writes it.

use std::{collections::BTreeMap, fs::File, os::unix::fs::FileExt};

use anyhow::{Context, bail, ensure};

/// How far from the end the directory's own entry may be: it and the longest comment.
const TAIL: u64 = 22 + 65535;
/// The directory of a million tensors takes less.
const MOST_DIRECTORY_BYTES: u64 = 256 << 20;
const NOT_ZIP: &str = "it is no file of torch.save";

struct Entry {
    header: u64,
    size: u64,
    /// As it is, without compression and encryption.
    is_plain: bool,
}

pub(super) struct Zip {
    file: File,
    entries: BTreeMap<String, Entry>,
}

impl Zip {
    pub(super) fn open(file: File) -> anyhow::Result<Zip> {
        let (start, size) = directory(&file).context(NOT_ZIP)?;
        ensure!(
            size <= MOST_DIRECTORY_BYTES,
            "its directory has {size} bytes, but must have {MOST_DIRECTORY_BYTES} at most"
        );
        let (end, length) = (start.checked_add(size), file.metadata()?.len());
        ensure!(end.is_some_and(|end| end <= length), "its directory is cut off: copy it again");
        let mut bytes = vec![0; size as usize];
        file.read_exact_at(&mut bytes, start)?;
        let (mut entries, mut rest) = (BTreeMap::new(), Fields(&bytes));
        while !rest.0.is_empty() {
            let (name, entry) = rest.entry().context("its directory is broken: copy it again")?;
            entries.insert(name, entry);
        }
        Ok(Zip { file, entries })
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Where an entry's bytes are, and how many.
    pub(super) fn stored(&self, name: &str) -> anyhow::Result<(u64, u64)> {
        let entry = self.entries.get(name).with_context(|| format!("has no values: {name} is absent"))?;
        ensure!(entry.is_plain, "is compressed: save it with torch.save again");
        let mut header = [0; 30];
        self.file.read_exact_at(&mut header, entry.header).context("is cut off: copy the file again")?;
        let mut fields = Fields(&header);
        let (true, Some(_)) = (fields.signature(b"PK\x03\x04"), fields.take(22)) else {
            bail!("has no header")
        };
        let (name, extra) = (fields.short().unwrap_or(0), fields.short().unwrap_or(0));
        let start = entry.header + 30 + name + extra;
        let (end, length) = (start.checked_add(entry.size), self.file.metadata()?.len());
        ensure!(end.is_some_and(|end| end <= length), "is cut off: copy the file again");
        Ok((start, entry.size))
    }

    /// All bytes of a small entry.
    pub(super) fn read(&self, name: &str, limit: u64) -> anyhow::Result<Vec<u8>> {
        let (start, size) = self.stored(name)?;
        ensure!(size <= limit, "{name} has {size} bytes, but must have {limit} at most");
        let mut bytes = vec![0; size as usize];
        self.file.read_exact_at(&mut bytes, start)?;
        Ok(bytes)
    }
}

/// Where the directory is, and how many bytes it has.
fn directory(file: &File) -> Option<(u64, u64)> {
    let length = file.metadata().ok()?.len();
    let first = length.saturating_sub(TAIL);
    let mut tail = vec![0; (length - first) as usize];
    file.read_exact_at(&mut tail, first).ok()?;
    let at = tail.windows(4).rposition(|bytes| bytes == b"PK\x05\x06")?;
    let mut end = Fields(tail.get(at + 12..)?);
    let (size, start) = (end.int()?, end.int()?);
    let mut locator = Fields(tail.get(at.checked_sub(20)?..).unwrap_or_default());
    if !locator.signature(b"PK\x06\x07") {
        return Some((start, size));
    }
    locator.take(4)?;
    let mut large = [0; 56];
    file.read_exact_at(&mut large, locator.long()?).ok()?;
    let mut fields = Fields(&large);
    let is_large = fields.signature(b"PK\x06\x06");
    fields.take(36)?;
    let (size, start) = (fields.long()?, fields.long()?);
    is_large.then_some((start, size))
}

/// Little-endian numbers, one after the other.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(bytes)
    }

    fn signature(&mut self, expected: &[u8; 4]) -> bool {
        self.take(4) == Some(expected)
    }

    fn short(&mut self) -> Option<u64> {
        Some(u16::from_le_bytes(self.take(2)?.try_into().ok()?).into())
    }

    fn int(&mut self) -> Option<u64> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?).into())
    }

    fn long(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    /// An entry of the directory, with its name.
    fn entry(&mut self) -> Option<(String, Entry)> {
        let begins = self.signature(b"PK\x01\x02");
        self.take(4)?;
        let (flags, method) = (self.short()?, self.short()?);
        self.take(8)?;
        let (mut stored, mut size) = (self.int()?, self.int()?);
        let (name, extra, comment) = (self.short()?, self.short()?, self.short()?);
        self.take(8)?;
        let mut header = self.int()?;
        let name = String::from_utf8_lossy(self.take(name as usize)?).into_owned();
        let mut extra = Fields(self.take(extra as usize)?);
        self.take(comment as usize)?;
        while let (Some(kind), Some(bytes)) = (extra.short(), extra.short()) {
            let mut field = Fields(extra.take(bytes as usize)?);
            // What has no room in 32 bits, in this order.
            for value in [&mut size, &mut stored, &mut header].into_iter().filter(|_| kind == 1) {
                if *value == u64::from(u32::MAX) {
                    *value = field.long()?;
                }
            }
        }
        let is_plain = method == 0 && flags & 1 == 0 && stored == size;
        begins.then_some((name, Entry { header, size, is_plain }))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn opened(bytes: &[u8]) -> anyhow::Result<Zip> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        Zip::open(file)
    }

    /// What `zip -0` makes of a file `a` with three bytes.
    fn small() -> Vec<u8> {
        let mut bytes =
            b"PK\x03\x04\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0\x03\0\0\0\x03\0\0\0\x01\0\0\0axyz".to_vec();
        bytes.extend(b"PK\x01\x02\x0a\0\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0\x03\0\0\0\x03\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0a");
        bytes.extend(b"PK\x05\x06\0\0\0\0\x01\0\x01\0\x2f\0\0\0\x22\0\0\0\0\0");
        bytes
    }

    #[test]
    fn an_entry_is_found_by_its_name() {
        let zip = opened(&small()).unwrap();
        assert_eq!(zip.names().collect::<Vec<_>>(), ["a"]);
        assert_eq!(zip.stored("a").unwrap(), (31, 3));
        assert_eq!(zip.read("a", 3).unwrap(), b"xyz");
        assert!(zip.read("a", 2).unwrap_err().to_string().contains("2 at most"));
        assert!(zip.stored("b").unwrap_err().to_string().contains("b is absent"));
    }

    proptest! {
        /// Whatever of a file is broken, reading it ends.
        #[test]
        fn no_bytes_are_too_bad(at in 0..103usize, byte: u8, cut in 0..104usize) {
            let mut bytes = small();
            prop_assert_eq!(bytes.len(), 103);
            bytes[at] = byte;
            for bytes in [&bytes[..], &bytes[..cut.min(103)]] {
                if let Ok(zip) = opened(bytes) {
                    zip.names().for_each(|name| drop(zip.read(name, 1 << 20)));
                }
            }
        }
    }
}
