//! Checkpoints in use: after a job went back, at the end of training, in separate folders of each host, and
//! in unwritable folders.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use longshore_proto::{JobSpec, Rank};
use longshore_tests::{
    command::{longshore, longshored},
    event::{End, Event},
    server::{ServerOptions, addresses, servers},
    status::job_status,
    train::{Said, Train},
};
use longshore_worker::{Options, Session};
use serde_json::Value;
use tempfile::TempDir;

const PATIENCE: Duration = Duration::from_secs(30);

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// Returns the names of the checkpoints in a run's events.
fn written(said: &Said) -> Vec<&str> {
    let events = said.events.iter();
    events
        .filter_map(|event| if let Event::Checkpoint { name, .. } = event { Some(&**name) } else { None })
        .collect()
}

fn sealed(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder.join("default")).expect("the job's checkpoints");
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> =
        names.filter(|name| folder.join("default").join(name).join("manifest.json").is_file()).collect();
    names.sort();
    names
}

fn list(servers: &[String]) -> String {
    let output = longshore(["checkpoints", "--job", "default", "--servers", &servers.join(",")]);
    assert_eq!(output.code, 0, "{output:?}");
    output.stdout
}

/// Deletes the job and restores it from a checkpoint, as an operator does to go back.
fn roll_back(servers: &[String], folder: &Path, name: &str) {
    let deleted = longshore(["delete", "--job", "default", "--servers", &servers.join(",")]);
    assert_eq!(deleted.code, 0, "{deleted:?}");
    let manifest = fs::read(folder.join("default").join(name).join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let spec: JobSpec = serde_json::from_value(manifest["spec"].clone()).unwrap();
    let session = Session::connect(Options::new(servers.to_vec(), spec, Rank(0))).unwrap();
    assert!(session.open().unwrap().is_fresh());
    session.restore(name).unwrap();
}

#[test]
fn after_a_rollback_each_checkpoint_is_the_same_one_or_gets_a_name_of_its_own() {
    let folder = TempDir::new().unwrap();
    let options = ServerOptions::new().checkpoint_dir(folder.path()).args(["--checkpoint-keep", "3"]);
    let servers = servers(2, &options);
    let addresses = addresses(&servers);
    let train = || Train::new(12).args(["--checkpoint-every", "4"]).servers(&addresses);
    let names = ["step-00000004", "step-00000008", "step-00000012"];
    let first = train().run();
    assert_eq!(written(&first.said), names);

    // The same steps give the same states, and so the same checkpoints.
    roll_back(&addresses, folder.path(), names[0]);
    let again = train().run();
    assert_eq!((again.start.first_step, again.end.state_hash), (5, first.end.state_hash));
    assert_eq!(written(&again.said), names[1..]);
    assert_eq!(sealed(folder.path()), names);

    // Other batches give other states, under other names. Pruning removes the oldest seal first, whatever its
    // version.
    roll_back(&addresses, folder.path(), names[0]);
    let other = train().args(["--seed", "2"]).run();
    assert_eq!(other.start.first_step, 5);
    assert_eq!(written(&other.said), ["step-00000008.2", "step-00000012.2"]);
    assert_eq!(sealed(folder.path()), ["step-00000008.2", "step-00000012", "step-00000012.2"]);
    let listed = list(&addresses);
    let stale: Vec<&str> = listed.lines().filter(|line| line.contains("stale")).collect();
    assert!(stale.len() == 1 && stale[0].starts_with("step-00000012 "), "{listed}");
    assert!(listed.lines().last().unwrap().starts_with("step-00000012.2 "), "{listed}");
}

#[test]
fn a_drain_after_a_rollback_keeps_its_state_under_another_name() {
    let folder = TempDir::new().unwrap();
    let mut server = ServerOptions::new().checkpoint_dir(folder.path()).checkpoint_on_drain().start();
    for (seed, names) in [("1", &["drain-00000006"][..]), ("2", &["drain-00000006", "drain-00000006.2"])] {
        Train::new(6).args(["--seed", seed]).servers(&[server.address().to_string()]).run();
        server.process.terminate();
        assert_eq!(server.process.code(), 0, "{}", server.process.stderr());
        assert_eq!(sealed(folder.path()), names);
        server.restart();
    }
}

#[test]
fn the_last_step_is_checkpointed_and_the_same_command_runs_again() {
    let folder = TempDir::new().unwrap();
    let train =
        |steps| Train::new(steps).args(["--checkpoint-every", "2", "--checkpoint-dir", &text(folder.path())]);
    let first = train(5).run();
    assert_eq!(written(&first.said), ["step-00000002", "step-00000004", "step-00000005"]);
    let End { checkpoint, weights_gone, .. } = first.end.clone();
    assert_eq!((checkpoint.as_deref(), weights_gone), (Some("step-00000005"), false));
    let again = train(5).run();
    assert_eq!(again.end.state_hash, first.end.state_hash);
    let other = train(5).args(["--seed", "2"]).run();
    assert_eq!(written(&other.said)[2], "step-00000005.2");
    let longer = train(7).args(["--seed", "2"]).start_with(["--resume"]).finish();
    assert_eq!((longer.start.first_step, longer.end.checkpoint.as_deref()), (6, Some("step-00000007")));
    // Several ranks are several processes, and the server runs in their parent.
    let ranks =
        Train::new(3).args(["--world-size", "2", "--checkpoint-dir", &text(&folder.path().join("two"))]);
    assert_eq!(written(&ranks.run().said), ["step-00000003"]);
}

#[test]
fn training_says_where_the_weights_are_and_exports_them() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let train = Train::new(3).args(["--export", &text(&out)]);
    let first = train.run();
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    assert_eq!((first.end.export.as_deref(), first.end.weights_gone), (out.to_str(), false));
    train.run();
    assert_eq!(fs::read(out.join("model.safetensors")).unwrap(), bytes);
    train.args(["--seed", "2"]).run();
    assert_ne!(fs::read(out.join("model.safetensors")).unwrap(), bytes, "a later export takes its place");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "and the earlier one is gone");

    fs::write(out.join("mine.txt"), "mine").unwrap();
    let (stderr, said) = Train::new(3).args(["--export", &text(&out)]).start().fails(PATIENCE);
    assert!(stderr.contains("mine.txt") && said.steps().count() == 0, "{stderr}");

    assert!(Train::new(3).run().end.weights_gone);
    for (more, words) in [
        (&[][..], &["gone", "--export DIR", "--checkpoint-dir DIR"][..]),
        (
            &["--tier", "nvme", "--state-dir", &text(&folder.path().join("state"))],
            &["the same command", "state"],
        ),
    ] {
        let _ = fs::create_dir(folder.path().join("state"));
        // `train` owns the text to train on, and must outlive the process.
        let train = Train::new(3).args(more);
        let output = train.command().output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && words.iter().all(|word| stdout.contains(word)), "{stdout}");
    }
}

/// Puts a file where the folder was, so that no process can write there. Returns the folder's new place.
fn take_away(folder: &Path) -> PathBuf {
    let aside = folder.with_extension("aside");
    fs::rename(folder, &aside).unwrap();
    fs::write(folder, "no folder").unwrap();
    aside
}

fn bring_back(folder: &Path) {
    fs::remove_file(folder).unwrap();
    fs::rename(folder.with_extension("aside"), folder).unwrap();
}

#[test]
fn a_checkpoint_that_fails_is_a_warning_shown_in_status_and_tried_again() {
    const STEPS: u64 = 400;
    let root = TempDir::new().unwrap();
    let folder = root.path().join("checkpoints");
    let server = ServerOptions::new().checkpoint_dir(&folder).allow("no checkpoint written").start();
    let servers = [server.address().to_string()];
    let train = Train::new(STEPS).args(["--checkpoint-every", "5"]).servers(&servers);
    let mut running = train.start();
    let is_checkpoint = |event: &Event| matches!(event, Event::Checkpoint { .. });
    running.until("a checkpoint", is_checkpoint);
    take_away(&folder);
    while !running.process.stderr().contains("no checkpoint of step") {
        running.until_steps(1);
    }
    let failed = job_status(&servers).servers[0].checkpoints.clone().expect("what became of checkpoints");
    assert!(failed.failure.as_ref().is_some_and(|said| said.contains(&text(&folder))), "{failed:?}");
    assert!(failed.name.is_some(), "the one before is still named: {failed:?}");
    bring_back(&folder);
    running.until("a checkpoint after the folder came back", is_checkpoint);
    let said = running.process.stderr();
    assert!(said.contains("Training goes on, and it is tried again"), "{said}");
    let run = running.finish();
    assert_eq!(run.end.checkpoint, Some(format!("step-{STEPS:08}")));
    let status = job_status(&servers).servers[0].checkpoints.clone().unwrap();
    assert_eq!((status.version, status.failure), (STEPS, None));
}

#[test]
fn a_folder_that_takes_no_checkpoint_is_told_before_the_first_step() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("checkpoints");
    let server = ServerOptions::new().checkpoint_dir(&folder).start();
    assert!(folder.is_dir(), "made at start");
    take_away(&folder);
    let train = Train::new(5).args(["--checkpoint-every", "5"]).servers(&[server.address().to_string()]);
    // The server reads that folder before it opens a new job: a note of an earlier release may name the job.
    let (stderr, said) = train.start().fails(PATIENCE);
    assert_eq!(said.steps().count(), 0);
    assert!(stderr.contains("OpenJob") && stderr.contains(&text(&folder)), "{stderr}");
    bring_back(&folder);
    assert_eq!(written(&train.run().said), ["step-00000005"]);

    for missing in [root.path().join("not/there"), Path::new("/proc/self").join("nor-here")] {
        let output = longshored(["--listen", "127.0.0.1:0", "--checkpoint-dir", &text(&missing)]);
        assert!(output.code != 0 && output.stderr.contains(&text(&missing)), "{output:?}");
    }
}

/// Hosts share nothing: each server's checkpoint folder has its own part alone.
#[test]
fn servers_with_folders_of_their_own_resume() {
    let expected = Train::new(14).undisturbed().hash;
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let mut servers =
        folders.each_ref().map(|folder| ServerOptions::new().checkpoint_dir(folder.path()).start());
    let addresses: Vec<_> = servers.iter().map(|server| server.address().to_string()).collect();
    let train = |steps| Train::new(steps).args(["--checkpoint-every", "6"]).servers(&addresses);
    let mut running = train(14).start();
    running.until("its second checkpoint", |event| matches!(event, Event::Checkpoint { version: 12, .. }));
    let stderr = running.process.stderr();
    running.kill();
    assert_eq!(stderr.matches("do not share a checkpoint folder").count(), 1, "said once: {stderr}");
    servers.iter_mut().for_each(|server| server.kill_and_restart());
    let run = train(14).start_with(["--resume"]).finish();
    assert_eq!((run.start.first_step, run.end.state_hash), (13, expected));
}

/// No process copies the parts of stopped servers between their folders. The resuming worker does.
#[test]
fn drained_servers_with_folders_of_their_own_resume() {
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let start =
        |folder: &TempDir| ServerOptions::new().checkpoint_dir(folder.path()).checkpoint_on_drain().start();
    let mut servers = folders.each_ref().map(start);
    let addresses: Vec<_> = servers.iter().map(|server| server.address().to_string()).collect();
    let first = Train::new(6).servers(&addresses).run();
    for server in &mut servers {
        server.process.terminate();
        assert_eq!(server.process.code(), 0, "{}", server.process.stderr());
        server.restart();
    }
    assert!(sealed(folders[0].path()).is_empty());
    let again = Train::new(6).servers(&addresses).start_with(["--resume"]).finish();
    assert_eq!((again.start.first_step, again.end.state_hash), (7, first.end.state_hash));
    assert_eq!(sealed(folders[1].path()), ["drain-00000006"]);
}

#[test]
fn a_damaged_checkpoint_is_listed_as_damaged() {
    let folder = TempDir::new().unwrap();
    let server = ServerOptions::new().checkpoint_dir(folder.path()).start();
    let servers = [server.address().to_string()];
    Train::new(6).args(["--checkpoint-every", "2"]).servers(&servers).run();
    let manifest = folder.path().join("default/step-00000006/manifest.json");
    let altered = fs::read_to_string(&manifest).unwrap().replacen("applied", "Applied", 1);
    fs::write(&manifest, altered).unwrap();
    let part = folder.path().join("default/step-00000002/server-00001-of-00001.safetensors");
    fs::OpenOptions::new().write(true).open(part).unwrap().set_len(100).unwrap();
    let listed = list(&servers);
    let lines: Vec<&str> = listed.lines().collect();
    let is = |line: &str, name: &str, damage: &str| line.starts_with(name) && line.contains(damage);
    assert!(is(lines[0], "step-00000002", "DAMAGED") && lines[0].contains("100 bytes"), "{listed}");
    assert!(is(lines[1], "step-00000004", "version 4") && !lines[1].contains("DAMAGED"), "{listed}");
    assert!(is(lines[2], "step-00000006", "DAMAGED") && lines[2].contains("manifest.json"), "{listed}");
}
