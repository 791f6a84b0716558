//! Jobs of 500 million and of 2 billion parameters on a dedicated server, for effects that need this size.
//! These slow tests run with `--soak`, and print the memory taken (`tests/run --soak large -- --nocapture`).

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use longshore_proto::{
    Formats, Hyper, JobName, JobSpec, MasterFormat, Param, Rank, StateFormat, TierKind, Version,
    limits::PROCESS_BYTES,
};
use longshore_tests::{
    binaries,
    command::run,
    process::memory_of,
    server::{Longshored, ServerOptions},
    skip, soak,
    status::job_status,
};
use longshore_wire::v1::{self, training_client::TrainingClient};
use longshore_worker::{LossScaler, Options, Pipeline, PipelineOptions, Session, Transport};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

/// Elements of a parameter and of a shard.
const ELEMENTS: u64 = 4 << 20;
const ROUNDS: usize = 2;

/// A job, and its memory settings.
struct Case {
    /// Number of parameters, each one shard.
    params: usize,
    formats: Formats,
    resident: u64,
    /// The server's memory. None for 6 GiB, more than any of these jobs takes.
    memory: Option<u64>,
    flags: &'static [&'static str],
}

impl Case {
    /// 500 million parameters with 6 GB of fp32 state. The state has 1 GiB of DRAM: 720 MiB resident, six buffers of 48
    /// MiB each, and the rest for tables.
    fn small(flags: &'static [&'static str]) -> Case {
        Case { params: 120, formats: Formats::default(), resident: 720 << 20, memory: None, flags }
    }

    /// 2 billion parameters, all of them on the drives, in the DRAM that `longshore plan` prints.
    fn large() -> Case {
        let formats = Formats { state: StateFormat::Bf16, master: MasterFormat::Bf16, seed: 1 };
        let (params, flags) = (480, &["--spill", "all"]);
        Case { params, formats, resident: 0, memory: Some(planned(params)), flags }
    }

    fn spec(&self) -> JobSpec {
        let param = |index| Param { name: format!("p{index}"), shape: vec![ELEMENTS], group: 0 };
        JobSpec { params: (0..self.params).map(param).collect(), formats: self.formats, ..spec() }
    }

    fn elements(&self) -> u64 {
        self.params as u64 * ELEMENTS
    }

    fn start(&self, root: &TempDir) -> Longshored {
        let memory = self.memory.map_or("6GiB".into(), |bytes| bytes.to_string());
        let options = ServerOptions::new().memory(&memory).state_root(root.path()).args(self.flags);
        options.args(["--resident", &self.resident.to_string()]).start()
    }
}

/// Returns the server's memory by `longshore plan` for this many parameters.
fn planned(params: usize) -> u64 {
    let mut command = binaries::command("longshore");
    command.args(["plan", "--json", "--params", &(params as u64 * ELEMENTS).to_string()]);
    command.args(["--tier", "nvme", "--spill", "all", "--state", "bf16", "--master", "bf16"]);
    let output = run("plan", &mut command);
    assert_eq!(output.code, 0, "{output:?}");
    let planned: serde_json::Value = serde_json::from_str(&output.stdout).expect("what plan prints");
    planned["memory_bytes"].as_u64().expect("bytes")
}

fn spec() -> JobSpec {
    JobSpec {
        shard_elements: ELEMENTS,
        tier: TierKind::Nvme,
        ..JobSpec::new(JobName::parse("name", "large").expect("a name"), Vec::new())
    }
}

/// Returns the first weights of a parameter. Rank 0 holds one parameter at a time.
fn weights() -> Vec<f32> {
    (0..ELEMENTS).map(|element| (element % 509) as f32 / 12725.0 - 0.02).collect()
}

fn enter(server: &Longshored, case: &Case) -> Pipeline {
    let options = Options {
        deadline: Duration::from_secs(120),
        slow_deadline: Duration::from_secs(300),
        // Over shared memory the worker's gradients would count as resident in the server too.
        transport: Transport::Tcp,
        ..Options::new(vec![server.address().to_string()], case.spec(), Rank(0))
    };
    let mut session = Session::connect(options).expect("a session");
    let joined = session.start(&|_| weights()).expect("a job");
    let scaler = LossScaler::fixed(1.0).expect("a scale");
    let hyper = |_| vec![Hyper { lr: 1e-6, ..Hyper::default() }];
    Pipeline::new(session, &joined, PipelineOptions::new(scaler, hyper)).expect("a pipeline")
}

/// Makes one step, and waits until its version is durable.
fn step(case: &Case, pipeline: &mut Pipeline, gradient: &[f32], server: &Control) {
    pipeline.begin().expect("a step");
    pipeline.weights().expect("weights").wait(0..case.elements()).expect("all weights");
    let mut assembler = pipeline.assembler(0).expect("an assembler");
    for param in (0..case.params).rev() {
        assembler.put(param, gradient).expect("a gradient");
    }
    assembler.finish().expect("all gradients");
    pipeline.finish(Vec::new()).expect("a decision");
    server.await_durable(pipeline.drain().expect("a decision"));
}

/// A gRPC client of the server, beside the worker's own client.
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

/// Each of these tests is too large to run beside another.
static ALONE: Mutex<()> = Mutex::new(());

#[track_caller]
fn alone() -> Option<MutexGuard<'static, ()>> {
    if !soak::runs() {
        skip::skipped("slow, and it takes up to 50 GB of disk (tests/run --soak)");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

fn takes_what_was_planned(case: &Case) {
    let Some(_alone) = alone() else { return };
    let root = TempDir::new().expect("a folder for state");
    let server = case.start(&root);
    let (mut pipeline, control) = (enter(&server, case), Control::of(&server));
    let gradient: Vec<f32> = (0..ELEMENTS).map(|index| (index % 251) as f32 * 1e-4).collect();
    for _ in 0..ROUNDS {
        step(case, &mut pipeline, &gradient, &control);
    }
    let (now, most) = memory_of(server.process.id());
    let admitted = job_status(&[server.address().to_string()]).servers[0].memory_bytes;
    eprintln!("{:?}: admitted {admitted}, resident {now}, at most {most}", case.flags);
    let planned = admitted + PROCESS_BYTES;
    assert!(most as f64 <= 1.03 * planned as f64, "{most} of {planned} planned");
}

#[test]
fn five_hundred_million_parameters_take_the_memory_admitted() {
    takes_what_was_planned(&Case::small(&[]));
}

#[test]
fn five_hundred_million_parameters_with_all_on_the_drive_take_the_memory_admitted() {
    takes_what_was_planned(&Case::small(&["--spill", "all"]));
}

#[test]
fn two_billion_parameters_on_the_drive_take_the_memory_planned() {
    takes_what_was_planned(&Case::large());
}
