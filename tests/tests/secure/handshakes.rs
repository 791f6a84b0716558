//! Refused connections: each is refused soon, and with the reason.

use std::{
    fs,
    io::Write,
    net::TcpStream,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use longshore_proto::limits::MAX_HANDSHAKES;
use longshore_tests::{
    command::run,
    conformance::cluster::eventually,
    server::{Longshored, ServerOptions},
    skip::skipped,
    tls::{Authority, Folders, Life, identity, write},
    train::Train,
};

use super::{TOKEN, ask, train};

fn reader() -> String {
    identity("reader", &["reader"], &["*"], &[])
}

/// Checks that the server refuses a client with this folder at once, for this reason.
fn is_refused(server: &Longshored, tls_dir: &Path, why: &str) {
    let start = Instant::now();
    let said = ask(server, tls_dir, &["status"]);
    assert!(said.code == 1 && said.stderr.contains(why), "{why:?}: {} {}", said.code, said.stderr);
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[test]
fn who_is_not_trusted_is_told_why() {
    let folders = Folders::new(&reader());
    let server = ServerOptions::new().tls(&folders.server()).start();
    let good = ask(&server, &folders.client("reader"), &["status"]);
    assert_eq!(good.code, 0, "{}", good.stderr);

    // The server lists no token, so it accepts no connection without a certificate.
    is_refused(&server, &folders.token(TOKEN), "it asks for a client's certificate, and none was shown");

    let other = Authority::new();
    let of_other = folders.dir("of-other");
    other.write_client(&of_other, "reader", Life::Valid);
    is_refused(&server, &of_other, "of an authority that ca.pem does not have");
    write(&of_other, "ca.pem", &folders.authority.certificate);
    is_refused(&server, &of_other, "of an authority that it does not know");

    let expired = folders.dir("expired");
    folders.authority.write_client(&expired, "reader", Life::Expired);
    is_refused(&server, &expired, "the client's certificate has expired");

    let nobody = folders.client("nobody");
    is_refused(&server, &nobody, "a certificate with the name \"nobody\" that this server does not know");

    // A server's certificate is no client's certificate.
    let server_as_client = folders.dir("server-as-client");
    for (from, to) in [("ca.pem", "ca.pem"), ("server.pem", "client.pem"), ("server.key", "client.key")] {
        write(&server_as_client, to, &fs::read_to_string(folders.server().join(from)).unwrap());
    }
    is_refused(&server, &server_as_client, "it does not accept the client's certificate");
}

/// Port checks, as by `longshore doctor`, count as no failure.
#[test]
fn who_asks_only_whether_the_port_is_open_has_failed_at_nothing() {
    let folders = Folders::new(&reader());
    let server = ServerOptions::new().tls(&folders.server()).start();
    let mut stranger = TcpStream::connect(server.address()).unwrap();
    drop(TcpStream::connect(server.address()).unwrap());
    assert_eq!(ask(&server, &folders.client("reader"), &["doctor"]).code, 0);
    // The log has one failure in ten seconds: this one or an earlier one.
    stranger.write_all(&[0; 64]).unwrap();
    let failed = eventually("the failure of a stranger's handshake", || {
        let log = server.log();
        log.into_iter().find(|line| line["fields"]["message"] == "a handshake failed")
    });
    let why = failed["fields"]["error"].as_str().unwrap();
    assert!(!why.contains("ended"), "{why}");
}

#[test]
fn a_run_that_is_not_trusted_ends_at_once() {
    let folders = Folders::new(&reader());
    let server = ServerOptions::new().tls(&folders.server()).start();
    let expired = folders.dir("expired");
    folders.authority.write_client(&expired, "reader", Life::Expired);
    // The worker ends far earlier than its deadline for servers that do not answer.
    let (stderr, _) = train(3, &server, &expired).start().fails(Duration::from_secs(15));
    assert!(stderr.contains("the client's certificate has expired"), "{stderr}");
}

#[test]
fn both_ends_must_mean_tls() {
    let folders = Folders::new(&reader());
    let client = folders.client("reader");
    let plain = ServerOptions::new().start();
    let said = ask(&plain, &client, &["status"]);
    assert!(said.code == 1 && said.stderr.contains("does not speak TLS"), "{}", said.stderr);

    let server = ServerOptions::new().tls(&folders.server()).start();
    let address = server.address().to_string();
    let plainly = longshore_tests::command::longshore(["status", "--servers", &address]);
    assert!(plainly.code == 1 && plainly.stderr.contains("must be made with TLS"), "{}", plainly.stderr);
    let start = Instant::now();
    let (stderr, _) =
        Train::new(3).servers(std::slice::from_ref(&address)).start().fails(Duration::from_secs(15));
    assert!(stderr.contains("must be made with TLS") && stderr.contains("--tls-dir"), "{stderr}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let https = longshore_tests::command::longshore(["status", "--servers", &format!("https://{address}")]);
    assert!(https.stderr.contains("https without a TLS folder"), "{}", https.stderr);
    let said = longshore_tests::command::longshore([
        "status",
        "--servers",
        &format!("http://{address}"),
        "--tls-dir",
        &client.display().to_string(),
    ]);
    assert!(said.stderr.contains("http beside a TLS folder"), "{}", said.stderr);
}

#[test]
fn only_tls_1_3_with_good_ciphers_is_spoken() {
    let folders = Folders::new(&reader());
    let server = ServerOptions::new().tls(&folders.server()).start();
    let client = folders.client("reader");
    if Command::new("openssl").arg("version").output().is_err() {
        return skipped("there is no openssl");
    }
    let connect = |flags: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["20", "openssl", "s_client", "-connect", server.address(), "-alpn", "h2", "-brief"]);
        for (flag, file) in [("-CAfile", "ca.pem"), ("-cert", "client.pem"), ("-key", "client.key")] {
            command.arg(flag).arg(client.join(file));
        }
        run("openssl s_client", command.args(flags))
    };
    // Alert numbers, since their names differ between versions of openssl. An openssl that refuses by itself
    // prints none.
    const HANDSHAKE_FAILURE: &str = "SSL alert number 40";
    const PROTOCOL_VERSION: &str = "SSL alert number 70";
    let said = connect(&["-tls1_3"]);
    assert!(said.stderr.contains("Protocol version: TLSv1.3"), "{}", said.stderr);
    // Without SECLEVEL=0 openssl would not offer versions below 1.2. rustls answers those with
    // HANDSHAKE_FAILURE.
    const ANY: [&str; 2] = ["-cipher", "ALL:@SECLEVEL=0"];
    for (offered, alert) in [
        (&["-tls1_2", ANY[0], ANY[1]][..], PROTOCOL_VERSION),
        (&["-tls1_1", ANY[0], ANY[1]], HANDSHAKE_FAILURE),
        (&["-tls1", ANY[0], ANY[1]], HANDSHAKE_FAILURE),
        (&["-tls1_3", "-ciphersuites", "TLS_AES_128_CCM_SHA256"], HANDSHAKE_FAILURE),
        (&["-tls1_3", "-ciphersuites", "TLS_AES_128_CCM_8_SHA256"], HANDSHAKE_FAILURE),
    ] {
        let said = connect(offered);
        assert!(!said.stderr.contains("CONNECTION ESTABLISHED"), "{offered:?}: {}", said.stderr);
        assert!(said.stderr.contains(alert), "{offered:?}: the server has not said so: {}", said.stderr);
    }
}

fn descriptors(server: &Longshored) -> usize {
    fs::read_dir(format!("/proc/{}/fd", server.process.id())).unwrap().count()
}

#[test]
fn half_open_handshakes_are_bounded_and_end() {
    let folders = Folders::new(&identity("worker", &["worker"], &["*"], &[]));
    let server = ServerOptions::new().tls(&folders.server()).start();
    let mut running = train(60, &server, &folders.client("worker")).start();
    running.until_step(3);
    let before = descriptors(&server);
    let mut flood: Vec<TcpStream> =
        (0..3 * MAX_HANDSHAKES).filter_map(|_| TcpStream::connect(server.address()).ok()).collect();
    // The server accepts each connection before the end of a step that begins after it, and the job
    // continues.
    running.until_steps(20);
    let beside = descriptors(&server) - before;
    assert!(beside <= MAX_HANDSHAKES + 8, "{beside} descriptors for half-open handshakes");
    // The last handshakes stay open until their deadline, and no longer.
    let last = flood.pop().unwrap();
    last.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let ended = std::io::Read::read(&mut &last, &mut [0; 1]);
    assert!(
        matches!(ended, Ok(0)) || ended.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
    );
    let end = running.finish().end;
    assert_eq!(end.state_hash, Train::new(60).undisturbed().hash);
}
