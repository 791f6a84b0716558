//! What an export is asked for.

use std::{path::PathBuf, time::Duration};

use longshore_proto::Dtype;

use crate::output::Output;

pub(crate) struct Settings {
    pub(crate) job: String,
    pub(crate) out: PathBuf,
    pub(crate) dtype: Dtype,
    /// The optimizer's moments and step counts, too.
    pub(crate) optimizer: bool,
    /// How many bytes of tensors go into one file.
    pub(crate) max_file_bytes: u64,
    /// Longest wait for a version that all servers can give.
    pub(crate) deadline: Duration,
    /// The export may take the place of an earlier one.
    pub(crate) replace: bool,
    /// Whether a bar may be shown.
    pub(crate) shown: Output,
}
