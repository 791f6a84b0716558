//! A file as `torch.save` writes it, whose tensors' values come later and in any order.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::PathBuf,
};

use longshore_proto::{Fault, checksum::Crc32};
use rustix::fs::{FallocateFlags, fallocate};

use super::{
    pickle::{Value, pickle},
    target::failed,
};

/// Where torch has values begin, so that they can be mapped.
const ALIGNMENT: u64 = 64;
const LOCAL_HEADER: u64 = 30;
/// Sizes of 64 bits: a field of an entry's header.
const LARGE: u64 = 20;
/// Where an entry's header has its checksum.
const CHECKSUM: u64 = 14;
const READ_BYTES: usize = 1 << 20;

struct Entry {
    name: String,
    header: u64,
    start: u64,
    size: u64,
}

/// A zip archive without compression. Every entry has sizes of 64 bits. The file is open only while it is written: an export may have
/// more files than a process may have open.
pub(super) struct Archive {
    path: PathBuf,
    entries: Vec<Entry>,
    /// The first tensor's entry.
    tensors: usize,
    end: u64,
}

impl Archive {
    /// Reserves all space. `tensors` are the bytes of each.
    pub(super) fn create(path: PathBuf, content: &Value, tensors: &[u64]) -> Result<Archive, Fault> {
        let mut archive = Archive { path, entries: Vec::new(), tensors: 0, end: 0 };
        match archive.begin(&pickle(content), tensors) {
            Ok(()) => Ok(archive),
            Err(error) => Err(failed("create", &archive.path)(error)),
        }
    }

    fn begin(&mut self, pickle: &[u8], tensors: &[u64]) -> io::Result<()> {
        let file = OpenOptions::new().write(true).create_new(true).open(&self.path)?;
        for (name, content) in [("data.pkl", pickle), ("byteorder", &b"little"[..]), ("version", &b"3\n"[..])]
        {
            let start = self.add(&file, name, content.len() as u64)?;
            file.write_all_at(content, start)?;
        }
        self.tensors = self.entries.len();
        for (number, &size) in tensors.iter().enumerate() {
            self.add(&file, &format!("data/{number}"), size)?;
        }
        fallocate(&file, FallocateFlags::empty(), 0, self.end.max(1))?;
        Ok(())
    }

    /// Adds an entry's header. Returns where its bytes go.
    fn add(&mut self, file: &File, name: &str, size: u64) -> io::Result<u64> {
        let name = format!("archive/{name}");
        let header = self.end;
        // A field without meaning brings the values to their place.
        let least = header + LOCAL_HEADER + name.len() as u64 + LARGE + 4;
        let padding = least.next_multiple_of(ALIGNMENT) - least;
        let mut bytes = b"PK\x03\x04".to_vec();
        short(&mut bytes, [45, 0, 0, 0, 0]);
        bytes.extend([0; 4]);
        bytes.extend([0xff; 8]);
        short(&mut bytes, [name.len() as u16, (LARGE + 4 + padding) as u16]);
        bytes.extend(name.as_bytes());
        short(&mut bytes, [1, 16]);
        long(&mut bytes, [size, size]);
        short(&mut bytes, [0x4246, padding as u16]);
        bytes.resize(bytes.len() + padding as usize, b'Z');
        file.write_all_at(&bytes, header)?;
        let start = header + bytes.len() as u64;
        self.end = start + size;
        self.entries.push(Entry { name, header, start, size });
        Ok(start)
    }

    /// Writes bytes of a tensor, from byte `at` on.
    pub(super) fn write(&self, tensor: usize, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let at = self.entries[self.tensors + tensor].start + at;
        let file = OpenOptions::new().write(true).open(&self.path);
        file.and_then(|file| file.write_all_at(bytes, at)).map_err(failed("write", &self.path))
    }

    /// Takes the checksum of what was written, writes the directory, and makes the file durable. Returns its bytes.
    pub(super) fn seal(self) -> Result<u64, Fault> {
        self.end().map_err(failed("write", &self.path))
    }

    fn end(&self) -> io::Result<u64> {
        let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
        let mut directory = Vec::new();
        for entry in &self.entries {
            let checksum = checksum(&file, entry)?.to_le_bytes();
            file.write_all_at(&checksum, entry.header + CHECKSUM)?;
            directory.extend(b"PK\x01\x02");
            short(&mut directory, [45, 45, 0, 0, 0, 0]);
            directory.extend(checksum);
            directory.extend([0xff; 8]);
            short(&mut directory, [entry.name.len() as u16, 28, 0, 0, 0]);
            directory.extend([0; 4]);
            directory.extend([0xff; 4]);
            directory.extend(entry.name.as_bytes());
            short(&mut directory, [1, 24]);
            long(&mut directory, [entry.size, entry.size, entry.header]);
        }
        let (size, count) = (directory.len() as u64, self.entries.len() as u64);
        let large = self.end + size;
        directory.extend(b"PK\x06\x06");
        long(&mut directory, [44]);
        short(&mut directory, [45, 45]);
        directory.extend([0; 8]);
        long(&mut directory, [count, count, size, self.end]);
        directory.extend(b"PK\x06\x07\0\0\0\0");
        long(&mut directory, [large]);
        directory.extend(b"\x01\0\0\0PK\x05\x06\0\0\0\0");
        directory.extend([0xff; 12]);
        directory.extend([0; 2]);
        file.write_all_at(&directory, self.end)?;
        file.sync_all()?;
        Ok(self.end + directory.len() as u64)
    }
}

fn checksum(file: &File, entry: &Entry) -> io::Result<u32> {
    let (mut sum, mut at) = (Crc32::new(), 0);
    let mut bytes = vec![0; entry.size.min(READ_BYTES as u64) as usize];
    while at < entry.size {
        let part = (entry.size - at).min(READ_BYTES as u64) as usize;
        file.read_exact_at(&mut bytes[..part], entry.start + at)?;
        sum.update(&bytes[..part]);
        at += part as u64;
    }
    Ok(sum.value())
}

fn short<const COUNT: usize>(bytes: &mut Vec<u8>, values: [u16; COUNT]) {
    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
}

fn long<const COUNT: usize>(bytes: &mut Vec<u8>, values: [u64; COUNT]) {
    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
}
