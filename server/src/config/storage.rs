//! Storage of jobs whose tier outlives the server's process.

use std::path::PathBuf;

use longshore_engine::tier::{self, Spill};

use super::ConfigError;

/// Settings of the tiers `nvme` and `shm`.
#[derive(Clone, Debug)]
pub struct StorageConfig {
    /// Folders of `nvme` jobs' state, striped over all of them.
    pub state_dirs: Vec<PathBuf>,
    /// DRAM for the resident shards of an `nvme` job.
    pub resident: u64,
    /// Shards of an `nvme` job that are read, updated or written at once.
    pub buffers: usize,
    pub spill: Spill,
    /// Bytes that the drives may be written with over their lifetime; 0 if unknown.
    pub drive_endurance: u64,
    /// Folder of `shm` jobs' state. None: a folder named after user and port.
    pub shm_dir: Option<PathBuf>,
}

impl Default for StorageConfig {
    fn default() -> StorageConfig {
        StorageConfig {
            state_dirs: Vec::new(),
            resident: 0,
            buffers: tier::DEFAULT_BUFFERS,
            spill: Spill::default(),
            drive_endurance: 0,
            shm_dir: None,
        }
    }
}

impl StorageConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if self.spill == Spill::All && self.state_dirs.is_empty() {
            let limit = "given with state_dir (--state-dir): without one no job lives on drives";
            return Err(ConfigError::Value { field: "spill", value: "all".into(), limit });
        }
        Ok(())
    }

    /// Converts the settings for the engine, with the folder of `shm` jobs.
    pub(crate) fn to_engine(&self, shm_dir: Option<PathBuf>, share_images: bool) -> tier::Storage {
        tier::Storage {
            dirs: self.state_dirs.clone(),
            shm_dir,
            share_images,
            resident_bytes: self.resident,
            buffers: self.buffers,
            spill: self.spill,
            ..tier::Storage::default()
        }
    }
}
