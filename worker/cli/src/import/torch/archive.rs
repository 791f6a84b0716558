//! One file of `torch.save`: its objects, and where in it the values of its tensors lie. Values are not read.

use std::{fs::File, io::Read, path::Path};

use anyhow::{Context, bail, ensure};
use longshore_proto::Dtype;

use super::{
    super::tensors::{Files, Kind, Tensor},
    pickle::{Id, Object, Pickle},
    zip::Zip,
};

/// The objects of an optimizer of a million parameters take less.
const MOST_PICKLE_BYTES: u64 = 1 << 30;

/// How files of torch begin that are no zip archives.
const LEGACY: [u8; 4] = [0x80, 0x02, 0x8a, 0x0a];

/// A file of `torch.save`.
pub(in super::super) struct Archive {
    file: usize,
    zip: Zip,
    /// The folder of all entries.
    prefix: String,
    pickle: Pickle,
}

impl Archive {
    pub(in super::super) fn open(path: &Path, files: &mut Files) -> anyhow::Result<Archive> {
        Archive::read(path, files.add(path)).with_context(|| format!("cannot read {}", path.display()))
    }

    fn read(path: &Path, file: usize) -> anyhow::Result<Archive> {
        let mut opened = File::open(path)?;
        let mut first = [0; 4];
        let is_legacy = opened.read_exact(&mut first).is_ok() && first == LEGACY;
        ensure!(!is_legacy, "torch before 1.6 wrote it: load it and torch.save it again");
        let zip = Zip::open(opened)?;
        let pickled = zip.names().find_map(|name| name.strip_suffix("/data.pkl"));
        let prefix = pickled.context("it has no data.pkl: it is no file of torch.save")?.to_string();
        if let Ok(order) = zip.read(&format!("{prefix}/byteorder"), 16) {
            ensure!(order == b"little", "its numbers are big-endian: save it again on another machine");
        }
        let pickle = Pickle::read(&zip.read(&format!("{prefix}/data.pkl"), MOST_PICKLE_BYTES)?)?;
        Ok(Archive { file, zip, prefix, pickle })
    }

    pub(super) fn pickle(&self) -> &Pickle {
        &self.pickle
    }

    /// A tensor. None if the object is no tensor.
    ///
    /// # Errors
    /// Says what the object is that looks like a tensor and has no values that lie here one after the other.
    pub(super) fn tensor(&self, id: Id) -> anyhow::Result<Option<Tensor>> {
        let Some((name, arguments)) = self.pickle.call(id) else { return Ok(None) };
        match (name, arguments) {
            (("torch._utils", "_rebuild_parameter"), &[data, ..]) => self.tensor(data),
            (("torch._utils", "_rebuild_tensor_v2"), &[storage, offset, shape, strides, ..]) => {
                self.plain(storage, offset, shape, strides).map(Some)
            }
            ((module, name), _) if module.starts_with("torch") => {
                bail!(
                    "is made by {module}.{name}, but must be a plain tensor: gather it, or save it as .float()"
                )
            }
            _ => Ok(None),
        }
    }

    fn plain(&self, storage: Id, offset: Id, shape: Id, strides: Id) -> anyhow::Result<Tensor> {
        let pickle = &self.pickle;
        let sizes = |id: Id| -> Option<Vec<u64>> {
            pickle.items(id)?.iter().map(|&size| u64::try_from(pickle.int(size)?).ok()).collect()
        };
        let broken = "is broken: save it again";
        let (shape, strides) = (sizes(shape).context(broken)?, sizes(strides).context(broken)?);
        let offset = pickle.int(offset).and_then(|offset| u64::try_from(offset).ok()).context(broken)?;
        let Object::Persistent(storage) = *pickle.get(storage) else { bail!(broken) };
        let Some(&[_, kind, key, ..]) = pickle.items(storage) else { bail!(broken) };
        let (kind, key) = (pickle.name(kind).context(broken)?.1, pickle.text(key).context(broken)?);
        let (kind, bytes) = match kind {
            "FloatStorage" => (Kind::Float(Dtype::F32), 4),
            "HalfStorage" => (Kind::Float(Dtype::F16), 2),
            "BFloat16Storage" => (Kind::Float(Dtype::Bf16), 2),
            "DoubleStorage" | "LongStorage" => (Kind::Other(kind.to_string()), 8),
            _ => (Kind::Other(kind.to_string()), 1),
        };
        let elements =
            shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size)).context(broken)?;
        if !is_contiguous(&shape, &strides) {
            bail!("has strides {strides:?}, but must be contiguous: save it as .contiguous()");
        }
        let name = format!("{}/data/{key}", self.prefix);
        let (start, size) = self.zip.stored(&name)?;
        let end = offset.checked_add(elements).and_then(|end| end.checked_mul(bytes)).context(broken)?;
        ensure!(end <= size, "has values up to byte {end}, but the file has {size}: copy it again");
        Ok(Tensor { file: self.file, start: start + offset * bytes, shape, kind })
    }
}

/// Whether values follow each other. A side of one element may have any stride.
fn is_contiguous(shape: &[u64], strides: &[u64]) -> bool {
    let mut due = 1;
    shape.len() == strides.len()
        && shape.iter().zip(strides).rev().all(|(&size, &stride)| {
            let fits = size <= 1 || stride == due;
            due = due.saturating_mul(size.max(1));
            fits || shape.contains(&0)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_follow_each_other_are_contiguous() {
        for (shape, strides, expected) in [
            (&[2, 3][..], &[3, 1][..], true),
            (&[], &[], true),
            (&[2, 1, 3], &[3, 7, 1], true),
            (&[3, 2], &[1, 3], false),
            (&[2, 3], &[4, 1], false),
            (&[0, 3], &[5, 9], true),
            (&[2], &[], false),
        ] {
            assert_eq!(is_contiguous(shape, strides), expected, "{shape:?} {strides:?}");
        }
    }
}
