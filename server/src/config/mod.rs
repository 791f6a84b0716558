//! Configuration: flags over environment over a TOML file over defaults.

mod flags;
pub mod retired;
mod size;
mod storage;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

pub use flags::Flags;
pub use longshore_engine::tier::Spill;
pub use retired::{check_variables, nearest};
pub use size::{ByteSize, SizeError, available_memory, total_memory};
pub use storage::StorageConfig;
use tracing_subscriber::filter::{LevelFilter, Targets};

use crate::log::LogFormat;

/// Settings of the server after flags, environment, file and defaults are merged.
#[derive(Clone, Debug)]
pub struct Config {
    /// TCP address to serve on. None: the Unix socket alone.
    pub listen: Option<SocketAddr>,
    /// Unix socket to serve on.
    pub listen_unix: Option<PathBuf>,
    /// Group whose members may connect to `listen_unix`, by name or number.
    pub unix_group: Option<String>,
    /// Address of the status page and metrics.
    pub http: Option<SocketAddr>,
    /// Serve the status page and metrics beyond loopback.
    pub http_open: bool,
    /// Names by which the status page may be asked for, beside IP addresses, localhost and this host's own name.
    pub http_host: Vec<String>,
    /// Serve the status page and metrics over TLS, to identities that have all jobs.
    pub http_tls: bool,
    /// Memory budget for jobs, in bytes.
    pub memory: u64,
    /// Update threads.
    pub threads: usize,
    /// Keep no shard of any job.
    pub witness: bool,
    pub storage: StorageConfig,
    /// Folder of checkpoints. None: the Checkpoint call is refused.
    pub checkpoint_dir: Option<PathBuf>,
    pub checkpoint_on_drain: bool,
    /// Sealed checkpoints kept of each job; 0 keeps all.
    pub checkpoint_keep: usize,
    /// Longest time that a drain waits for the current step.
    pub drain_deadline: Duration,
    /// Largest number of connections at once. None: as many as the jobs' ranks need, and 1024 more.
    pub max_connections: Option<usize>,
    /// Folder of the server's certificate and of `identities.toml`. TCP is encrypted if this folder is given.
    pub tls_dir: Option<PathBuf>,
    /// Serve TCP without encryption or authentication, also beyond loopback.
    pub insecure: bool,
    /// Share no memory with workers of this host.
    pub no_memfd: bool,
    pub log: Targets,
    pub log_format: LogFormat,
}

impl Config {
    pub fn default_on(listen: SocketAddr) -> Config {
        Config { listen: Some(listen), ..Config::nowhere() }
    }

    /// Returns the defaults without an address: 80% of the memory this process may use, all its cores.
    pub fn nowhere() -> Config {
        Config {
            listen: None,
            listen_unix: None,
            unix_group: None,
            http: None,
            http_open: false,
            http_host: Vec::new(),
            http_tls: false,
            memory: size::available_memory() / 5 * 4,
            threads: longshore_engine::threads::available_threads(),
            witness: false,
            storage: StorageConfig::default(),
            checkpoint_dir: None,
            checkpoint_on_drain: false,
            checkpoint_keep: 0,
            drain_deadline: Duration::from_secs(30),
            max_connections: None,
            tls_dir: None,
            insecure: false,
            no_memfd: false,
            log: Targets::new().with_default(LevelFilter::INFO),
            log_format: LogFormat::Text,
        }
    }

    pub fn resolve(flags: Flags) -> Result<Config, ConfigError> {
        flags::check_environment(std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()))?;
        let file = match &flags.config {
            Some(path) => Flags::read(path)?,
            None => Flags::default(),
        };
        let storage = StorageConfig::resolve(&flags, &file);
        let listen_unix = flags.listen_unix.or(file.listen_unix);
        // A Unix socket needs no port beside it.
        let by_default = || listen_unix.is_none().then(|| SocketAddr::from(([127, 0, 0, 1], 7070)));
        let listen = flags.listen.or(file.listen).or_else(by_default);
        let defaults = Config::nowhere();
        let config = Config {
            listen,
            listen_unix,
            unix_group: flags.unix_group.or(file.unix_group),
            http: flags.http.or(file.http),
            http_open: flags.http_open || file.http_open,
            http_host: if flags.http_host.is_empty() { file.http_host } else { flags.http_host },
            http_tls: flags.http_tls || file.http_tls,
            memory: flags.memory.or(file.memory).map_or(defaults.memory, |size| size.0),
            threads: flags.threads.or(file.threads).unwrap_or(defaults.threads),
            witness: flags.witness || file.witness,
            storage,
            checkpoint_dir: flags.checkpoint_dir.or(file.checkpoint_dir),
            checkpoint_on_drain: flags.checkpoint_on_drain.or(file.checkpoint_on_drain).unwrap_or(false),
            checkpoint_keep: flags.checkpoint_keep.or(file.checkpoint_keep).unwrap_or(0),
            drain_deadline: flags
                .drain_deadline_s
                .or(file.drain_deadline_s)
                .map_or(defaults.drain_deadline, Duration::from_secs),
            max_connections: flags.max_connections.or(file.max_connections),
            tls_dir: flags.tls_dir.or(file.tls_dir),
            insecure: flags.insecure || file.insecure,
            no_memfd: flags.no_memfd || file.no_memfd,
            log: flags.log.or(file.log).map_or(Ok(defaults.log), |filter| parse_log_filter(&filter))?,
            log_format: flags.log_format.or(file.log_format).unwrap_or_default(),
        };
        config.check()?;
        Ok(config)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        if self.tls_dir.is_some() && self.insecure {
            return Err(ConfigError::InsecureTls);
        }
        if self.listen.is_none() && self.listen_unix.is_none() {
            return Err(ConfigError::Nowhere);
        }
        let trusts = self.insecure || self.tls_dir.is_some();
        if let Some(listen) = self.listen.filter(|listen| !listen.ip().is_loopback() && !trusts) {
            return Err(ConfigError::Exposed { listen });
        }
        if self.http_tls && (self.tls_dir.is_none() || self.http_open) {
            return Err(ConfigError::HttpTls);
        }
        let asks = self.http_tls || self.http_open;
        if let Some(http) = self.http.filter(|http| !http.ip().is_loopback() && !asks) {
            return Err(ConfigError::HttpExposed { http });
        }
        if self.unix_group.is_some() && self.listen_unix.is_none() {
            return Err(ConfigError::GroupWithoutSocket);
        }
        let most_connections = self.max_connections.unwrap_or(8) as u64;
        for (field, value, range, limit) in [
            ("threads", self.threads as u64, 1..=4096, "in 1..=4096"),
            ("memory", self.memory, 1 << 20..=u64::MAX, "at least 1MiB"),
            ("max_connections", most_connections, 8..=1 << 20, "in 8..=1048576"),
            ("storage_buffers", self.storage.buffers as u64, 1..=1024, "in 1..=1024"),
            ("drain_deadline_s", self.drain_deadline.as_secs(), 0..=604_800, "at most 604800, a week"),
        ] {
            if !range.contains(&value) {
                return Err(ConfigError::Value { field, value: value.to_string(), limit });
            }
        }
        self.storage.check()?;
        if self.checkpoint_on_drain && self.checkpoint_dir.is_none() {
            return Err(ConfigError::DrainWithoutDir);
        }
        Ok(())
    }
}

impl StorageConfig {
    fn resolve(flags: &Flags, file: &Flags) -> StorageConfig {
        let defaults = StorageConfig::default();
        let state_dirs = if flags.state_dir.is_empty() { &file.state_dir } else { &flags.state_dir };
        StorageConfig {
            state_dirs: state_dirs.clone(),
            resident: flags.resident.or(file.resident).map_or(defaults.resident, |size| size.0),
            buffers: flags.storage_buffers.or(file.storage_buffers).unwrap_or(defaults.buffers),
            spill: flags.spill.or(file.spill).unwrap_or_default(),
            drive_endurance: flags.drive_endurance.or(file.drive_endurance).map_or(0, |size| size.0),
            shm_dir: flags.shm_dir.clone().or(file.shm_dir.clone()),
        }
    }
}

/// Parses a level, or levels by module as in `info,longshore_engine=debug`.
///
/// # Errors
/// `Value` also for a single word that is no level: as a module's name it would silence every other module.
pub fn parse_log_filter(filter: &str) -> Result<Targets, ConfigError> {
    let is_module = |part: &str| !part.contains('=') && part.parse::<LevelFilter>().is_err();
    let parsed = filter.parse().ok().filter(|_| !filter.split(',').any(is_module));
    let limit = "a level, or levels by module as in info,longshore_server=debug";
    parsed.ok_or_else(|| ConfigError::Value { field: "log", value: filter.into(), limit })
}

/// Reason why a configuration is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{path}: {source}. Give the path of a readable TOML file with --config")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {message}")]
    Parse { path: PathBuf, message: String },
    #[error("{path}: unknown key `{key}`{}", suggest(nearest.as_deref()))]
    UnknownKey { path: PathBuf, key: String, nearest: Option<String> },
    #[error("{path}: key `{key}` is no longer there: {instead}")]
    RetiredKey { path: PathBuf, key: String, instead: &'static str },
    #[error("variable {name} is no longer there: {instead}")]
    RetiredVariable { name: String, instead: &'static str },
    #[error("unknown variable {name}{}", suggest(nearest.as_deref()))]
    UnknownVariable { name: String, nearest: Option<String> },
    #[error(
        "listen is {listen}, which is not a loopback address, and connections would be neither encrypted nor authenticated: \
         name a folder of certificates with --tls-dir (`longshore tls init` makes one), or keep the server on a trusted network \
         and say --insecure, or listen on 127.0.0.1"
    )]
    Exposed { listen: SocketAddr },
    #[error(
        "http is {http}, which is not a loopback address, and whoever can reach it could read what the status page shows, as jobs, identities and paths of folders: \
         serve it over TLS to identities with --http-tls and --tls-dir, or keep it on a trusted network and say --http-open, or serve it on 127.0.0.1"
    )]
    HttpExposed { http: SocketAddr },
    #[error(
        "http_tls needs tls_dir, which has the certificate and the identities that may read, and contradicts http_open: name the folder with --tls-dir, \
         and leave http_open out"
    )]
    HttpTls,
    #[error("tls_dir and insecure contradict each other: leave one of them out")]
    InsecureTls,
    #[error("listen and listen_unix are both absent: say where to serve with --listen or --listen-unix")]
    Nowhere,
    #[error("{field} is {value}, but must be {limit}")]
    Value { field: &'static str, value: String, limit: &'static str },
    #[error("checkpoint_on_drain needs checkpoint_dir: say where with --checkpoint-dir")]
    DrainWithoutDir,
    #[error("unix_group needs listen_unix: say where with --listen-unix")]
    GroupWithoutSocket,
}

fn suggest(nearest: Option<&str>) -> String {
    nearest.map(|nearest| format!("; did you mean `{nearest}`?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn resolve(args: &[&str], toml: &str) -> Result<Config, ConfigError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("longshored.toml");
        std::fs::write(&path, toml).unwrap();
        let path = path.to_string_lossy().into_owned();
        Config::resolve(Flags::parse_from([&["longshored", "--config", &path], args].concat()))
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let config =
            resolve(&["--threads", "3"], "threads = 2\nmemory = \"64MiB\"\nlisten_unix = \"/run/l\"")
                .unwrap();
        assert_eq!((config.threads, config.memory), (3, 64 << 20));
        assert_eq!((config.listen, config.listen_unix), (None, Some("/run/l".into())));
        let both = resolve(&["--listen", "127.0.0.1:1"], "listen_unix = \"/run/l\"").unwrap();
        assert_eq!((both.listen.unwrap().port(), both.listen_unix.is_some()), (1, true));
        assert_eq!(resolve(&[], "").unwrap().listen.unwrap().to_string(), "127.0.0.1:7070");
    }

    #[test]
    fn what_cannot_be_spilled_is_said() {
        let error = |args: &[&str]| resolve(args, "").unwrap_err().to_string();
        let on = "state_dir = [\"/mnt/a\"]\n";
        assert_eq!(resolve(&[], &format!("{on}spill = \"all\"")).unwrap().storage.spill, Spill::All);
        assert_eq!(resolve(&["--spill", "all"], on).unwrap().storage.spill, Spill::All);
        assert!(error(&["--spill", "all"]).contains("--state-dir"));
        let key = resolve(&[], &format!("{on}spill = \"images\"")).unwrap_err().to_string();
        let flag = Flags::try_parse_from(["longshored", "--spill", "images"]).unwrap_err().to_string();
        for error in [key, flag] {
            assert!(error.contains("spill is images, but must be state or all: choose all"), "{error}");
        }
    }

    #[test]
    fn a_wait_that_no_clock_can_count_is_refused() {
        let most = u64::MAX.to_string();
        let error = resolve(&["--drain-deadline-s", &most], "").unwrap_err().to_string();
        assert!(error.contains("drain_deadline_s is 18446744073709551615, but must be at most"), "{error}");
        assert!(resolve(&["--drain-deadline-s", "0"], "").is_ok());
    }

    #[test]
    fn a_word_that_is_no_level_is_refused_as_a_log_filter() {
        for wrong in ["debgu", "info,longshore_engine", "longshore_engine=loud"] {
            let error = resolve(&["--log", wrong], "").unwrap_err().to_string();
            assert!(error.starts_with(&format!("log is {wrong}, but must be a level")), "{error}");
        }
        assert!(resolve(&["--log", "WARN,longshore_engine=debug"], "").is_ok());
    }

    #[test]
    fn an_unknown_key_names_the_nearest() {
        let error = resolve(&[], "checkpont_dir = \"/tmp\"").unwrap_err().to_string();
        assert!(error.contains("`checkpont_dir`; did you mean `checkpoint_dir`?"), "{error}");
    }

    #[test]
    fn a_retired_setting_says_what_to_do() {
        let key = resolve(&[], "otlp = \"http://collector:4317\"").unwrap_err().to_string();
        let variable = flags::check_environment(["LONGSHORED_OTLP".to_string()]).unwrap_err().to_string();
        for error in [key, variable] {
            assert!(error.contains("no longer there: scrape the metrics of --http"), "{error}");
        }
    }

    #[test]
    fn an_unknown_variable_names_the_nearest() {
        let error = flags::check_environment(["LONGSHORED_MEMROY".to_string()]).unwrap_err().to_string();
        assert!(error.contains("did you mean `LONGSHORED_MEMORY`?"), "{error}");
    }

    #[test]
    fn beyond_loopback_needs_a_word() {
        assert!(matches!(resolve(&["--listen", "0.0.0.0:1"], ""), Err(ConfigError::Exposed { .. })));
        assert!(resolve(&["--listen", "0.0.0.0:1", "--insecure"], "").is_ok());
        assert!(matches!(resolve(&["--http", "0.0.0.0:1"], ""), Err(ConfigError::HttpExposed { .. })));
        assert!(resolve(&["--http", "0.0.0.0:1", "--http-open"], "").is_ok());
        let with = |flags: &[&str]| resolve(flags, "http = \"0.0.0.0:1\"\ntls_dir = \"/etc/longshore\"");
        assert!(with(&["--http-tls"]).is_ok());
        assert!(matches!(with(&["--http-tls", "--http-open"]), Err(ConfigError::HttpTls)));
        assert!(matches!(resolve(&["--http-tls"], ""), Err(ConfigError::HttpTls)));
        assert_eq!(resolve(&[], "http = \"127.0.0.1:1\"").unwrap().http.map(|http| http.port()), Some(1));
        assert!(resolve(&["--listen", "0.0.0.0:1"], "tls_dir = \"/etc/longshore\"").is_ok());
        let both = resolve(&["--tls-dir", "/etc/longshore", "--insecure"], "");
        assert!(matches!(both, Err(ConfigError::InsecureTls)));
    }
}
