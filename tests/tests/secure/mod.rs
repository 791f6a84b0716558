//! Trust on a network: refused handshakes, forbidden calls, and changes while a job trains.

mod handshakes;
mod identities;
mod init;
mod local;
mod pages;
mod quotas;
mod record;
mod rotation;

use std::path::Path;

use longshore_tests::{
    command::{Output, longshore},
    server::Longshored,
    train::Train,
};
use longshore_wire::{Channel, tls::Credentials};
use longshore_worker::session::Address;

/// A token of these tests, and its SHA-256.
const TOKEN: &str = "foo";
const TOKEN_SHA256: &str = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae";

/// Returns a run over TLS, and never over shared memory.
fn train(steps: u64, server: &Longshored, tls_dir: &Path) -> Train {
    let tls_dir = tls_dir.display().to_string();
    Train::new(steps)
        .args(["--transport", "tcp", "--tls-dir", &tls_dir])
        .servers(&[server.address().to_string()])
}

/// Runs an operator's command on the server.
fn ask(server: &Longshored, tls_dir: &Path, arguments: &[&str]) -> Output {
    let tls_dir = tls_dir.display().to_string();
    longshore(arguments.iter().copied().chain(["--servers", server.address(), "--tls-dir", &tls_dir]))
}

/// A connection to the server.
async fn connect(server: &Longshored, tls_dir: &Path) -> Channel {
    let credentials = Credentials::read(tls_dir).unwrap();
    Address::new(server.address(), Some(&credentials)).unwrap().connect().await.unwrap()
}

/// Returns the version of the only job that the caller sees.
fn version(server: &Longshored, tls_dir: &Path) -> u64 {
    let said = ask(server, tls_dir, &["status", "--json"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    let status: serde_json::Value =
        serde_json::from_str(said.stdout.lines().next().unwrap_or_default()).unwrap();
    status["servers"][0]["version"].as_u64().unwrap_or_else(|| panic!("no version in {status}"))
}
