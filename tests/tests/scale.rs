//! A job's servers change while its ranks train, and the weights are those of an undisturbed run. The simulation has
//! changes at any moment, with kills and cut links. The engine's tests have moves of all tiers at any step. Here
//! commands, RPCs between servers, and memory and space that become free are real.

use std::{fs, thread, time::Duration};

use longshore_tests::{
    command::{Output, done, longshore},
    conformance::cluster::eventually,
    http::{self, FLAGS},
    process::DEADLINE,
    proxy::Proxy,
    seed::{Random, spin},
    server::{self, Longshored, ServerOptions},
    soak,
    status::{job_status, status},
    train::{Running, Train},
};
use tempfile::TempDir;

const DELAYED: [&str; 4] = ["--delay", "1", "--warmup-steps", "30"];

/// A training of three layers that goes on until it is stopped.
fn endless(more: &[&str]) -> Train {
    Train::new(1).args(["--layers", "3"]).args(more).endless()
}

/// Lets a run make a step more, and stops it. Its weights must be those of an undisturbed run of as many steps.
fn ends_with_the_same_bits(train: &Train, mut running: Running) {
    running.until_steps(1);
    let end = running.stop();
    assert_eq!(end.state_hash, train.hash_after(end.version), "at version {}", end.version);
}

/// Folders for jobs of each tier.
struct Homes([TempDir; 2]);

impl Homes {
    fn new() -> Homes {
        Homes([TempDir::new().unwrap(), TempDir::new_in("/dev/shm").unwrap()])
    }

    fn options(&self) -> ServerOptions {
        let Homes([drives, tmpfs]) = self;
        ServerOptions::new().state_root(drives.path()).shm_root(tmpfs.path())
    }

    /// Options with further flags, which spill images to drives. Drives keep the images of two versions. A shard whose
    /// older image is gone is fetched again without that image.
    fn options_with(&self, flags: &[&str]) -> ServerOptions {
        match flags {
            [] => self.options(),
            _ => self.options().args(flags).allow("must be kept for its next owner"),
        }
    }
}

fn scale(servers: &[Longshored], to: &[&Longshored], more: &[&str]) -> Output {
    let servers = server::addresses(servers).join(",");
    let to: Vec<&str> = to.iter().map(|server| server.address()).collect();
    let asked = ["scale", "--job", "default", "--servers", &servers, "--to", &to.join(",")];
    longshore([&asked[..], more].concat())
}

#[track_caller]
fn must_scale(servers: &[Longshored], to: &[&Longshored], more: &[&str]) -> Output {
    let output = scale(servers, to, more);
    assert_eq!(output.code, 0, "{output:?}");
    output
}

/// The weights of a training on 2, then 4, then 3 servers are those of the same training on one. Memory of shards that
/// have moved is free, and a checkpoint of four servers is restored on three.
fn scaled(ranks: usize, tier: &str, more: &[&str], flags: &[&str]) {
    let train = endless(more).args(["--world-size", &ranks.to_string()]);
    let (checkpoints, homes) = (TempDir::new().unwrap(), Homes::new());
    let options = homes.options_with(flags).checkpoint_dir(checkpoints.path());
    let servers = server::servers(4, &options);
    let addresses = server::addresses(&servers);
    let mut running = train.clone().args(["--tier", tier]).servers(&addresses[..2]).start();
    running.until_step(3);
    let before = job_status(&addresses[..2]).servers[0].memory_bytes;
    let [a, b, c, d] = [0, 1, 2, 3].map(|server| &servers[server]);
    must_scale(&servers[..2], &[a, b, c, d], &["--wait"]);
    running.until_steps(8);
    let after = job_status(&addresses);
    assert_eq!(after.servers.len(), 4, "every server takes part");
    let memory = after.servers[0].memory_bytes;
    // With everything on drives, all shards share the same buffers, so a moved shard frees no memory.
    let is_freed = memory < before || !flags.is_empty();
    assert!(is_freed, "memory of shards that have moved is free: {memory} of {before}");
    done(["checkpoint", "--name", "moved", "--servers", &addresses.join(",")]);
    must_scale(&servers[..1], &[a, b, c], &["--wait"]);
    let other = server::servers(3, &options);
    let other = server::addresses(&other).join(",");
    done(["restore", "--job", "default", "--name", "moved", "--servers", &other]);
    ends_with_the_same_bits(&train, running);
}

/// Every job leaves the named servers, except jobs that cannot move. For those the command says why.
#[test]
fn a_server_is_cleared_of_all_jobs_that_may_leave_it() {
    let homes = Homes::new();
    let servers = server::servers(3, &homes.options());
    let addresses = server::addresses(&servers);
    let (train, more) = (endless(&[]), ["--wait", "--patience", "60"]);
    let starts = |[job, tier]: [&str; 2]| {
        train.clone().args(["--job", job, "--tier", tier]).servers(&addresses[..1]).start()
    };
    let mut running = [["one", "memory"], ["two", "shm"]].map(starts);
    running.iter_mut().for_each(|running| running.until_step(3));
    let clear = |server: &str, more: &[&str]| {
        longshore([&["scale", "--servers", &addresses[1], "--remove", server][..], more].concat())
    };
    let only = clear(&addresses[0], &more);
    assert!(
        only.code == 1 && only.stdout.contains("one stays") && only.stdout.contains("--to HOST"),
        "{only:?}"
    );
    for job in ["one", "two"] {
        let asked = ["scale", "--servers", &addresses[0], "--job", job, "--add", &addresses[1], "--wait"];
        assert_eq!(longshore(asked).code, 0);
    }
    let planned = clear(&addresses[1], &["--dry-run"]);
    assert!(planned.code == 0 && planned.stdout.contains("two would move"), "{planned:?}");
    let cleared = clear(&addresses[1], &more);
    assert!(
        cleared.code == 0 && cleared.stdout.contains("one is on") && cleared.stdout.contains("two is on"),
        "{cleared:?}"
    );
    eventually("the end of both jobs on that server", || status(&addresses[1..2]).is_empty().then_some(()));
    assert!(clear(&addresses[1], &[]).stdout.contains("no job is on"));
    // Another server takes the place of the cleared server in every job.
    let replaced = clear(&addresses[0], &[&["--add", &addresses[2]], &more[..]].concat());
    assert!(replaced.code == 0 && replaced.stdout.contains("two is on"), "{replaced:?}");
    running.into_iter().for_each(|running| drop(running.kill()));
}

/// A job whose ranks have ended moves too, and continues from the same bits on the new servers alone.
#[test]
fn a_job_without_ranks_moves() {
    thread::scope(|scope| {
        scope.spawn(|| move_without_ranks("memory", &[]));
        move_without_ranks("nvme", &["--delay", "1"]);
    });
}

fn move_without_ranks(tier: &str, more: &[&str]) {
    let homes = Homes::new();
    let base = endless(more);
    let train = base.clone().args(["--tier", tier]);
    let mut servers = server::servers(4, &homes.options());
    let addresses = server::addresses(&servers);
    let mut running = train.clone().servers(&addresses[..2]).start();
    running.until_step(5);
    drop(running.kill());
    must_scale(&servers[..2], &[&servers[2], &servers[3]], &["--wait"]);
    eventually("the end on the others", || status(&addresses[..2]).is_empty().then_some(()));
    let shown = longshore(["status", "--servers", &addresses[2..].join(",")]);
    assert!(shown.code == 0 && !shown.stdout.contains("moves to"), "{tier}: {shown:?}");
    drop(servers.drain(..2));
    if tier != "memory" {
        servers.iter_mut().for_each(Longshored::kill_and_restart);
        let asked = ["status", "--servers", &addresses[2..].join(",")];
        eventually("the recovery of both", || (longshore(asked).code == 0).then_some(()));
    }
    // Servers that the job has left need not run, even if the trainer's list names them.
    let mut running = train.servers(&addresses).start();
    running.until_steps(3);
    ends_with_the_same_bits(&base, running);
    // Commands of operators reach the job's other servers, and ask none that it has left.
    let (one, exported) = (["--servers", &addresses[2], "--job", "default"], TempDir::new().unwrap());
    done([&["export", "--out", exported.path().to_str().unwrap()][..], &one].concat());
    done([&["delete"][..], &one].concat());
    assert_eq!(status(&addresses[2..]).len(), 0, "{tier}");
}

/// A job outgrows its memory: it moves to drives while it trains, a server there dies meanwhile, and it moves back.
#[test]
fn a_job_changes_its_tier_while_it_trains() {
    let (checkpoints, homes) = (TempDir::new().unwrap(), Homes::new());
    let train = endless(&DELAYED).allow("job default is on");
    let options = homes.options().checkpoint_dir(checkpoints.path());
    let mut servers = server::servers(5, &options.allow("stepping back to the version before"));
    let addresses = server::addresses(&servers);
    // Servers are named by their numbers, since their processes are replaced meanwhile.
    let asked = |from: usize, to: &[usize], more: &[&str]| {
        let to: Vec<&str> = to.iter().map(|&server| &*addresses[server]).collect();
        let asked = ["scale", "--job", "default", "--servers", &addresses[from], "--to", &to.join(",")];
        [&asked[..], more].concat().into_iter().map(String::from).collect::<Vec<_>>()
    };
    let mut running = train.clone().servers(&addresses[..2]).start();
    running.until_step(3);
    let refused = longshore(asked(0, &[0, 2], &["--tier", "nvme"]));
    assert!(refused.code == 1 && refused.stderr.contains("memory and nvme"), "{refused:?}");
    done(asked(0, &[2, 3], &["--tier", "nvme"]));
    let fetched = || {
        let seen = longshore(["status", "--json", "--no-hash", "--servers", &addresses[2..3].join(",")]);
        seen.stdout.contains("\"fetched_shards\":").then_some(())
    };
    eventually("the first shard on its way", fetched);
    // The rank lives: it sends again what was not durable.
    servers[2].kill_and_restart();
    done(asked(0, &[2, 3], &["--tier", "nvme", "--wait"]));
    eventually("the end on the others", || status(&addresses[..2]).is_empty().then_some(()));
    // The next process is started with the tier that the job had first, and one drive is not mounted.
    drop(running.kill());
    let host = addresses[3].split(':').next().unwrap();
    let [home, away] = [host, "away"].map(|name| homes.0[0].path().join(name));
    servers[3].process.kill();
    fs::rename(&home, &away).unwrap();
    fs::create_dir(&home).unwrap();
    servers[3].restart();
    let (why, _) = train.clone().servers(&addresses[2..4]).args(["--resume"]).start().fails(DEADLINE);
    assert!(why.contains("is the drive of its --state-dir mounted"), "{why}");
    servers[3].process.kill();
    fs::remove_dir_all(&home).unwrap();
    fs::rename(&away, &home).unwrap();
    servers[2..4].iter_mut().for_each(Longshored::kill_and_restart);
    let mut running = train.clone().servers(&addresses[..4]).start();
    running.until_steps(3);
    done(asked(2, &[4], &["--tier", "memory", "--wait"]));
    assert_eq!(job_status(&addresses[4..]).servers[0].disk_bytes, 0);
    ends_with_the_same_bits(&train, running);
}

/// A server that answers at another address still has its shards, for ranks and for other servers.
#[test]
fn a_server_has_another_address() {
    let (homes, base) = (Homes::new(), endless(&[]));
    for has_moved in [false, true] {
        let servers = server::servers(3, &homes.options());
        let [a, b, c] = [0, 1, 2].map(|at| servers[at].address().to_string());
        let link = Proxy::before(&servers[1]);
        let before = link.address().to_string();
        let train = base.clone().args(["--tier", "nvme"]);
        let mut running = train.clone().servers(&[a.clone(), before.clone()]).start();
        running.until_step(3);
        let scale = |to: &[&String]| {
            let to = to.iter().map(|server| server.as_str()).collect::<Vec<_>>().join(",");
            let asked = ["scale", "--job", "default", "--servers", &a, "--to", &to, "--wait"];
            done(asked);
        };
        if has_moved {
            scale(&[&a, &before, &c]);
        }
        drop((running.kill(), link));
        let mut running = train.servers(&[a.clone(), b.clone()]).start();
        running.until_steps(3);
        scale(&[&a, &c]);
        ends_with_the_same_bits(&base, running);
    }
}

/// The newest wish counts, also in the middle of the moves of another one.
#[test]
fn a_wish_is_withdrawn_in_the_middle() {
    let servers = server::servers(3, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let train = endless(&[]);
    let mut running = train.clone().servers(&addresses[..1]).start();
    running.until_step(3);
    let [a, b, c] = [0, 1, 2].map(|server| &servers[server]);
    must_scale(&servers[..1], &[a, b, c], &[]);
    eventually("the first shard on its way", || {
        let waits = longshore(["status", "--json", "--no-hash", "--servers", &addresses[1..].join(",")]);
        waits.stdout.contains("\"fetched_shards\":").then_some(())
    });
    must_scale(&servers[..1], &[a], &["--wait"]);
    // A wish for the servers that the job is on is fulfilled at once.
    must_scale(&servers[..1], &[a], &["--wait"]);
    eventually("the end on the others", || status(&addresses[1..]).is_empty().then_some(()));
    ends_with_the_same_bits(&train, running);
}

/// Each export finds the owners of its version, also where the ranks end in the middle of a move.
#[test]
fn a_job_is_exported_while_its_shards_move() {
    let servers = server::servers(2, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let mut running = endless(&[]).servers(&addresses).start();
    running.until_step(3);
    let folder = TempDir::new().unwrap();
    let export = |name: &str| {
        let out = folder.path().join(name).display().to_string();
        done(["export", "--servers", &addresses.join(","), "--out", &out]);
    };
    for turn in 0..6 {
        must_scale(&servers, &[&servers[turn % 2]], &[]);
        (0..3).for_each(|again| export(&format!("{turn}-{again}")));
    }
    running.stop();
    export("end");
}

/// A dry run says what would move, and what a server lacks for it.
#[test]
fn a_dry_run_moves_nothing() {
    let servers = [
        ServerOptions::new().args(FLAGS).start(),
        ServerOptions::new().memory("8MiB").start(),
        ServerOptions::new().start(),
    ];
    let mut running = endless(&[]).servers(&server::addresses(&servers[..1])).start();
    running.until_step(3);
    let (small, roomy) = (&servers[1], &servers[2]);
    let planned = must_scale(&servers[..1], &[&servers[0], roomy], &["--dry-run", "--json"]);
    let plan: serde_json::Value = serde_json::from_str(&planned.stdout).expect("JSON");
    let part = |at: usize, key: &str| plan["parts"][at][key].as_u64().expect(key);
    assert_eq!(part(0, "shards"), part(0, "shards_then") + part(1, "shards_then"));
    assert_eq!(
        (part(1, "shards"), part(1, "shards_then")),
        (0, plan["moved_shards"].as_u64().expect("moves"))
    );
    assert!(
        part(1, "takes_bytes") > part(1, "state_bytes_then")
            && part(1, "takes_bytes") <= part(1, "free_bytes")
    );
    let short = scale(&servers[..1], &[&servers[0], small], &["--dry-run"]);
    assert!(short.code == 1 && short.stdout.contains("does not fit"), "{short:?}");
    // Another address of a server that the job has is refused.
    let own = servers[0].address();
    let again = format!("http://{own}");
    let twice = ["scale", "--job", "default", "--servers", own, "--add", &again, "--dry-run"];
    let twice = longshore(twice);
    assert!(twice.code == 1 && twice.stderr.contains(&format!("which the job has as {own}")), "{twice:?}");
    assert!(
        job_status(&server::addresses(&servers[..1])).servers.len() == 1
            && status(&server::addresses(&servers[1..])).is_empty()
    );
    // The server takes as much memory as the plan has said.
    must_scale(&servers[..1], &[&servers[0], roomy], &["--wait"]);
    let page = http::json(&http::address(&servers[0]), "/status.json");
    let job = &page["jobs"][0];
    assert_eq!(job["members"][1]["shards"].as_u64(), Some(part(1, "shards_then")), "{job}");
    assert!(job["scaling"]["is_reached"] == true && job["scaling"]["fetched_bytes"] == 0, "{job}");
    let taken = status(&server::addresses(&servers[2..]))[0].servers[0].memory_bytes;
    assert_eq!(taken, part(1, "takes_bytes"));
    running.stop();
}

#[test]
fn servers_come_and_go_while_a_rank_trains() {
    scaled(1, "memory", &[], &[]);
}

/// The first change comes during exact steps, and the second one during delayed steps.
#[test]
fn servers_with_a_tmpfs_come_and_go_while_two_ranks_train() {
    scaled(2, "shm", &DELAYED, &[]);
}

#[test]
fn servers_with_images_and_gradients_on_drives_come_and_go() {
    scaled(
        2,
        "nvme",
        &["--delay", "1", "--warmup-steps", "0"],
        &["--spill", "all", "--storage-buffers", "2"],
    );
}

/// Shards of a leaving server go to servers that never had them, and their space on the drive becomes free.
#[test]
fn a_job_on_drives_shrinks_to_any_of_its_servers() {
    let train = endless(&[]);
    let homes = Homes::new();
    let servers = server::servers(3, &homes.options());
    let addresses = server::addresses(&servers);
    let mut running = train.clone().args(["--tier", "nvme"]).servers(&addresses).start();
    running.until_step(3);
    let mut taken = Vec::new();
    for to in [&[0, 2][..], &[2], &[1, 2]] {
        let to: Vec<&Longshored> = to.iter().map(|&server| &servers[server]).collect();
        must_scale(&servers[2..], &to, &["--wait"]);
        taken.push(job_status(&addresses[2..]).servers[0].disk_bytes);
    }
    assert!(taken[0] <= taken[1], "{taken:?}");
    // The space of shards that have left is free some steps later.
    let is_free = || job_status(&addresses[2..]).servers[0].disk_bytes < taken[1];
    eventually("free space", || is_free().then_some(()));
    ends_with_the_same_bits(&train, running);
}

/// A server without memory for any shard is refused by name, and training goes on where it is. A server with less room
/// than the others has the shards that fit.
#[test]
fn a_server_with_little_room_holds_up_no_step() {
    let servers = [
        ServerOptions::new().args(FLAGS).start(),
        ServerOptions::new().memory("8MiB").start(),
        ServerOptions::new().start(),
    ];
    let train = endless(&[]);
    let mut running = train.clone().servers(&server::addresses(&servers[..1])).start();
    running.until_step(3);
    let refused = scale(&servers[..1], &[&servers[0], &servers[1]], &["--wait", "--patience", "1"]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("memory") && refused.stderr.contains("raise --memory"), "{refused:?}");
    let nowhere = scale(&servers[..1], &[&servers[0], &servers[0]], &[]);
    assert!(nowhere.code == 1 && nowhere.stderr.contains("each once"), "{nowhere:?}");
    let part = |to: &Longshored, key: &str| {
        let planned = must_scale(&servers[..1], &[&servers[0], to], &["--dry-run", "--json"]);
        let plan: serde_json::Value = serde_json::from_str(&planned.stdout).expect("JSON");
        plan["parts"][1][key].as_u64().expect(key)
    };
    let even = part(&servers[2], "shards_then");
    let memory = part(&servers[2], "takes_bytes") - 1;
    let little = ServerOptions::new().memory(&memory.to_string()).start();
    assert_eq!(part(&little, "shards_then"), even - 1);
    must_scale(&servers[..1], &[&servers[0], &little], &["--wait"]);
    let page = http::json(&http::address(&servers[0]), "/status.json");
    assert_eq!(page["jobs"][0]["members"][1]["shards"].as_u64(), Some(even - 1), "{page}");
    ends_with_the_same_bits(&train, running);
}

/// Servers whose tier outlives them die at any moment of a change, and come back. Some die with rank 0. Stores on real
/// files are what the simulation lacks.
fn killed_and_scaled(tier: &str, more: &[&str], flags: &[&str]) {
    let (base, mut random) = (endless(more), Random::new());
    let homes = Homes::new();
    let options = homes.options().args(flags);
    let options = options.allow("cannot be fetched yet").allow("stepping back to the version before");
    let mut servers = server::servers(3, &options);
    let addresses = server::addresses(&servers);
    let train = base.clone().args(["--tier", tier]).servers(&addresses[..1]);
    let train = train.allow("waiting for a server").allow("cannot be changed yet");
    let mut running = train.start();
    running.until_started();
    for _ in 0..soak::pick(6, 60) {
        let wishes = [vec![0, 1, 2], vec![0, 1], vec![0, 2], vec![0]];
        let wish = &wishes[random.below(4) as usize];
        let to: Vec<&Longshored> = wish.iter().map(|&server| &servers[server]).collect();
        must_scale(&servers[..1], &to, &[]);
        spin(random.part_of(Duration::from_millis(300)));
        let server = random.below(3) as usize;
        if random.below(3) == 0 {
            running.kill();
            servers[server].kill_and_restart();
            running = train.start();
        } else {
            servers[server].kill_and_restart();
        }
    }
    ends_with_the_same_bits(&base, running);
}

#[test]
fn servers_with_a_tmpfs_are_killed_while_servers_come_and_go() {
    killed_and_scaled("shm", &DELAYED, &[]);
}

#[test]
fn servers_with_all_on_drives_are_killed_while_servers_come_and_go() {
    killed_and_scaled(
        "nvme",
        &["--delay", "1", "--warmup-steps", "0"],
        &["--spill", "all", "--storage-buffers", "2"],
    );
}

/// A server that has left a job says where the job is, instead of beginning it anew.
#[test]
fn a_server_that_a_job_has_left_may_stop() {
    let mut servers = server::servers(2, &ServerOptions::new());
    let addresses = server::addresses(&servers);
    let train = endless(&[]);
    let mut running = train.clone().servers(&addresses[..1]).start();
    running.until_step(3);
    must_scale(&servers[..1], &[&servers[1]], &["--wait"]);
    // Some steps after the move, rank 0 ends the job on the server that it left.
    running.until_steps(10);
    eventually("the end of the job on the server that it left", || {
        status(&addresses[..1]).is_empty().then_some(())
    });
    for rank in ["0", "1"] {
        let late = train.clone().servers(&addresses[..1]).args(["--rank", rank, "--world-size", "2"]);
        let (stderr, _) = late.start().fails(Duration::from_secs(60));
        assert!(stderr.contains("moved") && stderr.contains(&addresses[1]), "{stderr}");
    }
    let asked = longshore(["checkpoint", "--job", "default", "--servers", &addresses[0]]);
    let remedy = format!("name one of {}, to which the job has moved", addresses[1]);
    assert!(asked.code == 1 && asked.stderr.contains(&remedy), "{asked:?}");
    servers[0].process.kill();
    ends_with_the_same_bits(&train, running);
}
