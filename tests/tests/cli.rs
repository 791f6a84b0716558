//! The operator's view: every command's answer and error, exit codes, health, and ranks started and killed by
//! hand.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use longshore_tests::{
    binaries,
    command::{Output, longshore, longshored, run},
    event::Event,
    process::{DEADLINE, children, exists},
    server::{self, Longshored, ServerOptions},
    status::{job_status, status},
    train::{Running, Train},
};
use longshore_wire::v1;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tokio_stream::StreamExt;
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_reflection::pb::{
    v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    },
    v1alpha,
};

/// More steps than any test waits for: the worker is killed with its test.
const ENDLESS: u64 = 1_000_000;

fn one(server: &Longshored) -> [String; 1] {
    [server.address().to_string()]
}

/// Starts a server and a worker in the middle of a job.
fn under_way(options: ServerOptions) -> (Longshored, Running) {
    let server = options.start();
    let mut running = Train::new(ENDLESS).servers(&one(&server)).start();
    running.until_step(3);
    (server, running)
}

fn call(command: &str, server: &Longshored, more: &[&str]) -> Output {
    longshore([&[command, "--servers", server.address()], more].concat())
}

/// Checks that a command failed with this exit code, and with all of these words on stderr.
#[track_caller]
fn refused(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(output.code, code, "{output:?}");
    for word in words {
        assert!(output.stderr.contains(word), "{word:?} is missing: {}", output.stderr);
    }
}

#[track_caller]
fn said(output: &Output, words: &[&str]) {
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{output:?}");
    for word in words {
        assert!(output.stdout.contains(word), "{word:?} is missing: {}", output.stdout);
    }
}

/// Returns the only JSON object of an answer.
#[track_caller]
fn json(output: &Output) -> Value {
    assert_eq!((output.code, output.stderr.as_str()), (0, ""), "{output:?}");
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error} in {}", output.stdout))
}

#[test]
fn status_of_a_running_job() {
    let (server, _running) = under_way(ServerOptions::new());
    let words = [
        "loss scale 1, learning rate ",
        "job default",
        "268160 parameters",
        "master weights fp32, state fp32",
        "training",
        "rank 0  joined",
        "state hash",
    ];
    said(&call("status", &server, &[]), &words);
    let before = job_status(&one(&server));
    let at = &before.servers[0];
    assert_eq!(
        (before.job.as_str(), at.phase.as_str(), at.address.as_str()),
        ("default", "training", server.address())
    );
    assert!(at.version >= 3 && at.pushed_bytes > 0 && at.pulled_bytes > 0, "{before:?}");
    assert_eq!(before.state_hash.map(|hash| hash.len()), Some(32));
    assert!(job_status(&one(&server)).servers[0].version >= at.version);
    let status = json(&call("status", &server, &["--json"]));
    let number = |key: &str| status[key].as_f64().unwrap_or_else(|| panic!("{key} of {status}"));
    assert!(
        number("norm") > 0.0 && number("last_step") >= 3.0 && number("parameters") == 268_160.0,
        "{status}"
    );
    assert_eq!((number("loss_scale"), &status["skipped"]), (1.0, &Value::from(false)));
    assert!(status["learning_rates"][0].as_f64().is_some_and(|rate| rate > 0.0), "{status}");
    let quick = call("status", &server, &["--json", "--no-hash"]);
    said(&quick, &["\"state_hash\":null"]);
}

#[test]
fn checkpoints_of_a_running_job() {
    let folder = TempDir::new().unwrap();
    let (server, mut running) = under_way(ServerOptions::new().checkpoint_dir(folder.path()));
    assert_eq!(call("checkpoints", &server, &[]).stdout, "");
    let before = call("checkpoint", &server, &["--name", "before"]);
    said(&before, &["checkpoint before of version ", server.address()]);
    let version =
        before.stdout.split_whitespace().find_map(|word| word.trim_end_matches(',').parse::<u64>().ok());
    assert!(folder.path().join("default/before/manifest.json").is_file());
    // Training continues while the checkpoint is written.
    running.until_steps(1);
    said(&call("checkpoint", &server, &[]), &["checkpoint step-0"]);
    let list = call("checkpoints", &server, &[]);
    assert_eq!(list.stdout.lines().count(), 2, "{list:?}");
    said(&list, &["before  version ", "step-0"]);
    refused(&call("checkpoint", &server, &["--name", "../out"]), 1, &["../out", "name"]);
    running.until_step(version.expect("a version") + 1);
    let kept = [server.address(), "nothing was deleted", "checkpoint before", "--discard-state"];
    refused(&call("restore", &server, &["--name", "before"]), 1, &kept);
}

#[test]
fn commands_that_cannot_be_done_say_why() {
    let (server, _running) = under_way(ServerOptions::new());
    let address = server.address();
    let nope = call("status", &server, &["--json", "--job", "nope"]);
    refused(&nope, 1, &["no job \"nope\"", "there are default"]);
    assert_eq!(nope.stdout, "");
    refused(&call("resume", &server, &[]), 1, &[address, "nothing to resume"]);
    refused(&call("checkpoint", &server, &[]), 1, &[address, "--checkpoint-dir"]);
    refused(&call("checkpoints", &server, &[]), 1, &[address, "--checkpoint-dir"]);
    refused(&call("delete", &server, &[]), 2, &["--job"]);
    refused(&call("delete", &server, &["--job", "other"]), 1, &[address, "\"other\""]);
    assert_eq!(status(&one(&server)).len(), 1, "nothing may have changed");
}

#[test]
fn a_deleted_job_is_gone_with_its_memory() {
    let (server, running) = under_way(ServerOptions::new());
    said(&call("delete", &server, &["--job", "default"]), &["deleted default"]);
    let (stderr, _) = running.fails(DEADLINE);
    assert!(
        stderr.contains("lost the state of job default") && stderr.contains(server.address()),
        "{stderr}"
    );
    // The memory of the deleted job is freed once its last call has ended.
    let start = Instant::now();
    while !call("status", &server, &[]).stdout.contains("0 B of 1.00 GiB reserved") {
        assert!(start.elapsed() < DEADLINE, "{:?}", call("status", &server, &[]));
    }
    assert!(status(&one(&server)).is_empty());
}

/// Operators name all six servers that the trainer was given. The job has five shards, so it is on the first five
/// servers.
#[test]
fn a_job_of_fewer_shards_than_servers_is_lacking_on_none() {
    let mut servers = server::servers(6, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let list = addresses.join(",");
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out").display().to_string();
    let train = Train::new(3).allow("the job has fewer shards than servers").servers(&addresses);
    train.run();
    let shown = longshore(["status", "--servers", &list]);
    said(&shown, &["state hash"]);
    let top = longshore(["top", "--once", "--servers", &list]);
    said(&top, &["version 3"]);
    for output in [&shown, &top] {
        assert!(!output.stdout.contains("does not hold this job"), "{output:?}");
    }
    said(&longshore(["export", "--servers", &list, "--job", "default", "--out", &out]), &["version 3"]);
    refused(&longshore(["resume", "--servers", &list]), 1, &["nothing to resume"]);
    // A lost part is still reported, whichever server had it.
    servers[4].kill_and_restart();
    let lost = longshore(["status", "--servers", &list]);
    said(&lost, &[&format!("{}  does not hold this job", addresses[4]), "a part of the state is lost"]);
    refused(&longshore(["resume", "--servers", &list]), 1, &[&addresses[4], "must be open on this server"]);
}

/// The kernel still accepts connections for a process stopped by SIGSTOP, so only the missing answer shows the stop.
#[test]
fn a_stopped_server_hides_no_other() {
    let servers = server::servers(3, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let mut running = Train::new(ENDLESS).servers(&addresses).start();
    running.until_step(3);
    servers[1].process.stop();
    let list = addresses.join(",");
    let status = ["status", "--deadline-s", "3", "--no-hash", "--servers", &list];
    let (shown, asked) = std::thread::scope(|scope| {
        let shown = scope.spawn(|| longshore(status));
        let asked = longshore(status.iter().chain(&["--json"]));
        (shown.join().unwrap(), asked)
    });
    servers[1].process.go_on();
    refused(&shown, 1, &["1 of 3 servers did not answer", &addresses[1], "silent for 3 s"]);
    for address in [&addresses[0], &addresses[2]] {
        assert!(shown.stdout.contains(&format!("{address}  training  version")), "{shown:?}");
    }
    assert_eq!(asked.code, 1, "{asked:?}");
    let job: Value =
        serde_json::from_str(&asked.stdout).unwrap_or_else(|error| panic!("{error} in {asked:?}"));
    assert_eq!(job["servers"].as_array().map(Vec::len), Some(2), "{job}");
    assert_eq!(job["servers_without"], Value::from(vec![addresses[1].clone()]));
    // The calls did not harm the job: training continues.
    running.until_steps(2);
}

#[test]
fn what_cannot_be_is_refused_before_it_is_tried() {
    refused(
        &longshore(["plan", "--params", "1M", "--servers", "2"]),
        2,
        &["--servers is 2", "at most 1, the job's shards"],
    );
    let folder = TempDir::new().unwrap();
    let missing = folder.path().join("none").display().to_string();
    refused(
        &longshore(["bench", "storage", "--params", "1M", "--dir", &missing]),
        1,
        &[&format!("--dir is {missing}"), "but must be a folder that can be written"],
    );
    let output = longshored(["--listen", "127.0.0.1:0", "--shm-dir", &missing]);
    refused(&output, 1, &[&format!("shm_dir is {missing}"), "but must be present"]);
    assert!(!output.stderr.contains("state_dir"), "{output:?}");
}

/// The command of a run without --resume, after the servers of the memory tier have restarted.
#[test]
fn a_run_beside_checkpoints_says_how_to_go_on_from_them() {
    let folder = TempDir::new().unwrap();
    let options = || ServerOptions::new().args(["--checkpoint-dir", &folder.path().display().to_string()]);
    let server = options().start();
    Train::new(4).args(["--checkpoint-every", "2"]).servers(&one(&server)).run();
    drop(server);
    let server = options().start();
    let mut running = Train::new(ENDLESS).servers(&one(&server)).start();
    assert_eq!(running.until_started_at(), 1);
    let said = running.process.stderr();
    for word in ["starts afresh", "checkpoint step-00000004 of version 4", "--resume"] {
        assert!(said.contains(word), "{word:?} is missing: {said}");
    }
}

/// `status` of some of a job's servers names the job's other servers.
#[test]
fn status_of_some_servers_says_that_others_are_missing() {
    let servers = server::servers(2, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    Train::new(2).servers(&addresses).run();
    let status = longshore(["status", "--servers", &addresses[0]]);
    said(&status, &["1 of the job's 2 servers", "--servers", &addresses[1]]);
    assert!(!status.stdout.contains("between versions"), "{status:?}");
}

#[test]
fn arguments_that_the_parser_cannot_judge_are_wrong_arguments_too() {
    let token = ["--token-file", "/nowhere/token", "--servers", "127.0.0.1:1"];
    let train: [&[&str]; 12] = [
        &["--steps", "0"],
        &["--shard-elements", "3"],
        &["--shard-elements", "3", "--world-size", "2"],
        &token,
        &["--batch", "0"],
        &["--rank", "3", "--world-size", "2"],
        &["--rank", "1", "--world-size", "2"],
        &["--tier", "nvme"],
        &["--servers", "localhost"],
        &["--width", "33", "--heads", "2"],
        &["--deadline-s", "0"],
        &["--checkpoint-every", "1"],
    ];
    for flags in train {
        refused(&longshore([&["train"], flags].concat()), 2, &["longshore: "]);
    }
    refused(&longshore(["plan", "--params", "1M", "--servers", "0"]), 2, &["--servers"]);
    refused(&longshore(["status", "--servers", "localhost"]), 2, &["localhost", "no port"]);
    refused(&longshore([&["status"], &token[..]].concat()), 2, &["--token-file", "--tls-dir"]);
    let output = longshore(["train", "--steps", "0", "--output", "json"]);
    let error: Value = serde_json::from_str(output.stderr.lines().last().unwrap()).unwrap();
    assert_eq!((output.code, &error["error"]["exit_code"]), (2, &Value::from(2)), "{output:?}");
}

/// A flag without effect is refused, so that no user relies on it.
#[test]
fn flags_without_effect_are_refused() {
    let ignored: [(&[&str], &str); 9] = [
        (&["--newer-from", "1"], "leave it out"),
        (&["--correction", "worker-local"], "choose look-ahead"),
        (&["--correction", "compensation=0.5"], "choose look-ahead"),
        (&["--correction", "look-ahead-by-this-rate"], "choose look-ahead"),
        (&["--correction", "none"], "--delay"),
        (&["--resident", "1GiB"], "nvme with --resident"),
        (&["--export-dtype", "f32"], "--export <DIR>"),
        (&["--tls-dir", "."], "given with --servers"),
        (&["--state-dir", "."], "nvme with --state-dir"),
    ];
    for (flags, word) in ignored {
        refused(&longshore([&["train"], flags].concat()), 2, &[word]);
    }
    refused(&longshored(["--listen", "127.0.0.1:0", "--spill", "all"]), 2, &["spill is all", "--state-dir"]);
}

#[test]
fn an_unreachable_server_is_named() {
    let mut server = ServerOptions::new().start();
    server.process.kill();
    for command in ["status", "checkpoint", "checkpoints", "restore", "resume", "drain"] {
        refused(&call(command, &server, &[]), 1, &[server.address(), "cannot be reached", "longshored"]);
    }
    // An empty frame would look as if there were no jobs.
    let frame = call("top", &server, &["--once"]);
    refused(&frame, 1, &["no server answers", server.address()]);
    assert_eq!(frame.stdout, "");
    let (stderr, _) =
        Train::new(1).args(["--deadline-s", "1"]).servers(&one(&server)).start().fails(DEADLINE);
    assert!(stderr.contains(server.address()) && stderr.contains("cannot be reached"), "{stderr}");
}

#[test]
fn a_mistyped_variable_names_the_nearest() {
    let mut command = binaries::command("longshore");
    command.arg("status").env("LONGSHORE_SERVER", "127.0.0.1:1");
    let named = ["LONGSHORE_SERVER;", "`LONGSHORE_SERVERS`"];
    refused(&run("longshore", &mut command), 2, &named);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_reflection_answer_stock_clients() {
    let mut server = ServerOptions::new().start();
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", server.address())).unwrap();
    let channel = channel.connect().await.unwrap();

    let service = "longshore.v1.Training".to_string();
    let watch = HealthClient::new(channel.clone()).watch(HealthCheckRequest { service }).await.unwrap();
    let mut health = watch.into_inner();
    assert_eq!(health.next().await.unwrap().unwrap().status(), ServingStatus::Serving);

    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answers = ServerReflectionClient::new(channel.clone())
        .server_reflection_info(tokio_stream::once(request))
        .await
        .unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap();
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
        panic!("{answer:?}")
    };
    let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
    for name in ["Training", "Tensors", "Admin"] {
        assert!(names.contains(&format!("longshore.v1.{name}").as_str()), "{name} is not among {names:?}");
    }

    // Python's client knows only version v1alpha of reflection.
    let symbol = v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol(
        "longshore.v1.Admin".to_string(),
    );
    let request = v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(symbol) };
    let mut older = v1alpha::server_reflection_client::ServerReflectionClient::new(channel);
    let answers = older.server_reflection_info(tokio_stream::once(request)).await.unwrap();
    let found = answers.into_inner().next().await.unwrap().unwrap().message_response;
    let Some(v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(files)) = found
    else {
        panic!("{found:?}")
    };
    assert!(!files.file_descriptor_proto.is_empty());

    server.process.terminate();
    assert_eq!(health.next().await.unwrap().unwrap().status(), ServingStatus::NotServing);
    drop(health);
    assert_eq!(server.process.code(), 0);
}

/// A client that accepts messages of 4 MiB, gRPC's default, receives a longer description whole.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_description_reaches_a_stock_client() {
    let server = ServerOptions::new().start();
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", server.address())).unwrap();
    let channel = channel.connect().await.unwrap();
    let name = |index: u32| format!("model.layers.{index}.{}", "experts.".repeat(24));
    let param = |index| v1::Param { name: name(index), shape: vec![], group: 0 };
    let spec = v1::JobSpec {
        name: "wide".into(),
        params: (0..30_000).map(param).collect(),
        groups: vec!["all".into()],
        rule: v1::Rule::Adamw.into(),
        gradient_dtype: v1::Dtype::Bf16.into(),
        image_dtype: v1::Dtype::Bf16.into(),
        world_size: 1,
        micro_steps: 1,
        shard_elements: 1 << 20,
        tier: v1::Tier::Memory.into(),
        ..Default::default()
    };
    let placement = v1::Placement { servers: vec!["a".into()], owners: vec![0, 0], ..Default::default() };
    let open =
        v1::OpenJobRequest { spec: Some(spec.clone()), placement: Some(placement), ..Default::default() };
    v1::training_client::TrainingClient::new(channel.clone()).open_job(open).await.unwrap();

    let mut admin = v1::admin_client::AdminClient::new(channel);
    let request = v1::DescribeRequest { job: "wide".into(), ..Default::default() };
    let one = admin.describe(request.clone()).await.unwrap().into_inner();
    assert!(one.lists_left_out && one.spec.unwrap().params.is_empty());
    assert_eq!((one.tensors, one.parameters), (30_000, 30_000));
    let mut parts = admin.describe_in_parts(request.clone()).await.unwrap().into_inner();
    let mut whole = parts.message().await.unwrap().unwrap();
    while let Some(part) = parts.message().await.unwrap() {
        whole.join(part);
    }
    let spec = v1::JobSpec {
        state_format: v1::StateFormat::F32.into(),
        master_format: v1::MasterFormat::F32.into(),
        ..spec
    };
    assert!(whole.spec == Some(spec), "all of the description, with the formats that the server chose");
    let brief = v1::DescribeRequest { brief: true, ..request };
    assert_eq!(admin.describe(brief).await.unwrap().into_inner().spec, None);
    let shown = call("status", &server, &[]);
    said(
        &shown,
        &["30000 parameters in 30000 tensors", "loading", "none yet, the job waits for its weights"],
    );
}

#[test]
fn output_on_a_pipe_is_plain_lines() {
    let output = run("longshore train", &mut Train::new(20).command());
    said(
        &output,
        &["0.27 M parameters in 5 shards", "an embedded server", "step    20 of 20  loss", "state hash"],
    );
    let plain = |text: &str| text.chars().all(|letter| letter == '\n' || !letter.is_control());
    assert!(plain(&output.stdout), "control characters in {:?}", output.stdout);
    assert!(!output.stdout.contains("loss of each step"), "{output:?}");
    let plotted = run("longshore train", Train::new(8).command().arg("--plot"));
    let lines: Vec<&str> = plotted.stdout.lines().skip_while(|line| *line != "loss of each step").collect();
    assert!(lines.len() > 14 && lines[1].contains("|*") && lines[14].ends_with("step 8"), "{lines:#?}");
}

fn two_ranks(steps: u64) -> Train {
    Train::new(steps).args(["--world-size", "2", "--deadline-s", "5"])
}

/// The first signal lets the step in hand finish, and writes the requested files.
#[test]
fn a_signal_ends_a_run_as_its_end_does() {
    let folder = TempDir::new().unwrap();
    let dir = |name: &str| folder.path().join(name).display().to_string();
    for (signal, code, ranks) in [(Signal::INT, 130, "1"), (Signal::TERM, 143, "2")] {
        let (checkpoints, export) = (dir(&format!("checkpoints{code}")), dir(&format!("export{code}")));
        let flags: [&str; 6] = ["--world-size", ranks, "--checkpoint-dir", &checkpoints, "--export", &export];
        let mut running = Train::new(ENDLESS).args(flags).start();
        running.until_step(3);
        running.process.signal(signal);
        let mut last = 0;
        while let Some(event) = running.event() {
            if let Event::Step(step) = event {
                last = step.step;
            }
        }
        assert_eq!(running.process.code(), code, "{}", running.process.stderr());
        let said = running.process.stderr();
        assert!(
            said.contains(&format!("after step {last} of {ENDLESS}")) && said.contains("--resume"),
            "{said}"
        );
        assert!(Path::new(&export).join("model.safetensors").exists(), "{said}");
        let mut again = Train::new(ENDLESS).args(flags).start_with(["--resume"]);
        assert_eq!(again.until_started_at(), last + 1);
        again.process.terminate();
        assert_eq!(again.process.code(), 143);
    }
}

/// Returns the processes of the ranks of `running`, once both are there.
fn ranks(running: &mut Running) -> Vec<u32> {
    running.until_step(3);
    let ranks = children(running.process.id());
    assert_eq!(ranks.len(), 2, "one process a rank");
    ranks
}

fn until_gone(processes: &[u32]) {
    let start = Instant::now();
    while processes.iter().any(|&id| exists(id)) {
        assert!(start.elapsed() < DEADLINE, "one of {processes:?} is an orphan");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_rank_ends_its_run_without_orphans() {
    for killed in [0, 1] {
        let mut running = two_ranks(ENDLESS).start();
        let ranks = ranks(&mut running);
        assert!(Command::new("kill").args(["-9", &ranks[killed].to_string()]).status().unwrap().success());
        let (stderr, _) = running.fails(DEADLINE);
        let words = [format!("rank {killed} ended with"), "run the same command again".to_string()];
        assert!(words.iter().all(|word| stderr.contains(word)), "{stderr}");
        until_gone(&ranks);
    }
}

/// A killed parent cannot end its ranks. The same command starts new ranks, and these fence the old ones, which then
/// end.
#[test]
#[cfg(target_os = "linux")]
fn ranks_of_a_killed_parent_are_replaced() {
    let server = ServerOptions::new().start();
    let base = two_ranks(1).endless();
    let train = base.clone().servers(&one(&server));
    let mut running = train.start();
    let ranks = ranks(&mut running);
    running.process.kill();
    let mut running = train.start();
    assert!(running.until_started_at() > 1);
    running.until_steps(3);
    let end = running.stop();
    assert_eq!(end.state_hash, base.hash_after(end.version));
    until_gone(&ranks);
}
