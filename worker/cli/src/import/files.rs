//! The tensors of safetensors files: which there are, whether they are a job's parameters, and their values as fp32.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use longshore_proto::{Dtype, Fault, FaultKind, JobSpec, Param, StateArray};
use longshore_worker::{Filling, convert};
use safetensors::tensor::Metadata;
use serde::Deserialize;

use crate::plan::safetensors_header;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
/// How many misfits an error lists.
const LISTED: usize = 5;

struct Tensor {
    file: usize,
    /// The file's byte at which its values start.
    start: u64,
    shape: Vec<u64>,
    /// As the file says it.
    dtype: safetensors::Dtype,
}

/// All tensors of a file, or of the files that an index names.
pub(super) struct Tensors {
    from: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: BTreeMap<String, Tensor>,
}

impl Tensors {
    /// Reads what there is: a safetensors file, an index, or a folder with one of them.
    pub(super) fn open(from: &Path) -> anyhow::Result<Tensors> {
        let paths = paths(from)?;
        let mut found = Tensors { from: from.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        for path in paths {
            found.add(&path).with_context(|| format!("cannot read {}", path.display()))?;
        }
        Ok(found)
    }

    fn add(&mut self, path: &Path) -> anyhow::Result<()> {
        let (header_bytes, metadata): (u64, Metadata) = safetensors_header(path)?;
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let end = header_bytes + end as u64;
            ensure!(
                end <= length,
                "it has {length} bytes, but its tensor {name} ends at {end}: copy it again"
            );
            let shape = info.shape.iter().map(|&size| size as u64).collect();
            let tensor = Tensor {
                file: self.files.len(),
                start: header_bytes + start as u64,
                shape,
                dtype: info.dtype,
            };
            ensure!(
                self.tensors.insert(name.clone(), tensor).is_none(),
                "another file has its tensor {name}, too"
            );
        }
        self.files.push((path.to_path_buf(), file));
        Ok(())
    }

    /// The values of a job's parameters, if each is here.
    ///
    /// # Errors
    /// Names tensors that are missing, of another shape or type, or that are no parameter.
    pub(super) fn filling(&self, spec: &JobSpec, ignore_extra: bool) -> anyhow::Result<Weights<'_>> {
        let mut misfits = Vec::new();
        let mut params = Vec::new();
        for param in &spec.params {
            match self.tensors.get(&param.name).map(|tensor| (tensor, misfit(param, tensor))) {
                None => misfits.push(format!("{} is missing", param.name)),
                Some((_, Err(why))) => misfits.push(why),
                Some((tensor, Ok(dtype))) => params.push((tensor, dtype)),
            }
        }
        let known: BTreeSet<&str> = spec.params.iter().map(|param| param.name.as_str()).collect();
        let extra = self.tensors.keys().filter(|name| !known.contains(name.as_str()));
        if !ignore_extra {
            misfits.extend(
                extra.map(|name| {
                    format!("{name} is no parameter of the job (--ignore-extra leaves it alone)")
                }),
            );
        }
        if misfits.is_empty() {
            return Ok(Weights { tensors: self, params, buffer: RefCell::default() });
        }
        let more = misfits.len().saturating_sub(LISTED);
        misfits.truncate(LISTED);
        let more = if more == 0 { String::new() } else { format!("; and {more} more") };
        bail!("{} does not fit job {}: {}{more}", self.from.display(), spec.name, misfits.join("; "))
    }
}

/// The type of a tensor that fits, or why it does not.
fn misfit(param: &Param, tensor: &Tensor) -> Result<Dtype, String> {
    if tensor.shape != param.shape {
        return Err(format!("{} has shape {:?}, but must have {:?}", param.name, tensor.shape, param.shape));
    }
    match tensor.dtype {
        safetensors::Dtype::F32 => Ok(Dtype::F32),
        safetensors::Dtype::F16 => Ok(Dtype::F16),
        safetensors::Dtype::BF16 => Ok(Dtype::Bf16),
        other => Err(format!("{} is of type {other:?}, but must be of F32, F16 or BF16", param.name)),
    }
}

/// What a job is filled with.
pub(super) struct Weights<'a> {
    tensors: &'a Tensors,
    /// By parameter.
    params: Vec<(&'a Tensor, Dtype)>,
    /// Bytes of a chunk as the file has them, and as fp32.
    buffer: RefCell<(Vec<u8>, Vec<f32>)>,
}

impl Filling for Weights<'_> {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn write(&self, _: StateArray, param: usize, at: u64, target: &mut [u8]) -> longshore_worker::Result<()> {
        let (tensor, dtype) = self.params[param];
        let (path, file) = &self.tensors.files[tensor.file];
        let start = tensor.start + at * dtype.bytes();
        let failed = |error: io::Error| {
            let (value, limit) = (format!("{}: {error}", path.display()), "readable");
            Fault::new(FaultKind::Precondition, "from", value, limit, "look at the drive, and import again")
        };
        if dtype == Dtype::F32 {
            return Ok(file.read_exact_at(target, start).map_err(failed)?);
        }
        let mut buffer = self.buffer.borrow_mut();
        let (bytes, values) = &mut *buffer;
        let elements = target.len() / size_of::<f32>();
        bytes.resize(elements * dtype.bytes() as usize, 0);
        values.resize(elements, 0.0);
        file.read_exact_at(bytes, start).map_err(failed)?;
        convert::to_f32(dtype, bytes, values);
        convert::from_f32(Dtype::F32, values, target);
        Ok(())
    }
}

fn paths(from: &Path) -> anyhow::Result<Vec<PathBuf>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
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
    let text = std::fs::read_to_string(&index).with_context(|| format!("cannot read {}", index.display()))?;
    let Index { weight_map } = serde_json::from_str(&text)
        .with_context(|| format!("{} has no weight_map of names", index.display()))?;
    let names: BTreeSet<String> = weight_map.into_values().collect();
    let folder = index.parent().unwrap_or(Path::new("."));
    Ok(names.into_iter().map(|name| folder.join(name)).collect())
}
