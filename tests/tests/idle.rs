//! Idle jobs: their memory is given back once their state is safe elsewhere, and they come back with the same bits.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use longshore_tests::{
    command::longshore,
    conformance::cluster::eventually,
    process::DEADLINE,
    server::{self, Longshored, ServerOptions, addresses},
    status::{job_status, status},
    train::Train,
};
use longshore_wire::v1::{RestoreMode, RestoreRequest, admin_client::AdminClient};
use tempfile::TempDir;

const STEPS: u64 = 12;
const EVICTED_AT: u64 = 6;
/// Longer than any pause of a run that computes.
const LIMIT: [&str; 2] = ["--idle-limit", "4s"];

fn checkpointing(dir: &Path) -> ServerOptions {
    ServerOptions::new().checkpoint_dir(dir).args(LIMIT)
}

/// What a server's status says it has reserved.
fn reserved(server: &Longshored) -> String {
    let said = longshore(["status", "--no-hash", "--servers", server.address()]).stdout;
    said.lines().next().unwrap_or_default().to_string()
}

fn is_evicted(server: &Longshored) {
    eventually("the job to be evicted", || {
        server.process.stderr().contains("an idle job was evicted").then_some(())
    });
    eventually("its memory to be given back", || reserved(server).contains("  0 B of").then_some(()));
    let log = server.log();
    let line = log.iter().find(|line| line["fields"]["call"] == "evict").expect("a line for the record");
    assert_eq!((&line["target"], &line["fields"]["job"]), (&"audit".into(), &"\"default\"".into()));
}

fn comes_back_from_a_checkpoint(
    tier: &[&str],
    options: &dyn Fn(ServerOptions) -> ServerOptions,
    count: usize,
) {
    // The same bits on every tier.
    let expected = Train::new(STEPS).run().end.state_hash;
    let checkpoints = TempDir::new().unwrap();
    let servers = server::servers(count, &options(checkpointing(checkpoints.path())));
    let addresses = addresses(&servers);
    let train = |steps| Train::new(steps).args(tier).servers(&addresses);
    train(EVICTED_AT).run();
    let found = job_status(&addresses);
    assert_eq!(found.servers[0].idle_limit_seconds, Some(4.0));
    servers.iter().for_each(is_evicted);
    let gone = job_status(&addresses);
    assert!(gone.servers.is_empty(), "{gone:?}");
    assert!(gone.reasons_without[0].contains("checkpoint idle-00000006 has its state"), "{gone:?}");
    // Nothing else than its state is taken for it.
    let (stderr, _) = train(STEPS).start().fails(DEADLINE);
    assert!(stderr.contains("evicted at version 6") && stderr.contains("idle-00000006"), "{stderr}");
    assert!(stderr.contains("--resume"), "no remedy: {stderr}");
    let run = train(STEPS).start_with(["--resume"]).finish();
    assert_eq!((run.start.first_step, run.end.state_hash), (EVICTED_AT + 1, expected));
}

#[test]
fn a_job_in_memory_comes_back_from_its_checkpoint() {
    comes_back_from_a_checkpoint(&[], &|options| options, 1);
}

#[test]
fn so_does_one_of_two_servers_that_share_the_folder() {
    // The first of them may have to wait for the other one's part.
    comes_back_from_a_checkpoint(&[], &|options| options.allow("an idle job is not evicted"), 2);
}

#[test]
fn so_does_one_whose_files_were_in_a_tmpfs() {
    let root = TempDir::new_in("/dev/shm").unwrap();
    comes_back_from_a_checkpoint(&["--tier", "shm"], &|options| options.shm_root(root.path()), 1);
    let left = std::fs::read_dir(root.path())
        .unwrap()
        .flatten()
        .flat_map(|dir| std::fs::read_dir(dir.path()).unwrap());
    assert!(left.count() <= 1, "only the job that came back has files");
}

#[test]
fn restore_brings_it_back_and_delete_forgets_it() {
    let checkpoints = TempDir::new().unwrap();
    let server = checkpointing(checkpoints.path()).start();
    let address = server.address().to_string();
    let end = Train::new(EVICTED_AT).servers(std::slice::from_ref(&address)).run().end;
    is_evicted(&server);
    let restored =
        longshore(["restore", "--servers", &address, "--job", "default", "--name", "idle-00000006"]);
    assert_eq!(restored.code, 0, "{}", restored.stderr);
    assert_eq!(job_status(std::slice::from_ref(&address)).state_hash, Some(end.state_hash));
    // It idles again, and its checkpoint is there already.
    eventually("it to be evicted once more", || {
        server.process.stderr().matches("an idle job was evicted").nth(1).map(|_| ())
    });
    let deleted = longshore(["delete", "--servers", &address, "--job", "default"]);
    assert_eq!(deleted.code, 0, "{}", deleted.stderr);
    assert!(status(std::slice::from_ref(&address)).is_empty());
    let anew = Train::new(3).servers(&[address]).run();
    assert_eq!(anew.start.first_step, 1);
}

/// Waits until the server says why the job stays, checks it, and that nothing was given up.
fn stays(servers: &[Longshored], why: &str) {
    let addresses = addresses(servers);
    let end = Train::new(EVICTED_AT).servers(&addresses).run().end;
    for server in servers {
        eventually("the warning", || {
            server.process.stderr().contains("an idle job is not evicted").then_some(())
        });
    }
    let found = job_status(&addresses);
    for server in &found.servers {
        let said = server.not_evicted.as_deref().unwrap_or_default();
        assert!(said.contains(why), "{why:?} is not in {said:?}");
        assert!(server.memory_bytes > 0 && server.idle_seconds >= 4.0, "{server:?}");
    }
    assert_eq!(found.state_hash, Some(end.state_hash));
    let run = Train::new(STEPS).servers(&addresses).run();
    assert_eq!(run.start.first_step, EVICTED_AT + 1);
}

#[test]
fn without_a_checkpoint_folder_nothing_is_given_up() {
    let server = ServerOptions::new().args(LIMIT).allow("an idle job is not evicted").start();
    stays(&[server], "--checkpoint-dir");
}

#[test]
fn nor_where_each_server_has_a_folder_of_its_own() {
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let start = |dir: &TempDir| checkpointing(dir.path()).allow("an idle job is not evicted").start();
    let servers = folders.each_ref().map(start);
    stays(&servers, "all 2 servers");
    // The parts that nobody could seal are not left behind once the job is used.
    let part = |dir: &TempDir| dir.path().join("default/idle-00000006");
    eventually("the parts to be removed", || folders.iter().all(|dir| !part(dir).exists()).then_some(()));
}

#[test]
fn a_job_on_drives_gives_up_its_memory_alone() {
    let nvme = ["--tier", "nvme"];
    let expected = Train::new(STEPS).run().end.state_hash;
    let root = TempDir::new().unwrap();
    let server = ServerOptions::new().state_root(root.path()).args(LIMIT).start();
    let addresses = [server.address().to_string()];
    Train::new(EVICTED_AT).args(nvme).servers(&addresses).run();
    is_evicted(&server);
    let gone = job_status(&addresses);
    assert!(gone.reasons_without[0].contains("on this server's drives"), "{gone:?}");
    let run = Train::new(STEPS).args(nvme).servers(&addresses).run();
    assert_eq!((run.start.first_step, run.end.state_hash), (EVICTED_AT + 1, expected));
}

#[test]
fn a_killed_server_leaves_a_job_on_drives_evicted() {
    let nvme = ["--tier", "nvme"];
    let expected = Train::new(STEPS).run().end.state_hash;
    let root = TempDir::new().unwrap();
    let mut server = ServerOptions::new().state_root(root.path()).args(LIMIT).start();
    let addresses = [server.address().to_string()];
    let train = |steps| Train::new(steps).args(nvme).servers(&addresses);
    train(EVICTED_AT).run();
    is_evicted(&server);
    server.kill_and_restart();
    let gone = job_status(&addresses);
    assert!(gone.reasons_without[0].contains("on this server's drives"), "{gone:?}");
    assert!(reserved(&server).contains("  0 B of"), "{}", reserved(&server));
    // It is in use again, and no later process takes it for evicted.
    train(EVICTED_AT + 1).run();
    server.kill_and_restart();
    let run = train(STEPS).run();
    assert_eq!((run.start.first_step, run.end.state_hash), (EVICTED_AT + 2, expected));
}

#[test]
fn nor_does_a_killed_server_start_an_evicted_job_anew() {
    let expected = Train::new(STEPS).run().end.state_hash;
    let checkpoints = TempDir::new().unwrap();
    let mut server = checkpointing(checkpoints.path()).start();
    let addresses = [server.address().to_string()];
    let train = |steps| Train::new(steps).servers(&addresses);
    train(EVICTED_AT).run();
    is_evicted(&server);
    server.kill_and_restart();
    let (stderr, _) = train(STEPS).start().fails(DEADLINE);
    assert!(stderr.contains("evicted at version 6") && stderr.contains("--resume"), "{stderr}");
    // A restore takes the note away, and so does a deletion.
    let resumed = train(STEPS).start_with(["--resume"]).finish();
    assert_eq!((resumed.start.first_step, resumed.end.state_hash), (EVICTED_AT + 1, expected));
    server.kill_and_restart();
    assert_eq!(train(EVICTED_AT).run().start.first_step, 1);
    is_evicted(&server);
    let deleted = longshore(["delete", "--servers", &addresses[0], "--job", "default"]);
    assert_eq!(deleted.code, 0, "{}", deleted.stderr);
    server.kill_and_restart();
    assert_eq!(train(3).run().start.first_step, 1);
}

#[test]
fn an_evicted_job_on_drives_is_not_begun_anew_in_memory() {
    let nvme = ["--tier", "nvme"];
    let root = TempDir::new().unwrap();
    let server = ServerOptions::new().state_root(root.path()).args(LIMIT).start();
    let addresses = [server.address().to_string()];
    Train::new(EVICTED_AT).args(nvme).servers(&addresses).run();
    is_evicted(&server);
    let (stderr, _) = Train::new(STEPS).servers(&addresses).start().fails(DEADLINE);
    assert!(stderr.contains("tier"), "{stderr}");
    let run = Train::new(STEPS).args(nvme).servers(&addresses).run();
    assert_eq!(run.start.first_step, EVICTED_AT + 1);
}

#[test]
fn a_job_that_waits_for_its_checkpoint_does_so_after_a_crash() {
    let root = TempDir::new_in("/dev/shm").unwrap();
    let checkpoints = TempDir::new().unwrap();
    let mut server = checkpointing(checkpoints.path()).shm_root(root.path()).start();
    let addresses = [server.address().to_string()];
    let train = || Train::new(STEPS).args(["--tier", "shm"]).servers(&addresses);
    Train::new(EVICTED_AT).args(["--tier", "shm"]).servers(&addresses).run();
    is_evicted(&server);
    // The first run has opened it, and so its files are there again.
    for _ in 0..2 {
        let (stderr, _) = train().start().fails(DEADLINE);
        assert!(stderr.contains("evicted at version 6") && stderr.contains("--resume"), "{stderr}");
        server.kill_and_restart();
    }
    assert_eq!(train().start_with(["--resume"]).finish().start.first_step, EVICTED_AT + 1);
}

#[test]
fn ranks_of_a_job_on_drives_come_back_in_any_order() {
    let root = TempDir::new().unwrap();
    let started = |root: &Path, limit: &[&str]| ServerOptions::new().state_root(root).args(limit).start();
    let both = |steps, server: &Longshored| {
        let train = Train::new(steps).args(["--tier", "nvme", "--world-size", "2"]);
        let train = train.servers(&[server.address().to_string()]);
        // Rank 1 asks for the job before rank 0 has opened it again.
        let second = train.start_with(["--rank", "1"]);
        let first = train.start_with(["--rank", "0"]).finish();
        second.done();
        first.end.state_hash
    };
    let server = started(root.path(), &LIMIT);
    both(EVICTED_AT, &server);
    is_evicted(&server);
    let elsewhere = TempDir::new().unwrap();
    assert_eq!(both(STEPS, &server), both(STEPS, &started(elsewhere.path(), &[])));
}

/// Makes a file that whoever opens it waits for, as for one of a file server that is gone.
fn hang(file: &Path) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    assert!(Command::new("mkfifo").arg(file).status().unwrap().success());
}

#[test]
fn a_folder_that_hangs_keeps_only_the_jobs_that_need_it() {
    let nvme = ["--tier", "nvme", "--job", "on-drives"];
    let (root, checkpoints) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    hang(&checkpoints.path().join("in-memory/idle-00000006/manifest.json"));
    let mut server = checkpointing(checkpoints.path()).state_root(root.path()).start();
    let addresses = [server.address().to_string()];
    let train = |args: &[&str]| Train::new(EVICTED_AT).args(args).servers(&addresses);
    train(&["--job", "in-memory"]).run();
    train(&nvme).run();
    eventually("the job on drives to be evicted", || {
        let log = server.log();
        log.iter()
            .any(|line| line["fields"]["job"] == "\"on-drives\"" && line["fields"]["call"] == "evict")
            .then_some(())
    });
    assert_eq!(Train::new(STEPS).args(nvme).servers(&addresses).run().start.first_step, EVICTED_AT + 1);
    // Nor is the folder waited for when the server stops.
    server.process.terminate();
    assert_eq!(server.process.code(), 0);
}

#[test]
fn nor_does_it_keep_others_from_being_opened() {
    let nvme = ["--tier", "nvme", "--job", "on-drives"];
    let (root, checkpoints) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let server = ServerOptions::new().checkpoint_dir(checkpoints.path()).state_root(root.path()).start();
    let addresses = [server.address().to_string()];
    let train = |steps, args: &[&str]| Train::new(steps).args(args).servers(&addresses);
    train(EVICTED_AT, &nvme).run();
    let note = checkpoints.path().join("in-memory/~evicted.json");
    hang(&note);
    let waits = train(3, &["--job", "in-memory"]).start();
    eventually("the job to be opened", || {
        let log = server.log();
        log.iter()
            .any(|line| line["fields"]["message"] == "job opened" && line["fields"]["job"] == "in-memory")
            .then_some(())
    });
    assert_eq!(train(STEPS, &nvme).run().start.first_step, EVICTED_AT + 1);
    // The folder is there again, and its note is of a checkpoint that is not there any more.
    let mut answers = OpenOptions::new().write(true).open(&note).unwrap();
    fs::remove_file(&note).unwrap();
    answers.write_all(br#"{"checkpoint":"pruned","version":6}"#).unwrap();
    drop(answers);
    assert_eq!(waits.finish().start.first_step, 1);
}

/// A restore of much state is verified on all servers first, which takes minutes.
#[test]
fn a_job_whose_checkpoint_is_verified_is_in_use() {
    let checkpoints = TempDir::new().unwrap();
    let server = checkpointing(checkpoints.path()).start();
    let addresses = [server.address().to_string()];
    Train::new(EVICTED_AT).servers(&addresses).run();
    let made = longshore(["checkpoint", "--servers", &addresses[0], "--name", "mine"]);
    assert_eq!(made.code, 0, "{}", made.stderr);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut admin = AdminClient::connect(format!("http://{}", addresses[0])).await.unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(8) {
            let (job, name) = ("default".to_string(), "mine".to_string());
            let verify = RestoreRequest { job, name, mode: RestoreMode::Verify.into(), ..Default::default() };
            admin.restore(verify).await.expect("a job that is not evicted");
        }
    });
    is_evicted(&server);
}
