//! Frozen parameters on real servers. Ranks pull them with the rest, no step changes them, and they survive
//! servers' deaths, with checkpoints and without.

use std::{ops::Range, sync::Mutex};

use longshore_proto::{
    Dtype, Hyper, JobName, JobSpec, Param, Partition, Rank, Rule, StateArray, TierKind,
    limits::BLOCK_ELEMENTS,
};
use longshore_tests::server::{self, Longshored, ServerOptions};
use longshore_worker::{
    LossScaler, Options, Pipeline, PipelineOptions, Schedule, Session, Transport, export::Contents,
};
use tempfile::TempDir;

const STEPS: u64 = 6;
const BLOCK: u64 = BLOCK_ELEMENTS;

/// Adapters among frozen weights, in shards of two blocks.
fn spec(tier: TierKind, max_delay: u32) -> JobSpec {
    let sizes = [BLOCK + 17, 3 * BLOCK + 5, 300, 5 * BLOCK];
    let param =
        |(index, &size): (usize, &u64)| Param { name: format!("p{index}"), shape: vec![size], group: 0 };
    let params = sizes.iter().enumerate().map(param).collect();
    JobSpec {
        max_delay,
        shard_elements: 2 * BLOCK,
        tier,
        partitions: vec![
            Partition::whole(1),
            Partition::frozen(1),
            Partition { first: 2, ranks: vec![Rank(0)] },
            Partition::frozen(3),
        ],
        ..JobSpec::new(JobName::parse("name", "lora").expect("a name"), params)
    }
}

/// Returns a parameter's given weights, which bf16 cannot represent.
fn given(param: usize, elements: u64) -> Vec<f32> {
    (0..elements).map(|element| ((element * 31 + param as u64 * 7) % 1013) as f32 * 1.01e-3 - 0.5).collect()
}

fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| half::bf16::from_f32(value).to_f32()).collect()
}

fn options(servers: &[Longshored], spec: &JobSpec, transport: Transport) -> Options {
    Options { transport, ..Options::new(server::addresses(servers), spec.clone(), Rank(0)) }
}

/// A rank that trains, and its knowledge of the layout.
struct Trainer {
    pipeline: Pipeline,
    spec: JobSpec,
    places: Vec<Range<u64>>,
    frozen: Vec<bool>,
}

impl Trainer {
    fn enter(options: Options) -> Trainer {
        let spec = options.spec.clone();
        let delay = spec.max_delay;
        let mut session = Session::connect(options).expect("a session");
        let sizes: Vec<u64> = spec.params.iter().map(|param| param.shape[0]).collect();
        let joined = session.start(&|param| given(param, sizes[param])).expect("a job");
        let params = 0..spec.params.len();
        let places = params.clone().map(|param| session.layout().param_range(param)).collect();
        let frozen = params.map(|param| session.layout().is_param_frozen(param)).collect();
        let scaler = LossScaler::fixed(1.0).expect("a scale");
        let schedule = if delay > 0 { Schedule::delayed(2) } else { Schedule::exact() };
        let hyper = Hyper { lr: 0.01, weight_decay: 0.1, ..Hyper::default() };
        let options = PipelineOptions {
            schedule,
            clip: Some(1.0),
            ..PipelineOptions::new(scaler, move |_| vec![hyper])
        };
        let pipeline = Pipeline::new(session, &joined, options).expect("a pipeline");
        Trainer { pipeline, spec, places, frozen }
    }

    /// Makes one step. The gradient depends on all weights, also frozen ones, so the bits show the pulled
    /// weights.
    fn step(&mut self) {
        self.pipeline.begin().expect("a step");
        let feed = self.pipeline.weights().expect("weights");
        let mut weights = Vec::new();
        for (param, place) in self.places.iter().enumerate() {
            let mut values = vec![0.0; (place.end - place.start) as usize];
            feed.read(place.clone(), &mut values).expect("weights");
            if self.frozen[param] {
                assert_eq!(values, rounded(&given(param, values.len() as u64)), "p{param} changes");
            }
            weights.push(values);
        }
        drop(feed);
        let mut assembler = self.pipeline.assembler(0).expect("a micro-step");
        let base = &weights[3];
        for param in (0..self.spec.params.len()).rev().filter(|&param| !self.frozen[param]) {
            let of = weights[param].iter().enumerate();
            let gradient: Vec<f32> =
                of.map(|(at, weight)| weight * 0.5 - base[at % base.len()] * 0.1).collect();
            assembler.put(param, &gradient).expect("a gradient");
        }
        assembler.finish().expect("a push");
        self.pipeline.finish(Vec::new()).expect("a commit");
    }

    fn hash(&mut self) -> String {
        self.pipeline.drain().expect("the last step");
        self.pipeline.session().state_hash().expect("a hash").hash
    }

    fn leave(self) {
        self.pipeline.close().expect("the last step").leave().expect("left");
    }
}

fn trained(servers: &[Longshored], spec: &JobSpec, transport: Transport) -> String {
    let mut trainer = Trainer::enter(options(servers, spec, transport));
    (0..STEPS).for_each(|_| trainer.step());
    let hash = trainer.hash();
    trainer.leave();
    hash
}

fn root(tier: TierKind) -> TempDir {
    match tier {
        TierKind::Shm => TempDir::new_in("/dev/shm"),
        _ => TempDir::new(),
    }
    .expect("a folder for the servers' state")
}

fn server_options(tier: TierKind, root: &TempDir) -> ServerOptions {
    match tier {
        TierKind::Memory => ServerOptions::new(),
        TierKind::Shm => ServerOptions::new().shm_root(root.path()),
        TierKind::Nvme => ServerOptions::new().state_root(root.path()),
    }
}

#[test]
fn they_outlive_killed_servers() {
    for (tier, max_delay) in
        [(TierKind::Shm, 0), (TierKind::Shm, 1), (TierKind::Nvme, 0), (TierKind::Nvme, 1)]
    {
        let known = trained(
            &server::servers(1, &ServerOptions::new()),
            &spec(TierKind::Memory, max_delay),
            Transport::Tcp,
        );
        let root = root(tier);
        let options_of_servers = server_options(tier, &root).allow("stepping back");
        let options_of_servers = options_of_servers.allow("a damaged record is replaced");
        let mut servers = server::servers(3, &options_of_servers);
        let spec = spec(tier, max_delay);
        let mut trainer = Trainer::enter(options(&servers, &spec, Transport::Auto));
        for step in 0..STEPS {
            trainer.step();
            // Server 0 has trained shards, and the others only frozen ones.
            servers[step as usize % 3].kill_and_restart();
        }
        assert_eq!(trainer.hash(), known, "{tier}, delay {max_delay}");
        trainer.leave();
    }
}

#[test]
fn exports_have_their_weights_and_no_moments_of_them() {
    let servers = server::servers(2, &ServerOptions::new());
    let spec = spec(TierKind::Memory, 0);
    let mut trainer = Trainer::enter(options(&servers, &spec, Transport::Auto));
    (0..2).for_each(|_| trainer.step());
    trainer.hash();
    let layout = spec.validate().expect("a layout");
    for contents in [Contents::Weights(Dtype::F32), Contents::State(Rule::AdamW)] {
        let found = Mutex::new(vec![vec![0.0f32; layout.elements() as usize]; 3]);
        let sink = |array: StateArray, at: u64, bytes: &[u8]| {
            let values =
                bytes.chunks_exact(4).map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
            let moments_of_frozen = layout
                .params_in(at..at + bytes.len() as u64 / 4)
                .any(|param| layout.is_param_frozen(param) && array != StateArray::Master);
            assert!(!moments_of_frozen, "{array} at {at}");
            let target = &mut found.lock().expect("no panic")[array.index()][at as usize..];
            target.iter_mut().zip(values).for_each(|(target, value)| *target = value);
            Ok(())
        };
        trainer.pipeline.session().export(contents, &sink).expect("an export");
        let master = &found.into_inner().expect("no panic")[0];
        for (param, place) in trainer.places.iter().enumerate() {
            let start = given(param, place.end - place.start);
            let values = &master[place.start as usize..place.end as usize];
            assert_eq!(values == rounded(&start), trainer.frozen[param], "p{param}");
        }
    }
    trainer.leave();
}
