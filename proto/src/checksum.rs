//! CRC-32 of wire chunks, and the state hash of a version.

use crate::ids::Version;

/// Returns the CRC-32 of zlib, gzip and Python's `zlib.crc32`, so a stock client needs no extra library. The CPU's
/// carry-less multiply computes the sum faster than memory is copied.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}

/// Bytes copied and summed at a time. Half of a 32 KiB L1 cache, so the sum reads copied bytes from L1.
pub const TILE_BYTES: usize = 16 * 1024;

/// CRC-32 over bytes that arrive in pieces.
#[derive(Clone, Copy)]
pub struct Crc32(crc_fast::Digest);

impl Crc32 {
    pub fn new() -> Crc32 {
        Crc32(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32IsoHdlc))
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Copies `source` to `target` and adds the bytes to the sum, in one pass over memory.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy(&mut self, source: &[u8], target: &mut [u8]) {
        assert_eq!(source.len(), target.len(), "both sides hold the same bytes");
        for (source, target) in source.chunks(TILE_BYTES).zip(target.chunks_mut(TILE_BYTES)) {
            target.copy_from_slice(source);
            self.0.update(target);
        }
    }

    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for Crc32 {
    fn default() -> Self {
        Crc32::new()
    }
}

/// BLAKE3 of a block's master, first and second moment, each as little-endian bytes.
pub type BlockHash = [u8; 32];

/// Returns the state hash of a version: BLAKE3 over version, applied steps and block hashes in block order. Blocks are
/// numbered over the whole flat space, so the hash depends on neither shard size nor placement.
pub fn state_hash<'a>(
    version: Version,
    applied: u64,
    blocks: impl IntoIterator<Item = &'a BlockHash>,
) -> String {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"longshore state v1");
    hasher.update(&version.0.to_le_bytes());
    hasher.update(&applied.to_le_bytes());
    for block in blocks {
        hasher.update(block);
    }
    hasher.finalize().to_hex()[..32].to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_sum_to_the_whole() {
        let bytes: Vec<u8> = (0..100_000u32).map(|index| (index * 7 % 251) as u8).collect();
        let (mut sum, mut copied) = (Crc32::new(), vec![0; bytes.len()]);
        let (first, rest) = bytes.split_at(33_333);
        sum.update(first);
        sum.copy(rest, &mut copied[33_333..]);
        assert_eq!(sum.value(), crc32(&bytes));
        assert_eq!(&copied[33_333..], rest);
    }
}
