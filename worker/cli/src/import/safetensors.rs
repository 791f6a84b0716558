//! Lists the tensors of Hugging Face's safetensors, and the places of their values.

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use longshore_proto::Dtype;
use safetensors::tensor::Metadata;

use super::tensors::{Files, Kind, Tensor};
use crate::plan::{files_of_index, safetensors_header};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

/// Reads the list of tensors: of a safetensors file, of an index, or of a folder with one of them.
pub(super) fn weights(from: &Path, files: &mut Files) -> anyhow::Result<BTreeMap<String, Tensor>> {
    let mut found = BTreeMap::new();
    for path in paths(from)? {
        add(&path, files, &mut found).with_context(|| format!("cannot read {}", path.display()))?;
    }
    Ok(found)
}

fn add(path: &Path, files: &mut Files, found: &mut BTreeMap<String, Tensor>) -> anyhow::Result<()> {
    let (header_bytes, metadata): (u64, Metadata) = safetensors_header(path)?;
    let open = File::open(path)?;
    let length = open.metadata()?.len();
    let file = files.add(path, open);
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let end = header_bytes + end as u64;
        ensure!(end <= length, "it has {length} bytes, but its tensor {name} ends at {end}: copy it again");
        let kind = match info.dtype {
            safetensors::Dtype::F32 => Kind::Float(Dtype::F32),
            safetensors::Dtype::F16 => Kind::Float(Dtype::F16),
            safetensors::Dtype::BF16 => Kind::Float(Dtype::Bf16),
            other => Kind::Other(format!("{other:?}")),
        };
        let shape = info.shape.iter().map(|&size| size as u64).collect();
        let tensor = Tensor { file, start: header_bytes + start as u64, shape, kind };
        ensure!(found.insert(name.clone(), tensor).is_none(), "another file has its tensor {name}, too");
    }
    Ok(())
}

fn paths(from: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let (index, single) = (from.join(INDEX), from.join(SINGLE));
    let index = match from.is_dir() {
        true if index.exists() => index,
        true if single.exists() => return Ok(vec![single]),
        true => bail!(
            "{} has neither {SINGLE} nor {INDEX}: name a folder of Hugging Face's safetensors",
            from.display()
        ),
        false if from.extension().is_some_and(|extension| extension == "json") => from.to_path_buf(),
        false => return Ok(vec![from.to_path_buf()]),
    };
    files_of_index(&index)
}
