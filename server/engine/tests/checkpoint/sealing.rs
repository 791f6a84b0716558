//! Sealing: conditions of a checkpoint, refusals, and the removal of old ones.

use std::{
    fs::{self, File},
    thread,
    time::Duration,
};

use longshore_engine::{
    job::{CheckpointId, StoredImages},
    record::Record,
};
use longshore_proto::{Formats, MasterFormat, StateFormat};
use rustix::fs::{FlockOperation, flock};

use super::*;

#[test]
fn only_all_parts_of_one_version_are_sealed() {
    let (_root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 2, 1);
    let early = cluster.write(&store, "a");
    cluster.step(2);
    let late = cluster.write(&store, "a");
    let seal = |parts: &[String]| store.seal(&run(), "a", parts).unwrap_err();

    let fault = seal(&[early[0].clone(), late[1].clone()]);
    assert_eq!((fault.kind, &*fault.field), (FaultKind::Conflict, "parts[1].version"), "{fault}");
    let fault = seal(&late[..1]);
    assert_eq!((fault.kind, &*fault.field), (FaultKind::Precondition, "version"), "{fault}");
    for wrong in [&[][..], &[late[0].clone(), late[0].clone()], &["{}".to_string(), late[1].clone()]] {
        assert_eq!(seal(wrong).kind, FaultKind::Invalid);
    }
    let mut part: Part = serde_json::from_str(&late[1]).unwrap();
    part.file = "../../elsewhere".into();
    let fault = seal(&[late[0].clone(), part.to_json().unwrap()]);
    assert_eq!(fault.field, "parts[1].file", "{fault}");
    let mut part: Part = serde_json::from_str(&late[1]).unwrap();
    part.shards.pop();
    assert_eq!(
        seal(&[late[0].clone(), part.to_json().unwrap()]).kind,
        FaultKind::Corrupt,
        "fewer than the file has"
    );
    let other = store.seal(&JobName::parse("name", "other").unwrap(), "a", &late).unwrap_err();
    assert_eq!(other.field, "parts[0].job");

    assert_eq!(store.list(&run()).unwrap(), []);
    let sealed = store.seal(&run(), "a", &late).unwrap();
    assert_eq!(store.seal(&run(), "a", &late).unwrap(), sealed, "sealing may be repeated");
    let listed = store.list(&run()).unwrap().remove(0);
    assert_eq!(
        (&*listed.name, listed.version, listed.parts, listed.visible),
        ("a", Version(2), 2, vec![0, 1])
    );
    cluster.step(3);
    let fault = store.write(0, &cluster.jobs[0], "a", None, soon()).unwrap_err();
    assert_eq!((fault.kind, &*fault.field), (FaultKind::Conflict, "name"));
}

#[test]
fn an_unsealed_checkpoint_does_not_exist() {
    let (_root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 2, 1);
    cluster.write(&store, "a");
    assert_eq!(store.list(&run()).unwrap(), []);
    let target = Trained::open(&spec(1, 0), 1);
    let fault = target.restore(&store, "a").unwrap_err();
    assert_eq!(fault.kind, FaultKind::NotFound);
    assert!(fault.value.ends_with("manifest.json") && fault.remedy.contains("seal"), "{fault}");
    assert!(target.is_loading());
}

#[test]
fn another_model_is_refused_and_named() {
    let (_root, store) = store();
    Trained::after(&spec(1, 1), 1, 2).save(&store, "a");
    let good = spec(1, 1);
    let mut params = good.params.clone();
    params[1].shape = vec![62];
    let (mut grouped, fp32) = (good.params.clone(), good.formats);
    grouped[2].group = 1;
    let cases = [
        ("spec.params[1]", JobSpec { params, ..good.clone() }),
        ("spec.params[2]", JobSpec { params: grouped, ..good.clone() }),
        ("spec.params", JobSpec { params: good.params[..2].to_vec(), ..good.clone() }),
        ("spec.groups", JobSpec { groups: vec!["x".into(), "y".into()], ..good.clone() }),
        ("spec.rule", JobSpec { rule: Rule::Adam, ..good.clone() }),
        ("spec.image_dtype", JobSpec { image_dtype: Dtype::F16, ..good.clone() }),
        (
            "spec.state_format",
            JobSpec { formats: Formats { state: StateFormat::Block8, ..fp32 }, ..good.clone() },
        ),
        (
            "spec.master_format",
            JobSpec { formats: Formats { master: MasterFormat::Bf16, ..fp32 }, ..good.clone() },
        ),
    ];
    for (field, other) in cases {
        let target = Trained::open(&other, 1);
        let fault = target.restore(&store, "a").unwrap_err();
        assert_eq!((fault.kind, &*fault.field), (FaultKind::Conflict, field), "{fault}");
        assert!(fault.limit.ends_with("as in the checkpoint"), "{fault}");
        assert!(target.is_loading());
    }
    let free = JobSpec {
        name: JobName::parse("name", "fork").unwrap(),
        gradient_dtype: Dtype::F32,
        image_dtype: Dtype::F16,
        // A restore may change the rounding seed, and the world size. From then on, state in fewer bits is rounded
        // otherwise.
        formats: Formats { seed: 8, ..fp32 },
        world_size: 2,
        micro_steps: 3,
        max_delay: 0,
        ..spec(3, 0)
    };
    Trained::open(&free, 2).restore(&store, "a").unwrap();
}

#[test]
fn a_job_that_loads_is_not_written() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 1, 1);
    cluster.save(&store, "a");
    let loading = Trained::open(&spec(1, 0), 1);
    let fault = store.write(0, &loading.jobs[0], "b", None, soon()).unwrap_err();
    assert_eq!((fault.kind, &*fault.field), (FaultKind::Precondition, "job.phase"));
    let fault = store.write(0, &cluster.jobs[0], "b", Some(Version(0)), soon()).unwrap_err();
    assert_eq!((fault.kind, &*fault.field), (FaultKind::Precondition, "version"));
    assert_eq!(files(&root.path().join("run")), ["a"], "a refused checkpoint leaves nothing behind");
    assert!(!format!("{store:?}").contains("run/b"), "nor in memory: {store:?}");
}

#[test]
fn a_job_is_filled_from_one_source() {
    let cluster = Trained::open(&spec(5, 0), 1);
    let job = &cluster.jobs[0];
    let payload = vec![0; 1 << 20];
    let from = |name: &str| CheckpointId { name: name.to_string(), id: name.to_string() };
    let record = || Record::new(Version(1), 1, None);
    job.load(from("a"), record(), StoredImages::None, &mut |shard, _| {
        let upload = upload(job, RANK, (shard, ChunkId(0)), &payload).unwrap_err();
        assert_eq!((upload.kind, &*upload.value), (FaultKind::Precondition, "being restored"));
        let load = job.load(from("b"), record(), StoredImages::None, &mut |_, _| Ok(())).unwrap_err();
        assert_eq!((load.kind, &*load.value), (FaultKind::Precondition, "being restored"));
        Ok(())
    })
    .unwrap();
    let upload = upload(job, RANK, (ShardId(0), ChunkId(0)), &payload).unwrap_err();
    assert_eq!((upload.kind, &*upload.value), (FaultKind::Precondition, "being restored"));
    job.start_held("a").unwrap();
    assert_eq!(cluster.version(), Version(1));
}

#[test]
fn a_checkpoint_is_held_given_up_and_held_again_before_it_starts() {
    let (_root, store) = store();
    let spec = spec(3, 1);
    let trained = Trained::after(&spec, 2, 2);
    trained.save(&store, "two");
    let cluster = Trained::open(&spec, 2);
    let hold = |name: &str| -> Vec<String> {
        let hold = |job| store.hold(job, &run(), name, soon()).unwrap().id;
        cluster.jobs.iter().map(hold).collect()
    };
    let ids = hold("two");
    assert_eq!(ids, hold("two"));
    let job = &cluster.jobs[0];
    let restoring = job.progress().restoring.expect("what is held");
    assert!(restoring.held && restoring.checkpoint == "two", "{restoring:?}");
    assert_eq!((restoring.shards, job.progress().missing.len()), (job.opened().len() as u32, 0));
    assert!(cluster.is_loading());
    job.release().unwrap();
    job.release().unwrap();
    assert_eq!((job.progress().restoring, job.progress().missing.len()), (None, job.opened().len()));
    assert_eq!(job.start_held(&ids[0]).unwrap_err().field, "restore");
    hold("two");
    assert_eq!(job.start_held("another").unwrap_err().field, "restore");
    for _ in 0..2 {
        cluster.jobs.iter().try_for_each(|job| job.start_held(&ids[0])).unwrap();
        assert_eq!(hold("two"), ids);
    }
    assert_eq!(cluster.state_hash(), trained.state_hash());
    assert_eq!(job.release().unwrap_err().field, "job.phase");
}

#[test]
fn a_job_is_taken_for_its_checkpoint_only_when_every_bit_is_the_same() {
    let (_root, store) = store();
    let spec = spec(2, 0);
    let cluster = Trained::after(&spec, 2, 3);
    cluster.save(&store, "three");
    // A job on one server has reached the same state by training, so the restore succeeds.
    Trained::after(&spec, 1, 3).restore(&store, "three").unwrap();
    for (cluster, steps) in [(Trained::after(&spec, 1, 2), 2), (Trained::after(&spec, 1, 4), 4)] {
        let fault = cluster.restore(&store, "three").unwrap_err();
        assert!(fault.field == "job.phase" && fault.value.contains(&steps.to_string()), "{fault}");
    }
}

#[test]
fn what_is_verified_is_every_byte_and_changes_nothing() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(2, 1), 1, 2);
    cluster.save(&store, "two");
    let job = &cluster.jobs[0];
    let hash = cluster.state_hash();
    let info = store.verify(job, &run(), "two").unwrap();
    assert_eq!(store.check(None, &run(), "two").unwrap().0, info);
    let part = root.path().join("run/two/server-00001-of-00001.safetensors");
    let mut bytes = std::fs::read(&part).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&part, bytes).unwrap();
    assert_eq!(store.verify(job, &run(), "two").unwrap_err().kind, FaultKind::Corrupt);
    assert_eq!(cluster.state_hash(), hash);
}

#[test]
fn names_stay_inside_the_store() {
    let (_root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 1, 0);
    for name in ["../a", "", ".", "..", "a/b", ".hidden"] {
        assert_eq!(store.write(0, &cluster.jobs[0], name, None, soon()).unwrap_err().field, "name");
        assert_eq!(store.seal(&run(), name, &[]).unwrap_err().field, "name");
        assert_eq!(store.restore(&cluster.jobs[0], &run(), name, soon()).unwrap_err().field, "name");
    }
}

#[test]
fn the_first_sealed_go_first_and_the_one_just_sealed_never() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(5, 0), 1, 0);
    cluster.save(&store, "z");
    cluster.save(&store, "y");
    for (step, name) in [(1, "x"), (2, "w")] {
        cluster.step(step);
        cluster.save(&store, name);
    }
    cluster.write(&store, "unsealed");
    assert_eq!(names(&store), ["z", "y", "x", "w"]);
    assert_eq!(store.prune(&run(), None, "w"), Vec::<String>::new());
    assert_eq!(store.prune(&run(), Some(3), "w"), ["z"]);
    // A damaged checkpoint is listed as such, and neither counted nor removed.
    fs::write(root.path().join("run/y/manifest.json"), b"{").unwrap();
    let damaged = store.list(&run()).unwrap().into_iter().filter(|listed| listed.damage.is_some());
    assert_eq!(damaged.map(|listed| listed.name).collect::<Vec<_>>(), ["y"]);
    assert_eq!(store.prune(&run(), Some(0), "w"), ["x"]);
    assert_eq!(files(&root.path().join("run")), ["unsealed", "w", "y"]);
}

/// A job goes back to an older checkpoint. Its next sealed checkpoint then counts as the newest, even with a lower
/// version.
#[test]
fn after_a_rollback_the_checkpoint_just_sealed_stays_and_those_left_behind_are_stale() {
    let (_root, store) = store();
    let before = Trained::after(&spec(1, 0), 2, 1);
    before.save(&store, "one");
    for (step, name) in [(2, "two"), (4, "four")] {
        (before.version().0 + 1..=step).for_each(|step| before.step(step));
        before.save(&store, name);
    }
    let back = Trained::open(&spec(1, 0), 2);
    back.restore(&store, "one").unwrap();
    back.step(2);
    let parts = back.write(&store, "two-again");
    store.seal(&run(), "two-again", &parts).unwrap();
    let stale = |store: &Store| {
        let list = store.list(&run()).unwrap().into_iter();
        list.map(|listed| (listed.name, listed.stale)).collect::<Vec<_>>()
    };
    // The gradients are the same, so "two" has the same state as "two-again", and "four" is beyond that state.
    let expected = [("one", false), ("two", false), ("four", true), ("two-again", false)];
    assert_eq!(stale(&store), expected.map(|(name, stale)| (name.to_string(), stale)));
    assert_eq!(store.prune(&run(), Some(1), "two-again"), ["one", "two", "four"]);
    // A second server seals the same checkpoint after the first one has removed the others.
    store.seal(&run(), "two-again", &parts).unwrap();
    assert_eq!(names(&store), ["two-again"]);
}

/// After the job went back, step N is made again, and a checkpoint of the same name is requested.
#[test]
fn a_sealed_name_asked_for_again_is_the_same_checkpoint_only_with_the_same_state() {
    let (root, store) = store();
    let first = Trained::after(&spec(2, 1), 2, 1);
    first.save(&store, "one");
    first.step(2);
    let parts = first.write(&store, "two");
    store.seal(&run(), "two", &parts).unwrap();
    let manifest = fs::read(root.path().join("run/two/manifest.json")).unwrap();

    let again = Trained::open(&spec(2, 1), 2);
    again.restore(&store, "one").unwrap();
    again.step(2);
    assert_eq!(again.write(&store, "two"), parts);
    store.seal(&run(), "two", &parts).unwrap();
    let fault = store.write(0, &again.jobs[0], "two", Some(Version(3)), soon()).unwrap_err();
    assert_eq!((fault.kind, &*fault.field), (FaultKind::Conflict, "name"), "{fault}");

    let other = Trained::open(&spec(2, 1), 2);
    other.restore(&store, "one").unwrap();
    other.step_with(2, 77);
    for job in &other.jobs {
        let fault = store.write(0, job, "two", None, soon()).unwrap_err();
        assert_eq!((fault.kind, &*fault.field), (FaultKind::Conflict, "name"), "{fault}");
    }
    assert_eq!(fs::read(root.path().join("run/two/manifest.json")).unwrap(), manifest);
    other.save(&store, "two.2");
    let stale: Vec<_> = store.list(&run()).unwrap().into_iter().filter(|listed| listed.stale).collect();
    assert_eq!(stale.iter().map(|listed| &*listed.name).collect::<Vec<_>>(), ["two"]);
}

/// While a job changes its tier, its servers write their parts in two tiers.
#[test]
fn servers_of_two_tiers_write_one_checkpoint() {
    let (_root, store) = store();
    let dir = tempfile::tempdir().unwrap();
    let on_drives = Storage { dirs: vec![dir.path().to_path_buf()], ..Storage::default() };
    let in_memory = Trained::after(&spec(1, 1), 2, 2);
    let moved = Trained::open_on(&JobSpec { tier: TierKind::Nvme, ..spec(1, 1) }, 2, &on_drives);
    moved.upload();
    (1..=2).for_each(|step| moved.step(step));
    let write = || {
        let of = [&in_memory.jobs[0], &moved.jobs[1]];
        of.map(|job| store.write(0, job, "both", None, soon()).unwrap().to_json().unwrap())
    };
    let parts = write();
    store.seal(&run(), "both", &parts).unwrap();
    assert_eq!(write(), parts, "a call may be repeated on any server");
    let restored = Trained::open(&spec(2, 1), 1);
    restored.restore(&store, "both").unwrap();
    assert_eq!(restored.state_hash(), moved.state_hash());
}

/// Unsealed parts take as much room as a checkpoint, so parts that nobody will seal must go.
#[test]
fn parts_that_were_not_sealed_go_when_they_are_discarded_or_superseded() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 2, 1);
    cluster.write(&store, "given-up");
    for server in 0..2 {
        store.discard(0, &run(), "given-up", server, 2).unwrap();
        store.discard(0, &run(), "given-up", server, 2).unwrap();
    }
    assert!(!root.path().join("run").exists(), "nothing is left behind");
    cluster.write(&store, "forgotten");
    cluster.save(&store, "sealed");
    cluster.step(2);
    cluster.save(&store, "next");
    // Parts of "forgotten" may have been written at the same time as "sealed", and may still be sealed.
    assert_eq!(files(&root.path().join("run")), ["forgotten", "next", "sealed"]);
    cluster.step(3);
    cluster.save(&store, "last");
    assert_eq!(files(&root.path().join("run")), ["last", "next", "sealed"]);
    store.discard(0, &run(), "next", 0, 2).unwrap();
    Trained::open(&spec(1, 0), 1).restore(&store, "next").unwrap();
}

/// The sealed checkpoint counts, whatever becomes of older ones.
#[test]
fn old_checkpoints_that_cannot_be_listed_are_no_fault() {
    let (root, store) = store();
    fs::write(root.path().join("run"), b"not a folder").unwrap();
    assert!(store.list(&run()).is_err());
    assert_eq!(store.prune(&run(), Some(1), "last"), Vec::<String>::new());
}

/// Servers that share a folder discard their parts at once, and the removal of a large part takes a while.
#[test]
fn a_part_is_discarded_once_another_server_gives_the_folder_back() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 2, 1);
    cluster.write(&store, "given-up");
    let given_up = root.path().join("run/given-up");
    let folder = File::open(&given_up).unwrap();
    flock(&folder, FlockOperation::LockExclusive).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| store.discard(0, &run(), "given-up", 1, 2).unwrap());
        thread::sleep(Duration::from_millis(50));
        drop(folder);
    });
    let part = Part::file_name(0, 2);
    assert_eq!(files(&given_up), [part.replace("safetensors", "part.json"), part]);
}

/// A server is killed while it writes a part, publishes a part, or removes a checkpoint. Meanwhile another server still
/// writes.
#[test]
fn files_of_a_killed_server_go_with_a_later_checkpoint_and_those_of_others_stay() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 2, 1);
    let folder = |name: &str| root.path().join("run").join(name);
    let part = |number: u32| format!("server-0000{number}-of-00002.safetensors");
    for name in ["killed", "published", "alive", "copied"] {
        cluster.write(&store, name);
    }
    let draft = |name: &str| {
        let draft = folder(name).join(part(2) + ".tmp-1-0-0");
        fs::rename(folder(name).join(part(2)), &draft).unwrap();
        draft
    };
    draft("killed");
    fs::remove_file(folder("killed").join("server-00002-of-00002.part.json")).unwrap();
    // A part's entry is published before the part itself.
    draft("published");
    assert_eq!(store.seal_if_whole(&run(), "published", 2), Ok(false));
    assert_eq!(store.unsealed(&run()).iter().filter(|(name, _)| name == "published").count(), 1);
    let alive = fs::File::open(draft("alive")).unwrap();
    rustix::fs::flock(&alive, rustix::fs::FlockOperation::LockExclusive).unwrap();
    fs::remove_file(folder("copied").join("server-00001-of-00002.part.json")).unwrap();
    fs::create_dir(folder(".removed-old")).unwrap();
    fs::write(folder(".removed-old").join(part(1)), b"x").unwrap();
    for (step, name) in [(2, "a"), (3, "b"), (4, "c")] {
        cluster.step(step);
        cluster.save(&store, name);
    }
    assert_eq!(files(&root.path().join("run")), ["a", "alive", "b", "c", "copied"]);
    assert_eq!(store.prune(&run(), Some(1), "c"), ["a", "b"]);
    drop(alive);
    cluster.step(5);
    cluster.save(&store, "d");
    assert_eq!(files(&root.path().join("run")), ["c", "copied", "d"]);
}

/// Each host has its own folder. The same servers find their own parts there. Other servers are told which part is
/// missing.
#[test]
fn each_server_restores_from_a_folder_of_its_own() {
    let cluster = Trained::after(&spec(1, 1), 2, 2);
    let hosts = [store(), store()];
    let parts: Vec<String> = (cluster.jobs.iter().zip(&hosts))
        .map(|(job, (_, store))| store.write(0, job, "a", None, soon()).unwrap().to_json().unwrap())
        .collect();
    let mut manifests = Vec::new();
    for (server, (_, store)) in hosts.iter().enumerate() {
        let sealed = store.seal(&run(), "a", &parts).unwrap();
        assert_eq!((sealed.visible, &store.list(&run()).unwrap()[0].visible), (1, &vec![server as u32]));
        manifests.push(fs::read(sealed.path).unwrap());
    }
    assert_eq!(manifests[0], manifests[1]);
    let same = Trained::open(&spec(1, 1), 2);
    for (job, (_, store)) in same.jobs.iter().zip(&hosts) {
        store.restore(job, &run(), "a", soon()).unwrap();
    }
    assert_eq!(same.state_hash(), cluster.state_hash());
    let swapped = Trained::open(&spec(1, 1), 2);
    for (job, (_, store)) in swapped.jobs.iter().zip(hosts.iter().rev()) {
        let fault = store.restore(job, &run(), "a", soon()).unwrap_err();
        assert_eq!(fault.kind, FaultKind::NotFound, "{fault}");
        assert!(fault.value.contains(".safetensors (the part of server "), "{fault}");
        for word in ["in their order", "copy", "share"] {
            assert!(fault.remedy.contains(word), "no {word:?} in: {fault}");
        }
    }
    assert!(swapped.is_loading());
    // With all parts in one folder, any servers can restore them.
    let file = "run/a/server-00002-of-00002.safetensors";
    fs::copy(hosts[1].0.path().join(file), hosts[0].0.path().join(file)).unwrap();
    let target = Trained::open(&spec(2, 1), 1);
    assert_eq!(target.restore(&hosts[0].1, "a").unwrap()[0].state_hash, None);
    assert_eq!(target.state_hash(), cluster.state_hash());
    let (_root, empty) = store();
    assert_eq!(empty.seal(&run(), "a", &parts).unwrap_err().kind, FaultKind::NotFound);
}

#[test]
fn a_folder_that_takes_no_checkpoint_is_found_before_one_is_wanted() {
    let (root, store) = store();
    let cluster = Trained::open(&spec(1, 0), 1);
    assert!(store.check_folder().unwrap() > 0);
    store.check_room(&cluster.jobs[0]).unwrap();
    assert!(files(root.path()).is_empty(), "a check leaves nothing behind");
    let made = Store::new(root.path().join("made"));
    made.check_folder().unwrap();
    assert!(made.dir().is_dir());
    let fault = Store::new(root.path().join("not/there")).check_folder().unwrap_err();
    assert_eq!(fault.kind, FaultKind::NotFound, "{fault}");
    let file = root.path().join("file");
    fs::write(&file, b"").unwrap();
    assert_eq!(Store::new(file).check_folder().unwrap_err().limit, "a folder");
}

fn names(store: &Store) -> Vec<String> {
    store.list(&run()).unwrap().into_iter().map(|listed| listed.name).collect()
}

#[test]
fn authors_of_one_name_write_in_turn_and_discard_nothing_of_each_other() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 1, 1);
    let (store, job) = (&store, &cluster.jobs[0]);
    let write = |name: &'static str| -> Vec<String> {
        thread::scope(|scope| {
            let write = |author| {
                scope.spawn(move || store.write(author, job, name, None, soon()).unwrap().to_json().unwrap())
            };
            let writers: Vec<_> = (1..=4).map(write).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        })
    };
    let parts = write("sealed");
    assert!(parts.iter().all(|part| *part == parts[0]));
    store.discard(2, &run(), "sealed", 0, 1).unwrap();
    store.seal(&run(), "sealed", &parts[..1]).unwrap();
    write("given-up");
    for author in 1..=4 {
        assert!(root.path().join("run/given-up").exists(), "{author} is no author alone");
        store.discard(author, &run(), "given-up", 0, 1).unwrap();
    }
    assert_eq!(files(&root.path().join("run")), ["sealed"]);
}

/// A write takes longer than its caller waits, who gives the part up before the write ends.
#[test]
fn a_part_given_up_during_its_write_goes_when_the_write_ends() {
    let (root, store) = store();
    let cluster = Trained::after(&spec(1, 0), 1, 1);
    for name in ["a", "b", "c", "d", "e"] {
        let folder = root.path().join("run").join(name);
        let written = thread::scope(|scope| {
            let write = scope.spawn(|| store.write(1, &cluster.jobs[0], name, None, soon()));
            while files(&folder).is_empty() && !write.is_finished() {
                thread::yield_now();
            }
            store.discard(1, &run(), name, 0, 1).unwrap();
            write.join().unwrap()
        });
        assert!(!folder.exists(), "{written:?}");
        assert!(!format!("{store:?}").contains(&format!("run/{name}")), "{store:?}");
    }
}
