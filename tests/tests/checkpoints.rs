//! Checkpoints in use: at the end of training, in separate folders of each host, and in unwritable folders.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use longshore_tests::{
    command::longshored,
    event::{End, Event},
    server::ServerOptions,
    status::job_status,
    train::{Said, Train},
};
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
    // With several ranks, each rank is a process, and their parent embeds the server.
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
    let root = TempDir::new().unwrap();
    let folder = root.path().join("checkpoints");
    let server = ServerOptions::new().checkpoint_dir(&folder).allow("no checkpoint written").start();
    let servers = [server.address().to_string()];
    let train = Train::new(1).args(["--checkpoint-every", "5"]).servers(&servers).endless();
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
    let end = running.stop();
    assert_eq!(end.checkpoint, Some(format!("step-{:08}", end.version)));
    let status = job_status(&servers).servers[0].checkpoints.clone().unwrap();
    assert_eq!((status.version, status.failure), (end.version, None));
}

#[test]
fn a_folder_that_takes_no_checkpoint_is_told_before_the_first_step() {
    let root = TempDir::new().unwrap();
    let folder = root.path().join("checkpoints");
    let server = ServerOptions::new().checkpoint_dir(&folder).start();
    assert!(folder.is_dir(), "made at start");
    take_away(&folder);
    let train = Train::new(5).args(["--checkpoint-every", "5"]).servers(&[server.address().to_string()]);
    // The server reads that folder before it opens a new job. A note that an earlier release left there may name the
    // job.
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

/// Each server's folder has only its own part. The worker that resumes copies parts between the folders.
#[test]
fn drained_servers_with_folders_of_their_own_resume() {
    let folders = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let start = |folder: &TempDir| {
        ServerOptions::new().checkpoint_dir(folder.path()).args(["--checkpoint-on-drain"]).start()
    };
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
