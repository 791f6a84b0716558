//! The command lines of the documents and of errors' remedies. The binaries' parsers take each of them, and sequences
//! run against real servers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use longshore_tests::{
    binaries,
    command::run,
    server::{self, Longshored, ServerOptions, own_addresses},
    train::Train,
};
use longshore_wire::{
    tls::Credentials,
    v1::{
        DescribeRequest, JoinRequest, PauseRequest, admin_client::AdminClient,
        training_client::TrainingClient,
    },
};
use longshore_worker::session::Address;
use tempfile::TempDir;
use tokio::runtime::Runtime;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Programs in the documents that no test of this file runs, with the reason.
const ELSEWHERE: [(&str, &str); 24] = [
    (".ci/run", "runs these tests"),
    ("tests/run", "runs these tests"),
    ("apt-get", "installs packages of the host"),
    ("benchmarks/delay.py", "trains for minutes"),
    ("benchmarks/state.sh", "trains for minutes"),
    ("cargo", "builds what is tested"),
    ("cd", "leads to a folder of the sources"),
    ("deploy/release", "packages.rs runs it"),
    ("docker", "container.rs runs the image where there is an engine"),
    ("dpkg", "packages.rs installs the package in a copy of the system"),
    ("fakeroot", "packages.rs runs the build"),
    ("grpcurl", "stock_client.rs has another stock client"),
    ("helm", "chart.rs renders the chart"),
    ("install", "writes into the host's folders"),
    ("journalctl", "needs systemd as process 1"),
    ("kubectl", "needs a cluster; chart.rs checks the manifest"),
    ("pip", "builds the Python package, whose tests are its own"),
    ("python", "runs in the tests of the Python package"),
    ("rustup", "installs a toolchain"),
    ("sbatch", "slurm.rs runs the script where there is Slurm"),
    ("scp", "needs another host"),
    ("systemctl", "needs systemd as process 1; packages.rs checks the unit"),
    ("torchrun", "test_elastic.py runs it, with two agents"),
    ("useradd", "changes the host's users"),
];

/// Parts of `longshore` lines, with a reason. A line with such a part is parsed, but not run.
const NOT_RUN: [(&str, &str); 8] = [
    ("--lost", "needs a server that is lost; replicas.rs runs it beside ranks"),
    ("--wait", "waits until ranks make steps; scale.rs runs it beside them"),
    ("longshore bench", "measures for minutes; bench.rs runs short ones"),
    ("--model", "reads a model's files, as the tests of plan do"),
    ("--hardware", "reads what --probe prints, as bench.rs does"),
    ("--probe", "measures for seconds; bench.rs runs it"),
    ("--world-size 256", "simulates each GPU for seconds, as a test of plan does with 512"),
    ("--world-size 512", "simulates each GPU for seconds, as a test of plan does"),
];

/// Lines to run before a command that begins with these words, because its page takes their results for granted.
const BEFORE: [(&str, &[&str]); 5] = [
    ("longshore checkpoint --job gpt", &[TRAIN_GPT]),
    ("longshore checkpoint --servers host1:7070,host2:7070 --job gpt", &[TRAIN_GPT]),
    (
        "longshore import",
        &[
            "longshore train --servers host1:7070 --job template",
            "longshore export --servers host1:7070 --job template --out model/",
        ],
    ),
    ("longshore resume", &["pause"]),
    ("longshore scale", &["LONGSHORE_TLS_DIR=tls/worker longshore train --servers host1:7070 --job gpt"]),
];
const TRAIN_GPT: &str =
    "LONGSHORE_TLS_DIR=tls/worker longshore train --servers host1:7070,host2:7070 --job gpt";

/// Lines to run before a section that makes no certificates or starts no servers.
const CERTIFICATES: &str = "longshore tls init tls --hosts host1,host2";
const SERVERS: &str = "longshored --tls-dir server --checkpoint-dir /mnt/checkpoints";

/// The command lines under one heading.
struct Section {
    name: String,
    lines: Vec<String>,
}

/// Returns the pages' texts by path, beginning at the root.
fn pages() -> BTreeMap<String, String> {
    let docs = fs::read_dir(Path::new(ROOT).join("docs")).unwrap();
    let docs = docs.map(|entry| format!("docs/{}", entry.unwrap().file_name().to_string_lossy()));
    let docs = docs.filter(|name| name.ends_with(".md"));
    let others = ["README.md", "CONTRIBUTING.md", "deploy/README.md"].map(String::from);
    let read = |name: String| (name.clone(), fs::read_to_string(Path::new(ROOT).join(name)).unwrap());
    others.into_iter().chain(docs).map(read).collect()
}

/// Returns the shell blocks of all pages by heading, with continued lines joined.
fn sections() -> Vec<Section> {
    let mut found: Vec<Section> = Vec::new();
    for (page, text) in pages() {
        let (mut fence, mut name) = (None, page.clone());
        for line in text.replace("\\\n", " ").lines() {
            match (line.strip_prefix("```"), fence) {
                (Some(language), None) => fence = Some(language == "sh"),
                (Some(_), Some(_)) => fence = None,
                (None, None) if line.starts_with('#') => {
                    name = format!("{page}: {}", line.trim_matches(['#', ' ']))
                }
                (None, Some(true)) if found.last().is_some_and(|section| section.name == name) => {
                    found.last_mut().unwrap().lines.push(line.to_string());
                }
                (None, Some(true)) => {
                    found.push(Section { name: name.clone(), lines: vec![line.to_string()] })
                }
                _ => {}
            }
        }
    }
    found
}

/// A program's call: its variables, and its words without comment and redirection.
struct Call {
    variables: Vec<(String, String)>,
    words: Vec<String>,
}

/// Splits a text at spaces outside of double quotes.
fn words(text: &str) -> Vec<String> {
    let parts = text.split('"').enumerate();
    let words = parts.flat_map(|(index, part)| match index % 2 {
        0 => part.split_whitespace().map(String::from).collect(),
        _ => vec![part.to_string()],
    });
    words.collect()
}

fn calls(line: &str) -> Vec<Call> {
    let line = line.split(" #").next().unwrap_or_default().split(" > ").next().unwrap_or_default();
    let line = line.replace("cargo run --release --", "longshore").replace("target/release/", "");
    let call = |part: &str| {
        let mut words = words(part);
        let is_variable = |word: &String| word.starts_with("LONGSHORE") && word.contains('=');
        let exports = usize::from(words.first().is_some_and(|word| word == "export"));
        let count = words[exports..].iter().take_while(|word| is_variable(word)).count();
        let variables = words.drain(exports..exports + count);
        let variables = variables.filter_map(|word| {
            word.split_once('=').map(|(name, value)| (name.to_string(), value.to_string()))
        });
        Call { variables: variables.collect(), words }
    };
    line.split("&&").map(call).collect()
}

/// Checks that the binary's parser takes the words. A final --help keeps the command from running.
#[track_caller]
fn is_taken(place: &str, words: &[String]) {
    let help = run(&words[0], binaries::command(&words[0]).args(&words[1..]).arg("--help"));
    // Prose may name a flag without its value, so the parser may complain about a missing value.
    let taken = help.code == 0 || help.stderr.contains("a value is required");
    assert!(taken, "{place}: {}: {}", words.join(" "), help.stderr);
}

/// Returns the commands in backticks, up to the first placeholder.
fn inline(text: &str) -> Vec<Vec<String>> {
    let is_placeholder = |word: &String| {
        word.contains("...") || word.chars().all(|letter| letter.is_ascii_uppercase() || letter == '|')
    };
    let parts = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    let ours = parts.filter(|part| part.starts_with("longshore ") || part.starts_with("longshored "));
    let words = ours.map(|part| words(part).into_iter().take_while(|word| !is_placeholder(word)));
    words.map(|words| words.map(|word| word.replace("ADDRESS", "127.0.0.1")).collect()).collect()
}

#[test]
fn every_command_line_of_the_pages_is_one_that_the_binaries_take() {
    let mut count = 0;
    for (page, text) in pages() {
        for words in inline(&text) {
            is_taken(&page, &words);
            count += 1;
        }
    }
    for section in sections() {
        for Call { words, .. } in section.lines.iter().flat_map(|line| calls(line)) {
            match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                [] | ["export", ..] => continue,
                ["longshore" | "longshored", ..] => is_taken(&section.name, &words),
                ["docker", "exec", _, ..] => is_taken(&section.name, &words[3..]),
                [program, ..] => {
                    let known = ELSEWHERE.iter().any(|(name, _)| *name == program);
                    assert!(known, "{}: {program} is neither run nor named with a reason", section.name);
                }
            }
            count += 1;
        }
    }
    assert!(count > 100, "{count} commands");
}

/// Servers, folder and environment variables of a sequence of commands.
struct Stage {
    servers: Vec<Longshored>,
    folder: TempDir,
    variables: BTreeMap<String, String>,
    /// The subcommands that have run.
    ran: BTreeSet<String>,
}

impl Stage {
    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Runs a line of a page, with the test's own addresses, folders and sizes.
    fn line(&mut self, name: &str, line: &str) {
        if NOT_RUN.iter().any(|(part, _)| line.contains(part)) {
            return;
        }
        let before = BEFORE.iter().find(|(beginning, _)| line.starts_with(beginning));
        for earlier in before.map_or(&[][..], |(_, lines)| lines) {
            self.line(name, earlier);
        }
        for Call { variables, words } in calls(line) {
            let words = self.here(&words);
            let mut set = self.variables.clone();
            set.extend(variables.into_iter().map(|(name, value)| (name, self.here(&[value]).remove(0))));
            match words.first().map(String::as_str) {
                Some("export") => self.variables = set,
                Some("longshored") => self.start(&words[1..]),
                Some("longshore") => self.run(name, &words[1..], &set),
                Some("pause") => self.pause(),
                _ => {}
            }
        }
    }

    /// Replaces hosts, folders and numbers of steps.
    fn here(&self, words: &[String]) -> Vec<String> {
        let mut words = words.to_vec();
        if let Some(hosts) = words.iter().position(|word| word == "--hosts") {
            let all: Vec<String> = own_addresses().iter().map(ToString::to_string).collect();
            words[hosts + 1] = all.join(",");
        }
        for word in &mut words {
            for (index, server) in self.servers.iter().enumerate() {
                *word = word.replace(&format!("host{}:7070", index + 1), server.address());
            }
            if let Some(first) = self.servers.first() {
                *word = word.replace("127.0.0.1:7070", first.address());
            }
            for (theirs, ours) in [("127.0.0.1:7071", "127.0.0.1:0"), ("10.0.0.1:7071", "127.0.0.1:0")] {
                *word = word.replace(theirs, ours);
            }
            *word = word.replace("/mnt/", &self.path("")).replace("00500", "00002");
            if *word == "500" {
                *word = "2".into();
            }
        }
        words
    }

    /// Starts three servers with these flags, except for addresses and memory.
    fn start(&mut self, words: &[String]) {
        self.servers.clear();
        let mut flags = without(words, &["--listen", "--memory"]);
        match flags.iter().position(|word| word == "--tls-dir") {
            Some(at) => flags[at + 1] = self.path("tls/server"),
            None => drop(self.variables.remove("LONGSHORE_TLS_DIR")),
        }
        self.servers = server::servers(3, &ServerOptions::new().args(flags).allow("job paused"));
    }

    fn run(&mut self, place: &str, words: &[String], variables: &BTreeMap<String, String>) {
        let subcommand = words[0].clone();
        let rest = without(&words[1..], &["--data", "--preset", "--rank"]);
        // `train` owns the text to train on, which must outlive the command.
        let train = Train::new(2).args(rest).args(["--steps", "2"]);
        let mut command = match subcommand.as_str() {
            "train" => train.command(),
            _ => binaries::command("longshore"),
        };
        match subcommand.as_str() {
            "train" => {}
            "top" => drop(command.args(words).arg("--once")),
            _ => drop(command.args(words)),
        }
        let is_embedded =
            !variables.contains_key("LONGSHORE_SERVERS") && !words.contains(&"--servers".into());
        let is_used = |name: &&String| !(is_embedded && *name == "LONGSHORE_TLS_DIR");
        command.envs(variables.iter().filter(|(name, _)| is_used(name)));
        let done = run("longshore", command.current_dir(self.folder.path()));
        // With exit code 1, `plan` says that the job does not fit, and `doctor` that the host lacks something.
        let finds = ["plan", "doctor"].contains(&subcommand.as_str()) && done.code == 1;
        assert!(done.code == 0 || finds, "{place}: longshore {}: {done:?}", words.join(" "));
        self.ran.insert(subcommand);
    }

    /// Pauses the job gpt, as its rank 0 does at the smallest loss scale.
    fn pause(&self) {
        let credentials = Credentials::read(&self.folder.path().join("tls/worker")).unwrap();
        Runtime::new().unwrap().block_on(async {
            for server in &self.servers[..2] {
                let address = Address::new(server.address(), Some(&credentials)).unwrap();
                let channel = address.connect().await.unwrap();
                let describe = DescribeRequest { job: "gpt".into(), ..Default::default() };
                let job = AdminClient::new(channel.clone()).describe(describe).await.unwrap().into_inner();
                // The ended run's rank has left, so the test joins in its place with a higher incarnation.
                let incarnation = job.ranks[0].incarnation + 1;
                let join = JoinRequest { job: "gpt".into(), incarnation, ..Default::default() };
                let pause = PauseRequest { job: "gpt".into(), incarnation, reason: "a test".into() };
                let mut training = TrainingClient::new(channel);
                training.join(join).await.unwrap();
                training.pause(pause).await.unwrap();
            }
        });
    }
}

/// Leaves flags with their values out.
fn without(words: &[String], flags: &[&str]) -> Vec<String> {
    let mut left = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match flags.contains(&word.as_str()) {
            true => drop(words.next()),
            false => left.push(word.clone()),
        }
    }
    left
}

#[test]
fn sequences_of_the_pages_and_remedies_of_errors_run() {
    let mut ran = BTreeSet::new();
    for section in sections() {
        let has = |part: &str| section.lines.iter().any(|line| line.contains(part));
        if !has("longshore ") && !has("longshored ") {
            continue;
        }
        let folder = TempDir::new().unwrap();
        fs::create_dir(folder.path().join("checkpoints")).unwrap();
        let worker = ("LONGSHORE_TLS_DIR".to_string(), "tls/worker".to_string());
        let variables = BTreeMap::from([worker]);
        let mut stage = Stage { servers: Vec::new(), folder, variables, ran: BTreeSet::new() };
        if !has("tls init") {
            stage.line(&section.name, CERTIFICATES);
        }
        if !has("longshored ") && has(":7070") {
            stage.line(&section.name, SERVERS);
        }
        for line in &section.lines {
            stage.line(&section.name, line);
        }
        ran.append(&mut stage.ran);
    }
    for words in inline(&pages()["docs/errors.md"]) {
        assert!(ran.contains(&words[1]), "a remedy names `{}`, which no page runs", words.join(" "));
    }
}
