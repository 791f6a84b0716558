//! `longshore tls`: a cluster's folders from one command, and a cluster that runs with them.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use longshore_tests::{
    command::{done, longshore, longshored},
    conformance::cluster::eventually,
    server::{ServerOptions, own_addresses},
};

use super::{ask, train};

/// Returns all files below a folder.
fn files(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

fn hosts() -> String {
    own_addresses().iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn one_command_makes_a_cluster_that_trains() {
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("tls");
    let shown = dir.display().to_string();
    let made = done(["tls", "init", &shown, "--hosts", &hosts()]);
    assert!(made.stdout.contains("to each server") && made.stdout.contains("ca.key"), "{}", made.stdout);
    let found = files(&dir);
    assert!(found.len() >= 20, "{found:?}");
    for file in &found {
        assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, 0o600, "{}", file.display());
    }
    assert!(
        found.iter().filter(|file| file.ends_with("ca.key")).count() == 1,
        "a client or server has the authority's key"
    );
    let before: Vec<Vec<u8>> = found.iter().map(|file| fs::read(file).unwrap()).collect();
    let again = longshore(["tls", "init", &shown, "--hosts", &hosts()]);
    assert!(again.code == 1 && again.stderr.contains("nothing is overwritten"), "{}", again.stderr);
    assert_eq!(found.iter().map(|file| fs::read(file).unwrap()).collect::<Vec<_>>(), before);

    let server = ServerOptions::new().tls(&dir.join("server")).start();
    let first = train(2, &server, &dir.join("worker")).run().end;
    assert_eq!(first.version, 2);
    let by_token = train(4, &server, &dir.join("worker-token")).run().end;
    assert_eq!(by_token.version, 4);
    for who in ["reader", "reader-token", "operator"] {
        let said = ask(&server, &dir.join(who), &["status"]);
        assert_eq!(said.code, 0, "{who}: {}", said.stderr);
    }
    let deleted = ask(&server, &dir.join("operator-token"), &["delete", "--job", "default"]);
    assert_eq!(deleted.code, 0, "{}", deleted.stderr);

    // With these folders, servers of the cluster may fetch shards from each other.
    let other = ServerOptions::new().tls(&dir.join("server")).start();
    let running = train(1, &server, &dir.join("worker")).endless().allow("quota.memory");
    let mut running = running.start();
    running.until_step(2);
    let to = ["scale", "--job", "default", "--to", other.address(), "--wait"];
    let moved = ask(&server, &dir.join("operator"), &to);
    assert_eq!(moved.code, 0, "{}", moved.stderr);

    // Shards that move to a server count in their owner's quota there.
    let operator = dir.join("operator");
    let add = ask(&other, &operator, &["scale", "--job", "default", "--add", server.address(), "--wait"]);
    assert_eq!(add.code, 0, "{}", add.stderr);
    let list = dir.join("server/identities.toml");
    let unlimited = fs::read_to_string(&list).unwrap();
    let of_worker = "name = \"worker\"\n";
    fs::write(&list, unlimited.replace(of_worker, &[of_worker, "quota = { memory = \"1MiB\" }\n"].concat()))
        .unwrap();
    eventually("the quota", || other.process.stderr().contains("was taken up").then_some(()));
    let remove = ["scale", "--job", "default", "--remove", server.address()];
    assert_eq!(ask(&other, &operator, &remove).code, 0);
    eventually("the refusal", || {
        ask(&other, &operator, &["status"]).stdout.contains("quota.memory").then_some(())
    });
    fs::write(&list, unlimited).unwrap();
    let removed = ask(&other, &operator, &[&remove[..], &["--wait"]].concat());
    assert_eq!(removed.code, 0, "{}", removed.stderr);
    running.stop();
}

#[test]
fn one_more_identity_is_issued() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name).display().to_string();
    let (dir, out) = (path("tls"), path("alice"));
    assert_eq!(longshore(["tls", "init", &dir, "--hosts", &hosts(), "--no-tokens"]).code, 0);
    done(["tls", "issue", &dir, "--out", &out, "--client", "alice"]);
    let list = root.path().join("tls/server/identities.toml");
    let more = "\n[[identity]]\nname = \"alice\"\nroles = [\"reader\"]\njobs = [\"*\"]\n";
    fs::write(&list, fs::read_to_string(&list).unwrap() + more).unwrap();
    let server = ServerOptions::new().tls(&root.path().join("tls/server")).start();
    let said = ask(&server, Path::new(&out), &["status"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    let wrong = longshore(["tls", "issue", &dir, "--out", &path("b"), "--client", "a.b c"]);
    assert!(wrong.code == 1 && wrong.stderr.contains("letters, digits"), "{}", wrong.stderr);
}

#[test]
fn off_loopback_a_server_starts_with_certificates_or_not_at_all() {
    let root = tempfile::tempdir().unwrap();
    let refused = longshored(["--listen", "0.0.0.0:0", "--memory", "64MiB"]);
    assert!(
        refused.code == 2
            && refused.stderr.contains("--tls-dir")
            && refused.stderr.contains("longshore tls init")
    );
    let dir = root.path().display().to_string();
    let empty = longshored(["--listen", "0.0.0.0:0", "--memory", "64MiB", "--tls-dir", &dir]);
    assert!(empty.code == 1 && empty.stderr.contains("identities.toml"), "{}", empty.stderr);
}
