//! Steps of one rank, with a timed wait for compute.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use longshore_proto::{Hyper, JobSpec, Rank};
use longshore_worker::{
    error::Result,
    loss_scale::LossScaler,
    pipeline::{Pipeline, PipelineOptions, Timing},
    schedule::Schedule,
    session::{Options, Session},
};
use tracing::debug_span;

use super::Args;
use crate::access::Access;

pub(super) struct Measured {
    pub(super) steps: Vec<Step>,
    pub(super) fill: Duration,
}

pub(super) struct Step {
    pub(super) wall: Duration,
    pub(super) exposed: Duration,
    /// Time from the step's decision to the last of its weights, for exact steps without compute.
    pub(super) update: Duration,
    pub(super) timing: Timing,
}

/// Compute that takes time but no core, as a GPU's does. If the scheduler makes one part too long, the next part
/// is shorter by as much. Waits for weights are not made up for.
struct Compute {
    until: Instant,
    total: Duration,
}

impl Compute {
    fn begin() -> Compute {
        Compute { until: Instant::now(), total: Duration::ZERO }
    }

    fn run(&mut self, name: &'static str, part: Duration) {
        let _stage = debug_span!(target: "stage", "compute", pass = name).entered();
        self.total += part;
        self.until += part;
        let now = Instant::now();
        if part.is_zero() || self.until <= now {
            return;
        }
        thread::sleep(self.until - now);
    }

    /// Notes that the compute waited until now, so that its next part begins now.
    fn held_up(&mut self) {
        self.until = self.until.max(Instant::now());
    }
}

pub(super) fn run(
    args: &Args,
    spec: JobSpec,
    servers: (Vec<String>, Access),
    rank: u32,
    turns: &Barrier,
) -> anyhow::Result<Measured> {
    let prepared = caught(|| prepare(args, spec, servers, rank));
    let mut failed = prepared.as_ref().err().map(|error| anyhow::anyhow!("{error}"));
    let (mut pipeline, fill) = prepared.ok().unzip();
    let mut measured = Measured { steps: Vec::new(), fill: fill.unwrap_or_default() };
    for round in 0..=args.rounds {
        turns.wait();
        for _ in 0..args.steps {
            // A failure is reported at the end, since the other ranks wait at the barrier for this one.
            let Some(pipeline) = pipeline.as_mut().filter(|_| failed.is_none()) else { continue };
            match caught(|| step(args, pipeline)) {
                Ok(made) if round > 0 => measured.steps.push(made),
                Ok(_) => {}
                Err(error) => failed = Some(error),
            }
        }
        turns.wait();
    }
    if let Some(error) = failed {
        return Err(error);
    }
    if let Some(mut pipeline) = pipeline {
        let version = pipeline.drain()?;
        let outcomes = pipeline.outcomes();
        anyhow::ensure!(outcomes.iter().all(|outcome| !outcome.skip), "a step was skipped before {version}");
        let warm_up = args.steps;
        for (made, outcome) in measured.steps.iter_mut().zip(outcomes.into_iter().skip(warm_up)) {
            made.timing = outcome.timing;
        }
        pipeline.close()?.leave()?;
    }
    Ok(measured)
}

/// Makes a panic an error: the other ranks wait at the barrier until this rank is there too.
fn caught<T>(part: impl FnOnce() -> Result<T>) -> anyhow::Result<T> {
    match catch_unwind(AssertUnwindSafe(part)) {
        Ok(done) => Ok(done?),
        Err(_) => anyhow::bail!("the rank's thread panicked, as said above"),
    }
}

fn prepare(
    args: &Args,
    spec: JobSpec,
    (servers, access): (Vec<String>, Access),
    rank: u32,
) -> Result<(Pipeline, Duration)> {
    let mut options = access.of(Options::new(servers, spec, Rank(rank)));
    (options.connections, options.transport) = (args.connections, args.transport());
    options.link_bytes_per_s = args.link;
    let mut session = Session::connect(options)?;
    let sizes: Vec<u64> = (0..session.spec().params.len())
        .map(|param| session.layout().param_range(param))
        .map(|range| range.end - range.start)
        .collect();
    let weights = |param: usize| vec![0.5; sizes[param] as usize];
    let begun = Instant::now();
    let joined = session.start(&weights)?;
    let fill = begun.elapsed();
    let hyper = Hyper { lr: 1e-6, ..Hyper::default() };
    let schedule = if args.delay == 0 { Schedule::exact() } else { Schedule::delayed(0) };
    let options = PipelineOptions {
        schedule,
        clip: (args.clip > 0.0).then_some(args.clip),
        ..PipelineOptions::new(LossScaler::fixed(1.0)?, move |_| vec![hyper])
    };
    Ok((Pipeline::new(session, &joined, options)?, fill))
}

fn step(args: &Args, pipeline: &mut Pipeline) -> Result<Step> {
    let started = Instant::now();
    let mut compute = Compute::begin();
    let layout = pipeline.session().layout().clone();
    let layers = pipeline.session().spec().params.len();
    let parts = layers as f64 * f64::from(args.micro_steps);
    let forward = Duration::from_secs_f64(args.compute_ms / 1e3 / 3.0 / parts);
    pipeline.begin()?;
    let feed = pipeline.weights()?;
    for micro_step in 0..args.micro_steps {
        for layer in 0..layers {
            let range = layout.param_range(layer);
            if !feed.is_ready(range.clone()) {
                feed.wait(range)?;
                compute.held_up();
            }
            compute.run("forward", forward);
        }
        let mut assembler = pipeline.assembler(micro_step)?;
        for layer in (0..layers).rev() {
            compute.run("backward", 2 * forward);
            let range = layout.param_range(layer);
            assembler.put_with(layer, range.end - range.start, &mut |_, target| produce(target))?;
        }
        assembler.finish()?;
    }
    drop(feed);
    pipeline.finish(Vec::new())?;
    let decided = Instant::now();
    // Without compute, an exact step ends when the worker has all its weights. With compute, the next step's forward
    // takes the weights shard by shard, and waits for them count as exposed there.
    if let Some(feed) = pipeline.upcoming().filter(|_| args.delay == 0 && args.compute_ms == 0.0) {
        (0..layers).try_for_each(|layer| feed.wait(layout.param_range(layer)))?;
    }
    let wall = started.elapsed();
    let exposed = wall.saturating_sub(compute.total);
    Ok(Step { wall, exposed, update: decided.elapsed(), timing: Timing::default() })
}

/// Makes a gradient without CPU time, as a device's copy engine does. Only new memory is written: reused memory
/// still holds a gradient.
fn produce(target: &mut [u8]) {
    if target.starts_with(&[0; 4]) {
        target.chunks_exact_mut(2).zip(1u16..).for_each(|(element, value)| {
            // Elements are bf16 numbers from 2^-13 to 2^-12.
            element.copy_from_slice(&(0x3900 | value & 0x7F).to_le_bytes());
        });
    }
}
