//! The TOML file. Keys are the flags' names with underscores; unknown keys are refused.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use clap::CommandFactory;

use super::{ByteSize, ConfigError, Flags, Spill, StorageIo, names::nearest, retired};
use crate::log::LogFormat;

#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) listen: Option<SocketAddr>,
    pub(super) listen_unix: Option<PathBuf>,
    pub(super) unix_group: Option<String>,
    pub(super) http: Option<SocketAddr>,
    pub(super) http_open: Option<bool>,
    pub(super) http_host: Option<Vec<String>>,
    pub(super) http_tls: Option<bool>,
    pub(super) memory: Option<ByteSize>,
    pub(super) threads: Option<usize>,
    pub(super) state_dir: Option<Vec<PathBuf>>,
    pub(super) resident: Option<ByteSize>,
    pub(super) storage_io: Option<StorageIo>,
    pub(super) storage_buffers: Option<usize>,
    pub(super) spill: Option<Spill>,
    pub(super) drive_endurance: Option<ByteSize>,
    pub(super) shm_dir: Option<PathBuf>,
    pub(super) checkpoint_dir: Option<PathBuf>,
    pub(super) checkpoint_on_drain: Option<bool>,
    pub(super) checkpoint_keep: Option<usize>,
    pub(super) drain_deadline_s: Option<u64>,
    pub(super) max_connections: Option<usize>,
    pub(super) tls_dir: Option<PathBuf>,
    pub(super) insecure: Option<bool>,
    pub(super) no_memfd: Option<bool>,
    pub(super) log: Option<String>,
    pub(super) log_format: Option<LogFormat>,
}

impl File {
    pub(super) fn read(path: &Path) -> Result<File, ConfigError> {
        let text =
            fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
        let parse =
            |error: toml::de::Error| ConfigError::Parse { path: path.into(), message: error.to_string() };
        let table: toml::Table = text.parse().map_err(parse)?;
        let flags = Flags::command();
        let known: Vec<&str> =
            flags.get_arguments().map(|flag| flag.get_id().as_str()).filter(|id| *id != "config").collect();
        if let Some(key) = table.keys().find(|key| !known.contains(&key.as_str())) {
            let (path, key) = (path.into(), key.clone());
            return Err(match retired::instead(&key, &retired::SETTINGS) {
                Some(instead) => ConfigError::RetiredKey { path, key, instead },
                None => ConfigError::UnknownKey { path, nearest: nearest(&key, known), key },
            });
        }
        toml::from_str(&text).map_err(parse)
    }
}
