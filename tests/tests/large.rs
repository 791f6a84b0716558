//! A job of 500 million parameters on a server of its own, to test what shows only at that size. It is a slow test,
//! run by `--soak`. It prints what it measures (`tests/run --soak large -- --nocapture`), which stands in
//! docs/storage.md.

use std::{
    env, io,
    path::Path,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::{Duration, Instant},
};

use longshore_engine::{
    io::{Direction, Disk, OpenDisk, OpenFile, Part, Request},
    memory::{Region, Slab},
};
use longshore_proto::{Dtype, Hyper, JobName, JobSpec, Param, Rank, Rule, TierKind, Version};
use longshore_tests::{
    binaries,
    command::run,
    process::{forget_peak, memory_of},
    server::{Longshored, ServerOptions},
    skip,
    status::job_status,
};
use longshore_wire::v1::{self, training_client::TrainingClient};
use longshore_worker::{LossScaler, Options, Pipeline, PipelineOptions, Session, Transport};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

const PARAMS: usize = 120;
const ELEMENTS: u64 = 4 << 20;
/// With the six buffers of 48 MiB each, and one for tables, this is the state's 1 GiB of DRAM.
const RESIDENT: u64 = 720 << 20;
/// The bytes of a shard's state; so many shards are read, updated or written at once.
const SHARD_BYTES: usize = 12 * ELEMENTS as usize;
const IMAGE_BYTES: usize = 2 * ELEMENTS as usize;
const BUFFERS: usize = 6;
const ROUNDS: usize = 5;
/// The most memory that the exporting process may take.
const EXPORT_PEAK: u64 = 256 << 20;
/// The most memory that an export may add to the server: the copy of a shard, its messages ahead and a connection's
/// window.
const EXPORT_GROWTH: u64 = 32 << 20;
/// Runs a command and prints the most memory it had, in KiB, on stderr.
const PEAK: &str = "import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)";

fn spec() -> JobSpec {
    let param = |index| Param { name: format!("p{index}"), shape: vec![ELEMENTS], group: 0 };
    JobSpec {
        name: JobName::parse("name", "large").expect("a name"),
        params: (0..PARAMS).map(param).collect(),
        groups: vec!["all".into()],
        rule: Rule::AdamW,
        gradient_dtype: Dtype::Bf16,
        image_dtype: Dtype::Bf16,
        world_size: 1,
        micro_steps: 1,
        max_delay: 0,
        shard_elements: ELEMENTS,
        tier: TierKind::Nvme,
        formats: Default::default(),
        unchecked: false,
        partitions: Vec::new(),
        worker_local: false,
        leave_out: false,
    }
}

fn enter(server: &Longshored) -> Pipeline {
    let options = Options {
        deadline: Duration::from_secs(120),
        slow_deadline: Duration::from_secs(300),
        // Over shared memory the worker's gradients would count as resident in the server too.
        transport: Transport::Tcp,
        ..Options::new(vec![server.address().to_string()], spec(), Rank(0))
    };
    let mut session = Session::connect(options).expect("a session");
    let joined = session.start(&|_| vec![0.5; ELEMENTS as usize]).expect("a job");
    let scaler = LossScaler::fixed(1.0).expect("a scale");
    let hyper = |_| vec![Hyper { lr: 1e-6, ..Hyper::default() }];
    Pipeline::new(session, &joined, PipelineOptions::new(scaler, hyper)).expect("a pipeline")
}

/// Makes one step. Returns the update pass: the time from the last gradient's end until the version is durable, with
/// the decision before it and the records after it.
fn step(pipeline: &mut Pipeline, gradient: &[f32], server: &Control) -> Duration {
    pipeline.begin().expect("a step");
    pipeline.weights().expect("weights").wait(0..PARAMS as u64 * ELEMENTS).expect("all weights");
    let mut assembler = pipeline.assembler(0).expect("an assembler");
    for param in (0..PARAMS).rev() {
        assembler.put(param, gradient).expect("a gradient");
    }
    assembler.finish().expect("all gradients");
    let begun = Instant::now();
    pipeline.finish(Vec::new()).expect("a decision");
    server.await_durable(pipeline.drain().expect("a decision"));
    begun.elapsed()
}

/// A client beside the worker's.
struct Control {
    runtime: Runtime,
    client: TrainingClient<Channel>,
}

impl Control {
    fn of(server: &Longshored) -> Control {
        let runtime = Runtime::new().expect("a runtime");
        let client = runtime.block_on(TrainingClient::connect(format!("http://{}", server.address())));
        Control { runtime, client: client.expect("a server that listens") }
    }

    fn await_durable(&self, version: Version) {
        let job = spec().name.to_string();
        let request = v1::AwaitDurableRequest { job, version: version.0, deadline_ms: 120_000 };
        self.runtime.block_on(self.client.clone().await_durable(request)).expect("a durable version");
    }
}

/// A bare loop of what such a step moves, with as many requests at once, which shows the drive's own limit.
struct Drive {
    disk: Arc<dyn Disk>,
    free: Vec<Region>,
    /// The slot of the last pass.
    slot: usize,
    /// How many bytes of each shard are read and written.
    read: usize,
    written: usize,
}

impl Drive {
    fn create(folder: &Path, [read, written]: [usize; 2]) -> Drive {
        let most = read.max(written);
        let slab = Slab::allocate(BUFFERS * most).expect("memory");
        let free = slab.carve_here(&[most; BUFFERS]);
        let bytes = 2 * (PARAMS * most) as u64;
        let disk = OpenFile::default().create(&folder.join("bare"), bytes, Some(&free[0].mapping()));
        let mut drive = Drive { disk: disk.expect("a file"), free, slot: 0, read, written };
        // Blocks that were reserved and never written cost the file system more.
        for _ in 0..2 {
            drive.pass();
        }
        drive
    }

    /// Reads what is not resident from one slot and writes all of the other. Returns seconds and the bytes moved.
    fn pass(&mut self) -> (f64, u64) {
        let (from, to) = (self.slot, 1 - self.slot);
        let resident = RESIDENT as usize / SHARD_BYTES;
        let begun = Instant::now();
        let (done, results) = mpsc::channel();
        let (mut next, mut busy, mut bytes) = (0, 0, 0);
        while next < PARAMS || busy > 0 {
            if next < PARAMS
                && let Some(buffer) = self.free.pop()
            {
                let stays = (next + 1) * resident / PARAMS > next * resident / PARAMS;
                let (direction, slot) = if stays { (Direction::Write, to) } else { (Direction::Read, from) };
                self.submit(next, direction, slot, buffer, &done);
                (next, busy) = (next + 1, busy + 1);
                continue;
            }
            let (shard, direction, buffer, result) = results.recv().expect("a request that is done");
            Result::expect(result, "a read or a write");
            bytes += self.length(direction) as u64;
            if direction == Direction::Read {
                self.submit(shard, Direction::Write, to, buffer, &done);
            } else {
                self.free.push(buffer);
                busy -= 1;
            }
        }
        self.disk.flush().expect("a flush");
        self.slot = to;
        (begun.elapsed().as_secs_f64(), bytes)
    }

    fn length(&self, direction: Direction) -> usize {
        if direction == Direction::Read { self.read } else { self.written }
    }

    fn submit(
        &self,
        shard: usize,
        direction: Direction,
        slot: usize,
        buffer: Region,
        done: &mpsc::Sender<Moved>,
    ) {
        let offset = (slot * PARAMS + shard) * self.read.max(self.written);
        let parts = vec![Part { offset: offset as u64, range: 0..self.length(direction) }];
        let done = done.clone();
        let done = Box::new(move |buffer, result| drop(done.send((shard, direction, buffer, result))));
        self.disk.submit(Request { direction, parts, buffer, done });
    }
}

type Moved = (usize, Direction, Region, io::Result<()>);

/// Both tests are too large to run beside each other.
static ALONE: Mutex<()> = Mutex::new(());

#[track_caller]
fn alone() -> Option<MutexGuard<'static, ()>> {
    if env::var_os("LONGSHORE_SOAK").is_none() {
        skip::skipped("slow, and it takes 25 GB of disk (tests/run --soak)");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

fn start(root: &TempDir, flags: &[&str]) -> Longshored {
    let options = ServerOptions::new().memory("6GiB").state_root(root.path()).args(flags);
    options.args(["--resident", &RESIDENT.to_string()]).start()
}

/// Makes steps by turns with the drive's bare loop.
fn update(flags: &[&str], moved: [usize; 2]) {
    let Some(_alone) = alone() else { return };
    let root = TempDir::new().expect("a folder for state");
    let server = start(&root, flags);
    let (mut pipeline, control) = (enter(&server), Control::of(&server));
    let gradient: Vec<f32> = (0..ELEMENTS).map(|index| (index % 251) as f32 * 1e-4).collect();
    let mut drive = Drive::create(root.path(), moved);
    step(&mut pipeline, &gradient, &control);
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let pass = step(&mut pipeline, &gradient, &control).as_secs_f64();
        let (alone, bytes) = drive.pass();
        let (ratio, gb) = (alone / pass, bytes as f64 / 1e9);
        eprintln!(
            "{flags:?}: update pass {pass:.3} s, {:.2} GB/s; the drive alone {alone:.3} s, {:.2} GB/s; {ratio:.3} of it",
            gb / pass,
            gb / alone
        );
        ratios.push(ratio);
    }
    ratios.sort_by(f64::total_cmp);
    let (now, most) = memory_of(server.process.id());
    let admitted = job_status(&[server.address().to_string()]).servers[0].memory_bytes;
    let of_admitted = most as f64 / admitted as f64;
    eprintln!("{flags:?}: median {:.3} of the drive", ratios[ROUNDS / 2]);
    eprintln!("{flags:?}: admitted {admitted}, resident {now}, at most {most}: {of_admitted:.3} of admitted");
    assert!(of_admitted <= 1.05, "{most} of {admitted} admitted");
}

#[test]
fn five_hundred_million_parameters_take_the_memory_admitted() {
    update(&[], [SHARD_BYTES; 2]);
}

#[test]
fn five_hundred_million_parameters_with_images_on_the_drive_take_the_memory_admitted() {
    update(&["--spill", "images"], [SHARD_BYTES, SHARD_BYTES + IMAGE_BYTES]);
}

#[test]
fn five_hundred_million_parameters_with_all_on_the_drive_take_the_memory_admitted() {
    // A gradient is as long as an image. It is written before the pass, and read in it.
    update(&["--spill", "all"], [SHARD_BYTES + IMAGE_BYTES, SHARD_BYTES + IMAGE_BYTES]);
}

#[test]
fn an_export_of_two_gigabytes_takes_little_memory() {
    let Some(_alone) = alone() else { return };
    let root = TempDir::new().expect("a folder for state");
    let server = start(&root, &[]);
    let _pipeline = enter(&server);
    export(&server, root.path());
}

/// The export is fp32, 2 GB.
fn export(server: &Longshored, folder: &Path) {
    let python = env::var_os("LONGSHORE_TEST_PYTHON").expect("a Python: run tests/run, which makes one");
    let (before, _) = memory_of(server.process.id());
    forget_peak(server.process.id());
    let longshore = binaries::command("longshore").get_program().to_owned();
    let mut command = Command::new(python);
    command.args(["-c", PEAK]).arg(longshore);
    command
        .args(["export", "--servers", server.address(), "--dtype", "f32", "--out"])
        .arg(folder.join("out"));
    command.env_remove("LONGSHORE_SOAK");
    let begun = Instant::now();
    let output = run("export", &mut command);
    assert_eq!(output.code, 0, "{output:?}");
    let peak = output.stderr.lines().find_map(|line| line.strip_prefix("peak "));
    let peak = peak.expect("a peak").parse::<u64>().expect("KiB") << 10;
    let (_, most) = memory_of(server.process.id());
    let grown = most.saturating_sub(before);
    eprintln!(
        "export of {} bytes in {:.1} s: at most {peak} bytes in its process, and {grown} more in the server",
        PARAMS as u64 * ELEMENTS * 4,
        begun.elapsed().as_secs_f64()
    );
    assert!(peak < EXPORT_PEAK, "{peak} bytes");
    assert!(grown < EXPORT_GROWTH, "{before} bytes before, {most} at most");
}
