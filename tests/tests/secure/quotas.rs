//! Quotas of an identity: the server refuses more before it takes anything, and existing jobs stay.

use std::path::Path;

use longshore_tests::{
    conformance::cluster::eventually,
    process::DEADLINE,
    server::{Longshored, ServerOptions},
    status::ServerStatus,
    tls::{Folders, identity},
};
use tempfile::TempDir;

use super::{ask, train};

/// Returns an identities.toml with an operator for everything, and a worker with this quota.
fn list(quota: &str) -> String {
    let worker = identity("team", &["worker"], &["*"], &[]);
    [identity("operator", &["operator"], &["*"], &[]), worker, format!("quota = {quota}\n")].concat()
}

/// Returns the status line of the identity.
fn has(server: &Longshored, tls_dir: &Path) -> String {
    let said = ask(server, tls_dir, &["status", "--no-hash"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    let line = said.stdout.lines().find(|line| line.contains("identity team"));
    line.unwrap_or_else(|| panic!("no line on the identity: {}", said.stdout)).trim().to_string()
}

fn job(server: &Longshored, tls_dir: &Path, job: &str) -> ServerStatus {
    let said = ask(server, tls_dir, &["status", "--json", "--no-hash", "--job", job]);
    let status: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    serde_json::from_value(status["servers"][0].clone()).unwrap()
}

/// Checks that a run of a new job is refused for this limit.
fn is_refused(server: &Longshored, tls_dir: &Path, name: &str, why: &[&str]) {
    let (stderr, _) = train(3, server, tls_dir).args(["--job", name]).start().fails(DEADLINE);
    for why in why.iter().chain(&["identities.toml"]) {
        assert!(stderr.contains(why), "{why:?} is not in {stderr}");
    }
}

#[test]
fn a_job_beyond_the_quota_is_refused_and_nothing_is_taken() {
    let folders = Folders::new(&list("{ jobs = 1 }"));
    let server = ServerOptions::new().tls(&folders.server()).start();
    let [team, operator] = ["team", "operator"].map(|name| folders.client(name));
    train(3, &server, &team).args(["--job", "a"]).run();
    let found = job(&server, &team, "a");
    assert_eq!(found.owner.as_deref(), Some("team"));
    let before = has(&server, &team);
    assert!(before.starts_with("identity team: 1 of 1 jobs"), "{before}");
    is_refused(&server, &team, "b", &["quota.jobs is 1 more for team, which has 1", "at most 1 together"]);
    assert!(ask(&server, &operator, &["status"]).stdout.lines().all(|line| line != "job b"));
    assert_eq!(has(&server, &operator), before.replace("1 connections", "0 connections"));
    // Another run of the same job needs no further quota.
    train(6, &server, &team).args(["--job", "a"]).run();

    // New limits take effect without a restart.
    let memory = found.memory_bytes;
    folders.list(&list(&format!("{{ memory = \"{}\" }}", 2 * memory - 1)));
    eventually("the quota to be taken up", || has(&server, &team).contains("team: 1 jobs,").then_some(()));
    is_refused(&server, &team, "b", &["quota.memory", &format!("{} bytes together", 2 * memory - 1)]);
    folders.list(&list(&format!("{{ memory = \"{}\" }}", 2 * memory)));
    eventually("that one too", || server.process.stderr().matches("was taken up").nth(1).map(|_| ()));
    train(3, &server, &team).args(["--job", "b"]).run();

    // Both jobs stay beyond a smaller quota, and continue. A third job is refused.
    folders.list(&list("{ jobs = 1, memory = \"1MiB\" }"));
    eventually("the last one", || server.process.stderr().matches("was taken up").nth(2).map(|_| ()));
    train(9, &server, &team).args(["--job", "a"]).run();
    is_refused(&server, &team, "c", &["quota.jobs is 1 more for team, which has 2"]);
    for job in ["a", "b"] {
        assert_eq!(ask(&server, &operator, &["delete", "--job", job]).code, 0);
    }
    assert!(has(&server, &team).starts_with("identity team: 0 of 1 jobs, 0 B of"), "{}", has(&server, &team));
}

#[test]
fn who_opened_a_job_is_known_after_a_crash() {
    let root = TempDir::new().unwrap();
    let folders = Folders::new(&list("{ jobs = 1 }"));
    let mut server = ServerOptions::new().state_root(root.path()).tls(&folders.server()).start();
    let team = folders.client("team");
    let nvme = ["--tier", "nvme"];
    train(3, &server, &team).args(nvme).args(["--job", "a"]).run();
    let drives = job(&server, &team, "a").disk_bytes;
    assert!(drives > 0);
    server.kill_and_restart();
    eventually("the job to be recovered", || server.process.stderr().contains("job recovered").then_some(()));
    assert_eq!(job(&server, &team, "a").owner.as_deref(), Some("team"));
    is_refused(&server, &team, "b", &["quota.jobs"]);
    // Recovery needs no quota: existing jobs stay.
    folders.list(&list(&format!("{{ drives = \"{}\" }}", drives - 1)));
    server.kill_and_restart();
    eventually("it once more", || server.process.stderr().contains("job recovered").then_some(()));
    train(6, &server, &team).args(nvme).args(["--job", "a"]).run();
    let (stderr, _) = train(3, &server, &team).args(nvme).args(["--job", "b"]).start().fails(DEADLINE);
    assert!(stderr.contains("quota.drives"), "{stderr}");
}

#[test]
fn connections_beyond_the_quota_are_told_so_at_their_first_call() {
    let folders = Folders::new(&list("{ connections = 0 }"));
    let server = ServerOptions::new().tls(&folders.server()).start();
    let team = folders.client("team");
    let said = ask(&server, &team, &["status"]);
    assert!(
        said.code == 1 && said.stderr.contains("quota.connections is 1 more for team, which has 0"),
        "{}",
        said.stderr
    );
    folders.list(&list("{ connections = 1 }"));
    // Connections come one after the other, because an ended connection no longer counts.
    eventually("a connection to be allowed", || (ask(&server, &team, &["status"]).code == 0).then_some(()));
    eventually("the next one", || {
        has_if_any(&server, &team).filter(|line| line.ends_with("1 of 1 connections"))
    });
    let (stderr, _) = train(3, &server, &team).start().fails(DEADLINE);
    assert!(stderr.contains("quota.connections is 1 more for team, which has 1"), "{stderr}");
}

fn has_if_any(server: &Longshored, tls_dir: &Path) -> Option<String> {
    (ask(server, tls_dir, &["status"]).code == 0).then(|| has(server, tls_dir))
}
