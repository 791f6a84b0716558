//! The Debian package: what is in it runs, and its service is one that systemd takes.

use std::{env, fs, path::Path, process::Command};

use longshore_tests::{binaries, command::run, skip};
use tempfile::TempDir;

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

#[test]
fn a_debian_package_has_both_commands_and_a_service() {
    for tool in ["dpkg-deb", "dpkg", "objdump", "strip"] {
        if !is_installed(tool) {
            return skip::skipped(&format!(
                "there is no {tool}: install Debian's packages dpkg and binutils"
            ));
        }
    }
    let root = TempDir::new().unwrap();
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/debian/build");
    let binaries = Path::new(binaries::command("longshored").get_program()).parent().unwrap().to_owned();
    let built = run("deploy/debian/build", Command::new(build).arg(&binaries).arg(root.path()));
    assert_eq!(built.code, 0, "{built:?}");
    let package = fs::read_dir(root.path()).unwrap().next().expect("a package").unwrap().path();
    let control = run("dpkg-deb --field", Command::new("dpkg-deb").arg("--field").arg(&package));
    for line in ["Package: longshore", &format!("Version: {}", env!("CARGO_PKG_VERSION"))] {
        assert!(control.stdout.lines().any(|field| field == line), "{control:?}");
    }
    let tree = root.path().join("tree");
    let out = run("dpkg-deb --extract", Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&tree));
    assert_eq!(out.code, 0, "{out:?}");
    for name in ["longshore", "longshored"] {
        let version = run(name, Command::new(tree.join("usr/bin").join(name)).arg("--version"));
        assert_eq!(version.stdout.trim(), format!("{name} {}", env!("CARGO_PKG_VERSION")));
    }
    for file in [
        "man/man1/longshore.1.gz",
        "man/man1/longshore-status.1.gz",
        "man/man1/longshored.1.gz",
        "bash-completion/completions/longshore",
        "bash-completion/completions/longshored",
        "zsh/vendor-completions/_longshore",
        "fish/vendor_completions.d/longshored.fish",
    ] {
        let size = fs::metadata(tree.join("usr/share").join(file)).map(|found| found.len());
        assert!(size.is_ok_and(|size| size > 100), "{file} is missing or empty");
    }
    // The configuration that it installs is one that the server takes, here at other places.
    let config = fs::read_to_string(tree.join("etc/longshore/longshored.toml")).unwrap();
    let here = config
        .replace("/run/", &format!("{}/run/", root.path().display()))
        .replace("/var/", &format!("{}/var/", root.path().display()))
        .replace(":7070", ":0")
        .replace(":7071", ":0");
    for folder in ["run/longshore", "var/lib/longshore/state"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    let file = root.path().join("longshored.toml");
    fs::write(&file, here).unwrap();
    let mut server = longshore_tests::process::Process::start(
        "longshored as installed",
        Command::new(tree.join("usr/bin/longshored")).arg("--config").arg(&file),
    );
    assert!(server.line().unwrap_or_default().starts_with("longshored listening on "), "{}", server.stderr());
    server.terminate();
    assert_eq!(server.code(), 0, "{}", server.stderr());
    if is_installed("systemd-analyze") {
        let unit = tree.join("lib/systemd/system/longshored.service");
        // The service's program is not installed here; nothing else may be said of the unit.
        let said = run("systemd-analyze", Command::new("systemd-analyze").arg("verify").arg(unit));
        let others: Vec<&str> =
            said.stderr.lines().filter(|line| !line.contains("/usr/bin/longshored")).collect();
        assert!(others.is_empty(), "{others:?}");
    }
}
