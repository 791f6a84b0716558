//! The Debian package: what is in it runs, and its service is one that systemd takes. A release: its files are what its checksums say, and
//! made again they are the same.

use std::{env, fs, path::Path, process::Command};

use longshore_tests::{binaries, command::run, skip};
use tempfile::TempDir;

/// Makes dpkg-deb take seconds instead of a minute where other programs run. How small a package gets is not tested.
const QUICKLY: [(&str, &str); 1] = [("DPKG_DEB_COMPRESSOR_LEVEL", "0")];

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
    let mut build = Command::new(build);
    build.arg(&binaries).arg(root.path()).envs(QUICKLY);
    let built = run("deploy/debian/build", &mut build);
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

#[test]
fn a_release_made_twice_is_the_same_and_its_commands_run() {
    for tool in ["dpkg-deb", "fakeroot", "objcopy", "objdump", "sha256sum", "tar"] {
        if !is_installed(tool) {
            return skip::skipped(&format!(
                "there is no {tool}: install Debian's packages dpkg, fakeroot and binutils"
            ));
        }
    }
    let root = TempDir::new().unwrap();
    let release = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/release");
    let binaries = Path::new(binaries::command("longshored").get_program()).parent().unwrap().to_owned();
    let made = ["first", "second"].map(|name| {
        let out = root.path().join(name);
        let mut command = Command::new(&release);
        // The binaries that are here: to build those of a release takes as long as all other builds together.
        command.arg("--without-wheel").arg("--binaries").arg(&binaries).arg(&out);
        let made = run("deploy/release", command.env("SOURCE_DATE_EPOCH", "1700000000").envs(QUICKLY));
        assert_eq!(made.code, 0, "{made:?}");
        let checked =
            run("sha256sum", Command::new("sha256sum").args(["-c", "SHA256SUMS"]).current_dir(&out));
        assert_eq!(checked.code, 0, "{checked:?}");
        (out.clone(), fs::read_to_string(out.join("SHA256SUMS")).unwrap())
    });
    let [(out, sums), (_, again)] = &made;
    assert_eq!(sums, again);
    assert_eq!(sums.lines().count(), 3, "{sums}");
    assert_eq!(fs::read_dir(out).unwrap().count(), 4);
    let name = format!("longshore-{}-{}-linux", env!("CARGO_PKG_VERSION"), env::consts::ARCH);
    let archive = out.join(format!("{name}.tar.gz"));
    let unpacked = run("tar", Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(root.path()));
    assert_eq!(unpacked.code, 0, "{unpacked:?}");
    let tree = root.path().join(name);
    for name in ["longshore", "longshored"] {
        let version = run(name, Command::new(tree.join("bin").join(name)).arg("--version"));
        assert_eq!(version.stdout.trim(), format!("{name} {}", env!("CARGO_PKG_VERSION")));
    }
    for name in ["LICENSE", "README.md", "longshored.service"] {
        assert!(tree.join(name).is_file(), "no {name}");
    }
}
