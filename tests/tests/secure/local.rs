//! The Unix socket admits its server's user, and a group where the server names one, whatever its file's
//! mode. Loopback TCP admits the server's user alone.

use std::{
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
};

use longshore_tests::{
    binaries,
    command::{Output, longshored, run},
    conformance::cluster::eventually,
    server::{Longshored, ServerOptions},
    skip::skipped,
};
use rustix::process::geteuid;
use tempfile::TempDir;

/// Numbers of no user and no group on this host.
const STRANGER: u32 = 3_912_345;
const GROUP: u32 = 3_954_321;

/// Starts a server with a Unix socket, in a folder that every user can enter.
fn server(folder: &Path, arguments: &[&str]) -> (Longshored, PathBuf) {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    let socket = folder.join("longshored.sock");
    let server = ServerOptions::new().args(["--listen-unix", &socket.display().to_string()]).args(arguments);
    (server.start(), socket)
}

/// Asks for the status as a process of this user and group.
fn ask(socket: &Path, user: u32, group: u32) -> Output {
    let mut command = binaries::command("longshore");
    let server = format!("unix:{}", socket.display());
    run("longshore status", command.uid(user).gid(group).args(["status", "--servers", &server]))
}

#[test]
fn a_port_on_loopback_is_the_servers_users_alone() {
    if !geteuid().is_root() {
        return skipped("only root can act for another user");
    }
    let ask = |server: &Longshored, user: u32| {
        let mut command = binaries::command("longshore");
        run("longshore status", command.uid(user).gid(user).args(["status", "--servers", server.address()]))
    };
    let server = ServerOptions::new().start();
    assert_eq!(ask(&server, 0).code, 0);
    let stranger = ask(&server, STRANGER);
    let why = format!("caller is user {STRANGER} of this host, over unencrypted TCP, but must be user 0");
    assert!(stranger.code == 1 && stranger.stderr.contains(&why), "{stranger:?}");
    assert!(stranger.stderr.contains("--listen-unix with --unix-group"), "{stranger:?}");
    let trusting = ServerOptions::new().args(["--insecure"]).start();
    assert_eq!(ask(&trusting, STRANGER).code, 0);
}

fn mode_and_group(socket: &Path) -> (u32, u32) {
    let found = fs::metadata(socket).unwrap();
    (found.mode() & 0o777, found.gid())
}

#[test]
fn a_group_may_connect_and_strangers_may_not() {
    if !geteuid().is_root() {
        return skipped("only root can act for another user");
    }
    let folder = TempDir::new().unwrap();
    let (server, socket) = server(folder.path(), &["--unix-group", &GROUP.to_string()]);
    assert_eq!(mode_and_group(&socket), (0o660, GROUP));
    let member = ask(&socket, STRANGER, GROUP);
    assert_eq!(member.code, 0, "{}", member.stderr);
    let stranger = ask(&socket, STRANGER, STRANGER);
    assert!(stranger.code == 1 && stranger.stderr.contains("ermission denied"), "{}", stranger.stderr);
    // Where the mode admits every user, the server still refuses, and gives the reason.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(ask(&socket, STRANGER, STRANGER).code, 1);
    let line = eventually("a line on the record", || {
        server.log().into_iter().find(|line| line["target"] == "audit").map(|line| line["fields"].clone())
    });
    let who = format!("user {STRANGER}, group {STRANGER}");
    assert_eq!((line["who"].as_str(), line["outcome"].as_str()), (Some(&*who), Some("refused")), "{line}");
    assert_eq!(ask(&socket, STRANGER, GROUP).code, 0);
    assert_eq!(ask(&socket, 0, 0).code, 0);
}

#[test]
fn without_a_group_it_is_the_users_alone() {
    if !geteuid().is_root() {
        return skipped("only root can act for another user");
    }
    let folder = TempDir::new().unwrap();
    let (_server, socket) = server(folder.path(), &[]);
    assert_eq!(mode_and_group(&socket).0, 0o600);
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(ask(&socket, STRANGER, 0).code, 1);
    assert_eq!(ask(&socket, 0, 0).code, 0);
}

#[test]
fn a_group_that_is_not_there_is_refused_at_start() {
    let folder = TempDir::new().unwrap();
    let socket = folder.path().join("longshored.sock").display().to_string();
    let said =
        longshored(["--listen", "127.0.0.1:0", "--listen-unix", &socket, "--unix-group", "no such group"]);
    assert!(said.code == 1 && said.stderr.contains("has no group \"no such group\""), "{said:?}");
    let said = longshored(["--unix-group", "0"]);
    assert!(said.code == 2 && said.stderr.contains("--listen-unix"), "{said:?}");
}
