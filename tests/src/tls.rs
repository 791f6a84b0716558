//! A certificate authority for tests, and folders with the certificates that it signs.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, SystemTime},
};

use longshore_wire::tls::{certificate_pem, key_pem};
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::server::own_addresses;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Signs certificates.
pub struct Authority {
    key: KeyPair,
    params: CertificateParams,
    pub certificate: String,
}

/// A certificate's validity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Valid for a year, as `longshore tls` issues certificates.
    Valid,
    Expired,
    /// Valid for this long from now on.
    For(Duration),
}

impl Default for Authority {
    fn default() -> Authority {
        Authority::new()
    }
}

impl Authority {
    pub fn new() -> Authority {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        // Each authority needs its own name. With equal names, each one's certificates would look like forgeries of the
        // other's.
        let name = format!("authority {}", NEXT.fetch_add(1, Ordering::Relaxed));
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = certificate_pem(params.self_signed(&key).expect("a certificate").der());
        Authority { key, params, certificate }
    }

    fn sign(&self, names: Vec<String>, usage: ExtendedKeyUsagePurpose, life: Life) -> [String; 2] {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(names).expect("names");
        params.extended_key_usages = vec![usage];
        let (from, to) = match life {
            Life::Valid => (SystemTime::now() - DAY, SystemTime::now() + 365 * DAY),
            Life::For(time) => (SystemTime::now() - DAY, SystemTime::now() + time),
            Life::Expired => (SystemTime::now() - 3 * DAY, SystemTime::now() - 2 * DAY),
        };
        (params.not_before, params.not_after) = (from.into(), to.into());
        let signed = params.signed_by(&key, &Issuer::from_params(&self.params, &self.key));
        [certificate_pem(signed.expect("a certificate").der()), key_pem(key.serialized_der())]
    }

    /// Writes a server's certificate and key, for `names` or for all addresses that tests' servers listen on.
    pub fn write_server(&self, dir: &Path, names: Option<&[&str]>, life: Life) {
        let all = || own_addresses().iter().map(ToString::to_string).collect();
        let names = names.map_or_else(all, |names| names.iter().map(ToString::to_string).collect());
        let [certificate, key] = self.sign(names, ExtendedKeyUsagePurpose::ServerAuth, life);
        write(dir, "ca.pem", &self.certificate);
        write(dir, "server.pem", &certificate);
        write(dir, "server.key", &key);
    }

    /// Writes a client's certificate and key.
    pub fn write_client(&self, dir: &Path, name: &str, life: Life) {
        let [certificate, key] = self.sign(vec![name.to_string()], ExtendedKeyUsagePurpose::ClientAuth, life);
        write(dir, "ca.pem", &self.certificate);
        write(dir, "client.pem", &certificate);
        write(dir, "client.key", &key);
    }
}

/// A cluster's folders: `server`, and one for each client.
pub struct Folders {
    root: TempDir,
    pub authority: Authority,
}

impl Folders {
    /// Creates the server's folder, with these entries of `identities.toml`.
    pub fn new(identities: &str) -> Folders {
        let folders =
            Folders { root: tempfile::tempdir().expect("a temporary folder"), authority: Authority::new() };
        folders.authority.write_server(&folders.server(), None, Life::Valid);
        folders.list(identities);
        folders
    }

    /// Replaces the server's `identities.toml`.
    pub fn list(&self, identities: &str) {
        write(&self.server(), "identities.toml", identities);
    }

    pub fn server(&self) -> PathBuf {
        self.root.path().join("server")
    }

    pub fn dir(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Returns a folder with a client's certificate for this identity.
    pub fn client(&self, name: &str) -> PathBuf {
        let dir = self.dir(name);
        self.authority.write_client(&dir, name, Life::Valid);
        dir
    }

    /// Returns a folder with a token.
    pub fn token(&self, token: &str) -> PathBuf {
        let dir = self.dir(&format!("token-{token}"));
        write(&dir, "ca.pem", &self.authority.certificate);
        write(&dir, "token", token);
        dir
    }
}

/// Replaces a file atomically, as an operator who rotates certificates should.
pub fn write(dir: &Path, name: &str, text: &str) {
    fs::create_dir_all(dir).expect("a folder");
    let new = dir.join(format!("{name}.new"));
    fs::write(&new, text).expect("a file");
    fs::rename(new, dir.join(name)).expect("its place");
}

/// Returns an entry of `identities.toml`.
pub fn identity(name: &str, roles: &[&str], jobs: &[&str], tokens_sha256: &[&str]) -> String {
    format!(
        "[[identity]]\nname = {name:?}\nroles = {roles:?}\njobs = {jobs:?}\ntokens_sha256 = {tokens_sha256:?}\n"
    )
}
