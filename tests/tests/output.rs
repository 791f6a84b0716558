//! Machine-readable output of the command line: JSON of every command, errors as JSON, exit codes, clusters
//! by name, completions and manual pages.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use longshore_tests::{
    binaries,
    command::{Output, longshore, run},
    server::{Longshored, ServerOptions},
    tls::{Folders, identity},
    train::Train,
};
use serde_json::Value;
use tempfile::TempDir;

/// Runs `longshore` with these words on one server. Results are JSON.
fn on(server: &Longshored, words: &[&str]) -> Output {
    longshore([words, &["--servers", server.address(), "--output", "json"]].concat())
}

/// Returns a command's objects, one for each line. Each must have all of these keys.
#[track_caller]
fn objects(output: &Output, keys: &[&str]) -> Vec<Value> {
    assert_eq!(output.code, 0, "{output:?}");
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"));
    let objects: Vec<Value> = output.stdout.lines().map(parse).collect();
    assert!(!objects.is_empty(), "nothing was printed: {output:?}");
    for object in &objects {
        for key in keys {
            assert!(object.get(key).is_some(), "{key} is missing in {object}");
        }
    }
    objects
}

/// Returns the error of a command that ended with this code.
#[track_caller]
fn error(output: &Output, code: i32) -> Value {
    assert_eq!(output.code, code, "{output:?}");
    let last = output.stderr.lines().last().unwrap_or_default();
    let object: Value = serde_json::from_str(last).unwrap_or_else(|error| panic!("{error} in {output:?}"));
    for key in ["kind", "message", "field", "value", "limit", "remedy", "exit_code"] {
        assert!(object["error"].get(key).is_some(), "{key} is missing in {object}");
    }
    assert_eq!(object["error"]["exit_code"], code);
    object["error"].clone()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

#[test]
fn operators_commands_print_json() {
    let folder = TempDir::new().unwrap();
    let server = ServerOptions::new().checkpoint_dir(folder.path()).start();
    Train::new(4).args(["--checkpoint-every", "3"]).servers(&[server.address().to_string()]).run();
    let status = objects(
        &on(&server, &["status"]),
        &["job", "parameters", "servers", "state_hash", "norm", "last_step"],
    );
    assert_eq!((&status[0]["job"], &status[0]["last_step"]), (&"default".into(), &4.into()));
    assert_eq!(status[0]["servers"][0]["phase"], "idle");
    let top = objects(&on(&server, &["top"]), &["servers", "jobs"]);
    let job = &top[0]["jobs"][0];
    assert_eq!((&job["job"], &job["state"], &job["version"]), (&"default".into(), &"idle".into(), &4.into()));
    assert_eq!(job["steps"].as_array().map(Vec::len), Some(4), "{job}");
    assert!(job["steps"][3]["loss"].as_f64().is_some_and(|loss| loss > 0.0), "{job}");
    objects(&on(&server, &["checkpoints"]), &["job", "name", "version", "stale", "damage"]);
    objects(&on(&server, &["checkpoint", "--name", "by-hand"]), &["job", "name", "version", "manifests"]);
    let out = text(&folder.path().join("model"));
    let exported = objects(
        &on(&server, &["export", "--out", &out]),
        &["job", "version", "dtype", "out", "bytes", "files", "seconds"],
    );
    assert_eq!(exported[0]["out"], out.as_str());
    let imported = ["import", "--job", "tuned", "--like", "default", "--from", &out];
    objects(&on(&server, &imported), &["job", "params", "elements", "seconds"]);
    objects(&on(&server, &["delete", "--job", "default"]), &["job", "deleted"]);
    let restored = on(&server, &["restore", "--job", "default", "--name", "by-hand"]);
    assert_eq!(objects(&restored, &["job", "name", "version"])[0]["version"], 4);
    objects(&on(&server, &["doctor"]), &["check", "state", "said", "remedy"]);
    assert_eq!(error(&on(&server, &["resume", "--job", "default"]), 1)["kind"], "PRECONDITION");
    assert_eq!(
        error(&on(&server, &["step-back", "--job", "default", "--version", "3"]), 1)["kind"],
        "PRECONDITION"
    );
    objects(&on(&server, &["drain"]), &["servers", "drained"]);
}

#[test]
fn commands_without_servers_print_json() {
    let folder = TempDir::new().unwrap();
    let dir = |name: &str| text(&folder.path().join(name));
    let json = |words: &[&str]| longshore([words, &["--output", "json"]].concat());
    objects(
        &json(&["plan", "--params", "7B"]),
        &["parameters", "memory_bytes", "wire_bytes_per_step", "gpus", "short"],
    );
    let made = objects(
        &json(&["tls", "init", &dir("tls"), "--hosts", "localhost"]),
        &["dir", "server", "ca_key", "identities"],
    );
    assert_eq!(made[0]["identities"][1]["name"], "worker");
    let token = json(&["tls", "issue", &dir("tls"), "--out", &dir("token"), "--token"]);
    assert_eq!(objects(&token, &["dir", "of", "token_sha256", "next"])[0]["of"], "token");
    let pages = objects(&json(&["man", "--out", &dir("man")]), &["out", "pages"]);
    assert!(
        pages[0]["pages"].as_array().is_some_and(|pages| pages.contains(&"longshored.1".into())),
        "{pages:?}"
    );
    objects(&json(&["completions", "fish"]), &["program", "shell", "script"]);
    let bench = ["bench", "update", "--params", "1M", "--rounds", "1", "--filter", "adamw/bf16"];
    objects(&json(&bench), &["bench", "case", "gb_per_s", "limit_gb_per_s", "fraction"]);
    let wire = ["bench", "wire", "--megabytes", "1", "--rounds", "1", "--cases", "push tcp"];
    objects(&json(&wire), &["bench", "case", "gb_per_s", "cpu_s_per_gb"]);
    let storage = ["bench", "storage", "--params", "1M", "--rounds", "1", "--dir", &text(folder.path())];
    objects(&json(&storage), &["bench", "case", "gb_per_s", "step_s"]);
    objects(&longshore(["doctor", "--json"]), &["check", "state", "said", "remedy"]);
    assert_eq!(error(&json(&["inspect", &dir("none")]), 1)["exit_code"], 1);
}

/// A command whose results cannot be written fails, as on a full disk.
#[test]
fn a_stdout_that_takes_nothing_is_an_error() {
    for words in [&["completions", "bash"][..], &["plan", "--params", "7B"], &["--help"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = binaries::command("longshore").args(words).stdout(full).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains("No space left"), "{words:?}: {said}");
    }
}

#[test]
fn errors_say_by_fields_what_is_wrong() {
    let server = ServerOptions::new().start();
    let missing = error(&on(&server, &["delete", "--job", "nope"]), 1);
    assert_eq!((&missing["kind"], &missing["field"]), (&"NOT_FOUND".into(), &"job".into()));
    assert!(missing["message"].as_str().unwrap().contains(server.address()), "{missing}");
    let unreachable = error(&longshore(["status", "--servers", "127.0.0.1:1", "--output", "json"]), 1);
    assert_eq!((&unreachable["kind"], &unreachable["value"]), (&"UNAVAILABLE".into(), &"127.0.0.1:1".into()));
    let mistyped = error(&longshore(["status", "--output=json", "--sevrers", "x"]), 2);
    assert_eq!((&mistyped["kind"], &mistyped["field"]), (&"USAGE".into(), &"--sevrers".into()));
    assert!(mistyped["remedy"].as_str().unwrap().contains("--servers"), "{mistyped}");
    // The older flag --json changes only results, and errors stay text for scripts that parse them.
    let older = longshore(["status", "--servers", "127.0.0.1:1", "--json"]);
    assert!(
        older.code == 1 && older.stderr.starts_with("longshore: 127.0.0.1:1 cannot be reached"),
        "{older:?}"
    );
    let mut command = binaries::command("longshore");
    let by_variable = run("longshore", command.env("LONGSHORE_OUTPUT", "json").args(["inspect", "/nowhere"]));
    error(&by_variable, 1);
}

/// The help and docs/cli.md have the same table of exit codes, and each code means what the table says.
#[test]
fn exit_codes_are_what_the_help_says() {
    let help = longshore(["--help"]).stdout;
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/cli.md")).unwrap();
    let said: Vec<&str> = help.lines().skip_while(|line| !line.starts_with("Exit codes:")).skip(1).collect();
    assert_eq!(said.len(), 4, "{help}");
    for line in said {
        let (code, meaning) = line.trim().split_once("  ").unwrap();
        assert!(page.contains(&format!("| {code} | {meaning} |")), "docs/cli.md lacks {code}: {meaning}");
    }
    assert_eq!(longshore(["plan", "--params", "1M"]).code, 0);
    assert_eq!(longshore(["plan", "--params", "7B", "--memory", "1GiB"]).code, 1);
    assert_eq!(longshore(["inspect", "/nowhere"]).code, 1);
    for wrong in [
        &["plan", "--parms", "1M"][..],
        &["plan", "--preset", "nope"],
        &["plan", "--params", "1M", "--shard-elements", "1"],
        &["plan", "--params", "1M", "--servers", "2"],
        &["plan", "--params", "1M", "--frozen", "1M"],
        &["plan", "--params", "1B", "--gpu-tflops", "100"],
        &["status"],
        &["status", "--cluster", "nope"],
        &["frobnicate"],
    ] {
        let mut command = binaries::command("longshore");
        let output = run("longshore", command.env("XDG_CONFIG_HOME", "/nowhere").args(wrong));
        assert_eq!(output.code, 2, "{wrong:?}: {output:?}");
    }
}

/// A config file in a temporary folder, and commands that find it there.
struct Config(TempDir);

impl Config {
    fn new(text: &str) -> Config {
        let folder = TempDir::new().unwrap();
        fs::create_dir(folder.path().join("longshore")).unwrap();
        fs::write(folder.path().join("longshore/config.toml"), text).unwrap();
        Config(folder)
    }

    fn longshore(&self, variables: &[(&str, &str)], words: &[&str]) -> Output {
        let mut command = binaries::command("longshore");
        let variables: BTreeMap<_, _> = variables.iter().copied().collect();
        run("longshore", command.env("XDG_CONFIG_HOME", self.0.path()).envs(variables).args(words))
    }
}

#[test]
fn clusters_have_names() {
    let (first, second) = (ServerOptions::new().start(), ServerOptions::new().start());
    let config = Config::new(&format!(
        "default-cluster = \"first\"\n[clusters.first]\nservers = {:?}\n[clusters.second]\nservers = [{:?}]\n",
        first.address(),
        second.address()
    ));
    let asked = |variables: &[(&str, &str)], words: &[&str]| {
        let output = config.longshore(variables, &[&["status"], words].concat());
        assert_eq!(output.code, 0, "{output:?}");
        output.stdout.split_whitespace().next().unwrap_or_default().to_string()
    };
    assert_eq!(asked(&[], &[]), first.address());
    assert_eq!(asked(&[], &["--cluster", "second"]), second.address());
    assert_eq!(asked(&[("LONGSHORE_CLUSTER", "second")], &[]), second.address());
    assert_eq!(asked(&[("LONGSHORE_SERVERS", first.address())], &["--cluster", "second"]), second.address());
    assert_eq!(asked(&[("LONGSHORE_CLUSTER", "second")], &["--servers", first.address()]), first.address());
    // A list of servers is more specific than a cluster, so the list counts.
    let both = [("LONGSHORE_SERVERS", first.address()), ("LONGSHORE_CLUSTER", "second")];
    assert_eq!(asked(&both, &[]), first.address());
    let list = config.longshore(&[], &["clusters"]);
    assert!(list.stdout.starts_with(&format!("* first  {}  plain\n  second", first.address())), "{list:?}");
    let json = config.longshore(&[], &["clusters", "--output", "json"]);
    assert_eq!(objects(&json, &["cluster", "default", "servers", "tls_dir", "token_file"]).len(), 2);
    let both = config.longshore(&[], &["status", "--cluster", "first", "--servers", "a:1"]);
    assert!(both.code == 2 && both.stderr.contains("--cluster"), "{both:?}");
    // Training commands take a cluster only by name, so this plan does not connect to the default one.
    let trained = config.longshore(&[], &["plan", "--params", "1M"]);
    assert_eq!(trained.code, 0, "{trained:?}");
}

/// A cluster's entry also names its certificates, and a file with its token.
#[test]
fn a_cluster_is_entered_as_its_entry_says() {
    let hash = |token: &str| {
        let mut sum = Command::new("sh");
        let output = run("sha256sum", sum.args(["-c", &format!("printf %s {token} | sha256sum")]));
        output.stdout.split_whitespace().next().unwrap_or_default().to_string()
    };
    let roles = ["operator", "worker", "reader"];
    let folders = Folders::new(
        &[identity("boss", &roles, &["*"], &[]), identity("bearer", &roles, &["*"], &[&hash("opensesame")])]
            .concat(),
    );
    let server = ServerOptions::new().tls(&folders.server()).start();
    let (client, token) = (folders.client("boss"), folders.token("wrong"));
    fs::write(token.join("right"), "opensesame\n").unwrap();
    let config = Config::new(&format!(
        "[clusters.certificate]\nservers = {address:?}\ntls-dir = {client:?}\n\
         [clusters.token]\nservers = {address:?}\ntls-dir = {token:?}\ntoken-file = {:?}\n\
         [clusters.stranger]\nservers = {address:?}\ntls-dir = {token:?}\n",
        token.join("right"),
        address = server.address(),
    ));
    for name in ["certificate", "token"] {
        let status = config.longshore(&[], &["status", "--cluster", name]);
        assert!(status.code == 0 && status.stdout.contains("no jobs"), "{name}: {status:?}");
    }
    let bench =
        ["bench", "step", "--params", "1M", "--rounds", "1", "--steps", "1", "--cluster", "certificate"];
    let measured = config.longshore(&[], &bench);
    assert_eq!(measured.code, 0, "{measured:?}");
    let probe = config.longshore(&[], &["plan", "--probe", "--cluster", "token"]);
    assert!(probe.code == 0 && !probe.stdout.contains("loopback"), "{probe:?}");
    let refused = config.longshore(&[], &["status", "--cluster", "stranger"]);
    assert_eq!(refused.code, 1, "{refused:?}");
}
