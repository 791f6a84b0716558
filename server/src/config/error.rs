//! Reasons why a configuration is refused.

use std::{net::SocketAddr, path::PathBuf};

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
