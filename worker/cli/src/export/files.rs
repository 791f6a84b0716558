//! Assigns each parameter's values to a file and an offset, as Hugging Face's loaders expect.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{File, OpenOptions},
    io::Write,
    ops::Range,
    os::unix::fs::{FileExt, OpenOptionsExt},
};

use longshore_proto::{Dtype, Fault, FaultKind, JobSpec, Layout};
use rustix::fs::{FallocateFlags, fallocate};
use safetensors::tensor::{Metadata, TensorInfo};

use super::target::{Draft, INDEX, failed};

/// A parameter's range in the flat space, and the place of its values.
struct Extent {
    flat: Range<u64>,
    file: usize,
    start: u64,
}

/// The files of one export, written in a draft: `model.safetensors`, or `model-00001-of-0000N.safetensors` with an
/// index.
pub(super) struct Files {
    draft: Draft,
    files: Vec<File>,
    names: Vec<String>,
    /// Places of the parameters' values, in the order of the flat space.
    extents: Vec<Extent>,
    index: serde_json::Value,
    dtype: Dtype,
    bytes: u64,
}

/// Splits the parameters into files of at most `limit` bytes, except a single larger parameter.
fn split(spec: &JobSpec, dtype: Dtype, limit: u64) -> Vec<Range<usize>> {
    let (mut files, mut first, mut bytes) = (Vec::new(), 0, 0);
    for (index, param) in spec.params.iter().enumerate() {
        let size = param.elements().unwrap_or(0) * dtype.bytes();
        if bytes + size > limit && index > first {
            files.push(first..index);
            (first, bytes) = (index, 0);
        }
        bytes += size;
    }
    files.push(first..spec.params.len());
    files
}

impl Files {
    /// Creates the files, and reserves all space. `limit` is the most bytes of tensors in a file.
    ///
    /// # Errors
    /// If there is no room.
    pub(super) fn create(
        draft: Draft,
        spec: &JobSpec,
        layout: &Layout,
        dtype: Dtype,
        limit: u64,
    ) -> Result<Files, Fault> {
        let ranges = split(spec, dtype, limit);
        let mut files = Files {
            draft,
            files: Vec::new(),
            names: Vec::new(),
            extents: Vec::new(),
            index: serde_json::Value::Null,
            dtype,
            bytes: 0,
        };
        let mut weight_map = BTreeMap::new();
        for (index, params) in ranges.iter().enumerate() {
            let name = match ranges.len() {
                1 => "model.safetensors".to_string(),
                count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            weight_map.extend(spec.params[params.clone()].iter().map(|param| (&param.name, name.clone())));
            files.add(name, params.clone(), spec, layout)?;
        }
        files.extents.sort_unstable_by_key(|extent| extent.flat.start);
        files.index = serde_json::json!({"metadata": {"total_size": files.bytes}, "weight_map": weight_map});
        Ok(files)
    }

    fn add(
        &mut self,
        name: String,
        params: Range<usize>,
        spec: &JobSpec,
        layout: &Layout,
    ) -> Result<(), Fault> {
        let (mut tensors, mut extents, mut end) = (Vec::new(), Vec::new(), 0);
        for index in params {
            let (param, flat) = (&spec.params[index], layout.param_range(index));
            let start = end;
            end += (flat.end - flat.start) * self.dtype.bytes();
            let info = TensorInfo {
                dtype: match self.dtype {
                    Dtype::F32 => safetensors::Dtype::F32,
                    Dtype::F16 => safetensors::Dtype::F16,
                    Dtype::Bf16 => safetensors::Dtype::BF16,
                },
                shape: param.shape.iter().map(|&side| side as usize).collect(),
                data_offsets: (start as usize, end as usize),
            };
            tensors.push((param.name.clone(), info));
            extents.push(Extent { flat, file: self.files.len(), start });
        }
        let path = self.draft.path().join(&name);
        let refused = |error: &dyn std::fmt::Display| {
            let remedy = "export to smaller files with --max-file-size";
            let value = format!("{name} (its header: {error})");
            Fault::new(FaultKind::Invalid, "out", value, "a safetensors file", remedy)
        };
        // Hugging Face's loaders demand this entry. No other entry is added: the order of several entries would vary.
        let about = HashMap::from([("format".to_string(), "pt".to_string())]);
        let header = Metadata::new(Some(about), tensors).map_err(|error| refused(&error))?;
        let mut header = serde_json::to_vec(&header).map_err(|error| refused(&error))?;
        // Tensors start at a multiple of 8, as in files of other writers.
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(failed("create", &path))?;
        let data = 8 + header.len() as u64;
        fallocate(&file, FallocateFlags::empty(), 0, data + end)
            .map_err(|error| failed("reserve", &path)(error.into()))?;
        let write = |bytes: &[u8], at| file.write_all_at(bytes, at).map_err(failed("write", &path));
        write(&(header.len() as u64).to_le_bytes(), 0)?;
        write(&header, 8)?;
        extents.iter_mut().for_each(|extent| extent.start += data);
        self.extents.extend(extents);
        self.files.push(file);
        self.names.push(name);
        self.bytes += end;
        Ok(())
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Writes the values of flat elements from `at`. Values between parameters are dropped.
    pub(super) fn write(&self, at: u64, values: &[u8]) -> Result<(), Fault> {
        let size = self.dtype.bytes();
        let end = at + values.len() as u64 / size;
        let first = self.extents.partition_point(|extent| extent.flat.end <= at);
        for Extent { flat, file, start } in
            self.extents[first..].iter().take_while(|extent| extent.flat.start < end)
        {
            let (from, to) = (flat.start.max(at), flat.end.min(end));
            let part = &values[((from - at) * size) as usize..((to - at) * size) as usize];
            let written = self.files[*file].write_all_at(part, start + (from - flat.start) * size);
            written.map_err(failed("write", &self.draft.path().join(&self.names[*file])))?;
        }
        Ok(())
    }

    /// Makes all files durable, and moves the folder to its place.
    pub(super) fn publish(self) -> Result<(), Fault> {
        let folder = self.draft.path();
        for (file, name) in self.files.iter().zip(&self.names) {
            file.sync_all().map_err(failed("sync", &folder.join(name)))?;
        }
        if self.names.len() > 1 {
            let path = folder.join(INDEX);
            let text = format!("{:#}\n", self.index);
            let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
            let written =
                file.and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()));
            written.map_err(failed("write", &path))?;
        }
        self.draft.publish()
    }
}
