//! Expiry of certificates.

use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::{EndEntityCert, Error, KeyUsage};

/// The year 10000: X.509 has no time after 9999.
const AFTER_ALL: UnixTime = UnixTime::since_unix_epoch(Duration::from_secs(253_402_300_800));

/// Returns a certificate's expiry without checking its issuer, which handshakes check. None if the certificate is
/// malformed.
///
/// webpki reveals a certificate's times only in the error for an expired one. Its time check precedes the issuer check,
/// so no authorities are needed.
pub(super) fn of(certificate: &CertificateDer<'_>) -> Option<SystemTime> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    match certificate.verify_for_usage(&[], &[], &[], AFTER_ALL, KeyUsage::client_auth(), None, None) {
        Err(Error::CertExpired { not_after, .. }) => {
            Some(SystemTime::UNIX_EPOCH + Duration::from_secs(not_after.as_secs()))
        }
        _ => None,
    }
}
