//! Exports of weights for other programs: the rounded master weights of one version, also during training.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt, path::Path};

use longshore_tests::{
    command::{Output, done, longshore},
    server::{ServerOptions, addresses, servers},
    train::Train,
};
use tempfile::TempDir;

fn export(servers: &[String], out: &Path, more: &[&str]) -> Output {
    let (servers, out) = (servers.join(","), out.display().to_string());
    longshore(["export", "--servers", &servers, "--out", &out].into_iter().chain(more.iter().copied()))
}

fn version_of(output: &Output) -> u64 {
    assert_eq!(output.code, 0, "{}", output.stderr);
    let version = output.stdout.strip_prefix("version ").and_then(|text| text.split(' ').next());
    version.and_then(|version| version.parse().ok()).unwrap_or_else(|| panic!("no version: {output:?}"))
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("a file"));
    entries
        .map(|entry| {
            (entry.file_name().into_string().expect("a name"), fs::read(entry.path()).expect("a file"))
        })
        .collect()
}

#[test]
fn an_export_during_training_is_of_one_version_of_all_servers() {
    let folder = TempDir::new().unwrap();
    let servers = servers(2, &ServerOptions::new());
    let addresses = addresses(&servers);
    // Without a cosine schedule the weights of a step do not depend on the number of later steps.
    let train = |steps| Train::new(steps).args(["--lr-floor", "1"]).servers(&addresses);
    let mut running = train(100_000).start();
    running.until_step(20);
    let (during, after) = (folder.path().join("during"), folder.path().join("after"));
    let flags = ["--dtype", "f32", "--max-file-size", "300KiB"];
    let version = version_of(&export(&addresses, &during, &flags));
    assert!(version >= 20, "version {version}");
    // Training went on during the export, and still does.
    running.until_step(version + 5);
    running.kill();

    done(["delete", "--servers", &addresses.join(","), "--job", "default"]);
    train(version).run();
    assert_eq!(version_of(&export(&addresses, &after, &flags)), version);
    let (during, after) = (files(&during), files(&after));
    assert!(during.len() > 3, "{:?}", during.keys());
    assert!(during == after, "the weights of version {version} are not those of a run of {version} steps");
}

#[test]
fn what_cannot_be_exported_is_said_and_nothing_is_left_behind() {
    let folder = TempDir::new().unwrap();
    let servers = servers(2, &ServerOptions::new());
    let addresses = addresses(&servers);
    let out = folder.path().join("out");
    let nothing = export(&addresses, &out, &[]);
    assert!(nothing.code != 0 && nothing.stderr.contains("no job on these servers"), "{nothing:?}");
    Train::new(3).servers(&addresses).run();
    let absent = export(&addresses, &out, &["--job", "absent"]);
    assert!(absent.code != 0 && absent.stderr.contains("absent"), "{absent:?}");
    assert_eq!(files(folder.path()).len(), 0);

    fs::create_dir(&out).unwrap();
    fs::write(out.join("mine.txt"), "mine").unwrap();
    let full = export(&addresses, &out, &[]);
    assert!(full.code != 0 && full.stderr.contains("mine.txt"), "{full:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    fs::remove_file(out.join("mine.txt")).unwrap();
    assert_eq!(version_of(&export(&addresses, &out, &[])), 3);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&out), mode(&out.join("model.safetensors"))), (0o700, 0o600), "the owner's alone");
    assert_eq!(files(&out).into_keys().collect::<Vec<_>>(), ["model.safetensors"]);
}
