//! Stage 3 over real pulls: a synthetic model whose units are skipped or chosen at random trains under small budgets with
//! the bits of a run without one.

use std::sync::Arc;

use longshore_proto::{
    Dtype, Hyper, JobName, JobSpec, Layout, Param, Partition, Rank, Step, Version, limits::BLOCK_ELEMENTS,
};
use longshore_server::{Config, Server};
use longshore_worker::{
    Accumulate, Device, Error, HostDevice, LossScaler, Options, Pipeline, PipelineOptions, Result, Schedule,
    Session, StateHash, Transport, Unit, Units, UnitsReport, convert,
    error::{GradientError, UnitError},
    pipeline::Weights,
};

/// The layers of the model. Each has a part that every step uses, and experts of which a step uses one.
const LAYERS: usize = 4;
const EXPERTS: usize = 3;
const UNITS: usize = LAYERS * (1 + EXPERTS);
const STEPS: u64 = 6;

fn elements(param: usize) -> u64 {
    // Two parameters a unit, of sizes that are no multiple of anything.
    [30_011, 1_009][param % 2] + 613 * (param as u64 / 2 % 5)
}

fn serve() -> (tokio::runtime::Runtime, String) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = Config { memory: 1 << 30, threads: 1, ..Config::default_on("127.0.0.1:0".parse().unwrap()) };
    let server = runtime.block_on(Server::start(config)).unwrap();
    let address = server.address().to_string();
    // Its tasks live as long as the runtime.
    std::mem::forget(server);
    (runtime, address)
}

fn spec(name: &str, micro_steps: u32) -> JobSpec {
    let param = |index| Param { name: format!("p{index}"), shape: vec![elements(index)], group: 0 };
    JobSpec {
        micro_steps,
        max_delay: 1,
        shard_elements: 2 * BLOCK_ELEMENTS,
        ..JobSpec::new(JobName::parse("name", name).unwrap(), (0..2 * UNITS).map(param).collect())
    }
}

fn initial(param: usize) -> Vec<f32> {
    (0..elements(param))
        .map(|index| ((index * 31 + param as u64 * 17) % 1000) as f32 / 1000.0 - 0.5)
        .collect()
}

fn units() -> Vec<Unit> {
    (0..UNITS)
        .map(|unit| Unit { name: format!("block {unit}"), params: vec![2 * unit, 2 * unit + 1] })
        .collect()
}

fn draw(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The units that a micro-step's forward uses: some layers are left out, and each of the others chooses an expert.
fn route(step: Step, micro_step: u32) -> Vec<usize> {
    let mut route = Vec::new();
    for layer in 0..LAYERS {
        let chance = draw(step.0 * 1000 + u64::from(micro_step) * 100 + layer as u64);
        if layer == 0 || !chance.is_multiple_of(3) {
            let first = layer * (1 + EXPERTS);
            route.extend([first, first + 1 + (chance >> 8) as usize % EXPERTS]);
        }
    }
    route
}

/// A gradient that depends on every weight, the step and the micro-step.
fn gradient(weights: &[f32], step: Step, micro_step: u32) -> Vec<f32> {
    let noise = (step.0 * 13 + u64::from(micro_step) * 5) % 11;
    weights.iter().map(|weight| weight - 0.1 * noise as f32).collect()
}

struct Run {
    pipeline: Pipeline,
    units: Units,
    device: Arc<HostDevice>,
    layout: Layout,
}

impl Run {
    fn start(address: &str, name: &str, delay: u32, budget: u64, on_demand: bool) -> Result<Run> {
        Run::of(address, spec(name, 2), delay, budget, on_demand)
    }

    fn of(address: &str, spec: JobSpec, delay: u32, budget: u64, on_demand: bool) -> Result<Run> {
        let options =
            Options { transport: Transport::Tcp, ..Options::new(vec![address.to_string()], spec, Rank(0)) };
        let mut session = Session::connect(options)?;
        let joined = session.start(&initial)?;
        let device = Arc::new(HostDevice::new(budget));
        let units = Units::new(&session, device.clone(), units(), None)?;
        let layout = session.layout().clone();
        let hyper = |_| vec![Hyper { lr: 1e-2, ..Hyper::default() }];
        let how = PipelineOptions {
            clip: Some(1.0),
            accumulate: Accumulate::OnServers,
            schedule: if delay == 0 { Schedule::exact() } else { Schedule::delayed(2).draining_every(4) },
            weights: if on_demand { Weights::OnDemand } else { Weights::Whole },
            ..PipelineOptions::new(LossScaler::fixed(1.0)?, hyper)
        };
        let pipeline = Pipeline::new(session, &joined, how)?;
        Ok(Run { pipeline, units, device, layout })
    }

    /// The f32 weights of a unit, by parameter.
    fn weights(&self, unit: usize) -> Result<Vec<Vec<f32>>> {
        self.units.read(unit, |bytes| {
            let values = |param: usize| {
                let place = self.units.within(unit, &self.layout.param_range(param)).unwrap();
                let mut values = vec![0.0; elements(param) as usize];
                convert::to_f32(
                    Dtype::Bf16,
                    &bytes[place.start as usize * 2..place.end as usize * 2],
                    &mut values,
                );
                values
            };
            [2 * unit, 2 * unit + 1].map(values).into()
        })
    }

    fn step(&mut self) -> Result<()> {
        let plan = self.pipeline.begin()?;
        for micro_step in 0..2 {
            self.units.begin(&mut self.pipeline, micro_step)?;
            let route = route(plan.step, micro_step);
            for &unit in &route {
                let weights = self.units.acquire(unit)?;
                assert_eq!(weights.version, plan.reads);
                self.units.release(unit)?;
            }
            for &unit in route.iter().rev() {
                self.units.acquire(unit)?;
                let weights = self.weights(unit)?;
                self.units.release(unit)?;
                let of = |(index, weights): (usize, &Vec<f32>)| {
                    (2 * unit + index, gradient(weights, plan.step, micro_step))
                };
                self.units.emit(unit, weights.iter().enumerate().map(of).collect())?;
            }
            for unit in (0..UNITS).filter(|unit| !route.contains(unit)) {
                let zeros = |param| (param, vec![0.0; elements(param) as usize]);
                self.units.emit(unit, [2 * unit, 2 * unit + 1].map(zeros).into())?;
            }
            self.units.end(&mut self.pipeline)?;
        }
        self.pipeline.finish(Vec::new())
    }

    fn train(mut self) -> Result<(StateHash, UnitsReport, u64)> {
        while self.pipeline.last_step().0 < STEPS {
            self.step()?;
        }
        assert_eq!(self.pipeline.drain()?, Version(STEPS));
        // An evaluation reads the newest version, whatever the steps read.
        self.units.evaluate(Version(STEPS))?;
        let forward = route(Step(1), 0);
        for &unit in &forward {
            assert_eq!(self.units.acquire(unit)?.version, Version(STEPS));
            self.units.release(unit)?;
        }
        let (hash, report) = (self.pipeline.session().state_hash()?, self.units.report());
        let peak = self.device.budget().peak();
        drop(self.units);
        assert_eq!(self.device.budget().used(), 0, "device memory was not given back");
        self.pipeline.close()?.leave()?;
        Ok((hash, report, peak))
    }
}

fn largest() -> u64 {
    let bytes = |unit: usize| 2 * (elements(2 * unit).next_multiple_of(64) + elements(2 * unit + 1));
    (0..UNITS).map(bytes).max().unwrap()
}

#[test]
fn skipped_units_and_experts_train_under_any_budget_with_the_same_bits() {
    let (_runtime, address) = serve();
    for delay in [0, 1] {
        let run = |name: &str, budget: u64, on_demand| {
            let run = Run::start(&address, &format!("{name}-{delay}"), delay, budget, on_demand).unwrap();
            let (hash, report, peak) = run.train().unwrap();
            assert!(peak <= budget, "{peak} of {budget}");
            println!("{name}, delay {delay}: {report:?}, {peak} bytes of device memory");
            (hash, report)
        };
        let (expected, all) = run("all", u64::MAX, false);
        for (name, units) in [("one", 1), ("two", 2), ("five", 5)] {
            let (hash, few) = run(name, units * largest(), true);
            assert_eq!(hash, expected, "{name}, delay {delay}");
            assert!(few.pulled > 0 && few.acquired == all.acquired);
        }
        let (hash, most) = run("share", 8 * largest(), true);
        let (one, least) = run("least", largest(), true);
        assert_eq!((&hash, &one), (&expected, &expected));
        assert!(most.pulled_bytes < least.pulled_bytes, "a share stays on the device: {most:?} {least:?}");
    }
}

/// The unit and the reason of a refusal.
#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T>) -> UnitError {
    match result.expect_err("it is refused") {
        Error::Unit(error) => *error,
        other => panic!("not about a unit: {other}"),
    }
}

#[test]
fn wrong_use_is_refused_with_the_unit_and_the_remedy() {
    let (_runtime, address) = serve();
    let small = largest() - 1;
    let error = refused(Run::start(&address, "small", 0, small, true).map(|_| ()));
    assert!(matches!(&error, UnitError::TooLarge { budget, .. } if *budget == small), "{error}");
    assert!(error.to_string().contains("raise the budget to"), "{error}");

    let mut run = Run::start(&address, "refusals", 0, largest() + 3000, true).unwrap();
    assert!(matches!(run.units.acquire(0), Err(Error::Misuse(_))), "outside a step");
    let plan = run.pipeline.begin().unwrap();
    run.units.begin(&mut run.pipeline, 0).unwrap();
    let units = &run.units;
    assert!(matches!(refused(units.acquire(UNITS)), UnitError::Unknown { unit: UNITS, units: UNITS }));
    assert!(matches!(refused(units.release(3)), UnitError::NotAcquired { unit } if unit == "block 3"));
    units.acquire(3).unwrap();
    assert!(matches!(refused(units.acquire(3)), UnitError::AcquiredTwice { unit } if unit == "block 3"));
    let error = refused(units.acquire(4));
    assert!(matches!(&error, UnitError::NoRoom { unit, .. } if unit == "block 4"), "{error}");
    units.release(3).unwrap();
    assert!(matches!(refused(units.release(3)), UnitError::NotAcquired { .. }));
    // Its weights may still lie on the device, but nothing keeps them there.
    let unread = refused(units.read(3, |_| unreachable!("nothing is shown")));
    assert_eq!(unread, UnitError::NotAcquired { unit: "block 3".into() });
    assert_eq!(unread.to_string(), "unit block 3 is not acquired: acquire it first, and release it once");
    units.acquire(4).unwrap();

    let zeros = |param: usize| vec![(param, vec![0.0; elements(param) as usize])];
    assert!(matches!(refused(units.emit(0, zeros(2))), UnitError::OtherUnit { param: 2, .. }));
    assert!(matches!(refused(units.emit(0, zeros(5000 % (2 * UNITS)))), UnitError::OtherUnit { .. }));
    units.emit(0, zeros(1)).unwrap();
    let twice = refused(units.emit(0, zeros(1)));
    assert!(matches!(&twice, UnitError::Gradient { unit, .. } if unit == "block 0"), "{twice}");
    assert!(matches!(units.end(&mut run.pipeline), Err(Error::Gradient(_))), "gradients are missing");

    // Unit 4 is still acquired.
    let wanted = Version(plan.reads.0 + 7);
    let changed = refused(units.evaluate(wanted));
    let expected = UnitError::VersionChanged { unit: "block 4".to_string(), held: plan.reads, wanted };
    assert_eq!(changed, expected);
    units.release(4).unwrap();

    // The micro-step that could not end goes on.
    for param in (0..2 * UNITS).filter(|&param| param != 1) {
        units.emit(param / 2, zeros(param)).unwrap();
    }
    units.acquire(4).unwrap();
    units.end(&mut run.pipeline).unwrap();
    assert!(matches!(units.end(&mut run.pipeline), Err(Error::Misuse(_))), "it has ended");

    run.units.begin(&mut run.pipeline, 1).unwrap();
    (0..2 * UNITS).for_each(|param| run.units.emit(param / 2, zeros(param)).unwrap());
    run.units.end(&mut run.pipeline).unwrap();

    // A micro-step that is refused can be begun once the unit is released.
    run.pipeline.finish(Vec::new()).unwrap();
    run.pipeline.begin().unwrap();
    let held = units.begin(&mut run.pipeline, 0).unwrap_err();
    assert!(matches!(held, Error::Unit(_)), "{held}");
    units.release(4).unwrap();
    units.begin(&mut run.pipeline, 0).unwrap();
}

/// The last unit has a trained parameter and a frozen one.
#[test]
fn a_gradient_of_a_frozen_parameter_is_refused_with_its_unit_and_the_remedy() {
    let (_runtime, address) = serve();
    let frozen = 2 * UNITS - 1;
    let partitions = vec![Partition::whole(1), Partition::frozen(frozen as u32)];
    let spec = JobSpec { partitions, ..spec("frozen", 2) };
    let mut run = Run::of(&address, spec, 0, u64::MAX, true).unwrap();
    run.pipeline.begin().unwrap();
    run.units.begin(&mut run.pipeline, 0).unwrap();
    let zeros = vec![(frozen, vec![0.0; elements(frozen) as usize])];
    let last = UNITS - 1;
    let error = refused(run.units.emit(last, zeros));
    let source = GradientError::Frozen { name: format!("p{frozen}"), rank: 0 };
    assert_eq!(error, UnitError::Gradient { unit: format!("block {last}"), source });
    let said = error.to_string();
    let remedy = "put no gradient of it, or open a job in which it is trained";
    assert!(said.contains(&format!("block {last}")) && said.contains(remedy), "{said}");
    // The micro-step goes on with the gradients of the others, the unit's own among them.
    for param in 0..frozen {
        run.units.emit(param / 2, vec![(param, vec![0.0; elements(param) as usize])]).unwrap();
    }
    run.units.end(&mut run.pipeline).unwrap();
}

#[test]
fn units_divide_the_parameters_or_are_refused() {
    let (_runtime, address) = serve();
    let run = Run::start(&address, "division", 0, u64::MAX, true).unwrap();
    let device: Arc<dyn Device> = run.device.clone();
    let make = |units: Vec<(&str, Vec<usize>)>| {
        let units = units.into_iter().map(|(name, params)| Unit { name: name.into(), params }).collect();
        refused(Units::new(run.pipeline.session(), device.clone(), units, None).map(|_| ()))
    };
    assert!(matches!(make(vec![("a", vec![0]), ("b", vec![])]), UnitError::Empty { unit } if unit == "b"));
    let shared = make(vec![("a", vec![0, 1]), ("b", vec![1])]);
    assert!(
        matches!(&shared, UnitError::Shared { first, second, .. } if first == "a" && second == "b"),
        "{shared}"
    );
    assert!(matches!(make(vec![("a", vec![2 * UNITS])]), UnitError::NoSuchParameter { .. }));
    // Its gradient could not leave.
    let without = make(vec![("a", (1..2 * UNITS).collect())]);
    assert!(matches!(&without, UnitError::Uncovered { .. }), "{without}");
}
