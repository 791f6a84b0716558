//! TLS below HTTP/2, by tokio-rustls: both ends' configurations, read from the files of a folder, and the socket.
//!
//! The only version is TLS 1.3, which both of Longshore's ends and every stock gRPC client since 2019 support. TLS 1.3
//! leaves no weak cipher suite to choose, and older versions are not compiled in. Sessions are not resumed, so each
//! connection shows its certificate anew, and a replaced certificate takes effect at once.

mod client;
mod files;
mod refusal;
mod secured;
mod server;
#[cfg(test)]
mod tests;

pub use self::{
    client::{Client, Credentials},
    files::{
        CA, CLIENT_CERTIFICATE, CLIENT_KEY, IDENTITIES, SERVER_CERTIFICATE, SERVER_KEY, TOKEN,
        certificate_pem, key_pem,
    },
    refusal::{DialError, Untrusted},
    secured::Secured,
    server::{Certificates, Pages, Reader, Server, first_expiry},
};
