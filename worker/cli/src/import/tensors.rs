//! Tensors of Hugging Face's safetensors: the place of each one's values, and their conversion to fp32.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use longshore_proto::{Dtype, Fault, FaultKind};
use longshore_worker::convert;
use safetensors::tensor::Metadata;

use crate::plan::{files_of_index, safetensors_header};

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Float(Dtype),
    /// A type that no weights have, by its name in the file.
    Other(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) file: usize,
    pub(super) start: u64,
    pub(super) shape: Vec<u64>,
    pub(super) kind: Kind,
}

/// The place of a tensor that fits a parameter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) start: u64,
    pub(super) dtype: Dtype,
}

#[derive(Default)]
pub(super) struct Files {
    files: Vec<(PathBuf, File)>,
    /// Bytes of a chunk in the file's type, and the same values as fp32.
    buffer: RefCell<(Vec<u8>, Vec<f32>)>,
}

impl Files {
    pub(super) fn add(&mut self, path: &Path, file: File) -> usize {
        self.files.push((path.to_path_buf(), file));
        self.files.len() - 1
    }

    /// Writes values as fp32, from the place's element `at` on.
    pub(super) fn write(&self, place: Place, at: u64, target: &mut [u8]) -> Result<(), Fault> {
        let Place { file, start, dtype } = place;
        let start = start + at * dtype.bytes();
        if dtype == Dtype::F32 {
            return self.read(file, start, target);
        }
        let mut buffer = self.buffer.borrow_mut();
        let (bytes, values) = &mut *buffer;
        let elements = target.len() / size_of::<f32>();
        bytes.resize(elements * dtype.bytes() as usize, 0);
        values.resize(elements, 0.0);
        self.read(file, start, bytes)?;
        convert::to_f32(dtype, bytes, values);
        convert::from_f32(Dtype::F32, values, target);
        Ok(())
    }

    fn read(&self, file: usize, start: u64, target: &mut [u8]) -> Result<(), Fault> {
        let (path, file) = &self.files[file];
        file.read_exact_at(target, start).map_err(|error| {
            let (value, limit) = (format!("{}: {error}", path.display()), "readable");
            Fault::new(FaultKind::Precondition, "from", value, limit, "look at the drive, and import again")
        })
    }
}

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
        let end = header_bytes.saturating_add(end as u64);
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
