//! Reads a job's state from its checkpoint: safetensors, parsed from the format's definition alone.

use std::{collections::BTreeMap, fs, path::Path};

use longshore_proto::{Layout, ShardId};
use serde_json::Value;

/// Master weights, first and second moment of the whole flat space. Their bits are kept as integers, so that equal NaNs
/// compare as equal.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    pub master: Vec<u32>,
    pub first: Vec<u32>,
    pub second: Vec<u32>,
}

/// Reads a sealed checkpoint's folder.
pub fn read(folder: &Path, layout: &Layout) -> State {
    let mut tensors = BTreeMap::new();
    for part in parts(folder) {
        tensors.extend(tensors_of(&part));
    }
    let array = |name: &str| {
        let shard = |shard: u32| {
            let name = format!("shard.{shard:06}.{name}");
            let bits = tensors.get(&name).unwrap_or_else(|| panic!("{name} is in no part of {folder:?}"));
            assert_eq!(bits.len() as u64, layout.shard_len(ShardId(shard)), "{name}");
            bits.clone()
        };
        (0..layout.shards()).flat_map(shard).collect()
    };
    State { master: array("master"), first: array("first"), second: array("second") }
}

/// Returns the part files, in the order of the servers.
pub fn parts(folder: &Path) -> Vec<std::path::PathBuf> {
    let files =
        fs::read_dir(folder).expect("a checkpoint's folder").map(|entry| entry.expect("a file").path());
    let mut parts: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).collect();
    parts.sort();
    assert!(!parts.is_empty(), "no part in {folder:?}");
    parts
}

/// Returns the tensors of a part: eight bytes of header length, the header as JSON, then the data.
fn tensors_of(part: &Path) -> BTreeMap<String, Vec<u32>> {
    let bytes = fs::read(part).expect("a part");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let data = &bytes[8 + header..];
    let header: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a safetensors header");
    let header = header.as_object().expect("an object");
    let fp32 = header.iter().filter(|(_, tensor)| tensor["dtype"] == "F32");
    let read = |(name, tensor): (&String, &Value)| {
        let at = |index: usize| tensor["data_offsets"][index].as_u64().expect("an offset") as usize;
        let words = data[at(0)..at(1)].chunks_exact(4);
        (name.clone(), words.map(|word| u32::from_le_bytes(word.try_into().expect("four bytes"))).collect())
    };
    fp32.map(read).collect()
}
