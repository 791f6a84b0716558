//! Flags, each with its environment variable and its key in the TOML file. Unknown variables and keys are refused.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use clap::{CommandFactory, Parser};

use super::{
    ByteSize, ConfigError, Spill,
    retired::{self, SETTINGS, check_variables, nearest},
};
use crate::log::LogFormat;

/// Owns a model's fp32 weights and optimizer state, and updates them as GPU workers push gradients.
///
/// Flags win over environment variables, these over the TOML file, and that over the defaults.
#[derive(Debug, Default, Parser, serde::Deserialize)]
#[serde(default)]
#[command(name = "longshored", version)]
pub struct Flags {
    /// TOML file with any of the options below, written with underscores
    #[arg(long, env = "LONGSHORED_CONFIG", value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Address to serve on; port 0 takes a free one. On loopback without --tls-dir this user and root may call
    /// [default: 127.0.0.1:7070, and none with --listen-unix]
    #[arg(long, env = "LONGSHORED_LISTEN", value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Unix socket to serve on, for workers on this host; only this user and root may connect
    #[arg(long, env = "LONGSHORED_LISTEN_UNIX", value_name = "PATH")]
    pub listen_unix: Option<PathBuf>,
    /// Group whose members may connect to --listen-unix too, and do everything there: a name or a number [default: none]
    #[arg(long, env = "LONGSHORED_UNIX_GROUP", value_name = "GROUP")]
    pub unix_group: Option<String>,
    /// Address of the status page, /metrics, /healthz and /readyz; it changes nothing [default: none]
    #[arg(long, env = "LONGSHORED_HTTP", value_name = "ADDRESS:PORT")]
    pub http: Option<SocketAddr>,
    /// Allow a --http address that is not loopback: anyone who can reach it can read what the status page shows: jobs, identities and their quotas, paths of folders
    #[arg(long, env = "LONGSHORED_HTTP_OPEN")]
    pub http_open: bool,
    /// Names by which --http may be asked for without TLS, beside IP addresses, localhost and this host's own name
    #[arg(long, env = "LONGSHORED_HTTP_HOST", value_delimiter = ',', value_name = "NAME,...")]
    pub http_host: Vec<String>,
    /// Serve --http over TLS, with the certificate of --tls-dir, to identities of its identities.toml that have all jobs
    #[arg(long, env = "LONGSHORED_HTTP_TLS")]
    pub http_tls: bool,
    /// Memory for jobs, as in 512GiB [default: 80% of what is available]
    #[arg(long, env = "LONGSHORED_MEMORY", value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Update threads [default: the cores this process may use, by affinity and CPU quota]
    #[arg(long, env = "LONGSHORED_THREADS", value_name = "N")]
    pub threads: Option<usize>,
    /// Keep no shard of any job: a witness, whose answers tell which of a job's two servers with replicas is lost
    #[arg(long, env = "LONGSHORED_WITNESS")]
    pub witness: bool,
    /// Folders for the state of jobs with the nvme tier, striped over all of them
    #[arg(long, env = "LONGSHORED_STATE_DIR", value_delimiter = ',', value_name = "DIR,...")]
    pub state_dir: Vec<PathBuf>,
    /// Memory in which an nvme job keeps a part of its state, as in 64GiB [default: 0]
    #[arg(long, env = "LONGSHORED_RESIDENT", value_name = "SIZE")]
    pub resident: Option<ByteSize>,
    /// Shards of an nvme job that are read, updated or written at once [default: 6]
    #[arg(long, env = "LONGSHORED_STORAGE_BUFFERS", value_name = "N")]
    pub storage_buffers: Option<usize>,
    /// Parts of an nvme job that live on the drives: state, or all, which has the 16-bit weights and the gradients that
    /// workers do not lend. all takes 4 bytes a parameter less in memory, and 2 a parameter and rank. A step writes as
    /// many for gradients, and 2 a parameter for weights [default: state]
    #[arg(long, env = "LONGSHORED_SPILL", value_name = "WHAT")]
    pub spill: Option<Spill>,
    /// Bytes that the drives of --state-dir together may be written with, as in 600TB: status then forecasts their wear
    #[arg(long, env = "LONGSHORED_DRIVE_ENDURANCE", value_name = "SIZE")]
    pub drive_endurance: Option<ByteSize>,
    /// Folder of a tmpfs for jobs with the shm tier, this server's own; systemd empties /dev/shm of an ordinary user who
    /// logs out (RemoveIPC) [default: /dev/shm/longshore-UID/PORT]
    #[arg(long, env = "LONGSHORED_SHM_DIR", value_name = "DIR")]
    pub shm_dir: Option<PathBuf>,
    /// Folder for checkpoints, best one that all servers share; without it Checkpoint is refused
    #[arg(long, env = "LONGSHORED_CHECKPOINT_DIR", value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,
    /// Write a checkpoint of every job when told to stop
    #[arg(long, env = "LONGSHORED_CHECKPOINT_ON_DRAIN", num_args = 0..=1, default_missing_value = "true")]
    pub checkpoint_on_drain: Option<bool>,
    /// Checkpoints kept of each job; 0 keeps all [default: 0]
    #[arg(long, env = "LONGSHORED_CHECKPOINT_KEEP", value_name = "N")]
    pub checkpoint_keep: Option<usize>,
    /// Longest wait for the step in hand when told to stop, in seconds [default: 30]
    #[arg(long, env = "LONGSHORED_DRAIN_DEADLINE_S", value_name = "SECONDS")]
    pub drain_deadline_s: Option<u64>,
    /// Most connections at once [default: 1024, and 4 more for each rank of its jobs]
    #[arg(long, env = "LONGSHORED_MAX_CONNECTIONS", value_name = "N")]
    pub max_connections: Option<usize>,
    /// Folder with ca.pem, server.pem, server.key and identities.toml, as `longshore tls init` makes it: TCP is encrypted, and
    /// who calls is checked
    #[arg(long, env = "LONGSHORED_TLS_DIR", value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Serve without encryption and without asking who calls, on any address: anyone who can reach it can read and change the jobs
    #[arg(long, env = "LONGSHORED_INSECURE")]
    pub insecure: bool,
    /// Share no memory with workers of this host and user: their payloads come through sockets
    #[arg(long, env = "LONGSHORED_NO_MEMFD")]
    pub no_memfd: bool,
    /// Log filter, as in info or longshore_server=debug [default: info]
    #[arg(long, env = "LONGSHORED_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// Log format [default: text]
    #[arg(long, env = "LONGSHORED_LOG_FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
}

impl Flags {
    /// Reads a TOML file, whose keys are the flags' names with underscores.
    pub(super) fn read(path: &Path) -> Result<Flags, ConfigError> {
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

const PREFIX: &str = "LONGSHORED_";

/// Refuses a `LONGSHORED_` variable that belongs to no flag.
pub(super) fn check_environment(names: impl IntoIterator<Item = String>) -> Result<(), ConfigError> {
    let flags = Flags::command();
    let known: Vec<&str> = flags.get_arguments().filter_map(|flag| flag.get_env()?.to_str()).collect();
    check_variables(PREFIX, (&known, &SETTINGS), names)
}
