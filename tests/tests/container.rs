//! The container image. Built from the Dockerfile, it serves as the user named there, on a read-only root
//! without capabilities. The server writes to its volume, and drains when stopped. With `LONGSHORE_SOAK` the
//! image also builds the binaries.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command},
    time::Duration,
};

use longshore_tests::{
    binaries,
    command::{Output, done, run},
    conformance::cluster::eventually,
    http,
    process::Process,
    skip, soak,
    train::Train,
};
use serde_json::Value;
use tempfile::TempDir;

/// Deadline of a build of the whole workspace, on two shared cores.
const BUILD: Duration = Duration::from_secs(3600);
/// The settings of deploy/container/compose.yaml: the root file system is read-only, and all capabilities are
/// dropped.
const HARDENED: [&str; 6] = [
    "--rm",
    "--network=host",
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--shm-size=1g",
];
const STEPS: u64 = 4;

/// An image with a tag of this process. Drop removes the image and its containers.
struct Image {
    tool: &'static str,
    name: String,
}

impl Image {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.tool);
        command.args(arguments);
        command
    }

    fn tool(&self, arguments: &[&str]) -> Output {
        run(self.tool, &mut self.command(arguments))
    }

    /// Returns the name of the serving container.
    fn server(&self) -> String {
        self.name.replace(':', "-")
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let server = self.server();
        for arguments in [["rm", "--force", "--volumes", &server], ["image", "rm", "--force", &self.name]] {
            let _ = self.command(&arguments).output();
        }
    }
}

/// Returns a tool that can build here, or the reason why there is none.
fn tool() -> Result<&'static str, String> {
    let answers = |tool: &&str| Command::new(tool).arg("info").output().is_ok_and(|out| out.status.success());
    let found = ["docker", "podman"].into_iter().find(answers);
    found.ok_or(
        "neither `docker info` nor `podman info` ends with 0: install podman, or start Docker's daemon"
            .to_string(),
    )
}

/// Builds the image with the binaries under test instead of the Dockerfile's first stage. The first stage
/// takes as long as all other builds together. `Err` gives the reason why no build is possible here.
fn build() -> Result<Image, String> {
    let tool = tool()?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let dockerfile = root.join("deploy/container/Dockerfile");
    let text = fs::read_to_string(&dockerfile).expect("the Dockerfile");
    let last = text.rfind("\nFROM ").expect("two stages");
    let whole = soak::runs();
    let needed = if whole { text.as_str() } else { &text[last..] };
    for base in needed.lines().filter_map(|line| line.strip_prefix("FROM ")?.split(' ').next()) {
        if run(tool, Command::new(tool).args(["image", "inspect", base])).code != 0 {
            return Err(format!("the image {base} is not here: {tool} pull {base}"));
        }
    }
    let folder = TempDir::new().unwrap();
    let (dockerfile, context) = if whole { (dockerfile, root) } else { quick(folder.path(), &text[last..]) };
    let image = Image { tool, name: format!("longshore-test:{}", process::id()) };
    let mut command = image.command(&["build", "--network=host", "--tag", &image.name, "--file"]);
    let mut building = Process::start("the image's build", command.arg(dockerfile).arg(context));
    let status = building.wait(BUILD);
    assert!(status.success(), "{status}: {}", building.stderr());
    Ok(image)
}

/// Returns a Dockerfile of the last stage, and its context. The context has the binaries under test instead
/// of the first stage's.
fn quick(folder: &Path, last: &str) -> (PathBuf, PathBuf) {
    let context = folder.join("context");
    let release = context.join("source/target/release");
    fs::create_dir_all(&release).unwrap();
    fs::create_dir(context.join("state")).unwrap();
    for name in ["longshore", "longshored"] {
        fs::copy(binaries::command(name).get_program(), release.join(name)).unwrap();
    }
    let dockerfile = folder.join("Dockerfile");
    fs::write(&dockerfile, last.replace("--from=build ", "")).unwrap();
    (dockerfile, context)
}

#[test]
fn the_image_serves_unprivileged_and_drains() {
    let image = match build() {
        Ok(image) => image,
        Err(reason) => return skip::skipped(&reason),
    };
    let version = image.tool(&["run", "--rm", &image.name, "--version"]);
    if version.stderr.contains("`GLIBC_") {
        return skip::skipped(
            "the binaries were built with a newer glibc than the image has: --soak builds them in it",
        );
    }
    // Docker and podman end with 125 or 126 if the engine is at fault. With "exec" in the message, the image's command
    // is at fault instead.
    if matches!(version.code, 125 | 126) && !version.stderr.contains("exec") {
        return skip::skipped(&format!("{} runs no container here: {}", image.tool, version.stderr.trim()));
    }
    assert_eq!(version.stdout.trim(), format!("longshored {}", env!("CARGO_PKG_VERSION")), "{version:?}");
    let user = image.tool(&["image", "inspect", "--format", "{{.Config.User}}", &image.name]);
    assert_eq!(user.stdout.trim(), "65532:65532", "{user:?}");

    let mut command = image.command(&["run", "--name", &image.server()]);
    // The image's own flags, at free ports.
    let flags =
        ["--listen=127.0.0.1:0", "--http=127.0.0.1:0", "--memory=1GiB", "--state-dir=/var/lib/longshore"];
    let mut server = Process::start("the container", command.args(HARDENED).arg(&image.name).args(flags));
    let said = server.line().unwrap_or_default();
    let address =
        said.strip_prefix("longshored listening on ").unwrap_or_else(|| panic!("{}", server.stderr()));
    // stdout and stderr come separately, so the log may not have the status page's address yet.
    let page = eventually("the status page's address", || {
        let log = server.stderr();
        let (page, _) = log.split_once("url=http://")?.1.split_once('/')?;
        Some(page.to_string())
    });
    for path in ["/healthz", "/readyz"] {
        assert_eq!(http::get(&page, path).0, 200, "{path}");
    }
    for tier in ["memory", "nvme"] {
        let job = Train::new(STEPS).args(["--job", tier]);
        let expected = job.undisturbed().hash;
        let trained = job.args(["--tier", tier]).servers(&[address.to_string()]).run();
        assert_eq!(trained.end.state_hash, expected, "{tier}: {}", server.stderr());
    }
    // The image's other program, `longshore`, runs in a container of its own.
    let mut status = image.command(&["run", "--entrypoint=/usr/bin/longshore"]);
    let status =
        run("status", status.args(HARDENED).args([&image.name, "status", "--json", "--servers", address]));
    assert!(status.code == 0 && status.stdout.contains("nvme"), "{status:?}");

    // `stop` sends the signal that the image names.
    let stopped = image.tool(&["stop", "-t", "60", &image.server()]);
    assert_eq!(stopped.code, 0, "{stopped:?}");
    assert_eq!(server.code(), 0, "{}", server.stderr());
    assert!(server.stderr().contains("draining"), "{}", server.stderr());
}

/// Returns the compose file, parsed by Python's YAML. None where this machine's Python has no YAML.
fn compose() -> Option<Value> {
    let python = env::var_os("LONGSHORE_TEST_PYTHON")
        .expect("LONGSHORE_TEST_PYTHON names no Python: run tests/run, which makes one");
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/container/compose.yaml");
    let mut parse = Command::new(python);
    parse
        .args(["-c", "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))"])
        .arg(file);
    let parsed = run("python", &mut parse);
    if parsed.stderr.contains("No module named 'yaml'") {
        skip::skipped("this Python has no PyYAML: tests/python/requirements.txt has it");
        return None;
    }
    assert_eq!(parsed.code, 0, "{parsed:?}");
    Some(serde_json::from_str(&parsed.stdout).unwrap())
}

#[test]
fn the_compose_files_commands_run_and_its_health_check_reads_no_state() {
    let Some(compose) = compose() else { return };
    let folder = TempDir::new().unwrap();
    for (name, service) in compose["services"].as_object().unwrap() {
        let words = |of: &Value| -> Vec<String> {
            of.as_array().unwrap().iter().map(|word| word.as_str().unwrap().to_string()).collect()
        };
        // The compose file's flags, but with addresses and a folder that a test may use.
        let state = folder.path().join(name);
        fs::create_dir(&state).unwrap();
        let flags = words(&service["command"]).into_iter().map(|flag| match flag.as_str() {
            "0.0.0.0:7070" | "0.0.0.0:7071" => "127.0.0.1:0".to_string(),
            "/var/lib/longshore" => state.display().to_string(),
            _ => flag,
        });
        let server = Process::start(name, binaries::command("longshored").args(flags));
        let said = server.line().unwrap_or_default();
        let address =
            said.strip_prefix("longshored listening on ").unwrap_or_else(|| panic!("{}", server.stderr()));
        Train::new(STEPS).servers(&[address.to_string()]).run();
        let check = words(&service["healthcheck"]["test"]);
        assert_eq!(check[..2], ["CMD", "/usr/bin/longshore"]);
        let check = check[2..].iter().map(|word| if word == "127.0.0.1:7070" { address } else { word });
        let healthy = done(check);
        assert!(healthy.stdout.contains("state hash: left out, as --no-hash says"), "{healthy:?}");
    }
}
