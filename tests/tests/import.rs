//! A new job's weights from safetensors of another program.

use std::{fs, path::Path};

use longshore_tests::{
    command::{Output, done, longshore},
    server::{ServerOptions, addresses, servers},
    status,
    train::Train,
};
use tempfile::TempDir;

fn import(servers: &[String], from: &Path, more: &[&str]) -> Output {
    let (servers, from) = (servers.join(","), from.display().to_string());
    longshore(["import", "--servers", &servers, "--from", &from].into_iter().chain(more.iter().copied()))
}

fn export(servers: &[String], job: &str, out: &Path, dtype: &str) {
    let (servers, out) = (servers.join(","), out.display().to_string());
    let flags = ["--dtype", dtype, "--max-file-size", "300KiB"];
    done(["export", "--servers", &servers, "--job", job, "--out", &out].into_iter().chain(flags));
}

fn same_files(one: &Path, other: &Path) -> bool {
    let names = |folder: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let (ours, theirs) = (names(one), names(other));
    assert!(ours.len() > 3, "{ours:?}");
    ours == theirs
        && ours.iter().all(|name| fs::read(one.join(name)).unwrap() == fs::read(other.join(name)).unwrap())
}

#[test]
fn a_job_like_another_one_gets_the_weights_of_files_and_trains_on() {
    let folder = TempDir::new().unwrap();
    let servers = servers(2, &ServerOptions::new());
    let addresses = addresses(&servers);
    Train::new(5).servers(&addresses).run();
    for dtype in ["f32", "bf16"] {
        let (out, again) = (folder.path().join(dtype), folder.path().join(format!("{dtype}-again")));
        export(&addresses, "default", &out, dtype);
        let output = import(&addresses, &out, &["--job", dtype, "--like", "default"]);
        assert_eq!(output.code, 0, "{}", output.stderr);
        assert!(output.stdout.starts_with(&format!("job {dtype}: ")), "{}", output.stdout);
        export(&addresses, dtype, &again, dtype);
        assert!(same_files(&out, &again), "the imported weights are others");
    }
    let jobs = status::status(&addresses);
    let versions: Vec<_> = jobs.iter().map(|job| (job.job.as_str(), job.servers[0].version)).collect();
    assert_eq!(versions, [("bf16", 0), ("default", 5), ("f32", 0)]);
    // A trainer finds the job and continues from these weights.
    Train::new(2).args(["--job", "f32"]).servers(&addresses).run();
    let version = |job: &str| {
        status::status(&addresses).iter().find(|found| found.job == job).unwrap().servers[0].version
    };
    assert_eq!(version("f32"), 2);

    let full = import(&addresses, &folder.path().join("f32"), &["--job", "f32"]);
    assert_eq!(full.code, 1);
    assert!(full.stderr.contains("job is f32, which has its weights, but must be new"), "{}", full.stderr);
}

#[test]
fn tensors_that_do_not_fit_are_named_and_nothing_is_opened() {
    let folder = TempDir::new().unwrap();
    let servers = servers(1, &ServerOptions::new());
    let addresses = addresses(&servers);
    Train::new(1).servers(&addresses).run();
    let out = folder.path().join("model");
    let path = out.display().to_string();
    done(["export", "--servers", &addresses.join(","), "--out", &path, "--dtype", "f32"]);
    let file = out.join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&whole[8..8 + length]).unwrap();
    let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let first = tensors.map(|(name, _)| name.clone()).next().unwrap();
    let spoil = |change: &dyn Fn(&mut serde_json::Map<String, serde_json::Value>)| {
        let mut header = header.as_object().unwrap().clone();
        change(&mut header);
        let mut json = serde_json::to_vec(&header).unwrap();
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(&json);
        bytes.extend(&whole[8 + length..]);
        fs::write(&file, bytes).unwrap();
        let output = import(&addresses, &out, &["--job", "new", "--like", "default"]);
        assert_eq!(output.code, 1, "{output:?}");
        output.stderr
    };
    let renamed = spoil(&|header| {
        let tensor = header.remove(&first).unwrap();
        header.insert("other".into(), tensor);
    });
    assert!(renamed.contains(&format!("{first} is missing")), "{renamed}");
    assert!(
        renamed.contains("other is no parameter of the job (--ignore-extra leaves it alone)"),
        "{renamed}"
    );
    let reshaped = spoil(&|header| {
        let shape = header[&first]["shape"].as_array().unwrap().clone();
        header[&first]["shape"] = [vec![1.into()], shape].concat().into();
    });
    assert!(reshaped.contains(&format!("{first} has shape [1, ")), "{reshaped}");
    let retyped = spoil(&|header| header[&first]["dtype"] = "I32".into());
    assert!(
        retyped.contains(&format!("{first} is of type I32, but must be of F32, F16 or BF16")),
        "{retyped}"
    );
    fs::write(&file, &whole[..whole.len() - 100]).unwrap();
    let cut = import(&addresses, &out, &["--job", "new", "--like", "default"]);
    assert!(cut.code == 1 && cut.stderr.contains("copy it again"), "{cut:?}");
    let index = folder.path().join("other.safetensors.index.json");
    fs::write(&index, r#"{"weight_map": {"a": "../model.safetensors"}}"#).unwrap();
    let outside = import(&addresses, &index, &["--job", "new", "--like", "default"]);
    assert!(outside.code == 1 && outside.stderr.contains("is not in its folder"), "{outside:?}");
    let absent = import(&addresses, folder.path(), &["--job", "new", "--like", "default"]);
    assert!(absent.stderr.contains("has neither model.safetensors nor"), "{absent:?}");
    let unlike = import(&addresses, &out, &["--job", "new"]);
    assert!(unlike.stderr.contains("no job \"new\""), "{unlike:?}");
    assert_eq!(status::status(&addresses).len(), 1, "nothing was opened");
}

#[test]
fn files_of_torch_and_deepspeed_are_refused_with_the_way_through_python() {
    let folder = TempDir::new().unwrap();
    let server = ServerOptions::new().start();
    let addresses = [server.address().to_string()];
    let (model, pickled, universal) =
        (folder.path().join("model"), folder.path().join("last.pt"), folder.path().join("universal"));
    fs::create_dir_all(universal.join("step5/zero")).unwrap();
    fs::write(universal.join("latest_universal"), "step5").unwrap();
    for (from, flags, code, remedy) in [
        (&pickled, [].as_slice(), 1, "safetensors.torch as s; s.save_file(torch.load("),
        (&universal, &[], 1, "longshore.checkpoint.load_deepspeed(optimizer, folder)"),
        (&universal.join("step5"), &[], 1, "longshore.checkpoint.load_deepspeed(optimizer, folder)"),
        (&model, &["--optimizer", "adamw.pt"], 2, "optimizer.load_state_dict(torch.load(FILE))"),
        (&model, &["--step", "5"], 2, "pass step= to longshore.checkpoint.load_deepspeed(optimizer, FOLDER)"),
    ] {
        let output = import(&addresses, from, &[&["--job", "new"], flags].concat());
        assert!(output.code == code && output.stderr.contains(remedy), "{flags:?}: {output:?}");
    }
}
