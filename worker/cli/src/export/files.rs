//! Which file and which byte each parameter's values go to, as Hugging Face's loaders expect them.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use longshore_proto::{Dtype, Fault, FaultKind, JobSpec, Layout};
use rustix::fs::{CWD, FallocateFlags, RenameFlags, fallocate};
use safetensors::tensor::{Metadata, TensorInfo};

const INDEX: &str = "model.safetensors.index.json";
/// What an export with the optimizer's state has beside the weights.
pub(super) const OPTIMIZER: &str = "optimizer.pt";

/// Where an export goes.
pub(super) struct Target {
    pub(super) folder: PathBuf,
    /// It may hold an earlier export.
    pub(super) replace: bool,
}

/// Where one parameter lies.
struct TensorExtent {
    file: usize,
    /// The file's byte at which its values start.
    start: u64,
    /// The parameter's elements in the flat space.
    flat: Range<u64>,
}

/// The files of one export: `model.safetensors`, or `model-00001-of-0000N.safetensors` with an index. They are
/// written in a folder beside the target, which takes the target's place when all is there, so that a failed export
/// leaves nothing behind.
pub(super) struct Files {
    target: Target,
    draft: tempfile::TempDir,
    files: Vec<File>,
    names: Vec<String>,
    /// In flat order.
    extents: Vec<TensorExtent>,
    index: serde_json::Value,
    dtype: Dtype,
    bytes: u64,
}

pub(super) fn failed(call: &str, path: &Path) -> impl Fn(io::Error) -> Fault {
    let place = format!("{} ({call}", path.display());
    move |error| {
        let (kind, limit, remedy) = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => (
                FaultKind::Exhausted,
                "large enough for the weights",
                "free space there, or name another folder with --out",
            ),
            _ => (FaultKind::Precondition, "writable", "name a folder that can be written with --out"),
        };
        Fault::new(kind, "out", format!("{place}: {error})"), limit, remedy)
    }
}

/// The parameters of each file. No file is larger than `limit` bytes, unless one parameter alone is.
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
    /// Reserves all space. `limit` is how many bytes of tensors go into one file.
    ///
    /// # Errors
    /// `Io` when `target` holds something, cannot be written, or has no room.
    pub(super) fn create(
        target: Target,
        spec: &JobSpec,
        layout: &Layout,
        dtype: Dtype,
        limit: u64,
    ) -> Result<Files, Fault> {
        let draft = target.draft()?;
        let ranges = split(spec, dtype, limit);
        let mut files = Files {
            target,
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
        files.index = serde_json::json!({"metadata": {"total_size": files.bytes}, "weight_map": weight_map});
        Ok(files)
    }

    /// Adds one file with its header.
    fn add(
        &mut self,
        name: String,
        params: Range<usize>,
        spec: &JobSpec,
        layout: &Layout,
    ) -> Result<(), Fault> {
        let (mut tensors, mut end) = (Vec::new(), 0);
        for index in params.clone() {
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
            self.extents.push(TensorExtent { file: self.files.len(), start, flat });
        }
        let path = self.draft.path().join(&name);
        let refused = |error: &dyn std::fmt::Display| {
            let remedy = "export to smaller files with --max-file-size";
            let value = format!("{name} (its header: {error})");
            Fault::new(FaultKind::Invalid, "out", value, "a safetensors file", remedy)
        };
        // Hugging Face's loaders demand this entry. It is the only one, since several would be written in another
        // order each time.
        let about = HashMap::from([("format".to_string(), "pt".to_string())]);
        let header = Metadata::new(Some(about), tensors).map_err(|error| refused(&error))?;
        let mut header = serde_json::to_vec(&header).map_err(|error| refused(&error))?;
        // Tensors start at a multiple of 8, as other writers have it.
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(failed("create", &path))?;
        let data = 8 + header.len() as u64;
        fallocate(&file, FallocateFlags::empty(), 0, data + end)
            .map_err(|error| failed("reserve", &path)(error.into()))?;
        let write = |bytes: &[u8], at| file.write_all_at(bytes, at).map_err(failed("write", &path));
        write(&(header.len() as u64).to_le_bytes(), 0)?;
        write(&header, 8)?;
        for place in &mut self.extents[params] {
            place.start += data;
        }
        self.files.push(file);
        self.names.push(name);
        self.bytes += end;
        Ok(())
    }

    /// Bytes of all tensors.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Where the files are until they are published.
    pub(super) fn folder(&self) -> &Path {
        self.draft.path()
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Writes the values of flat elements from `at`. Values of elements between parameters are dropped.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let size = self.dtype.bytes();
        let end = at + bytes.len() as u64 / size;
        let first = self.extents.partition_point(|place| place.flat.end <= at);
        for place in self.extents[first..].iter().take_while(|place| place.flat.start < end) {
            let (from, to) = (place.flat.start.max(at), place.flat.end.min(end));
            let values = &bytes[((from - at) * size) as usize..((to - at) * size) as usize];
            let offset = place.start + (from - place.flat.start) * size;
            self.files[place.file]
                .write_all_at(values, offset)
                .map_err(failed("write", &self.draft.path().join(&self.names[place.file])))?;
        }
        Ok(())
    }

    /// Makes all files durable and puts the folder in its place.
    pub(super) fn publish(self) -> Result<(), Fault> {
        let folder = self.draft.path();
        for (file, name) in self.files.iter().zip(&self.names) {
            file.sync_all().map_err(failed("sync", &folder.join(name)))?;
        }
        if self.names.len() > 1 {
            let path = folder.join(INDEX);
            let text = format!("{:#}\n", self.index);
            fs::write(&path, text).map_err(failed("write", &path))?;
            File::open(&path).and_then(|file| file.sync_all()).map_err(failed("sync", &path))?;
        }
        // The draft's own mode is 0700 while it is a draft.
        set_mode(folder).map_err(failed("chmod", folder))?;
        let parent = self.target.parent().to_path_buf();
        self.target.take(self.draft)?;
        File::open(&parent).and_then(|folder| folder.sync_all()).map_err(failed("sync", &parent))
    }
}

fn set_mode(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755))
}

impl Target {
    /// Whether it could be written now.
    pub(super) fn check(&self) -> Result<(), Fault> {
        self.draft().map(drop)
    }

    /// A folder beside it.
    fn draft(&self) -> Result<tempfile::TempDir, Fault> {
        self.holds_export()?;
        let parent = self.parent();
        fs::create_dir_all(parent).map_err(failed("create", parent))?;
        let draft = tempfile::Builder::new().prefix(".export-").tempdir_in(parent);
        draft.map_err(failed("create", parent))
    }

    fn parent(&self) -> &Path {
        let parent = self.folder.parent().filter(|parent| !parent.as_os_str().is_empty());
        parent.unwrap_or(Path::new("."))
    }

    /// Gives the draft its place in one operation, so that either the earlier export or this one is there, and whole.
    fn take(&self, draft: tempfile::TempDir) -> Result<(), Fault> {
        if self.holds_export()? {
            // The draft's name then leads to the earlier export, which goes with it.
            return rustix::fs::renameat_with(CWD, draft.path(), CWD, &self.folder, RenameFlags::EXCHANGE)
                .map_err(|error| failed("rename", &self.folder)(error.into()));
        }
        fs::rename(draft.path(), &self.folder).map_err(failed("rename", &self.folder))?;
        let _ = draft.keep();
        Ok(())
    }

    /// Whether an export is there. Nothing else may be overwritten: the target must be empty or hold an export.
    fn holds_export(&self) -> Result<bool, Fault> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(failed("read", &self.folder)(error)),
        };
        let mut holds = false;
        for entry in entries {
            let entry = entry.map_err(failed("read", &self.folder))?;
            if !self.replace || !is_exported(&entry.file_name().to_string_lossy()) {
                let value = entry.path().display().to_string();
                let (limit, remedy) = match self.replace {
                    false => {
                        ("an empty folder, or none yet", "name another folder with --out, or empty this one")
                    }
                    true => (
                        "an empty folder, an earlier export, or none yet",
                        "name another folder, or empty this one",
                    ),
                };
                return Err(Fault::new(FaultKind::Conflict, "out", value, limit, remedy));
            }
            holds = true;
        }
        Ok(holds)
    }
}

fn is_exported(name: &str) -> bool {
    name == INDEX || name == OPTIMIZER || name.starts_with("model") && name.ends_with(".safetensors")
}
