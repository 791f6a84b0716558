//! TLS below HTTP/2, by tokio-rustls: both ends' configurations, made from the files of a folder, and the socket. `pages` has it
//! below HTTP/1.1.
//!
//! TLS 1.3 alone. Longshore's own two ends have it, and so has every stock gRPC client since 2019. With it there is no
//! cipher suite to choose wrongly, and the code of older versions is not even compiled in. No session is resumed, so that
//! each connection shows its certificate anew, and one that was replaced is seen by the next connection.

mod client;
mod expiry;
mod files;
mod pages;
mod refusal;
mod secured;
mod server;
#[cfg(test)]
mod tests;

pub use self::{
    client::{Client, Credentials},
    files::{CA, CLIENT_CERTIFICATE, CLIENT_KEY, IDENTITIES, SERVER_CERTIFICATE, SERVER_KEY, TOKEN},
    pages::{Pages, Reader},
    refusal::{DialError, Untrusted},
    secured::Secured,
    server::{Certificates, Server},
};
