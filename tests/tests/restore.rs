//! Rare paths back to a checkpoint: an unmounted drive, an interrupted restore, a damaged checkpoint, and ranks that
//! start at any moment of a restore.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use longshore_tests::{
    command::{Output, longshore},
    conformance::{cluster::Cluster, raw::placement, run, scenario::Scenario, synthetic::Synthetic},
    process::DEADLINE,
    server::{self, Longshored, ServerOptions},
    status::job_status,
    train::Train,
};
use longshore_wire::{
    Wire,
    v1::{Phase, RestoreMode},
};
use longshore_worker::{Error, Opened, Options, Session};
use tempfile::TempDir;

const STEPS: u64 = 30;
const CHECKPOINT_EVERY: u64 = 8;
/// The step at which training is cut off, after the second checkpoint.
const CUT_AT: u64 = 17;

fn train(tier: &str) -> Train {
    Train::new(STEPS).args(["--tier", tier, "--checkpoint-every", &CHECKPOINT_EVERY.to_string()])
}

fn hash() -> String {
    Train::new(STEPS).undisturbed().hash
}

/// Trains some steps past a checkpoint, then kills the worker.
fn train_until_cut(train: &Train) {
    let mut running = train.start();
    running.until_step(CUT_AT);
    running.kill();
}

/// Returns the versions of the sealed checkpoints, oldest first. A worker may make one more checkpoint before its kill.
fn sealed(checkpoints: &Path) -> Vec<u64> {
    let entries = fs::read_dir(checkpoints.join("default")).unwrap().map(|entry| entry.unwrap().path());
    let sealed = entries.filter(|folder| folder.join("manifest.json").exists());
    let version = |folder: PathBuf| folder.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok();
    let mut versions: Vec<u64> = sealed.filter_map(version).collect();
    versions.sort_unstable();
    assert!(versions.len() >= 2 && versions[0] == CHECKPOINT_EVERY, "{versions:?}");
    versions
}

fn newest(checkpoints: &Path) -> (String, u64) {
    let version = sealed(checkpoints).pop().unwrap();
    (name(version), version)
}

fn name(version: u64) -> String {
    format!("step-{version:08}")
}

/// Returns the output of `longshore restore`.
fn restored(version: u64) -> String {
    format!("restored {}: version {version}\n", name(version))
}

fn restore(servers: &[Longshored], more: &[&str]) -> Output {
    let servers = server::addresses(servers).join(",");
    longshore([&["restore", "--job", "default", "--servers", &servers], more].concat())
}

#[track_caller]
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is missing in: {text}");
    }
}

/// A server's state folder that is empty, as with an unmounted drive. Its files are kept in `aside`.
struct Unmounted {
    folder: PathBuf,
    aside: PathBuf,
}

impl Unmounted {
    fn swap(root: &Path, server: &Longshored) -> Unmounted {
        let host = server.address().split(':').next().unwrap();
        let (folder, aside) = (root.join(host), root.join(format!("{host}-aside")));
        fs::rename(&folder, &aside).unwrap();
        fs::create_dir(&folder).unwrap();
        Unmounted { folder, aside }
    }

    fn mount(self) {
        fs::remove_dir_all(&self.folder).unwrap();
        fs::rename(&self.aside, &self.folder).unwrap();
    }
}

/// Two servers of three are healthy and durable, and the third restarts with an empty folder.
#[test]
fn healthy_state_is_not_deleted_because_another_drive_is_missing() {
    let (expected, root) = (hash(), TempDir::new().unwrap());
    let options = ServerOptions::new().state_root(root.path());
    let checkpoints = TempDir::new().unwrap();
    let mut servers = server::servers(3, &options.checkpoint_dir(checkpoints.path()).allow("stepping back"));
    let addresses = server::addresses(&servers);
    let train = train("nvme").servers(&addresses);
    train_until_cut(&train);
    let before = job_status(&addresses);
    servers[2].process.kill();
    let unmounted = Unmounted::swap(root.path(), &servers[2]);
    servers[2].restart();
    let (newest, _) = newest(checkpoints.path());
    for more in [&["--resume"][..], &["--resume-from", &name(CHECKPOINT_EVERY)], &[]] {
        let (stderr, _) = train.start_with(more).fails(DEADLINE);
        says(
            &stderr,
            &[&addresses[2], "lost", &addresses[0], "at version ", "Start it again where its state is"],
        );
        says(&stderr, &["--discard-state", "mounted"]);
    }
    let refused = restore(&servers, &[]);
    assert_eq!(refused.code, 1, "{refused:?}");
    says(&refused.stderr, &["nothing was deleted", &addresses[0], &addresses[1], &addresses[2], &newest]);
    let healthy = job_status(&addresses[..2]);
    for (now, then) in healthy.servers.iter().zip(&before.servers) {
        assert_eq!((now.version, now.applied), (then.version, then.applied), "nothing may be deleted");
    }
    // The drive is back, and only time was lost.
    servers[2].process.kill();
    unmounted.mount();
    servers[2].restart();
    let run = train.run();
    // At most the step that had not reached every drive at the kill is lost.
    assert!(run.start.first_step >= CUT_AT, "{:?}", run.start);
    assert_eq!(run.end.state_hash, expected);
}

/// Here the missing drive never comes back, so the user gives the state up.
#[test]
fn state_is_given_up_for_an_explicit_word() {
    let (expected, root) = (hash(), TempDir::new().unwrap());
    let options = ServerOptions::new().state_root(root.path());
    let checkpoints = TempDir::new().unwrap();
    let mut servers = server::servers(2, &options.checkpoint_dir(checkpoints.path()));
    let train = train("nvme").servers(&server::addresses(&servers));
    train_until_cut(&train);
    servers[0].process.kill();
    Unmounted::swap(root.path(), &servers[0]);
    servers[0].restart();
    // A checkpoint is read before any state is given up for it.
    let (newest, version) = newest(checkpoints.path());
    let part = checkpoints.path().join("default").join(&newest).join("server-00002-of-00002.safetensors");
    flip(&part);
    let (stderr, _) = train.start_with(["--resume-from", &newest, "--discard-state"]).fails(DEADLINE);
    says(&stderr, &["server-00002-of-00002.safetensors", "BLAKE3"]);
    assert!(job_status(&server::addresses(&servers)).servers[1].version >= CUT_AT, "nothing may be deleted");
    flip(&part);
    let train = train.args(["--checkpoint-every", "0"]);
    let run = train.start_with(["--resume", "--discard-state"]).finish();
    assert_eq!(run.start.first_step, version + 1);
    assert_eq!(run.end.state_hash, expected);
}

/// Inverts a byte amid the tensors.
fn flip(path: &Path) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let at = file.metadata().unwrap().len() / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[!byte[0]], at).unwrap();
}

#[test]
fn without_a_checkpoint_nothing_is_deleted() {
    let root = TempDir::new().unwrap();
    let checkpoints = TempDir::new().unwrap();
    let options = ServerOptions::new().state_root(root.path()).checkpoint_dir(checkpoints.path());
    let options = options.allow("stepping back");
    let mut servers = server::servers(2, &options);
    let addresses = server::addresses(&servers);
    let train = Train::new(STEPS).args(["--tier", "nvme"]).servers(&addresses);
    train_until_cut(&train);
    servers[1].process.kill();
    let unmounted = Unmounted::swap(root.path(), &servers[1]);
    servers[1].restart();
    let (stderr, _) = train.start_with(["--resume", "--discard-state"]).fails(DEADLINE);
    says(&stderr, &[&addresses[1], "no checkpoint to resume from", "nothing was deleted"]);
    servers[1].process.kill();
    unmounted.mount();
    servers[1].restart();
    assert!(train.run().start.first_step >= CUT_AT);
}

/// Returns a job of the memory tier with checkpoints, whose servers have all restarted empty.
fn forgotten(count: usize, checkpoints: &Path) -> (Train, Vec<Longshored>) {
    let mut servers = server::servers(count, &ServerOptions::new().checkpoint_dir(checkpoints));
    let train = train("memory").servers(&server::addresses(&servers));
    train_until_cut(&train);
    servers.iter_mut().for_each(Longshored::kill_and_restart);
    (train, servers)
}

#[test]
fn a_damaged_checkpoint_is_passed_over_aloud_and_an_older_one_can_be_named() {
    let expected = hash();
    let checkpoints = TempDir::new().unwrap();
    let (train, mut servers) = forgotten(2, checkpoints.path());
    let versions = sealed(checkpoints.path());
    let [.., older, newest] = versions[..] else { unreachable!("there are two at least") };
    let (older_name, newest) = (name(older), name(newest));
    let part = "server-00002-of-00002.safetensors";
    flip(&checkpoints.path().join("default").join(&newest).join(part));
    let (stderr, _) = train.start_with(["--resume-from", &newest]).fails(DEADLINE);
    says(&stderr, &[&newest, part, "BLAKE3", "--resume-from"]);
    let word = "A CHECKPOINT CANNOT BE RESTORED";
    let resuming = Train::allow(train, word).args(["--checkpoint-every", "0"]);
    let mut running = resuming.start_with(["--resume"]);
    running.until_started();
    says(&running.process.stderr(), &[word, "WARN", &newest, &older_name, part]);
    let run = running.finish();
    assert_eq!((run.start.first_step, &run.end.state_hash), (older + 1, &expected));
    servers.iter_mut().for_each(Longshored::kill_and_restart);
    let first = name(CHECKPOINT_EVERY);
    let run = resuming.start_with(["--resume-from", &first]).finish();
    assert_eq!((run.start.first_step, &run.end.state_hash), (CHECKPOINT_EVERY + 1, &expected));
}

/// Makes a checkpoint of version 2 of a job on three servers, and deletes the job. Returns the checkpoint's
/// hash.
fn deleted(cluster: &Cluster, plan: &Scenario) -> longshore_worker::StateHash {
    let model = Synthetic::default();
    let mut pipeline = run::enter(cluster.options(&plan.spec("job", &model), 0), &model, plan);
    run::steps(&mut pipeline, &model, plan, 2, &mut run::Rank::default()).expect("steps");
    pipeline.drain().expect("a drain");
    let session = pipeline.session();
    session.checkpoint("two").expect("a checkpoint");
    let hash = session.state_hash().expect("a hash");
    session.delete_job().expect("a deletion");
    hash
}

#[test]
fn what_a_dead_client_left_of_a_restore_is_brought_to_its_end() {
    let cluster = Cluster::start(3);
    let (plan, model) = (Scenario::exact(4), Synthetic::default());
    let expected = deleted(&cluster, &plan);
    let spec = plan.spec("job", &model);
    let servers: Vec<_> = (0..3).map(|server| cluster.raw(server)).collect();
    let placed = placement(&cluster.addresses(), &spec.validate().expect("a spec"));
    // The client died while servers loaded, after all had loaded, or while they started to train.
    let left: [&[(usize, RestoreMode)]; 3] = [
        &[(0, RestoreMode::Hold), (1, RestoreMode::Hold)],
        &[(0, RestoreMode::Hold), (1, RestoreMode::Hold), (2, RestoreMode::Hold)],
        &[(0, RestoreMode::Hold), (1, RestoreMode::Hold), (2, RestoreMode::Hold), (1, RestoreMode::Whole)],
    ];
    for acts in left {
        for (server, raw) in servers.iter().enumerate() {
            raw.open(spec.to_wire(), &placed, server as u32).expect("an open");
        }
        for &(server, mode) in acts {
            servers[server].restore_in("job", "two", mode).expect("an act");
        }
        let held = servers[0].progress("job");
        assert_eq!(held.phase(), Phase::Loading);
        let restore = held.restore.expect("what is held");
        assert!(restore.held && restore.name == "two" && restore.shards > 0, "{restore:?}");
        let mut session = Session::connect(cluster.options(&spec, 0)).expect("a session");
        assert_eq!(session.open().expect("an open"), Opened::Restoring { checkpoint: "two".into() });
        let joined = session.start(&|_| panic!("nothing may be uploaded over a restore")).expect("a start");
        assert_eq!(joined.version.0, 2);
        assert_eq!(session.state_hash().expect("a hash"), expected);
        session.delete_job().expect("a deletion");
    }
}

/// Two servers train, and one has nothing yet. Only rank 0 can judge that a restore was interrupted.
#[test]
fn ranks_other_than_0_do_not_judge_what_they_see_of_a_restore() {
    let cluster = Cluster::start(3);
    let (plan, model) = (Scenario { world: 2, ..Scenario::exact(4) }, Synthetic::default());
    let one = Scenario::exact(4);
    deleted(&cluster, &one);
    let spec = plan.spec("job", &model);
    let placed = placement(&cluster.addresses(), &spec.validate().expect("a spec"));
    let servers: Vec<_> = (0..3).map(|server| cluster.raw(server)).collect();
    let options =
        |rank| Options { slow_deadline: Duration::from_millis(300), ..cluster.options(&spec, rank) };
    let impatient = |what: &str| {
        let mut session = Session::connect(options(1)).expect("a session");
        let error = session.start(&|_| Vec::new()).expect_err("it waits for rank 0");
        assert!(matches!(error, Error::TimedOut(_)), "{what}: {error}");
        assert!(error.to_string().contains("rank 0 to open the job"), "{error}");
    };
    impatient("nowhere open");
    assert!(servers.iter().all(|server| server.find("job").is_err()), "only rank 0 opens the job");
    for (server, raw) in servers.iter().enumerate().take(2) {
        raw.open(spec.to_wire(), &placed, server as u32).expect("an open");
        raw.restore("job", "two").expect("a restore");
    }
    impatient("restored on two servers and not open on the third");
    let lost = Session::connect(options(0)).expect("a session").open().expect_err("rank 0 knows");
    assert!(matches!(lost, Error::StateLost(_)), "{lost}");
    assert!(servers[2].find("job").is_err(), "nothing is created beside what is missing");
    servers[2].open(spec.to_wire(), &placed, 2).expect("an open");
    impatient("restored on two servers and open on the third");
    let patient = thread::scope(|scope| {
        let patient = scope
            .spawn(|| Session::connect(cluster.options(&spec, 1)).expect("a session").start(&|_| Vec::new()));
        // A part was missing. The other servers hold the checkpoint's state, and nothing has to be deleted.
        let how = longshore_worker::GoBack::default();
        let session = Session::connect(cluster.options(&spec, 0)).expect("a session");
        assert_eq!(session.go_back(&how).expect("the third one's part").version.0, 2);
        patient.join().expect("no panic")
    });
    assert_eq!(patient.expect("a start").version.0, 2);
}

#[test]
fn a_job_goes_to_another_number_of_servers_by_its_checkpoint() {
    let checkpoints = TempDir::new().unwrap();
    let servers = server::servers(3, &ServerOptions::new().checkpoint_dir(checkpoints.path()));
    let addresses = server::addresses(&servers);
    let mut running = Train::new(STEPS).servers(&addresses[..2]).start();
    running.until_step(CUT_AT);
    running.kill();
    let on_three = Train::new(STEPS).servers(&addresses);
    // The job's state on two servers counts, until a checkpoint has that state too.
    let (stderr, _) = on_three.start().fails(DEADLINE);
    says(&stderr, &["over 3 servers", "over 2 servers", "`longshore scale --servers"]);
    let (stderr, _) = on_three.start_with(["--resume"]).fails(DEADLINE);
    says(&stderr, &["no checkpoint to resume from"]);
    let two = addresses[..2].join(",");
    assert_eq!(longshore(["checkpoint", "--servers", &two]).code, 0);
    let run = on_three.start_with(["--resume"]).finish();
    assert!(run.start.first_step > CUT_AT, "{:?}", run.start);
    assert_eq!(run.end.state_hash, hash());
    // The command line takes the job back to two servers. The third server keeps nothing.
    assert_eq!(longshore(["checkpoint", "--servers", &addresses.join(",")]).code, 0);
    let back = longshore(["restore", "--job", "default", "--servers", &two]);
    assert_eq!((back.code, back.stdout.as_str()), (0, restored(STEPS).as_str()), "{back:?}");
    let left = longshore(["status", "--servers", &addresses[2]]);
    assert!(!left.stdout.contains("default"), "{left:?}");
    // The third server is named in place of the first one, which has its part.
    let restore = |named: &[usize], more: &[&str]| {
        let servers = named.iter().map(|&server| &*addresses[server]).collect::<Vec<_>>().join(",");
        longshore([&["restore", "--job", "default", "--servers", &servers], more].concat())
    };
    let is_refused = |named: &[usize], part: &str| {
        let refused = restore(named, &[]);
        assert_eq!(refused.code, 1, "{refused:?}");
        says(&refused.stderr, &[part, "--discard-state"]);
    };
    let part = |of: usize, number: u32| format!("default on {} as server {number} of", addresses[of]);
    is_refused(&[2, 1], &part(1, 1));
    // Another run comes to the checkpoint's version.
    Train::new(STEPS).args(["--seed", "9"]).servers(&addresses[2..]).run();
    is_refused(&[0, 1, 2], &part(2, 0));
    is_refused(&[1, 2], &part(1, 1));
    assert_eq!(longshore(["delete", "--job", "default", "--servers", &two]).code, 0);
    is_refused(&[0, 2], "nothing was deleted");
    assert_eq!(restore(&[0], &[]).stdout, restored(STEPS));
    is_refused(&[0, 2], &part(2, 0));
    assert_eq!(restore(&[0, 1, 2], &["--discard-state"]).stdout, restored(STEPS));
}

/// Rank 0 is refused, and no other rank waits for it.
#[test]
fn a_rank_other_than_0_is_refused_on_another_number_of_servers() {
    let servers = server::servers(3, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let train = Train::new(2).args(["--world-size", "2"]);
    train.clone().servers(&addresses[..2]).run();
    let train = train.servers(&addresses);
    let (stderr, _) = train.start_with(["--rank", "1"]).fails(DEADLINE);
    says(&stderr, &["over 3 servers", "over 2 servers"]);
    // With --resume rank 0 needs a checkpoint, and the servers have no folder for one.
    let (stderr, _) = train.start_with(["--rank", "1", "--resume"]).fails(DEADLINE);
    says(&stderr, &["checkpoint"]);
}
