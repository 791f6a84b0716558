//! Which servers a command talks to, and how it shows them who it is.

use std::path::PathBuf;

use longshore_proto::{Fault, FaultKind};
use longshore_wire::tls::Credentials;
use longshore_worker::session::Options;

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
    /// What servers are shown and asked for; None where connections are plain.
    ///
    /// # Errors
    /// Where files cannot be used, and where a token would be sent over a connection that anybody can read.
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

    /// The options of a rank that shows the same.
    pub(crate) fn of(&self, options: Options) -> Options {
        Options { tls_dir: self.tls_dir.clone(), token_file: self.token_file.clone(), ..options }
    }
}
