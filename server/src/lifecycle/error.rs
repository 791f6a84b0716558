//! Errors of a server's start and stop.

use std::{net::SocketAddr, path::PathBuf};

use longshore_proto::Fault;

use crate::config::ConfigError;

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot listen on {address}: {source}. Choose another --listen, or stop what uses the port")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("cannot listen on {address}: {source}. Choose another --http, or stop what uses the port")]
    BindHttp { address: SocketAddr, source: std::io::Error },
    #[error("cannot listen on {}: {source}. Choose another --listen-unix, or stop what uses it", path.display())]
    BindUnix { path: PathBuf, source: std::io::Error },
    #[error("cannot make a folder for the Unix socket in {}: {source}. Name a folder that this user may write to with TMPDIR", path.display())]
    SocketFolder { path: PathBuf, source: std::io::Error },
    #[error("cannot let a group use the Unix socket: {0}. Choose another --unix-group")]
    UnixGroup(std::io::Error),
    #[error("cannot start {threads} update threads: {reason}. Lower --threads or raise the process limit")]
    Threads { threads: usize, reason: String },
    #[error("{0}")]
    StateDir(Fault),
    #[error("{0}")]
    Tls(Fault),
    #[error(transparent)]
    Isa(#[from] longshore_engine::kernels::IsaError),
    #[error(transparent)]
    Checkpoints(#[from] Fault),
    #[error("cannot handle signals: {0}")]
    Signals(std::io::Error),
    #[error("serving ended: {0}")]
    Serve(String),
    #[error("told to stop a second time: the drain was broken off")]
    BrokenOff,
}
