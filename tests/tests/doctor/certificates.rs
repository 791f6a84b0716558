//! Certificates that are untrusted, or expire soon.

use std::{fs, time::Duration};

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

/// Runs doctor on a server and a client with certificates of these validities. The server's is for `names`, if any,
/// and a `foreign` client trusts another authority. Returns the output and the server's check.
fn ask(server: Life, names: Option<&[&str]>, client: Life, foreign: bool) -> (Output, String) {
    let folders = Folders::new(&identity("boss", &["reader"], &["*"], &[]));
    folders.authority.write_server(&folders.server(), names, server);
    let dir = folders.dir("boss");
    folders.authority.write_client(&dir, "boss", client);
    if foreign {
        fs::write(dir.join("ca.pem"), Authority::new().certificate).unwrap();
    }
    let server = ServerOptions::new().tls(&folders.server()).allow("expired").start();
    let output = on_server(server.address(), &["--tls-dir", &text(&dir)]);
    (output, format!("server {}", server.address()))
}

#[test]
fn a_servers_certificate_is_not_trusted_or_expires_soon() {
    let elsewhere: &[&str] = &["elsewhere"];
    for (life, names, foreign, check, state, words) in [
        (Life::Expired, None, false, "trust", "bad", &["expired", "new certificate"][..]),
        (Life::Valid, None, true, "trust", "bad", &["authority", "ca.pem"]),
        (Life::Valid, Some(elsewhere), false, "trust", "bad", &["by a name that its certificate has"]),
        (TEN_DAYS, None, false, "certificate", "warning", &["expires in 10 days", "--hosts"]),
    ] {
        let (output, server) = ask(life, names, Life::Valid, foreign);
        finds(&output, &format!("{server} {check}"), state, words);
    }
}

#[test]
fn a_clients_certificate_has_expired_or_expires_soon() {
    let (output, server) = ask(Life::Valid, None, TEN_DAYS, false);
    let words = ["expires in 10 days", "longshore tls issue", "without a restart"];
    finds(&output, "TLS folder", "warning", &words);
    assert_eq!(findings(&output)[&format!("{server} certificate")].0, "ok");
    let (output, _) = ask(Life::Valid, None, Life::Expired, false);
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
    let output = on_server(server.address(), &["--tls-dir", &text(&dir)]);
    finds(&output, "TLS folder", "warning", &["expires in 10 days"]);
}

#[test]
fn a_server_asks_for_certificates_and_a_token_does_not_expire() {
    let folders = Folders::new(&identity("boss", &["reader"], &["*"], &[TOKEN_SHA256]));
    let server = ServerOptions::new().tls(&folders.server()).start();
    let name = format!("server {}", server.address());
    finds(&on_server(server.address(), &[]), &format!("{name} trust"), "bad", &["--tls-dir"]);
    let output = on_server(server.address(), &["--tls-dir", "/nowhere"]);
    finds(&output, "TLS folder", "bad", &["/nowhere", "tls init"]);
    let token = text(&folders.token(TOKEN));
    let found = findings(&on_server(server.address(), &["--tls-dir", &token]));
    assert!(!found.contains_key("TLS folder"), "{found:?}");
    for part in ["", " certificate", " round trip"] {
        assert_eq!(found[&format!("{name}{part}")].0, "ok", "{part}: {found:?}");
    }
}
