//! Errors of dialling: a broken connection, or an end that does not trust the other end.

use std::io;

use longshore_proto::{Fault, FaultKind};
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

/// Reason why dialling failed.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// A retry may succeed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An end refused the other, and a retry fails again. Callers find the fault by its type among the sources of the
    /// transport's error.
    #[error("{0}")]
    Untrusted(#[source] Untrusted),
}

/// Fault of an end that does not trust the other.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Untrusted(pub Fault);

impl DialError {
    /// Classifies a failed handshake with `host`.
    pub(super) fn of_handshake(error: io::Error, host: &str) -> DialError {
        let found = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
        match found.and_then(|error| fault(error, host)) {
            Some(fault) => DialError::Untrusted(Untrusted(fault)),
            None => DialError::Io(error),
        }
    }
}

/// Returns the fault of a TLS error. None if the connection may have been cut by chance.
fn fault(error: &Error, host: &str) -> Option<Fault> {
    let (value, remedy) = match error {
        Error::InvalidCertificate(certificate) => {
            (format!("the server's certificate is not accepted: {}", why(certificate)), remedy(certificate))
        }
        Error::AlertReceived(alert) => (format!("the server refused: {}", alerted(*alert)?), ALERT_REMEDY),
        Error::InvalidMessage(
            InvalidMessage::CertificatePayloadTooLarge | InvalidMessage::HandshakePayloadTooLarge,
        ) => (
            "the other end's handshake is too long: it shows many certificates".to_string(),
            "give it a shorter chain: its own certificate and those between it and the authority of ca.pem",
        ),
        Error::InvalidMessage(_) => (
            format!("what answers does not speak TLS: {error}"),
            "start the server with --tls-dir, or dial without it",
        ),
        Error::PeerIncompatible(_) | Error::NoApplicationProtocol => (
            format!("the other end speaks otherwise: {error}"),
            "let both ends be of one version, with TLS 1.3 and HTTP/2",
        ),
        _ => return None,
    };
    let field = format!("tls with {host}");
    Some(Fault::new(FaultKind::Unauthenticated, field, value, "a connection that both ends trust", remedy))
}

const ALERT_REMEDY: &str = "have a certificate of the authority that the server trusts as client.pem in the TLS folder, and \
                            one that has not expired";

/// Returns the text of an alert. None for alerts unrelated to trust.
fn alerted(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::CertificateRequired => "it asks for a client's certificate, and none was shown",
        AlertDescription::UnknownCA => "the client's certificate is of an authority that it does not know",
        AlertDescription::CertificateExpired => "the client's certificate has expired",
        AlertDescription::CertificateRevoked => "the client's certificate was revoked",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::DecryptError
        | AlertDescription::AccessDenied => "it does not accept the client's certificate",
        AlertDescription::ProtocolVersion | AlertDescription::HandshakeFailure => {
            "it speaks another version of TLS"
        }
        AlertDescription::NoApplicationProtocol => "it does not speak HTTP/2",
        _ => return None,
    })
}

fn why(error: &CertificateError) -> String {
    match error {
        CertificateError::UnknownIssuer => "it is of an authority that ca.pem does not have".into(),
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "it has expired".into(),
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet".into()
        }
        other => format!("{other}"),
    }
}

fn remedy(error: &CertificateError) -> &'static str {
    match error {
        CertificateError::UnknownIssuer => "take the ca.pem that belongs to this server's certificate",
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "dial the server by a name that its certificate has, or make it one with this name"
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "give the server a new certificate; it takes it up without a restart"
        }
        _ => "see the clocks of both hosts and the server's certificate",
    }
}
