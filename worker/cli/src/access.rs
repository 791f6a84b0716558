//! The servers of a command, and the credentials shown to them.

use std::path::PathBuf;

use longshore_proto::{Fault, FaultKind};
use longshore_wire::tls::Credentials;
use longshore_worker::session::Options;

use crate::servers::Servers;

#[derive(clap::Args, Clone, Debug, Default)]
pub struct Access {
    /// Servers that the config file has under this name, instead of --servers (`longshore clusters` lists them)
    #[arg(long, env = "LONGSHORE_CLUSTER", value_name = "NAME")]
    pub cluster: Option<String>,
    /// Folder with ca.pem, and with client.pem and client.key or with token: connections to --servers are then encrypted
    #[arg(long, env = "LONGSHORE_TLS_DIR", value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// File with a token that is shown instead of the one in --tls-dir
    #[arg(long, env = "LONGSHORE_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
}

impl Access {
    /// Returns the credentials for the servers; None for plain connections.
    ///
    /// # Errors
    /// If files cannot be used, or if a token would be sent over an unencrypted connection.
    pub(crate) fn credentials(&self) -> Result<Option<Credentials>, Fault> {
        match (&self.tls_dir, &self.token_file) {
            (Some(dir), token) => Credentials::read_with(dir, token.as_deref()).map(Some),
            (None, Some(token)) => {
                let remedy = "name the folder of the servers' ca.pem with --tls-dir, or leave the token out";
                let limit = "given with --tls-dir";
                Err(Fault::new(FaultKind::Precondition, "--token-file", token.display(), limit, remedy))
            }
            (None, None) => Ok(None),
        }
    }

    pub(crate) fn of(&self, options: Options) -> Options {
        Options { tls_dir: self.tls_dir.clone(), token_file: self.token_file.clone(), ..options }
    }
}

#[derive(clap::Args)]
pub(crate) struct ServersArgs {
    /// The servers, in the order the job was opened with [default: those of --cluster, or of the config file's default cluster]
    #[arg(long, env = "LONGSHORE_SERVERS", value_delimiter = ',', value_name = "HOST:PORT,...")]
    pub(crate) servers: Vec<String>,
    #[command(flatten)]
    pub(crate) access: Access,
}

impl ServersArgs {
    pub(crate) fn connect(&self) -> anyhow::Result<Servers> {
        Servers::connect(&self.servers, &self.access)
    }
}

#[derive(clap::Args)]
pub(crate) struct JobArgs {
    #[command(flatten)]
    pub(crate) servers: ServersArgs,
    /// The job [default: the only one there]
    #[arg(long)]
    pub(crate) job: Option<String>,
}

impl JobArgs {
    pub(crate) fn connect(&self) -> anyhow::Result<(Servers, String)> {
        let servers = self.servers.connect()?;
        let job = servers.job(self.job.as_ref())?;
        Ok((servers, job))
    }

    /// Connects as [`JobArgs::connect`] does, but to exactly the job's servers.
    pub(crate) fn connect_to_holders(&self) -> anyhow::Result<(Servers, String)> {
        let (servers, job) = self.connect()?;
        Ok((servers.of_job(&job, &self.servers.access)?, job))
    }
}
