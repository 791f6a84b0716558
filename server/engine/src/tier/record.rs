//! A frame around JSON in sectors of its own, which readers find whole or not at all. Tiers store records and joins in
//! frames.

use longshore_proto::{Fault, FaultKind};
use serde::{Serialize, de::DeserializeOwned};

use super::fault::FIELD;
use crate::retired;

/// Frames are padded to whole sectors of any known device.
pub(super) const SECTOR: usize = 4096;
/// The room for one frame. 1 MiB of trainer state is 2 MiB of hex, and 1024 param groups are 300 KiB.
pub(super) const RECORD_BYTES: usize = 4 * 1024 * 1024;
const MAGIC: [u8; MAGIC_BYTES] = *b"LONGSREC";
pub(super) const MAGIC_BYTES: usize = 8;
pub(super) const FORMAT: u32 = 1;
/// The format of a record with a changed placement, which servers of earlier versions must refuse. Format 2 had a
/// checksum of each fetched block, and format 3 has a digest for each shard.
pub(super) const MOVED: u32 = 3;
const HEAD: usize = 32;

#[derive(Debug)]
pub(super) enum Found<T> {
    /// Nothing was ever written.
    Blank,
    Valid(T),
    /// The record was torn by a crash, or damaged since.
    Broken(String),
    /// A newer version of this program wrote the record.
    Refused(Fault),
}

/// Returns the CRC-64/NVME of all the bytes in order. At 8 bytes a block a missed error is out of reach. With
/// carry-less multiplication it is as fast as CRC-32.
pub(super) fn crc64<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
    parts.into_iter().for_each(|part| digest.update(part));
    digest.finalize()
}

/// Returns [`crc64`], or 1 in place of 0: where checksums lie, 0 means that none is known.
pub(super) fn nonzero_crc64<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    crc64(parts).max(1)
}

/// Makes a frame: magic, format version, JSON length, checksum, zeros up to byte 32, JSON, zeros to a whole
/// sector. The checksum covers every byte but itself, the padding too. Magic and format come first and stay
/// there in every later format, so that any reader can tell the format.
pub(super) fn encode(body: &impl Serialize) -> Result<Vec<u8>, String> {
    encode_as(FORMAT, body)
}

pub(super) fn encode_as(format: u32, body: &impl Serialize) -> Result<Vec<u8>, String> {
    let json = serde_json::to_vec(body).map_err(|error| error.to_string())?;
    let mut frame = vec![0; (HEAD + json.len()).next_multiple_of(SECTOR)];
    if frame.len() > RECORD_BYTES {
        return Err(format!("{} bytes of record", frame.len()));
    }
    frame[..8].copy_from_slice(&MAGIC);
    frame[8..12].copy_from_slice(&format.to_le_bytes());
    frame[12..16].copy_from_slice(&(json.len() as u32).to_le_bytes());
    frame[HEAD..HEAD + json.len()].copy_from_slice(&json);
    let crc = checksum(&frame);
    frame[16..24].copy_from_slice(&crc.to_le_bytes());
    Ok(frame)
}

fn checksum(frame: &[u8]) -> u64 {
    crc64([&frame[..16], &frame[24..]])
}

/// Returns true if a frame is whole but for its format. In such a frame the format's bytes are damaged: no newer
/// version wrote it.
fn is_whole_in_a_known_format(frame: &[u8]) -> bool {
    (FORMAT..=MOVED).any(|format| {
        let frame = [&frame[..8], &format.to_le_bytes(), &frame[12..]].concat();
        frame[16..24] == checksum(&frame).to_le_bytes()
    })
}

/// Returns the fault of state that a newer version of this program wrote.
pub(super) fn newer(kind: &str, format: u32, most: u32) -> Fault {
    let limit = format!("of format {most} at most, as this version reads");
    let remedy = "start the newer version of longshored, which wrote it; nothing was changed or deleted";
    Fault::new(FaultKind::Precondition, FIELD, format!("a {kind} of format {format}"), limit, remedy)
}

/// Returns the length of the frame that begins with the sector `head`. None if no frame is that long.
pub(super) fn frame_len(head: &[u8]) -> Option<usize> {
    let json = u32::from_le_bytes([head[12], head[13], head[14], head[15]]) as usize;
    let length = (HEAD + json).next_multiple_of(SECTOR);
    (length <= RECORD_BYTES).then_some(length)
}

/// Reads the frame at the start of `area`.
pub(super) fn decode<T: DeserializeOwned>(area: &[u8]) -> Found<T> {
    let broken = |why: &str| Found::Broken(why.to_string());
    if area.len() < SECTOR {
        return broken("too short");
    }
    if area[..SECTOR].iter().all(|&byte| byte == 0) {
        return Found::Blank;
    }
    if area[..8] != MAGIC {
        return broken("no magic");
    }
    let format = u32::from_le_bytes([area[8], area[9], area[10], area[11]]);
    let word = |at: usize| u32::from_le_bytes([area[at], area[at + 1], area[at + 2], area[at + 3]]);
    let json = word(12) as usize;
    let frame = area.get(..(HEAD + json).next_multiple_of(SECTOR));
    let is_whole = |frame: &[u8]| frame[16..24] == checksum(frame).to_le_bytes();
    match frame {
        Some(frame) if is_whole(frame) && (FORMAT..=MOVED).contains(&format) => {}
        // Later formats keep only magic and format in place.
        _ if format > MOVED && !frame.is_some_and(is_whole_in_a_known_format) => {
            return Found::Refused(newer("record", format, MOVED));
        }
        None => return broken("bad length"),
        Some(_) => return broken("its checksum differs"),
    }
    let Some(frame) = frame else { return broken("bad length") };
    let body = &frame[HEAD..HEAD + json];
    if let Err(fault) = retired::check(body) {
        return Found::Refused(fault);
    }
    match serde_json::from_slice(body) {
        Ok(body) => Found::Valid(body),
        Err(error) => Found::Broken(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_frame_is_found_by_its_head() {
        let longest = "a".repeat(RECORD_BYTES - HEAD - 2);
        let frame = encode(&longest).unwrap();
        assert_eq!((frame.len(), frame_len(&frame[..SECTOR])), (RECORD_BYTES, Some(RECORD_BYTES)));
        assert!(encode(&(longest + "a")).is_err());
        assert_eq!(frame_len(&encode(&"a").unwrap()), Some(SECTOR));
        assert_eq!(frame_len(&[0xff; SECTOR]), None);
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let body: Vec<u32> = (0..900).collect();
        let mut frame = encode(&body).unwrap();
        assert!(matches!(decode::<Vec<u32>>(&frame), Found::Valid(found) if found == body));
        for bit in 0..frame.len() * 8 {
            frame[bit / 8] ^= 1 << (bit % 8);
            assert!(matches!(decode::<Vec<u32>>(&frame), Found::Broken(_)), "bit {bit}");
            frame[bit / 8] ^= 1 << (bit % 8);
        }
        assert!(matches!(decode::<Vec<u32>>(&vec![0; SECTOR]), Found::Blank));
        // Magic and format alone are known of a newer record.
        frame[8] = MOVED as u8 + 1;
        frame[12..].fill(0xAB);
        let Found::Refused(fault) = decode::<Vec<u32>>(&frame) else { panic!("a newer format is no damage") };
        assert!(fault.remedy.starts_with("start the newer version"), "{fault}");
    }
}
