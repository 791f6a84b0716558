//! Tensors in files: the place of each one's values, and their conversion to fp32.

use std::{
    cell::RefCell,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use longshore_proto::{Dtype, Fault, FaultKind};
use longshore_worker::convert;

/// The type of a tensor's values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Float(Dtype),
    /// A type that no weights have, by the file's own name.
    Other(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) file: usize,
    /// Offset of the first value in the file.
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

/// The open files of a model's tensors.
#[derive(Default)]
pub(super) struct Files {
    files: Vec<(PathBuf, File)>,
    /// Bytes of a chunk in the file's type, and the same values as fp32.
    buffer: RefCell<(Vec<u8>, Vec<f32>)>,
}

impl Files {
    /// Returns the file's number.
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
