//! Tensors that lie in files: where the values of each one are, and what they are as fp32.

use std::{
    cell::RefCell,
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use longshore_proto::{Dtype, Fault, FaultKind};
use longshore_worker::convert;

/// How many files are open at a time: a parameter of a universal checkpoint has four.
const OPEN_FILES: usize = 8;

/// What a tensor's values are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Float(Dtype),
    /// What no weights are kept in, in the file's own words.
    Other(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) file: usize,
    /// The file's byte at which its values start.
    pub(super) start: u64,
    pub(super) shape: Vec<u64>,
    pub(super) kind: Kind,
}

/// Where the values of a tensor are that fits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) file: usize,
    pub(super) start: u64,
    pub(super) dtype: Dtype,
}

/// Files, of which a few are open.
pub(super) struct Files {
    paths: Vec<PathBuf>,
    open: RefCell<VecDeque<(usize, File)>>,
    /// Bytes of a chunk as the file has them, and as fp32.
    buffer: RefCell<(Vec<u8>, Vec<f32>)>,
}

impl Files {
    pub(super) fn new() -> Files {
        Files { paths: Vec::new(), open: RefCell::default(), buffer: RefCell::default() }
    }

    pub(super) fn add(&mut self, path: &Path) -> usize {
        self.paths.push(path.to_path_buf());
        self.paths.len() - 1
    }

    /// Writes values, from the place's element `at` on, as fp32.
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

    pub(super) fn read(&self, file: usize, start: u64, target: &mut [u8]) -> Result<(), Fault> {
        let path = &self.paths[file];
        let failed = |error: io::Error| {
            let (value, limit) = (format!("{}: {error}", path.display()), "readable");
            Fault::new(FaultKind::Precondition, "from", value, limit, "look at the drive, and import again")
        };
        let mut open = self.open.borrow_mut();
        let found = match open.iter().position(|(known, _)| *known == file) {
            Some(found) => found,
            None => {
                open.truncate(OPEN_FILES - 1);
                open.push_front((file, File::open(path).map_err(failed)?));
                0
            }
        };
        open[found].1.read_exact_at(target, start).map_err(failed)
    }
}
