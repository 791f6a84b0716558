//! CRC-32 of wire chunks, and the state hash of a version.

use crate::ids::Version;

/// CRC-32 as zlib, gzip and Python's `zlib.crc32` compute it, so that a stock client needs no library for it.
/// The CPU's carry-less multiply makes it faster than the memory copy beside it.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}

/// BLAKE3 of a block's master, first and second moment, each as little-endian bytes.
pub type BlockHash = [u8; 32];

/// The state hash of a version: BLAKE3 over version, applied steps and the block hashes in block order. It depends on
/// neither shard size nor placement, since blocks are global.
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
    #[test]
    fn crc32_is_zlibs() {
        assert_eq!(super::crc32(b"123456789"), 0xCBF4_3926);
    }
}
