//! Certificates that are untrusted, or expire soon.

use std::{fs, path::Path, time::Duration};

use longshore_tests::{
    command::Output,
    server::ServerOptions,
    tls::{Authority, Folders, Life, identity},
};

use super::{findings, finds, on_server, text};

/// Ten days and an hour, so that ten whole days are left while the test runs.
const TEN_DAYS: Life = Life::For(Duration::from_secs((10 * 24 + 1) * 3600));
const TOKEN: &str = "an-unlikely-token";
/// The hash of `TOKEN`, as in identities.toml.
const TOKEN_SHA256: &str = "1a25fbbd94be418422d6a47d76db38cae1f983c9327fe3baaf895aa8e9cee6e0";

/// Runs doctor on a server with a certificate for `names`, if any. With `foreign`, the client trusts another
/// authority. Returns the output and the check's name.
fn trust(life: Life, names: Option<&[&str]>, foreign: bool) -> (Output, String) {
    let folders = Folders::new(&identity("boss", &["reader"], &["*"], &[]));
    folders.authority.write_server(&folders.server(), names, life);
    let server = ServerOptions::new().tls(&folders.server()).allow("expired").start();
    let client = folders.client("boss");
    if foreign {
        fs::write(client.join("ca.pem"), Authority::new().certificate).unwrap();
    }
    let output = ask(server.address(), &client);
    (output, format!("server {} trust", server.address()))
}

#[test]
fn a_certificate_has_expired() {
    let (output, check) = trust(Life::Expired, None, false);
    finds(&output, &check, "bad", &["expired", "new certificate"]);
}

#[test]
fn a_certificate_is_of_another_authority() {
    let (output, check) = trust(Life::Valid, None, true);
    finds(&output, &check, "bad", &["authority", "ca.pem"]);
}

#[test]
fn a_certificate_has_another_name() {
    let (output, check) = trust(Life::Valid, Some(&["elsewhere"]), false);
    finds(&output, &check, "bad", &["dial the server by a name that its certificate has"]);
}

#[test]
fn a_server_asks_for_certificates() {
    let folders = Folders::new(&identity("boss", &["reader"], &["*"], &[]));
    let server = ServerOptions::new().tls(&folders.server()).start();
    finds(
        &on_server(server.address(), &[]),
        &format!("server {} trust", server.address()),
        "bad",
        &["--tls-dir"],
    );
    let output = on_server(server.address(), &["--tls-dir", "/nowhere"]);
    finds(&output, "TLS folder", "bad", &["/nowhere", "tls init"]);
}

/// Runs doctor with these validities of both certificates. Returns its output and the name of the server's
/// check.
fn lives(server: Life, client: Life) -> (Output, String) {
    let folders = Folders::new(&identity("boss", &["reader"], &["*"], &[]));
    folders.authority.write_server(&folders.server(), None, server);
    let dir = folders.dir("boss");
    folders.authority.write_client(&dir, "boss", client);
    let server = ServerOptions::new().tls(&folders.server()).start();
    (ask(server.address(), &dir), format!("server {} certificate", server.address()))
}

fn ask(address: &str, dir: &Path) -> Output {
    on_server(address, &["--tls-dir", &text(dir)])
}

#[test]
fn a_clients_certificate_expires_soon() {
    let (output, server) = lives(Life::Valid, TEN_DAYS);
    finds(
        &output,
        "TLS folder",
        "warning",
        &["expires in 10 days", "longshore tls issue", "without a restart"],
    );
    assert_eq!(findings(&output)[&server].0, "ok");
}

#[test]
fn a_servers_certificate_expires_soon() {
    let (output, server) = lives(TEN_DAYS, Life::Valid);
    finds(&output, &server, "warning", &["expires in 10 days", "--hosts", "without a restart"]);
    assert_eq!(findings(&output)["TLS folder"].0, "ok");
}

#[test]
fn a_clients_certificate_has_expired() {
    let (output, _) = lives(Life::Valid, Life::Expired);
    let (state, said, _) = &findings(&output)["TLS folder"];
    assert!(state == "bad" && said.contains("expired 2 days ago"), "{output:?}");
}

/// The authority of a client's certificate need not be in the client's folder, which lists the servers'
/// authorities.
#[test]
fn a_clients_certificate_of_another_authority_expires_soon() {
    let folders = Folders::new(&identity("boss", &["reader"], &["*"], &[]));
    let (clients, dir) = (Authority::new(), folders.dir("boss"));
    clients.write_client(&dir, "boss", TEN_DAYS);
    fs::write(dir.join("ca.pem"), &folders.authority.certificate).unwrap();
    fs::write(folders.server().join("ca.pem"), &clients.certificate).unwrap();
    let server = ServerOptions::new().tls(&folders.server()).start();
    finds(&ask(server.address(), &dir), "TLS folder", "warning", &["expires in 10 days"]);
}

#[test]
fn a_token_does_not_expire() {
    let folders = Folders::new(&identity("boss", &["reader"], &["*"], &[TOKEN_SHA256]));
    let server = ServerOptions::new().tls(&folders.server()).start();
    let found = findings(&ask(server.address(), &folders.token(TOKEN)));
    assert!(!found.contains_key("TLS folder"), "{found:?}");
    for part in ["", " certificate", " round trip"] {
        assert_eq!(found[&format!("server {}{part}", server.address())].0, "ok", "{part}: {found:?}");
    }
}
