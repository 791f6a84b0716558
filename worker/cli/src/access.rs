//! The servers of a command, and the credentials shown to them.

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

    /// Returns the options of a rank with the same credentials.
    pub(crate) fn of(&self, options: Options) -> Options {
        Options { tls_dir: self.tls_dir.clone(), token_file: self.token_file.clone(), ..options }
    }
}
