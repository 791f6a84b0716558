//! The files of a TLS folder.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use longshore_proto::{Fault, FaultKind, limits::MOST_CHAIN_BYTES};
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
};
use webpki::{EndEntityCert, Error, KeyUsage};

/// Certificates of the authorities that must have issued the peer's certificate.
pub const CA: &str = "ca.pem";
pub const SERVER_CERTIFICATE: &str = "server.pem";
pub const SERVER_KEY: &str = "server.key";
pub const CLIENT_CERTIFICATE: &str = "client.pem";
pub const CLIENT_KEY: &str = "client.key";
/// A client's token, instead of a certificate.
pub const TOKEN: &str = "token";
/// Identities that may call a server, with their roles and jobs.
pub const IDENTITIES: &str = "identities.toml";

pub(super) const REMEDY: &str =
    "make the folder's files with `longshore tls init`, or see docs/secure.md for their names";
/// Largest file that is read. Chains and lists of authorities take some kilobytes.
const MOST_BYTES: u64 = 1 << 20;

/// The year 10000: X.509 has no time after 9999.
const AFTER_ALL: UnixTime = UnixTime::since_unix_epoch(Duration::from_secs(253_402_300_800));

/// Reads a file.
///
/// # Errors
/// If the file is absent, unreadable or too large.
pub(super) fn read(dir: &Path, name: impl AsRef<Path>) -> Result<Vec<u8>, Fault> {
    let path = dir.join(&name);
    let size = fs::metadata(&path).map(|found| found.len());
    match size.and_then(|size| if size > MOST_BYTES { Ok(None) } else { fs::read(&path).map(Some) }) {
        Ok(Some(bytes)) => Ok(bytes),
        Ok(None) => Err(wrong(dir, name, "larger than 1 MiB")),
        Err(error) => Err(wrong(dir, name, error)),
    }
}

pub(super) fn read_optional(dir: &Path, name: impl AsRef<Path>) -> Result<Option<Vec<u8>>, Fault> {
    if dir.join(&name).try_exists().is_ok_and(|exists| !exists) {
        return Ok(None);
    }
    read(dir, name).map(Some)
}

pub(super) fn wrong(dir: &Path, name: impl AsRef<Path>, why: impl std::fmt::Display) -> Fault {
    let value = format!("{}, {why}", dir.join(name).display());
    Fault::new(FaultKind::Precondition, "tls_dir", value, "a folder whose files can be used", REMEDY)
}

pub(super) fn authorities(dir: &Path, bytes: &[u8]) -> Result<RootCertStore, Fault> {
    let mut roots = RootCertStore::empty();
    for certificate in chain(dir, CA, bytes)? {
        roots.add(certificate).map_err(|error| wrong(dir, CA, error))?;
    }
    Ok(roots)
}

pub(super) fn chain(dir: &Path, name: &str, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| wrong(dir, name, format!("no PEM: {error}")))?;
    if chain.is_empty() {
        return Err(wrong(dir, name, "without a certificate"));
    }
    Ok(chain)
}

/// Reads the chain that an end shows, its own certificate first.
pub(super) fn shown(dir: &Path, name: &str, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, Fault> {
    let chain = chain(dir, name, bytes)?;
    let bytes = length(&chain);
    if bytes > MOST_CHAIN_BYTES {
        let why =
            format!("a chain of {bytes} bytes, of which the other end takes {MOST_CHAIN_BYTES} at most");
        return Err(wrong(dir, name, why));
    }
    Ok(chain)
}

/// Returns the total bytes of a chain's certificates.
pub(super) fn length(chain: &[CertificateDer<'_>]) -> usize {
    chain.iter().map(|certificate| certificate.len()).sum()
}

pub(super) fn key(dir: &Path, name: &str, bytes: &[u8]) -> Result<PrivateKeyDer<'static>, Fault> {
    PrivateKeyDer::from_pem_slice(bytes).map_err(|error| wrong(dir, name, format!("no private key: {error}")))
}

pub fn certificate_pem(der: &[u8]) -> String {
    pem("CERTIFICATE", der)
}

/// Returns a private key of PKCS #8 as a PEM file has it.
pub fn key_pem(der: &[u8]) -> String {
    pem("PRIVATE KEY", der)
}

fn pem(kind: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines: String = text.as_bytes().chunks(64).map(|line| String::from_utf8_lossy(line) + "\n").collect();
    format!("-----BEGIN {kind}-----\n{lines}-----END {kind}-----\n")
}

/// Returns a certificate's expiry without checking its issuer, which handshakes check. None if the certificate is
/// malformed.
///
/// webpki reveals a certificate's times only in the error for an expired certificate. Its time check precedes the
/// issuer check, so no authorities are needed.
pub(super) fn expiry(certificate: &CertificateDer<'_>) -> Option<SystemTime> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    match certificate.verify_for_usage(&[], &[], &[], AFTER_ALL, KeyUsage::client_auth(), None, None) {
        Err(Error::CertExpired { not_after, .. }) => {
            Some(SystemTime::UNIX_EPOCH + Duration::from_secs(not_after.as_secs()))
        }
        _ => None,
    }
}
