//! Checkpoints that are truncated, altered, incomplete, or another job's. Servers refuse them, and a good
//! checkpoint still restores.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::Path,
};

use longshore_proto::FaultKind::{self, Corrupt, Invalid, NotFound};
use longshore_tests::{
    command::longshore,
    conformance::{
        cluster::Cluster,
        raw::{assert_fault, placement},
        run,
        synthetic::Synthetic,
    },
};
use longshore_wire::{
    Wire,
    v1::{self, Phase},
};
use longshore_worker::{Error, Session};

use super::{BEFORE, Victim, finish, plan};

/// A damage to a checkpoint's folder, and the refusal's kind, field and words.
type Damage = (&'static str, fn(&Path), FaultKind, &'static str, &'static str);

const PART: &str = "server-00001-of-00001.safetensors";

/// The engine's tests alter every byte.
const DAMAGES: [Damage; 3] = [
    ("longer", |folder| resize(&folder.join(PART), 1), Corrupt, PART, ""),
    ("altered", |folder| flip(&folder.join(PART), 65_536), Corrupt, "weights and optimizer state", "BLAKE3"),
    ("unsealed", |folder| remove(&folder.join("manifest.json")), NotFound, "manifest.json", "never sealed"),
];

#[test]
fn a_damaged_checkpoint_is_refused_and_a_whole_one_still_restores() {
    let cluster = Cluster::start(1);
    let Victim { spec, layout, servers, pipeline, mut seen, .. } = Victim::start(&cluster, "restored");
    pipeline.session().checkpoint("whole").expect("a checkpoint");
    pipeline.session().delete_job().expect("a delete");
    drop(pipeline);
    let server = &servers[0];
    server.open(spec.to_wire(), &placement(&cluster.addresses(), &layout), 0).expect("an open");
    for (name, damage, kind, value, limit) in DAMAGES {
        let folder = cluster.checkpoint("restored", name);
        copy(&cluster.checkpoint("restored", "whole"), &folder);
        damage(&folder);
        assert_fault(server.restore("restored", name), kind, "checkpoint", value, limit);
        assert_eq!(server.progress("restored").phase(), Phase::Loading, "{name}");
    }
    assert_fault(server.restore("restored", "nowhere"), NotFound, "checkpoint", "nowhere", "there");
    assert_fault(server.restore("restored", "../whole"), Invalid, "name", "../whole", "A-Z");
    let restored = server.restore("restored", "whole").expect("the whole one");
    assert_eq!(restored.progress.expect("a progress").version, BEFORE);
    // The first answer may have been lost; a repeated call gets the same answer.
    let again = server.restore("restored", "whole").expect("it is so already");
    assert_eq!((again.id, again.version), (restored.id, BEFORE));
    let pipeline = run::enter(cluster.options(&spec, 0), &Synthetic::default(), &plan());
    seen.outcomes.retain(|outcome| outcome.step.0 <= BEFORE);
    finish(&cluster, "restored", pipeline, seen);
}

/// A failure is kept with the open job, and names that are none never get as far.
#[test]
fn a_checkpoint_that_fails_before_its_job_is_open_is_not_the_jobs() {
    let cluster = Cluster::start(1);
    let server = cluster.raw(0);
    let seal = |job: &str, name: &str| {
        let (job, name) = (job.to_string(), name.to_string());
        let request = v1::SealCheckpointRequest { job, name, parts: vec!["{\"\n".into()] };
        server.call(server.admin.clone().seal_checkpoint(request))
    };
    let forged = "a\n2026-01-01T00:00:00Z  INFO audit: who=\"operator\"";
    assert_fault(seal(forged, "last"), Invalid, "job", "\\n", "A-Z");
    assert_fault(seal("ghost", forged), Invalid, "name", "\\n", "A-Z");
    let mut admin = server.admin.clone();
    let (job, name) = ("ghost".to_string(), forged.to_string());
    let discard = v1::DiscardCheckpointRequest { job, name };
    assert_fault(server.call(admin.discard_checkpoint(discard)), Invalid, "name", "\\n", "A-Z");
    assert!(seal("ghost", "last").is_err());
    let spec = plan().spec("ghost", &Synthetic::default());
    let layout = spec.validate().expect("a spec");
    server.open(spec.to_wire(), &placement(&cluster.addresses(), &layout), 0).expect("an open");
    assert_eq!(server.describe("ghost").checkpoints, None);
    let fault = seal("ghost", "last").expect_err("parts that are none");
    let failure = server.describe("ghost").checkpoints.expect("the open job's").failure;
    assert!(failure == fault.to_string() && !failure.contains('\n'), "{failure:?}");
}

/// A server of two cannot read its part. The other server must end with neither a half-restored job nor none
/// at all.
#[test]
fn a_restore_that_fails_on_one_server_leaves_nothing_on_the_other() {
    const SECOND: &str = "server-00002-of-00002.safetensors";
    let cluster = Cluster::start(2);
    let (model, addresses) = (Synthetic::default(), cluster.addresses());
    let spec = plan().spec("halved", &model);
    let first = Victim::start(&cluster, "halved");
    first.pipeline.session().checkpoint("two").expect("a checkpoint");
    let expected = first.pipeline.session().state_hash().expect("a hash");
    first.pipeline.session().delete_job().expect("a deletion");
    let part = cluster.checkpoint("halved", "two").join(SECOND);
    flip(&part, 65_536);
    let opened = || {
        let session = Session::connect(cluster.options(&spec, 0)).expect("a session");
        assert!(session.open().expect("an open").is_fresh());
        session
    };
    let check = |said: &str| {
        for words in [SECOND, "BLAKE3", "taken back", "restore it again", &addresses[0]] {
            assert!(said.contains(words), "{words:?} is missing in: {said}");
        }
        for server in 0..2 {
            let progress = cluster.raw(server).progress("halved");
            assert_eq!((progress.phase(), progress.restore.clone()), (Phase::Loading, None), "{progress:?}");
            assert!(!progress.missing_shards.is_empty(), "{progress:?}");
        }
    };
    let error = opened().restore("two").expect_err("a part is damaged");
    assert!(matches!(error, Error::NotRestored(_)), "{error:?}");
    check(&error.to_string());
    drop(opened());
    let restore =
        || longshore(["restore", "--servers", &addresses.join(","), "--job", "halved", "--name", "two"]);
    let refused = restore();
    assert_eq!(refused.code, 1, "{refused:?}");
    check(&refused.stderr);
    flip(&part, 65_536);
    let session = opened();
    let restored = restore();
    assert_eq!((restored.code, restored.stdout.as_str()), (0, "restored two: version 2\n"), "{restored:?}");
    assert_eq!(session.state_hash().expect("a hash"), expected);
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let path = entry.expect("a file").path();
        fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("a copy");
    }
}

fn remove(path: &Path) {
    fs::remove_file(path).expect("a file to remove");
}

/// Makes a file longer or shorter by `by` bytes, to no less than empty.
fn resize(path: &Path, by: i64) {
    let file = OpenOptions::new().write(true).open(path).expect("a file");
    let length = file.metadata().expect("a length").len();
    file.set_len(length.saturating_add_signed(by)).expect("a new length");
}

/// Inverts one byte, counted from the end when negative.
fn flip(path: &Path, at: i64) {
    let file = OpenOptions::new().read(true).write(true).open(path).expect("a file");
    let length = file.metadata().expect("a length").len();
    let at = if at < 0 { length - at.unsigned_abs() } else { at as u64 };
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[!byte[0]], at).expect("a byte");
}
