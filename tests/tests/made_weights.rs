//! Weights that servers make by themselves have the same bits on any servers, tier and shards, also after `kill -9` of a server
//! that has made a part of them, or of the rank 0 that has asked for them.

use std::{
    cell::{Cell, RefCell},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use longshore_proto::{FaultKind, InitialWeights, Initialisation, JobSpec, Rank, TierKind};
use longshore_tests::{
    conformance::cluster::eventually,
    server::{self, Longshored, ServerOptions},
    train::Train,
};
use longshore_wire::{Wire, v1};
use longshore_worker::{Error, Options, Session};
use tempfile::TempDir;

const BLOCK: u64 = 65536;
/// The parameter whose weights rank 0 uploads, and how they begin.
const UPLOADED: usize = 2;
const SIZES: [u64; 4] = [40 * BLOCK + 77, 1000, 3 * BLOCK, 150 * BLOCK + 1];

fn spec(tier: TierKind, shard_blocks: u64) -> JobSpec {
    let param =
        |(index, &size): (usize, &u64)| v1::Param { name: format!("p{index}"), shape: vec![size], group: 0 };
    let message = v1::JobSpec {
        name: "made".into(),
        params: SIZES.iter().enumerate().map(param).collect(),
        groups: vec!["all".into()],
        rule: v1::Rule::Adamw.into(),
        gradient_dtype: v1::Dtype::Bf16.into(),
        image_dtype: v1::Dtype::Bf16.into(),
        world_size: 1,
        micro_steps: 1,
        shard_elements: shard_blocks * BLOCK,
        tier: v1::Tier::Memory.into(),
        ..v1::JobSpec::default()
    };
    JobSpec { tier, ..JobSpec::from_wire(Some(message)).expect("a spec") }
}

fn initialisation(seed: u64) -> Initialisation {
    let kinds = [
        InitialWeights::Normal { mean: 0.0, std: 0.02 },
        InitialWeights::Constant(1.0),
        InitialWeights::Uploaded,
        InitialWeights::TruncatedNormal { mean: 0.0, std: 1.0, low: -2.0, high: 2.0 },
    ];
    Initialisation::by_param(seed, kinds)
}

fn given(param: usize) -> Vec<f32> {
    assert_eq!(param, UPLOADED, "the servers make the others");
    (0..SIZES[UPLOADED]).map(|element| element as f32 * 1e-6).collect()
}

fn session(servers: &[String], spec: &JobSpec) -> Session {
    let options = Options {
        deadline: Duration::from_secs(30),
        ..Options::new(servers.to_vec(), spec.clone(), Rank(0))
    };
    Session::connect(options).expect("the servers are there")
}

/// Has the servers make the weights, and returns the state hash. `meanwhile` runs before the upload of what they do not make.
fn made_hash(servers: &[String], spec: &JobSpec, seed: u64, meanwhile: impl Fn()) -> String {
    let mut session = session(servers, spec);
    let weights = |param| {
        meanwhile();
        given(param)
    };
    let joined = session.start_made(&initialisation(seed), &weights).expect("weights are made");
    assert_eq!((joined.version.0, joined.applied), (0, 0));
    session.state_hash().expect("a hash").hash
}

fn roots() -> [TempDir; 2] {
    [TempDir::new().expect("a folder"), tempfile::tempdir_in("/dev/shm").expect("a folder of a tmpfs")]
}

fn options(tier: TierKind, [disk, shm]: &[TempDir; 2]) -> ServerOptions {
    match tier {
        TierKind::Memory => ServerOptions::new(),
        TierKind::Shm => ServerOptions::new().shm_root(shm.path()),
        TierKind::Nvme => ServerOptions::new().state_root(disk.path()),
    }
}

fn undisturbed(seed: u64) -> String {
    let server = ServerOptions::new().start();
    made_hash(&[server.address().to_string()], &spec(TierKind::Memory, 64), seed, || ())
}

#[test]
fn the_hash_is_that_of_one_server_on_every_tier_with_other_shards() {
    let expected = undisturbed(1);
    assert_ne!(undisturbed(2), expected, "the seed counts");
    for (tier, count, shard_blocks, isa) in [
        (TierKind::Memory, 3, 1, "scalar"),
        (TierKind::Shm, 2, 7, "scalar"),
        (TierKind::Nvme, 3, 16, "scalar"),
        (TierKind::Nvme, 1, 200, ""),
    ] {
        let roots = roots();
        let servers = server::servers(count, &options(tier, &roots).isa(isa));
        let hash = made_hash(&server::addresses(&servers), &spec(tier, shard_blocks), 1, || ());
        assert_eq!(hash, expected, "{count} servers, {tier}, shards of {shard_blocks} blocks, {isa:?}");
    }
}

/// The server is killed once it has made all that it makes, and rank 0 is about to upload the rest.
#[test]
fn a_server_killed_before_the_upload_makes_the_same_again() {
    let expected = undisturbed(1);
    for tier in [TierKind::Memory, TierKind::Shm, TierKind::Nvme] {
        let roots = roots();
        let servers = RefCell::new(server::servers(2, &options(tier, &roots)));
        let addresses = server::addresses(&servers.borrow());
        let killed = Cell::new(false);
        let kill = || {
            if !killed.replace(true) {
                servers.borrow_mut()[1].kill_and_restart();
            }
        };
        assert_eq!(made_hash(&addresses, &spec(tier, 4), 1, kill), expected, "{tier}");
        assert!(killed.get(), "{tier}");
    }
}

/// The server is killed between its first shard and its last one.
#[test]
fn a_server_killed_between_two_shards_makes_the_same_again() {
    let expected = undisturbed(1);
    for tier in [TierKind::Memory, TierKind::Shm, TierKind::Nvme] {
        let roots = roots();
        let mut server = options(tier, &roots).threads(1).start();
        let (addresses, spec) = ([server.address().to_string()], spec(tier, 1));
        let hash = thread::scope(|scope| {
            let hash = scope.spawn(|| made_hash(&addresses, &spec, 1, || ()));
            kill_between_shards(&mut server, &addresses, &spec);
            hash.join().expect("the hash")
        });
        assert_eq!(hash, expected, "{tier}");
    }
}

fn kill_between_shards(server: &mut Longshored, addresses: &[String], spec: &JobSpec) {
    let watcher = session(addresses, spec);
    let shards = spec.validate().expect("a layout").shards() as usize;
    let missing = eventually("a part of the weights", || {
        let progress = watcher.describe().ok()?.pop()?.progress?;
        let missing = progress.missing_shards.len();
        (progress.phase() == v1::Phase::Training || missing < shards).then_some(missing)
    });
    assert!(missing > 4, "it was too late to kill the server: {missing} of {shards} shards are missing");
    server.kill_and_restart();
}

#[test]
fn the_trainer_has_its_weights_made_on_any_servers() {
    let train = || Train::new(8).args(["--init-on-servers"]);
    let expected = train().run().end.state_hash;
    assert_ne!(Train::new(8).run().end.state_hash, expected, "they are other weights than a worker's");
    let servers = server::servers(3, &ServerOptions::new());
    let on_three = train().servers(&server::addresses(&servers)).run();
    assert_eq!(on_three.end.state_hash, expected);
}

/// Where a rank 0 that is killed finds the servers' addresses. Only its own process has this variable.
const SERVERS: &str = "LONGSHORE_TEST_SERVERS";
const KILLED: &str = "made_weights::a_rank_0_with_another_seed_is_refused_once_a_server_is_full";

/// Two of three servers are full, and rank 0 is killed before it uploads what the third one lacks.
#[test]
fn a_rank_0_with_another_seed_is_refused_once_a_server_is_full() {
    if let Ok(addresses) = std::env::var(SERVERS) {
        die_before_the_upload(&addresses);
    }
    let expected = undisturbed(1);
    for tier in [TierKind::Memory, TierKind::Shm, TierKind::Nvme] {
        let (roots, spec) = (roots(), spec(tier, 64));
        let mut servers = server::servers(3, &options(tier, &roots));
        let addresses = server::addresses(&servers);
        let mut killed = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", KILLED])
            .env(SERVERS, format!("{tier} {}", addresses.join(",")))
            .stdout(Stdio::null())
            .spawn()
            .expect("rank 0");
        let phases = || {
            let answers = session(&addresses, &spec).describe().ok()?;
            Some(
                answers
                    .iter()
                    .map(|answer| answer.progress.as_ref().map(|progress| progress.phase()))
                    .collect(),
            )
        };
        let full = || {
            let phases: Vec<_> = phases()?;
            (phases[1..] == [Some(v1::Phase::Training); 2]).then_some(phases[0])
        };
        assert_eq!(eventually("two full servers", full), Some(v1::Phase::Loading), "{tier}");
        killed.kill().expect("a kill");
        killed.wait().expect("its end");
        if tier != TierKind::Memory {
            // What its weights were made from went with its process.
            servers[1].kill_and_restart();
        }
        let other =
            session(&addresses, &spec).start_made(&initialisation(2), &given).expect_err("another seed");
        let Error::Call(failed) = &other else { panic!("{tier}: {other:?}") };
        assert_eq!(
            (failed.fault.kind, &*failed.fault.field),
            (FaultKind::Conflict, "initialisation"),
            "{other}"
        );
        for words in ["initialisation is another one", "were made from", "delete the job to start over"] {
            assert!(other.to_string().contains(words), "{tier}: no {words:?} in: {other}");
        }
        assert_eq!(made_hash(&addresses, &spec, 1, || ()), expected, "{tier}");
    }
}

/// Is the rank 0 of a job whose servers make weights, until it is killed.
fn die_before_the_upload(given: &str) -> ! {
    let (tier, addresses) = given.split_once(' ').expect("a tier and addresses");
    let addresses: Vec<String> = addresses.split(',').map(str::to_string).collect();
    let wait = |_: usize| -> Vec<f32> {
        loop {
            thread::park();
        }
    };
    let started =
        session(&addresses, &spec(tier.parse().expect("a tier"), 64)).start_made(&initialisation(1), &wait);
    unreachable!("rank 0 went on: {started:?}")
}
