//! `longshore doctor` finds each planted fault, prints a remedy, and finds nothing else.

mod certificates;

use std::{
    collections::BTreeMap,
    env, fs,
    net::TcpListener,
    path::Path,
    process::{Command, id},
    time::{Duration, UNIX_EPOCH},
};

use longshore_tests::{
    binaries,
    command::{Output, longshore, run},
    seccomp::WITHOUT_IO_URING,
    server::ServerOptions,
    skip,
    stock::Stock,
    tls::{Folders, identity},
};
use longshore_wire::v1::ListJobsResponse;
use serde_json::Value;
use tempfile::TempDir;

/// Checks whose result depends on this host.
const OF_HOST: [&str; 5] = ["cores", "memory", "io_uring", "tmpfs", "descriptors"];

/// Returns a folder with the kernel's files of a healthy host, which doctor reads instead of this host's.
fn system() -> TempDir {
    let root = TempDir::new().unwrap();
    for (name, text) in [
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
        ("sys/devices/system/node/node0/cpulist", "0-7\n"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       65536000 kB\n"),
    ] {
        plant(&root, name, text);
    }
    root
}

fn plant(root: &TempDir, name: &str, text: &str) {
    let path = root.path().join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Each check's state, finding and remedy.
type Findings = BTreeMap<String, (String, String, String)>;

fn findings(output: &Output) -> Findings {
    let parse = |line: &str| -> Value {
        serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
    };
    let text = |found: &Value, key: &str| found[key].as_str().unwrap_or_default().to_string();
    let one = |line: &str| {
        let found = parse(line);
        (text(&found, "check"), (text(&found, "state"), text(&found, "said"), text(&found, "remedy")))
    };
    output.stdout.lines().map(one).collect()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Runs `longshore doctor` behind the words `before`, if any. A shell script in `before` runs doctor by "$0" and "$@".
fn doctor(before: &[&str], words: &[&str]) -> Output {
    let longshore = binaries::command("longshore");
    let mut command = Command::new(before.first().map_or(longshore.get_program(), |first| first.as_ref()));
    let rest = before.get(1..).unwrap_or_default();
    command.args(rest);
    if !before.is_empty() {
        command.arg(longshore.get_program());
    }
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("LONGSHORE")) {
        command.env_remove(name);
    }
    run("longshore doctor", command.args(["doctor", "--json"]).args(words))
}

/// Checks that doctor finds one fault, in this state, with these words and a remedy. Doctor may find nothing
/// else, except in checks that depend on this host.
#[track_caller]
fn finds(output: &Output, check: &str, state: &str, words: &[&str]) {
    let found = findings(output);
    let (graded, said, remedy) = found.get(check).unwrap_or_else(|| panic!("no check {check}: {output:?}"));
    assert_eq!(graded, state, "{said}: {output:?}");
    for word in words {
        assert!(said.contains(word) || remedy.contains(word), "{word:?} is missing: {said}. {remedy}");
    }
    assert!(!remedy.is_empty(), "nothing is said to be done about {check}: {said}");
    let others: Vec<_> = found
        .iter()
        .filter(|(name, (state, ..))| *name != check && state != "ok" && !OF_HOST.contains(&name.as_str()))
        .collect();
    assert!(others.is_empty(), "found as well: {others:?}");
    assert_eq!(output.code, i32::from(state == "bad"), "{output:?}");
}

#[test]
fn a_healthy_host_and_cluster_have_nothing_wrong() {
    let folders = Folders::new(&identity("boss", &["operator", "worker", "reader"], &["*"], &[]));
    let server = ServerOptions::new().memory("2GiB").tls(&folders.server()).start();
    let (system, drive) = (system(), TempDir::new().unwrap());
    let words = [
        "--system",
        &text(system.path()),
        "--state-dir",
        &text(drive.path()),
        "--servers",
        server.address(),
        "--tls-dir",
        &text(&folders.client("boss")),
        "--speed",
    ];
    let output = doctor(&[], &words);
    let found = findings(&output);
    let (_, said, _) = &found[&format!("state directory {} speed", drive.path().display())];
    // The speed itself depends on the machine.
    assert!(said.contains(" GB/s") || said.contains("not measured"), "{said}");
    assert_eq!(fs::read_dir(drive.path()).unwrap().count(), 0);
    for part in ["", " port", " trust"].map(|part| format!("server {}{part}", server.address())) {
        assert!(found.get(&part).is_none_or(|(state, ..)| state == "ok"), "{part}: {output:?}");
    }
    for part in ["", " certificate", " clock", " round trip", " speed"] {
        let name = format!("server {}{part}", server.address());
        assert_eq!(found.get(&name).map(|(state, ..)| state.as_str()), Some("ok"), "{name}: {output:?}");
    }
    let ill: Vec<_> = found.iter().filter(|(_, (state, ..))| state != "ok").collect();
    let of_host = |(name, _): &(&String, &(String, String, String))| OF_HOST.contains(&name.as_str());
    if !ill.is_empty() && ill.iter().all(of_host) {
        return skip::skipped(&format!("this host is not healthy: {ill:?}"));
    }
    assert!(ill.is_empty(), "{ill:?}");
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{output:?}");
}

/// A fault of the host: words before `longshore doctor`, changed files of the kernel, and doctor's flags. Then the
/// check that must fail, its state, and words of its finding.
type Fault<'a> =
    (&'a [&'a str], &'a [(&'a str, &'a str)], &'a [&'a str], &'static str, &'static str, [&'static str; 2]);

#[test]
fn a_host_lacks_something() {
    let few = ["sh", "-c", "ulimit -n 256 && exec \"$0\" \"$@\""];
    let pages = [("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")];
    let node = [
        ("sys/devices/system/node/node1/cpulist", "8-15\n"),
        ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       0 kB\n"),
    ];
    let none = ["--state-dir", "/mnt/none"];
    let faults: [Fault<'_>; 6] = [
        (&few, &[], &[], "descriptors", "warning", ["256", "ulimit -n"]),
        (&WITHOUT_IO_URING, &[], &[], "io_uring", "warning", ["refused", "seccomp"]),
        (&["env", "TMPDIR=/proc"], &[], &[], "io_uring", "warning", ["not tried", "TMPDIR"]),
        (&[], &pages, &[], "huge pages", "warning", ["never", "echo madvise"]),
        (&[], &node, &[], "NUMA", "warning", ["node1", "numactl"]),
        (&[], &[], &none, "state directory /mnt/none", "bad", ["mount its drive", "correct the path"]),
    ];
    for (before, planted, more, check, state, words) in faults {
        let system = system();
        planted.iter().for_each(|(name, text)| plant(&system, name, text));
        let words_of_call = [&["--system", system.path().to_str().unwrap()], more].concat();
        finds(&doctor(before, &words_of_call), check, state, &words);
    }
}

/// The drives are mounted in a namespace of mounts.
#[test]
fn a_drive_is_full_or_not_as_it_should_be() {
    if !Command::new("unshare").args(["-rm", "true"]).status().is_ok_and(|status| status.success()) {
        return skip::skipped("no namespace of mounts can be made: run it as root, or allow user namespaces");
    }
    for (mount, state, words) in [
        ("-t tmpfs -o size=1m tmpfs", "bad", ["it is full", "name another drive"]),
        ("-t tmpfs -o ro,size=1g tmpfs", "bad", ["Read-only", "right to write"]),
        ("-t ramfs ramfs", "warning", ["no direct I/O", "O_DIRECT"]),
    ] {
        let (system, drive) = (system(), TempDir::new().unwrap());
        let dir = text(drive.path());
        let script = format!("mount {mount} {dir} && exec \"$0\" \"$@\"");
        let words_of_call = ["--system", &text(system.path()), "--state-dir", &dir];
        let output = doctor(&["unshare", "-rm", "sh", "-c", &script], &words_of_call);
        finds(&output, &format!("state directory {dir}"), state, &words);
    }
}

/// Runs doctor on one server of a healthy host.
fn on_server(address: &str, more: &[&str]) -> Output {
    let system = system();
    doctor(&[], &[&["--system", &text(system.path()), "--servers", address], more].concat())
}

#[test]
fn nothing_is_at_an_address() {
    finds(&on_server("localhost", &[]), "server localhost", "bad", &["no port", "host:port"]);
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    for (address, check, words) in [
        ("nowhere.invalid:7070", "name", ["nowhere.invalid", "/etc/hosts"]),
        (&closed, "port", ["refused", "start longshored"]),
    ] {
        finds(&on_server(address, &[]), &format!("server {address} {check}"), "bad", &words);
    }
}

#[test]
fn a_server_is_stopped() {
    let server = ServerOptions::new().start();
    server.process.stop();
    let output = on_server(server.address(), &[]);
    server.process.go_on();
    finds(&output, &format!("server {}", server.address()), "bad", &["silent", "stopped"]);
}

/// A stock server gives answers that no server of this version gives.
#[test]
fn a_server_answers_and_is_not_as_it_should_be() {
    let list = ListJobsResponse {
        release: env!("CARGO_PKG_VERSION").into(),
        unix_micros: UNIX_EPOCH.elapsed().unwrap().as_micros() as u64,
        memory_budget: 1 << 30,
        ..Default::default()
    };
    let (older, hour) = ("0.0.9".to_string(), 3600 * 1_000_000);
    for (list, late, check, words) in [
        (ListJobsResponse { release: older, ..list.clone() }, 0, "", ["0.0.9", "one version"]),
        (
            ListJobsResponse { unix_micros: list.unix_micros - hour, ..list.clone() },
            0,
            " clock",
            ["36", "NTP"],
        ),
        (list.clone(), 20, " round trip", ["ms", "one place"]),
        (
            ListJobsResponse { memory_reserved: 1 << 30, ..list.clone() },
            0,
            " memory",
            ["0 B left", "--memory"],
        ),
    ] {
        let server = Stock::start(&list, Duration::from_millis(late));
        let output = on_server(server.address(), &[]);
        finds(&output, &format!("server {}{check}", server.address()), "warning", &words);
    }
}

/// Doctor asks several servers at once, and a faulty one hides no other.
#[test]
fn one_ill_server_hides_no_other() {
    let server = ServerOptions::new().start();
    let ill = format!("nowhere-{}.invalid:1", id());
    let output = on_server(&format!("{ill},{}", server.address()), &[]);
    finds(&output, &format!("server {ill} name"), "bad", &["does not resolve"]);
    let found = findings(&output);
    assert_eq!(found[&format!("server {}", server.address())].0, "ok");
    assert!(found.keys().all(|check| !check.ends_with(" speed")), "nothing is measured unasked: {found:?}");
}

/// Each doctor measures through its own job, which is deleted afterwards.
#[test]
fn two_may_measure_the_same_server_at_once() {
    let server = ServerOptions::new().memory("4GiB").start();
    let both: Vec<_> = (0..2)
        .map(|_| {
            let address = server.address().to_string();
            std::thread::spawn(move || doctor(&[], &["--servers", &address, "--speed"]))
        })
        .collect();
    let name = format!("server {} speed", server.address());
    for output in both.into_iter().map(|one| one.join().unwrap()) {
        let said = findings(&output).remove(&name).unwrap_or_else(|| panic!("{output:?}"));
        assert!(said.0 != "bad", "{said:?}");
    }
    let jobs = longshore(["status", "--no-hash", "--servers", server.address()]);
    assert!(jobs.stdout.contains("no jobs"), "{jobs:?}");
}
