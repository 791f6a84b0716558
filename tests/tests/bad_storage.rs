//! State directories that rot, vanish, fill up, or belong to something else. The server and the command line name such
//! a directory and damage nothing. Once repaired, jobs continue to the right bits.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use longshore_proto::Fault;
use longshore_tests::{
    binaries,
    command::{Output, done, longshore, longshored},
    process::Process,
    seccomp::WITHOUT_IO_URING,
    server::{Longshored, ServerOptions},
    status::job_status,
    train::Train,
};
use longshore_wire::{
    fault_from_status,
    v1::{AwaitDurableRequest, training_client::TrainingClient},
};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use tempfile::TempDir;

const STEPS: u64 = 12;
const HALFWAY: u64 = 6;
const PATIENCE: Duration = Duration::from_secs(30);

fn train() -> Train {
    Train::new(STEPS).args(["--tier", "nvme"])
}

fn hash() -> String {
    Train::new(STEPS).undisturbed().hash
}

/// Threads do the reads and writes where io_uring is refused, as by a container's runtime. The log gives the reason.
#[test]
fn without_io_uring_a_job_has_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let server = options(&[root.path().join("nvme0")]).under(&WITHOUT_IO_URING).start();
    let train = train().servers(&[server.address().to_string()]);
    assert_eq!(train.run().end.state_hash, hash());
    let opened: Vec<Value> =
        server.log().into_iter().filter(|line| line["fields"]["message"] == "disk opened").collect();
    assert!(!opened.is_empty(), "{:?}", server.log());
    for line in opened {
        let field = |name: &str| line["fields"][name].as_str().unwrap_or_default().to_string();
        assert!(field("engine").contains("threads"), "{line}");
        assert!(field("why").contains("io_uring: refused by seccomp"), "{line}");
    }
}

fn options(dirs: &[PathBuf]) -> ServerOptions {
    for dir in dirs {
        fs::create_dir_all(dir).unwrap();
    }
    let dirs: Vec<_> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    // A killed worker may leave a begun step that no process finishes, so a drain gives up after 1 s.
    let options = ServerOptions::new().args(["--drain-deadline-s", "1"]);
    let options = options.allow("the step in hand was not finished");
    options.args(["--state-dir", &dirs.join(","), "--storage-buffers", "2"])
}

/// Trains halfway, then kills the worker and stops the server.
fn train_halfway(train: &Train, server: &mut Longshored) {
    let mut worker = train.start();
    worker.until_step(HALFWAY);
    worker.kill();
    server.process.terminate();
    assert_eq!(server.process.code(), 0);
}

fn job_folder(dir: &Path) -> PathBuf {
    dir.join("default").join("server-0-of-1")
}

/// Returns the status, once the server knows whether it can recover its job.
fn status_of(server: &Longshored) -> Output {
    let begun = Instant::now();
    loop {
        let output = longshore(["status", "--servers", server.address()]);
        if !output.stdout.contains("is recovering") {
            return output;
        }
        assert!(begun.elapsed() < PATIENCE, "{output:?}");
    }
}

#[test]
fn bit_rot_is_named_and_one_step_back_is_whole() {
    let expected = hash();
    let root = TempDir::new().unwrap();
    let dir = root.path().join("a");
    let mut server =
        options(std::slice::from_ref(&dir)).allow("not recovered").allow("stepping back").start();
    let train = train().servers(&[server.address().to_string()]);
    train_halfway(&train, &mut server);
    let data = job_folder(&dir).join("data");
    let bytes = fs::metadata(&data).unwrap().len();
    let file = OpenOptions::new().read(true).write(true).open(&data).unwrap();
    let flip = |at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
    };
    let mut found = None;
    // Some of the flipped bytes hit records, tables or the unused slot. The search goes on until a block of the state
    // is hit.
    for at in (0..32).map(|part| (2 * part + 1) * bytes / 64) {
        flip(at);
        server.restart();
        let status = status_of(&server);
        if status.stdout.contains("block") {
            found = Some(status.stdout);
            break;
        }
        server.process.kill();
        flip(at);
    }
    let said = found.expect("a flipped bit in the slot of the newest version is found");
    for part in [data.to_str().unwrap(), "shard", "block", "CRC-64", "longshore step-back --version"] {
        assert!(said.contains(part), "{part} is missing in: {said}");
    }
    let (stderr, _) = train.start().fails(PATIENCE);
    assert!(stderr.contains("CRC-64") && stderr.contains(server.address()), "{stderr}");
    let version = said.split("step-back --version ").nth(1).and_then(|rest| rest.split('`').next()).unwrap();
    done(["step-back", "--version", version, "--servers", server.address()]);
    assert_eq!(job_status(&[server.address().to_string()]).servers[0].version.to_string(), version);
    assert_eq!(train.run().end.state_hash, expected);
}

#[test]
fn a_vanished_directory_is_named_and_its_return_is_enough() {
    let expected = hash();
    let root = TempDir::new().unwrap();
    let dirs = [root.path().join("a"), root.path().join("b")];
    let mut server = options(&dirs).allow("not recovered").start();
    let train = train().servers(&[server.address().to_string()]);
    train_halfway(&train, &mut server);
    // A folder of the job is gone, as after mounting an empty disk.
    let (there, away) = (job_folder(&dirs[1]), root.path().join("away"));
    fs::rename(&there, &away).unwrap();
    server.restart();
    let said = status_of(&server).stdout;
    assert!(said.contains(there.to_str().unwrap()) && said.contains("mount the disk again"), "{said}");
    let (stderr, _) = train.start().fails(PATIENCE);
    assert!(stderr.contains(there.to_str().unwrap()), "{stderr}");
    // Once the disk is back, opening the job suffices.
    fs::create_dir_all(there.parent().unwrap()).unwrap();
    fs::rename(&away, &there).unwrap();
    assert_eq!(train.run().end.state_hash, expected);
    // The whole directory is gone, as with an unmounted disk. The server then does not start.
    server.process.kill();
    fs::rename(&dirs[0], root.path().join("gone")).unwrap();
    let refused = longshored(["--listen", "127.0.0.1:0", "--state-dir", dirs[0].to_str().unwrap()]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains(dirs[0].to_str().unwrap()), "{refused:?}");
    assert!(refused.stderr.contains("check its path"), "{refused:?}");
    // Unused mount points are empty folders. No job begins in them until the operator gives the missing job up.
    fs::rename(&dirs[1], root.path().join("gone-too")).unwrap();
    dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
    server.restart();
    let (stderr, _) = train.start().fails(PATIENCE);
    assert!(stderr.contains("mount its drive") && stderr.contains("had jobs: default"), "{stderr}");
    let delete = ["delete", "--job", "default", "--servers", server.address(), "--discard-unreadable"];
    assert_eq!(longshore(delete).code, 0);
    assert_eq!(train.run().end.state_hash, expected);
}

/// Waits for a version that the server will never make durable. Returns the fault.
fn await_durable(address: &str, deadline: Duration) -> Fault {
    let request = AwaitDurableRequest {
        job: "default".to_string(),
        version: u64::MAX,
        deadline_ms: deadline.as_millis() as u64,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answer = runtime.block_on(async {
        let mut training = TrainingClient::connect(format!("http://{address}")).await.unwrap();
        training.await_durable(request).await
    });
    fault_from_status(&answer.unwrap_err(), address)
}

/// A limit on file sizes, set while the server runs, stands for a failing drive.
#[test]
fn a_failed_store_is_said_at_once_and_not_called_slow() {
    let root = TempDir::new().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"]);
    shell.arg(binaries::command("longshored").get_program());
    shell.args(["--listen", "127.0.0.1:0", "--memory", "1GiB", "--state-dir"]).arg(root.path());
    let mut process = Process::start("longshored in a shell", &mut shell);
    let line = process.line().unwrap_or_default();
    let address = line.strip_prefix("longshored listening on ").expect("an address").to_string();
    let train = Train::new(1_000_000).args(["--tier", "nvme"]).servers(std::slice::from_ref(&address));
    let mut worker = train.start();
    worker.until_step(HALFWAY);
    let limit = Some(1 << 20);
    let limit = Rlimit { current: limit, maximum: limit };
    prlimit(Pid::from_raw(process.id() as i32), Resource::Fsize, limit).unwrap();
    let (stderr, _) = worker.fails(PATIENCE);
    assert!(stderr.contains("File too large") && stderr.contains(&address), "{stderr}");
    let begun = Instant::now();
    let fault = await_durable(&address, Duration::from_secs(60));
    assert!(fault.to_string().contains("File too large"), "{fault}");
    // A drain does not wait for the failed store either.
    process.terminate();
    assert_eq!(process.code(), 0, "{}", process.stderr());
    assert!(begun.elapsed() < Duration::from_secs(15), "it took {:?}", begun.elapsed());
}

/// A missing drive may come back, so unreadable state is deleted only on explicit request.
#[test]
fn a_job_that_cannot_be_read_is_deleted_on_an_explicit_word_alone() {
    let expected = hash();
    let root = TempDir::new().unwrap();
    let dirs = [root.path().join("a"), root.path().join("b")];
    let mut server = options(&dirs).allow("not recovered").allow("not a job that can be opened").start();
    let train = train().servers(&[server.address().to_string()]);
    train_halfway(&train, &mut server);
    let header = job_folder(&dirs[0]).join("header.json");
    fs::remove_file(&header).unwrap();
    server.restart();
    let said = status_of(&server);
    assert!(said.stdout.contains("without header.json"), "{said:?}");
    let (stderr, _) = train.start().fails(PATIENCE);
    assert!(stderr.contains("put header.json back"), "{stderr}");
    let delete = ["delete", "--job", "default", "--servers", server.address()];
    let refused = longshore(delete);
    assert!(refused.code != 0 && refused.stderr.contains("--discard-unreadable"), "{refused:?}");
    assert!(dirs.iter().all(|dir| job_folder(dir).join("data").exists()));
    done(delete.into_iter().chain(["--discard-unreadable"]));
    assert!(dirs.iter().all(|dir| fs::read_dir(dir).unwrap().count() == 0));
    assert_eq!(train.run().end.state_hash, expected);
}

/// No other job may begin under the name of unreadable state. The old state would be hidden, and would
/// replace the new job at the next start.
#[test]
fn another_job_is_not_begun_in_place_of_one_that_cannot_be_read() {
    let expected = hash();
    let root = TempDir::new().unwrap();
    let dirs = [root.path().join("a"), root.path().join("b")];
    let mut server = options(&dirs).allow("not recovered").allow("not a job that can be opened").start();
    let second = ServerOptions::new().start();
    let addresses = [server.address().to_string(), second.address().to_string()];
    let train = train().servers(&addresses[..1]);
    train_halfway(&train, &mut server);
    let is_refused = |other: Train, words: &[&str]| {
        let (stderr, _) = other.start().fails(PATIENCE);
        for word in words.iter().chain(&["longshore delete --job=default --discard-unreadable"]) {
            assert!(stderr.contains(word), "{word} is missing in: {stderr}");
        }
    };
    let away = root.path().join("away");
    fs::rename(job_folder(&dirs[1]), &away).unwrap();
    server.restart();
    assert!(status_of(&server).stdout.contains("mount the disk again"));
    is_refused(Train::new(STEPS).servers(&addresses[..1]), &["spec.tier", "mount the disk again"]);
    is_refused(self::train().servers(&addresses), &["placement.owners", "mount the disk again"]);
    // With damaged headers the server cannot tell which settings the job had.
    fs::create_dir_all(job_folder(&dirs[1]).parent().unwrap()).unwrap();
    fs::rename(&away, job_folder(&dirs[1])).unwrap();
    let headers = [&dirs[0], &dirs[1]].map(|dir| job_folder(dir).join("header.json"));
    let texts = headers.each_ref().map(|header| fs::read(header).unwrap());
    headers.iter().for_each(|header| fs::write(header, "{}").unwrap());
    server.kill_and_restart();
    is_refused(Train::new(STEPS).servers(&addresses[..1]), &["kept here and not readable"]);
    // With readable headers again, opening the job suffices.
    headers.iter().zip(texts).for_each(|(header, text)| fs::write(header, text).unwrap());
    is_refused(Train::new(STEPS).servers(&addresses[..1]), &["spec.tier"]);
    assert_eq!(train.run().end.state_hash, expected);
}

#[test]
fn status_forecasts_the_wear_of_drives() {
    let root = TempDir::new().unwrap();
    let server = options(&[root.path().join("a")]).args(["--drive-endurance", "600TB"]).start();
    let addresses = [server.address().to_string()];
    train().servers(&addresses).run();
    let found = &job_status(&addresses).servers[0];
    // A step writes 12 bytes a parameter in whole blocks, its checksums, and two records.
    let state = 5 * 65_536 * 12;
    let step = found.disk_written_bytes_per_step.unwrap();
    assert!((state..state + 64 * 1024).contains(&step), "{step} bytes a step, of which state {state}");
    assert!(found.disk_bytes > 2 * state && found.disk_written_bytes > (STEPS - 1) * state);
    let (day, days) = (found.disk_written_bytes_per_day.unwrap() as f64, found.drive_endurance_days.unwrap());
    assert!((days * day / 600e12 - 1.0).abs() < 1e-6, "{days} days at {day} bytes a day");
    let said = status_of(&server).stdout;
    assert!(said.contains("a step") && said.contains("a day, the rated"), "{said}");
    // `longshore plan` must predict the same bytes a step.
    let of_job = [
        "plan",
        "--params",
        "327680",
        "--tier",
        "nvme",
        "--storage-buffers",
        "2",
        "--shard-elements",
        "65536",
    ];
    let a_step = (86_400.0 / (day / step as f64)).to_string();
    let planned =
        longshore(of_job.into_iter().chain(["--json", "--step-s", &a_step, "--drive-endurance", "600TB"]));
    let planned: serde_json::Value = serde_json::from_str(&planned.stdout).expect("one object");
    assert_eq!(planned["memory_bytes"], found.memory_bytes);
    assert_eq!(planned["disk_bytes"], found.disk_bytes);
    assert_eq!(planned["disk_written_bytes_per_step"], state);
    let planned_days = planned["drive_endurance_days"].as_f64().unwrap();
    assert!((planned_days / days - 1.0).abs() < 0.02, "{planned_days} days planned, {days} found");
    let refused = longshore(of_job.into_iter().chain(["--memory", "1MiB"]));
    assert_eq!(refused.code, 1, "{}", refused.stderr);
    assert!(
        refused.stderr.contains("--memory is 1.00 MiB") && refused.stderr.contains("short of"),
        "{}",
        refused.stderr
    );
}
