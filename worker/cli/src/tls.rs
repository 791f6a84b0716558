//! Certificates and tokens of a cluster, and the folders of servers and clients.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    net::IpAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail, ensure};
use longshore_proto::Fault;
use longshore_wire::tls::{
    CA, CLIENT_CERTIFICATE, CLIENT_KEY, IDENTITIES, SERVER_CERTIFICATE, SERVER_KEY, TOKEN, certificate_pem,
    key_pem,
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use ring::{
    digest::{SHA256, digest},
    rand::{SecureRandom, SystemRandom},
};
use rustls::pki_types::{DnsName, PrivateKeyDer, pem::PemObject};

/// The authority's own key, which neither servers nor clients need.
pub(crate) const CA_KEY: &str = "ca.key";
/// Prefix of the authority's name, before a part of its key's hash. With equal names, certificates of one authority
/// would look like forged certificates of another.
const CA_NAME: &str = "Longshore CA";
const CA_DAYS: u32 = 3650;
/// Difference of clocks that certificates tolerate.
const BEFORE: Duration = Duration::from_secs(3600);
const TOKEN_BYTES: usize = 32;

pub(crate) enum Subject<'a> {
    /// A server is known by its hosts' names and addresses.
    Server(&'a [String]),
    /// A client is known by its identity.
    Client(&'a str),
}

/// A certificate authority, whose folder has its certificate and its key.
pub(crate) struct Authority {
    certificate: String,
    key: KeyPair,
    params: CertificateParams,
}

impl Authority {
    /// Makes an authority in a new folder.
    pub(crate) fn create(dir: &Path) -> anyhow::Result<Authority> {
        let key = KeyPair::generate()?;
        let params = authority_params(&key)?;
        let certificate = certificate_pem(params.self_signed(&key)?.der());
        write_new(&dir.join(CA), certificate.as_bytes())?;
        write_new(&dir.join(CA_KEY), key_pem(key.serialized_der()).as_bytes())?;
        Ok(Authority { certificate, key, params })
    }

    pub(crate) fn open(dir: &Path) -> anyhow::Result<Authority> {
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path)
                .with_context(|| format!("{}: name the folder of `longshore tls init`", path.display()))
        };
        let certificate = read(CA)?;
        let key = PrivateKeyDer::from_pem_slice(read(CA_KEY)?.as_bytes())
            .with_context(|| dir.join(CA_KEY).display().to_string())?;
        let key = KeyPair::try_from(&key)?;
        let params = authority_params(&key)?;
        Ok(Authority { certificate, key, params })
    }

    /// Makes a folder with a new certificate, its key, and the authority's certificate.
    pub(crate) fn issue(&self, dir: &Path, subject: &Subject<'_>, days: u32) -> anyhow::Result<()> {
        let folder = NewFolder::make(dir)?;
        write_new(&dir.join(CA), self.certificate.as_bytes())?;
        self.issue_into(dir, subject, days)?;
        folder.keep();
        Ok(())
    }

    /// Adds a new certificate and its key to a folder of this authority.
    pub(crate) fn issue_into(&self, dir: &Path, subject: &Subject<'_>, days: u32) -> anyhow::Result<()> {
        let (names, usage, files) = match subject {
            Subject::Server(hosts) => {
                (hosts.to_vec(), ExtendedKeyUsagePurpose::ServerAuth, [SERVER_CERTIFICATE, SERVER_KEY])
            }
            Subject::Client(name) => {
                check_name(name)?;
                let usage = ExtendedKeyUsagePurpose::ClientAuth;
                (vec![(*name).to_string()], usage, [CLIENT_CERTIFICATE, CLIENT_KEY])
            }
        };
        let common = names.first().cloned().unwrap_or_default();
        let mut params =
            CertificateParams::new(names).context("a host's name or address cannot be in a certificate")?;
        params.distinguished_name.push(DnType::CommonName, common);
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        set_life(&mut params, days);
        let key = KeyPair::generate()?;
        let signed = params.signed_by(&key, &Issuer::from_params(&self.params, &self.key))?;
        write_new(&dir.join(files[0]), certificate_pem(signed.der()).as_bytes())?;
        write_new(&dir.join(files[1]), key_pem(key.serialized_der()).as_bytes())
    }

    /// Makes a folder with a new token and the authority's certificate. Returns the token's hash for
    /// identities.toml.
    pub(crate) fn token(&self, dir: &Path) -> anyhow::Result<String> {
        let mut bytes = [0; TOKEN_BYTES];
        SystemRandom::new()
            .fill(&mut bytes)
            .map_err(|_| io::Error::other("the system gives no random numbers"))?;
        let token = hex(&bytes);
        let folder = NewFolder::make(dir)?;
        write_new(&dir.join(CA), self.certificate.as_bytes())?;
        write_new(&dir.join(TOKEN), format!("{token}\n").as_bytes())?;
        folder.keep();
        Ok(hex(digest(&SHA256, token.as_bytes()).as_ref()))
    }
}

pub(crate) fn write_identities(dir: &Path, text: &str) -> anyhow::Result<()> {
    write_new(&dir.join(IDENTITIES), text.as_bytes())
}

fn authority_params(key: &KeyPair) -> anyhow::Result<CertificateParams> {
    let mut params = CertificateParams::new(Vec::new())?;
    let hash = digest(&SHA256, key.public_key_raw());
    params.distinguished_name.push(DnType::CommonName, format!("{CA_NAME} {}", hex(&hash.as_ref()[..8])));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    set_life(&mut params, CA_DAYS);
    Ok(params)
}

fn set_life(params: &mut CertificateParams, days: u32) {
    let now = SystemTime::now();
    params.not_before = (now - BEFORE).into();
    params.not_after = (now + Duration::from_secs(24 * 3600) * days).into();
}

/// Refuses a name that is no DNS name: certificates carry the identity as a DNS name.
fn check_name(name: &str) -> anyhow::Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let good = (1..=63).contains(&name.len())
        && name.bytes().all(plain)
        && !name.starts_with('-')
        && !name.ends_with('-');
    ensure!(good, "an identity is called {name:?}: use letters, digits and inner hyphens, 63 at most");
    Ok(())
}

/// A new folder that only its owner can read. Unless it is kept, dropping the value empties the folder, so that a
/// command that failed may be repeated.
pub(crate) struct NewFolder<'a> {
    dir: &'a Path,
    was_there: bool,
    is_kept: bool,
}

impl NewFolder<'_> {
    /// Makes a folder, or accepts an empty one.
    pub(crate) fn make(dir: &Path) -> anyhow::Result<NewFolder<'_>> {
        let was_there = match fs::read_dir(dir) {
            Ok(mut entries) => {
                if entries.next().is_some() {
                    bail!("{} is not empty, and nothing is overwritten: name a new folder", dir.display());
                }
                true
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut builder = DirBuilder::new();
                builder.recursive(true).mode(0o700);
                builder.create(dir).with_context(|| format!("making {}", dir.display()))?;
                false
            }
            Err(error) => return Err(error).with_context(|| dir.display().to_string()),
        };
        Ok(NewFolder { dir, was_there, is_kept: false })
    }

    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for NewFolder<'_> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        // An error of the removal is ignored: the command's own error is shown, and a second one would hide it.
        if !self.was_there {
            let _ = fs::remove_dir_all(self.dir);
            return;
        }
        for entry in fs::read_dir(self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}

/// Refuses a host that no client can dial: neither an address nor a DNS name, which may begin with `*.`.
pub(crate) fn check_host(host: &str) -> Result<(), Fault> {
    let name = host.strip_prefix("*.").unwrap_or(host);
    if host.parse::<IpAddr>().is_ok() || DnsName::try_from(name).is_ok() {
        return Ok(());
    }
    let limit = "an address, or a name of letters, digits, dots and hyphens";
    Err(Fault::invalid(
        "--hosts",
        format!("{host:?}"),
        limit,
        "name each host as clients dial it, without a port",
    ))
}

fn write_new(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    written.with_context(|| format!("writing {}", path.display()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_names_and_addresses() {
        for good in
            ["localhost", "host-1.example.com", "longshore_server_1", "10.0.0.1", "::1", "*.example.com"]
        {
            assert_eq!(check_host(good), Ok(()), "{good}");
        }
        for bad in ["", "*", "evil host", "a,b", "host:7070", "*.", "a*.example.com", "-"] {
            assert!(check_host(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_folder_that_is_not_kept_is_as_before() {
        let outer = tempfile::TempDir::new().unwrap();
        let new = outer.path().join("new");
        for (dir, is_there) in [(new.as_path(), false), (outer.path(), true)] {
            let folder = NewFolder::make(dir).unwrap();
            write_new(&dir.join(CA), b"half").unwrap();
            fs::create_dir(dir.join("server")).unwrap();
            drop(folder);
            assert_eq!(dir.exists(), is_there);
        }
        NewFolder::make(outer.path()).unwrap().keep();
    }
}
