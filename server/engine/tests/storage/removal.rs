//! A created or deleted job is there whole or gone, whatever interrupts the call. Unreadable files are never destroyed
//! by accident.

use std::{
    env, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use longshore_engine::tier::{Storage, delete_stored, finish_interrupted, stored_jobs};
use longshore_proto::{FaultKind, JobName, JobSpec, TierKind};

use super::{
    Dirs,
    common::{Noise, lasting_tiers, run_and_kill},
    open, small, started,
};

const CHILD: &str = "LONGSHORE_TEST_DELETED_IN";
/// Number of kills for each tier.
const KILLS: u64 = 12;

fn job(tier: TierKind) -> JobSpec {
    JobSpec { tier, ..small(0) }
}

/// Returns storage in two state directories, or in one folder of a tmpfs.
fn storage(root: &Path, tier: TierKind) -> Storage {
    let dirs = [root.join("a"), root.join("b")];
    dirs.iter().for_each(|dir| fs::create_dir_all(dir).unwrap());
    let shm_dir = (tier == TierKind::Shm).then(|| dirs[0].clone());
    let dirs = if tier == TierKind::Shm { Vec::new() } else { dirs.to_vec() };
    Storage { dirs, shm_dir, buffers: 2, ..Storage::default() }
}

fn tier_of(root: &Path) -> TierKind {
    if root.starts_with("/dev/shm") { TierKind::Shm } else { TierKind::Nvme }
}

/// The child creates a job and deletes it, again and again.
#[test]
#[ignore = "the process that another test starts and kills"]
fn child() {
    let root = env::var(CHILD).expect("a folder, from the test that starts this one");
    let root = Path::new(&root);
    let (storage, spec) = (storage(root, tier_of(root)), job(tier_of(root)));
    for _ in 0..10_000 {
        let cluster = started(&spec, &storage);
        fs::write(root.join("ready"), b"").unwrap();
        cluster.jobs[0].discard().unwrap();
    }
}

#[test]
fn a_job_whose_creation_or_deletion_is_killed_is_there_whole_or_gone() {
    let roots = [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()];
    let mut noise = Noise(5);
    for root in roots.iter().map(|root| root.path()) {
        let (storage, spec) = (storage(root, tier_of(root)), job(tier_of(root)));
        let (mut there, mut gone) = (0, 0);
        for _ in 0..KILLS {
            let after = Duration::from_micros(noise.next() % 20_000);
            run_and_kill("storage::removal::child", CHILD, root, after);
            let dirs = storage.folders();
            finish_interrupted(&dirs);
            let found = stored_jobs(&dirs);
            assert!(found.unreadable.is_empty(), "{:?}", found.unreadable);
            match found.jobs.len() {
                0 => {
                    gone += 1;
                    // The folder of the job may stay, but only if it is empty.
                    let is_empty = |path: PathBuf| fs::read_dir(path).is_ok_and(|mut of| of.next().is_none());
                    let left = dirs.iter().flat_map(|dir| fs::read_dir(dir).unwrap());
                    let left = left.filter(|of| !is_empty(of.as_ref().unwrap().path())).count();
                    assert_eq!(left, 0, "left of a job that is gone");
                }
                _ => there += 1,
            }
            // The job can be opened, trained and deleted.
            let mut cluster = open(&spec, &storage).unwrap();
            cluster.join(0);
            if cluster.jobs[0].progress().phase == longshore_engine::step::Phase::Loading {
                cluster.upload(&super::weights(&spec, 1));
            }
            super::run_steps(&mut cluster, 1..=1);
            cluster.jobs[0].discard().unwrap();
        }
        println!("{}: {there} times there, {gone} times gone", root.display());
    }
}

fn find(dir: &Path, what: &str) -> PathBuf {
    let found = fs::read_dir(dir.join("test")).unwrap().map(|entry| entry.unwrap().path());
    found.into_iter().find(|path| path.file_name().unwrap().to_string_lossy().contains(what)).unwrap()
}

/// A process may die between two directories of a deletion. The folder in one of them is then marked as deleted, and
/// the other folder is unchanged.
#[test]
fn a_store_of_which_one_folder_is_marked_deleted_is_deleted() {
    let spec = small(0);
    let dirs = Dirs::new(2);
    for (marked, other) in [(0, 1), (1, 0)] {
        drop(started(&spec, &dirs.storage));
        let home = dirs.folder(marked);
        // A deletion first renames the folder to `mark`.
        let aside = dirs.storage.dirs[marked].join("aside");
        let header = fs::read_to_string(home.join("header.json")).unwrap();
        let store: u64 =
            header.split("\"store\":").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
        fs::rename(&home, &aside).unwrap();
        let mark = home.with_file_name(format!("~deleted-{store:016x}-server-0-of-1"));
        fs::rename(&aside, &mark).unwrap();
        assert!(dirs.folder(other).join("header.json").exists());
        finish_interrupted(&dirs.storage.dirs);
        assert!(dirs.storage.dirs.iter().all(|dir| fs::read_dir(dir).unwrap().count() == 0));
    }
    // The mark of another store does not affect this one.
    drop(started(&spec, &dirs.storage));
    fs::create_dir(dirs.folder(0).with_file_name("~deleted-0000000000000007-server-0-of-1")).unwrap();
    finish_interrupted(&dirs.storage.dirs);
    assert_eq!(
        open(&spec, &dirs.storage).unwrap().jobs[0].protocol.ranks()[0].incarnation.map(|now| now.0),
        Some(1)
    );
}

/// A process may die between two directories of a new store. Both folders are then complete, but one still has its
/// temporary name.
#[test]
fn a_store_of_which_one_folder_is_in_its_place_is_finished() {
    let spec = small(0);
    let dirs = Dirs::new(2);
    drop(started(&spec, &dirs.storage));
    let new = dirs.folder(1).with_file_name("~new-server-0-of-1");
    fs::rename(dirs.folder(1), &new).unwrap();
    drop(open(&spec, &dirs.storage).unwrap());
    assert!(dirs.folder(1).exists() && !new.exists());
    // A store none of whose folders has its final name never existed.
    for directory in 0..2 {
        let new = dirs.folder(directory).with_file_name("~new-server-0-of-1");
        fs::rename(dirs.folder(directory), new).unwrap();
    }
    finish_interrupted(&dirs.storage.dirs);
    assert!(dirs.storage.dirs.iter().all(|dir| fs::read_dir(dir).unwrap().count() == 0));
    // An empty folder may belong to another server. A job of its name can still begin there.
    let empty = dirs.storage.dirs[1].join(spec.name.as_str());
    fs::create_dir(&empty).unwrap();
    finish_interrupted(&dirs.storage.dirs);
    assert!(empty.exists());
    drop(started(&spec, &dirs.storage));
}

#[test]
fn files_without_a_header_are_not_written_over() {
    let dirs = Dirs::new(1);
    for tier in lasting_tiers() {
        let (spec, storage, dir) = (job(tier), &dirs.storage, dirs.of(tier).to_path_buf());
        drop(started(&spec, storage));
        let header = find(&dir, "server-").join("header.json");
        let bytes = fs::read(&header).unwrap();
        fs::remove_file(&header).unwrap();
        let fault = open(&spec, storage).err().unwrap();
        assert_eq!(fault.kind, FaultKind::Corrupt, "{fault}");
        for word in ["without header.json", "put header.json back", "--discard-unreadable"] {
            assert!(fault.to_string().contains(word), "no {word:?} in: {fault}");
        }
        let found = stored_jobs(std::slice::from_ref(&dir));
        assert_eq!((found.jobs.len(), found.unreadable.len()), (0, 1), "the server must know of it");
        // Once its header is put back, the folder is the job again. Without a header, the operator can give the job up.
        fs::write(&header, &bytes).unwrap();
        assert!(open(&spec, storage).is_ok());
        fs::remove_file(&header).unwrap();
        delete_stored(std::slice::from_ref(&dir), &JobName::parse("job", "test").unwrap()).unwrap();
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    }
}

/// The store notices deleted, moved or replaced files of a running job before the next version counts.
#[test]
fn a_job_whose_files_go_away_fails() {
    for tier in lasting_tiers() {
        for case in 0..4 {
            let (spec, dirs) = (job(tier), Dirs::new(1));
            let dir = dirs.of(tier);
            let mut cluster = started(&spec, &dirs.storage);
            super::run_steps(&mut cluster, 1..=2);
            let home = find(dir, "server-");
            let data = home.join(if tier == TierKind::Shm { "state" } else { "data" });
            match case {
                0 => fs::remove_dir_all(&home).unwrap(),
                1 => fs::remove_file(home.join("header.json")).unwrap(),
                2 => fs::rename(&home, home.with_file_name("elsewhere")).unwrap(),
                _ => {
                    fs::remove_file(&data).unwrap();
                    fs::write(&data, b"another").unwrap();
                }
            }
            let (flats, commit) = super::step_of(&spec, 3);
            cluster.push(3, &flats);
            let failed = cluster.commit(&commit).and_then(|_| cluster.settle());
            let fault = failed.unwrap_err();
            assert_eq!(fault.kind, FaultKind::Internal, "{tier:?}, case {case}: {fault}");
            assert!(fault.value.contains("under the running server"), "{fault}");
        }
    }
}
