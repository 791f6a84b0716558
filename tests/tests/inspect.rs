//! `longshore inspect` of servers' folders: whole, in use, damaged, and on a tmpfs.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
};

use longshore_tests::{
    command::{Output, longshore},
    server::{Longshored, ServerOptions},
    train::Train,
};
use serde_json::Value;
use tempfile::TempDir;

const STEPS: u64 = 8;

fn inspect(dir: &Path) -> (Output, Vec<Value>) {
    let output = longshore(["inspect", "--json", &dir.display().to_string()]);
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"));
    let reports = output.stdout.lines().map(parse).collect();
    (output, reports)
}

fn stop(mut server: Longshored) {
    server.process.terminate();
    assert_eq!(server.process.code(), 0, "{}", server.process.stderr());
}

#[test]
fn a_state_directory_is_verified_to_the_last_block() {
    let root = TempDir::new().unwrap();
    let dir = root.path().join("a");
    fs::create_dir(&dir).unwrap();
    let server = ServerOptions::new().args(["--state-dir", &dir.display().to_string()]).start();
    let run = Train::new(STEPS).args(["--tier", "nvme"]).servers(&[server.address().to_string()]).run();

    let (busy, reports) = inspect(&dir);
    assert!(busy.code != 0 && reports[0]["error"].as_str().unwrap().contains("in use by another process"));
    assert!(busy.stderr.contains("a server uses") && !busy.stderr.contains("nothing that"), "{busy:?}");
    assert_eq!(reports[0]["in_use"], true);
    stop(server);

    let (whole, reports) = inspect(&dir);
    assert_eq!((whole.code, reports.len()), (0, 1), "{whole:?}");
    let report = &reports[0];
    assert_eq!(report["recoverable"], run.end.version);
    let versions = report["versions"].as_array().unwrap();
    assert!(versions.iter().all(|version| version["whole"] == true && version["blocks"] == 5), "{report}");
    let text = longshore(["inspect", &dir.display().to_string()]);
    assert!(text.stdout.contains(&format!("a server goes on from version {STEPS}")), "{text:?}");

    let data = dir.join("default/server-0-of-1/data");
    // A flipped byte in every 64 KiB damages both slots and all shards.
    let file = OpenOptions::new().read(true).write(true).open(&data).unwrap();
    let bytes = file.metadata().unwrap().len();
    for at in (0..bytes).step_by(64 << 10) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    let (rotten, reports) = inspect(&dir);
    assert!(rotten.code != 0 && rotten.stderr.contains("nothing that a server can go on from"), "{rotten:?}");
    assert!(reports[0]["recoverable"].is_null(), "{}", reports[0]);
}

#[test]
fn a_tmpfs_directory_says_which_steps_are_decided() {
    let root = TempDir::new_in("/dev/shm").unwrap();
    let server = ServerOptions::new().args(["--shm-dir", &root.path().display().to_string()]).start();
    Train::new(STEPS).args(["--tier", "shm"]).servers(&[server.address().to_string()]).run();
    stop(server);
    let (whole, reports) = inspect(root.path());
    assert_eq!(whole.code, 0, "{whole:?}");
    assert_eq!((&reports[0]["tier"], &reports[0]["recoverable"]), (&Value::from("shm"), &Value::from(STEPS)));

    let state = root.path().join("default/server-0-of-1/state");
    let file = OpenOptions::new().write(true).open(&state).unwrap();
    file.set_len(file.metadata().unwrap().len() - 4096).unwrap();
    let (cut, reports) = inspect(root.path());
    assert!(reports[0]["damage"][0].as_str().unwrap().contains(&state.display().to_string()), "{cut:?}");
    assert_eq!(
        (cut.code, &reports[0]["whole"], &reports[0]["recoverable"]),
        (1, &false.into(), &Value::Null)
    );
}

#[test]
fn a_folder_of_something_else_is_refused() {
    let root = TempDir::new().unwrap();
    let (empty, _) = inspect(root.path());
    assert!(empty.code != 0 && empty.stderr.contains("--state-dir"), "{empty:?}");
    let folder = root.path().join("job/server-0-of-1");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("header.json"), "{}\n{}").unwrap();
    let (odd, reports) = inspect(root.path());
    assert!(odd.code != 0 && reports[0]["error"].as_str().unwrap().contains("header.json"), "{odd:?}");
}
