//! What an export is asked for.

use std::{path::PathBuf, time::Duration};

use longshore_proto::{Dtype, Rule};
use longshore_worker::export::Contents;

use crate::output::Output;

/// The largest safetensors file, unless a tensor is larger.
pub(crate) const MAX_FILE_BYTES: u64 = 5 << 30;

pub(crate) struct Settings {
    pub(crate) job: String,
    pub(crate) out: PathBuf,
    pub(crate) format: Format,
    /// Longest wait for a version that all servers can give.
    pub(crate) deadline: Duration,
    /// The export may take the place of an earlier one.
    pub(crate) replace: bool,
    /// Whether a bar may be shown.
    pub(crate) shown: Output,
}

/// What is written, and for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Safetensors, as Hugging Face's loaders expect them.
    Safetensors {
        dtype: Dtype,
        /// How many bytes of tensors go into one file.
        max_file_bytes: u64,
        /// torch's file of the optimizer's moments and step counts, too.
        optimizer: bool,
    },
    /// A universal checkpoint of DeepSpeed: all state in fp32.
    Universal,
}

impl Format {
    /// What servers send for it.
    pub(super) fn contents(self, rule: Rule) -> Contents {
        match self {
            Format::Safetensors { dtype, optimizer: false, .. } => Contents::Weights(dtype),
            Format::Safetensors { optimizer: true, .. } | Format::Universal => Contents::State(rule),
        }
    }
}
