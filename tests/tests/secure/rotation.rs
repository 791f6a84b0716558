//! Changes while a job trains: replaced certificates, and revoked certificates and tokens.

use std::{
    path::Path,
    time::{Duration, Instant, SystemTime},
};

use longshore_tests::{
    conformance::cluster::eventually,
    http::{self, FLAGS},
    process::DEADLINE,
    server::{Longshored, ServerOptions},
    tls::{Authority, Folders, Life, identity, write},
    train::Train,
};
use longshore_wire::v1::{ListJobsRequest, admin_client::AdminClient};
use rustls::{
    crypto::ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    pki_types::{CertificateDer, pem::PemObject},
};
use tokio::runtime::Runtime;

use super::{TOKEN, TOKEN_SHA256, ask, connect, train, version};

fn taken_up(server: &Longshored) -> usize {
    server.process.stderr().matches("the TLS folder has changed and was taken up").count()
}

#[test]
fn a_certificate_is_rotated_while_a_job_trains() {
    let folders = Folders::new(
        &[identity("worker", &["worker"], &["*"], &[]), identity("reader", &["reader"], &["*"], &[])]
            .concat(),
    );
    let server = ServerOptions::new().tls(&folders.server()).start();
    let worker = folders.client("worker");
    let mut running = train(1, &server, &worker).endless().start();
    running.until_step(5);
    // A new authority signs the only valid certificates from then on. The job's connections stay.
    let next = Authority::new();
    next.write_server(&folders.server(), None, Life::Valid);
    next.write_client(&worker, "worker", Life::Valid);
    eventually("the new certificate to be taken up", || (taken_up(&server) == 1).then_some(()));
    let old = folders.client("reader");
    assert!(ask(&server, &old, &["status"]).stderr.contains("ca.pem does not have"));
    let new = folders.dir("new-reader");
    next.write_client(&new, "reader", Life::Valid);
    running.until_step(version(&server, &new) + 3);
    let end = running.stop();
    // The bits must be those of a run without a network.
    assert_eq!(end.state_hash, Train::new(1).endless().hash_after(end.version));
}

/// Validity of a certificate that expires during a test: long enough for a worker to start on a busy host.
const SHORT: Duration = Duration::from_secs(8);
const ENDED: &str = "since their certificates have expired";

/// Connections of two jobs begin with certificates that expire soon. One job's folder has the next certificate in time.
#[test]
fn connections_end_with_their_certificate_and_go_on_with_the_next() {
    let names = ["worker", "late", "reader"];
    let roles = names.map(|name| identity(name, &["worker", "reader"], &["*"], &[]));
    let folders = Folders::new(&roles.concat());
    let server = ServerOptions::new().tls(&folders.server()).start();
    let [worker, late, reader] = names.map(|name| folders.client(name));
    for (name, dir) in [("worker", &worker), ("late", &late)] {
        folders.authority.write_client(dir, name, Life::For(SHORT));
    }
    // A rank that cannot reach a server gives up after its deadline, or after twice that time.
    let expires = train(1, &server, &late).endless().args(["--job", "late", "--deadline-s", "3"]);
    let (mut expires, mut running) = (expires.start(), train(1, &server, &worker).endless().start());
    expires.until_step(5);
    running.until_step(5);
    folders.authority.write_client(&worker, "worker", Life::Valid);
    let (stderr, _) = expires.fails(DEADLINE);
    assert!(stderr.contains("the client's certificate has expired"), "{stderr}");
    assert!(server.process.stderr().contains(ENDED));
    let said = ask(&server, &reader, &["status", "--json", "--job", "default"]);
    let status: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    running.until_step(status["servers"][0]["version"].as_u64().expect("a version") + 3);
}

#[test]
fn a_token_that_is_taken_back_ends_what_it_may() {
    let reader = identity("reader", &["reader"], &["*"], &[]);
    let both = [identity("worker", &["worker"], &["default"], &[TOKEN_SHA256]), reader.clone()].concat();
    let folders = Folders::new(&both);
    let server = ServerOptions::new().tls(&folders.server()).allow("does not list the owner").start();
    let (token, looking) = (folders.token(TOKEN), folders.client("reader"));
    let training = train(1, &server, &token).endless();
    let mut running = training.start();
    running.until_step(5);
    folders.list(&reader);
    let (stderr, said) = running.fails(DEADLINE);
    assert!(stderr.contains("a token that this server does not know"), "{stderr}");
    assert!(stderr.contains("UNAUTHENTICATED"), "{stderr}");
    // The server may have taken a last decision whose answer did not arrive.
    let stopped = version(&server, &looking);
    assert!(
        (said.last_step()..=said.last_step() + 1).contains(&stopped),
        "{stopped} after {}",
        said.last_step()
    );
    assert_eq!(version(&server, &looking), stopped);
    // With the token listed again, training continues from the same step.
    folders.list(&both);
    eventually("the identity to be taken up", || (taken_up(&server) == 2).then_some(()));
    let mut running = training.start();
    running.until_steps(3);
    let end = running.stop();
    assert_eq!(end.state_hash, Train::new(1).endless().hash_after(end.version));
}

/// Returns a certificate's hash as `openssl x509 -noout -fingerprint -sha256` prints it.
fn fingerprint(dir: &Path) -> String {
    let certificate = CertificateDer::from_pem_file(dir.join("client.pem")).unwrap();
    let sha256 = TLS13_CHACHA20_POLY1305_SHA256.tls13().unwrap().common.hash_provider.hash(&certificate);
    let digits: Vec<String> = sha256.as_ref().iter().map(|byte| format!("{byte:02X}")).collect();
    digits.join(":")
}

#[test]
fn one_certificate_of_an_identity_is_revoked_and_its_connections_end() {
    let workers = identity("worker", &["worker"], &["*"], &[]);
    let folders = Folders::new(&workers);
    let server = ServerOptions::new().tls(&folders.server()).start();
    let (lost, kept) = (folders.client("worker"), folders.dir("kept"));
    folders.authority.write_client(&kept, "worker", Life::Valid);
    let runtime = Runtime::new().unwrap();
    let mut admin = AdminClient::new(runtime.block_on(connect(&server, &lost)));
    let mut call = || runtime.block_on(admin.list_jobs(ListJobsRequest::default()));
    assert!(call().is_ok());
    folders.list(&format!("revoked_sha256 = [{:?}]\n{workers}", fingerprint(&lost)));
    server.process.hang_up();
    let ended = "since their credentials were taken back";
    eventually("the connection to end", || server.process.stderr().contains(ended).then_some(()));
    // The connection may end under the first call.
    let why = "a certificate with the name \"worker\" that was revoked";
    eventually("the refusal", || call().is_err_and(|status| status.message().contains(why)).then_some(()));
    assert_eq!(ask(&server, &kept, &["status"]).code, 0);
}

#[test]
fn a_folder_that_cannot_be_used_leaves_everything_as_it_was() {
    let folders = Folders::new(&identity("reader", &["reader"], &["*"], &[]));
    let text = "the TLS folder has changed and cannot be used";
    let server = ServerOptions::new().tls(&folders.server()).args(FLAGS).allow(text).start();
    let reader = folders.client("reader");
    let http = http::address(&server);
    let unusable = || http::metrics(&http)["longshore_tls_dir_unusable"];
    let expiry = http::metrics(&http)["longshore_certificate_expiry_timestamp_seconds{file=\"server.pem\"}"];
    let left = expiry - SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    assert!((364.0..366.0).contains(&(left / 86400.0)) && unusable() == 0.0, "{left}");
    write(&folders.server(), "identities.toml", "[[identity]]\nname = 7\n");
    eventually("the mistake to be said", || server.process.stderr().contains(text).then_some(()));
    eventually("the metric", || (unusable() == 1.0).then_some(()));
    assert_eq!(ask(&server, &reader, &["status"]).code, 0);
    // The key belongs to another certificate.
    folders.list(&identity("reader", &["reader"], &["*"], &[]));
    let other = Authority::new();
    let elsewhere = folders.dir("elsewhere");
    other.write_server(&elsewhere, None, Life::Valid);
    write(&folders.server(), "server.key", &std::fs::read_to_string(elsewhere.join("server.key")).unwrap());
    eventually("that to be said too", || (server.process.stderr().matches(text).count() == 2).then_some(()));
    assert_eq!(ask(&server, &reader, &["status"]).code, 0);
}

/// Interval at which a server checks the files. A change needs two equal checks, so it takes at least this
/// time.
const LOOK: Duration = Duration::from_millis(500);

#[test]
fn a_signal_has_the_folder_read_at_once() {
    let operator = identity("operator", &["operator"], &["*"], &[]);
    let folders = Folders::new(&operator);
    let server = ServerOptions::new().tls(&folders.server()).start();
    // On a busy host a test may see a change late, but not 20 times in a row.
    let taken_up_at_once = (1..=20).any(|change| {
        let names: String =
            (0..change).map(|index| identity(&format!("reader-{index}"), &["reader"], &["*"], &[])).collect();
        let before = Instant::now();
        folders.list(&(operator.clone() + &names));
        server.process.hang_up();
        eventually("the change", || (taken_up(&server) == change).then_some(()));
        before.elapsed() < LOOK
    });
    assert!(taken_up_at_once, "no change was taken up before the server would have looked by itself");
    // The identities listed since then are known.
    assert_eq!(ask(&server, &folders.client("reader-0"), &["status"]).code, 0);
}

#[test]
fn a_signal_does_not_end_a_server_that_has_nothing_to_read() {
    let mut server = ServerOptions::new().start();
    server.process.hang_up();
    eventually("it to be said", || server.process.stderr().contains("SIGHUP").then_some(()));
    server.process.terminate();
    assert_eq!(server.process.code(), 0);
}
