//! The Debian package: its programs run, systemd accepts its service, and its scripts do their work. The
//! release: its files match their checksums, and a second build gives the same files.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use longshore_tests::{binaries, command::run, skip};
use tempfile::TempDir;

/// Without compression, dpkg-deb takes seconds instead of a minute on a busy machine. The package's size is not tested.
const QUICKLY: [(&str, &str); 1] = [("DPKG_DEB_COMPRESSOR_LEVEL", "0")];

const DPKG: [&str; 4] = ["dpkg-deb", "dpkg", "objdump", "strip"];

/// Reports the test as skipped where a program of these Debian packages is missing.
#[track_caller]
fn lacks(programs: &[&str], packages: &str) -> bool {
    let is_missing = |program: &&&str| Command::new(program).arg("--version").output().is_err();
    let missing = programs.iter().find(is_missing);
    if let Some(program) = missing {
        skip::skipped(&format!("there is no {program}: install Debian's {packages}"));
    }
    missing.is_some()
}

/// Builds the package of the binaries under test in this folder.
fn build_package(folder: &Path) {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/debian/build");
    let built = run("deploy/debian/build", Command::new(build).arg(built_at()).arg(folder).envs(QUICKLY));
    assert_eq!(built.code, 0, "{built:?}");
}

fn built_at() -> PathBuf {
    Path::new(binaries::command("longshored").get_program()).parent().unwrap().to_owned()
}

#[test]
fn a_debian_package_has_both_commands_and_a_service() {
    if lacks(&DPKG, "packages dpkg and binutils") {
        return;
    }
    let root = TempDir::new().unwrap();
    build_package(root.path());
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
    // The installed configuration is valid for the server, here with other paths and ports.
    let config = fs::read_to_string(tree.join("etc/longshore/longshored.toml")).unwrap();
    let here = config
        .replace("/run/", &format!("{}/run/", root.path().display()))
        .replace("/var/", &format!("{}/var/", root.path().display()))
        // This host has no group `longshore`.
        .replace("\"longshore\"", &format!("\"{}\"", rustix::process::getgid().as_raw()))
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
}

#[test]
fn systemd_takes_the_service() {
    if lacks(&["systemd-analyze"], "package systemd") {
        return;
    }
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd/longshored.service");
    // The service's program is not installed here. The unit must give no other message.
    let said = run("systemd-analyze", Command::new("systemd-analyze").arg("verify").arg(&unit));
    let others: Vec<&str> =
        said.stderr.lines().filter(|line| !line.contains("/usr/bin/longshored")).collect();
    assert!(others.is_empty(), "{others:?}");
    // Members of the group may write to no folder of the service.
    let text = fs::read_to_string(&unit).unwrap();
    assert!(text.lines().any(|line| line == "UMask=0077"), "{text}");
}

/// Returns a shell that runs a script in a copy-on-write overlay of this system, with `folder` as /mnt. The
/// overlay lies in memory and ends with the script. None where this user has no permission.
fn in_a_copy(folder: &Path, script: &str) -> Option<Command> {
    const COPY: &str = "mount -t tmpfs tmpfs /mnt && mkdir /mnt/upper /mnt/work /mnt/root \
        && mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root \
        && mount --bind /dev /mnt/root/dev && mount --bind /proc /mnt/root/proc && mount --bind \"$0\" /mnt/root/mnt";
    let shell = |script: &str| {
        let mut shell = Command::new("unshare");
        shell.args(["--mount", "sh", "-c", &format!("{COPY} && exec chroot /mnt/root sh -euc \"$1\"")]);
        shell.arg(folder).arg(script);
        shell
    };
    let tried = shell("command -v dpkg useradd getent").output();
    tried.is_ok_and(|output| output.status.success()).then(|| shell(script))
}

#[test]
fn the_package_is_installed_upgraded_and_removed_and_no_state_goes() {
    if lacks(&DPKG, "packages dpkg and binutils") {
        return;
    }
    // systemd does not run there, so the scripts' requests to it are recorded.
    const SCRIPT: &str = r#"
        exec 2>&1
        cd /mnt
        says() { printf '%s: %s\n' "$@"; }
        mkdir -p /run/systemd/system
        printf '#!/bin/sh\necho "systemctl $*"\n' > /usr/local/bin/systemctl
        chmod +x /usr/local/bin/systemctl
        export PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive
        conf=/etc/longshore/longshored.toml
        at() { says "$1" "$(stat -c '%U:%G %a' "$1" 2>/dev/null || echo gone)"; }
        all() { for file in /usr/bin/longshored $conf /var/lib/longshore/state /var/lib/longshore/state/job; do at $file; done; }
        echo == install; dpkg -i longshore_*.deb; all
        says version "$(longshored --version)"
        # The service's start makes both folders.
        install -d -m 0700 -o longshore -g longshore /var/lib/longshore /var/lib/longshore/state
        echo '# edited' >> $conf; : > /var/lib/longshore/state/job
        echo == upgrade
        dpkg-deb -R longshore_*.deb tree; sed -i 's/^Version: .*/&+1/' tree/DEBIAN/control; dpkg-deb -b tree newer.deb
        dpkg -i newer.deb; all; says edited "$(tail -1 $conf)"
        # The service's user links to /etc, and the operator has deleted the configuration.
        echo == again
        (cd /var/lib/longshore; mv state kept; ln -s /etc state); mv $conf kept
        dpkg -i newer.deb; at /etc; at $conf
        (cd /var/lib/longshore; rm state; mv kept state); mv kept $conf
        echo == remove; dpkg -r longshore; all
        echo == purge; dpkg -P longshore; all
        says user "$(getent passwd longshore | cut -d: -f1,6,7)"
    "#;
    let root = TempDir::new().unwrap();
    let Some(mut copy) = in_a_copy(root.path(), SCRIPT) else {
        return skip::skipped(
            "this user may not mount an overlay over this system's files, or it is no Debian",
        );
    };
    build_package(root.path());
    let out = run("dpkg in a copy of this system", copy.envs(QUICKLY));
    assert_eq!(out.code, 0, "{out:?}");
    let phases: Vec<&str> = out.stdout.split("== ").collect();
    let [_, install, upgrade, again, remove, purge] = phases[..] else { panic!("{}", out.stdout) };
    let has = |phase: &str, lines: &[&str]| {
        for line in lines {
            assert!(phase.lines().any(|said| said.contains(line)), "no {line:?} in {phase}");
        }
    };
    let (conf, state) = ("longshored.toml: root:longshore 640", "longshore/state: longshore:longshore 700");
    let version = format!("version: longshored {}", env!("CARGO_PKG_VERSION"));
    has(install, &["longshored: root:root 755", conf, "state: gone", &version, "systemctl daemon-reload"]);
    has(upgrade, &["longshored: root:root 755", conf, state, "state/job: root:root 644", "edited: # edited"]);
    has(again, &["/etc: root:root 755", "longshored.toml: gone", "systemctl daemon-reload"]);
    // An upgrade leaves the service running, and a removal stops it in order.
    assert!(!upgrade.contains("disable") && !install.contains("disable"), "{}", out.stdout);
    has(
        remove,
        &[
            "systemctl --no-reload disable --now longshored.service",
            "longshored: gone",
            conf,
            "state/job: root:root 644",
        ],
    );
    has(
        purge,
        &[
            "longshored.toml: gone",
            "state/job: root:root 644",
            "may hold the state of jobs",
            "user: longshore:",
        ],
    );
}

#[test]
fn a_release_made_twice_is_the_same_and_its_commands_run() {
    let tools = ["dpkg-deb", "fakeroot", "objcopy", "objdump", "sha256sum", "tar"];
    if lacks(&tools, "packages dpkg, fakeroot and binutils") {
        return;
    }
    let root = TempDir::new().unwrap();
    let release = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/release");
    let made = ["first", "second"].map(|name| {
        let out = root.path().join(name);
        let mut command = Command::new(&release);
        // The binaries under test are packed, since building a release's own takes as long as all other builds
        // together.
        command.arg("--without-wheel").arg("--binaries").arg(built_at()).arg(&out);
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
