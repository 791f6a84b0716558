//! Steps of stage 3 over a link of a given speed: how much of the pulls hides behind compute, and how near a step that
//! cannot hide them comes to the link.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use longshore_proto::JobSpec;
use longshore_worker::{Device, HostDevice, Pipeline, Result, Unit, Units, UnitsReport};
use serde_json::json;

use super::{
    Args,
    hosts::Hosts,
    limits::update_bytes_per_s,
    prediction::{self, Alone, Uses, predict, simulated},
    rank::{Compute, prepare, produce},
};
use crate::{bench::median, output::Output, plan::in_use_and_next};

/// So many of the largest units are in device memory where no budget is given.
const UNITS: u64 = 4;

pub(super) struct Measured {
    units: usize,
    budget: u64,
    /// The most bytes of the device that were in use at once.
    device_peak: u64,
    /// The compute of one use of a unit, on average.
    compute_s: f64,
    /// The bytes that a server promised to the job.
    reserved: u64,
    /// The speed of the link.
    link: f64,
    /// The bytes of all gradients on the wire.
    pushed: u64,
    steps: Vec<Step>,
}

struct Step {
    wall: Duration,
    compute: Duration,
    acquired: u64,
    late: u64,
    waited: Duration,
    pulled: u64,
    pulled_bytes: u64,
}

pub(super) fn run(args: &Args, spec: JobSpec, hosts: &Hosts) -> anyhow::Result<Measured> {
    let (mut pipeline, _) = prepare(args, spec, (hosts.addresses().to_vec(), hosts.access().clone()), 0)?;
    let session = pipeline.session();
    let spec = session.spec();
    let elements: Vec<u64> = spec.params.iter().map(|param| param.shape.iter().product()).collect();
    let bytes = |elements: u64| elements * spec.image_dtype.bytes();
    let largest = elements.iter().copied().max().map_or(0, bytes);
    let budget = args.device_budget.map_or(UNITS * largest, |budget| budget.0);
    let of_servers =
        args.server_link.map_or(f64::INFINITY, |speed| speed as f64 * args.server_count() as f64);
    let link = args.link.map_or(of_servers, |speed| of_servers.min(speed as f64));
    let compute = computes(args, link, &elements.iter().copied().map(bytes).collect::<Vec<_>>());
    let blocks = (0..elements.len())
        .map(|param| Unit { name: spec.params[param].name.clone(), params: vec![param] })
        .collect();
    let device = Arc::new(HostDevice::new(budget));
    let units = Units::new(session, device.clone(), blocks, Some(budget))?;
    let pushed = elements.iter().sum::<u64>() * spec.gradient_dtype.bytes() * u64::from(args.micro_steps);
    let compute_s = compute.iter().map(Duration::as_secs_f64).sum::<f64>() / compute.len() as f64;
    let (units_count, steps) = (units.len(), Vec::new());
    let mut measured =
        Measured { units: units_count, budget, device_peak: 0, compute_s, link, pushed, reserved: 0, steps };
    for round in 0..=args.rounds {
        for _ in 0..args.steps {
            let made = step(args, &mut pipeline, &units, &compute)?;
            // The first round warms up.
            if round > 0 {
                measured.steps.push(made);
            }
        }
    }
    pipeline.drain()?;
    drop(units);
    measured.device_peak = device.budget().peak();
    measured.reserved = hosts.reserved(pipeline.session().spec())?;
    pipeline.close()?.leave()?;
    Ok(measured)
}

/// The compute of one use of each unit.
fn computes(args: &Args, link: f64, bytes: &[u64]) -> Vec<Duration> {
    let uses = 2.0 * bytes.len() as f64 * f64::from(args.micro_steps);
    let each = args.compute_ms / 1e3 / uses;
    let of = |bytes: &u64| args.compute_of_transfer.map_or(each, |times| times * *bytes as f64 / link);
    bytes.iter().map(|bytes| Duration::from_secs_f64(of(bytes))).collect()
}

fn step(args: &Args, pipeline: &mut Pipeline, units: &Units, compute: &[Duration]) -> Result<Step> {
    let (started, before) = (Instant::now(), units.report());
    let mut busy = Compute::begin();
    pipeline.begin()?;
    for micro_step in 0..args.micro_steps {
        units.begin(pipeline, micro_step)?;
        busy.held_up();
        for (unit, &time) in compute.iter().enumerate() {
            use_unit(units, unit, &mut busy, ("forward", time))?;
        }
        for (unit, &time) in compute.iter().enumerate().rev() {
            use_unit(units, unit, &mut busy, ("backward", time))?;
            let elements = pipeline.session().spec().params[unit].shape.iter().product();
            units.emit_with(unit, unit, elements, &mut |_, target| produce(target))?;
        }
        units.end(pipeline)?;
    }
    pipeline.finish(Vec::new())?;
    Ok(Step::between(before, units.report(), started.elapsed(), busy.total))
}

fn use_unit(
    units: &Units,
    unit: usize,
    busy: &mut Compute,
    (name, time): (&'static str, Duration),
) -> Result<()> {
    let late = units.report().late;
    units.acquire(unit)?;
    if units.report().late > late {
        busy.held_up();
    }
    busy.run(name, time);
    units.release(unit)
}

impl Step {
    fn between(before: UnitsReport, after: UnitsReport, wall: Duration, compute: Duration) -> Step {
        Step {
            wall,
            compute,
            acquired: after.acquired - before.acquired,
            late: after.late - before.late,
            waited: after.waited - before.waited,
            pulled: after.pulled - before.pulled,
            pulled_bytes: after.pulled_bytes - before.pulled_bytes,
        }
    }
}

pub(super) fn report(
    (args, out): (&Args, Output),
    spec: &JobSpec,
    measured: &Measured,
) -> anyhow::Result<()> {
    let of = |value: &dyn Fn(&Step) -> f64| median(&measured.steps.iter().map(value).collect::<Vec<_>>());
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let transfer = |step: &Step| step.pulled_bytes.max(measured.pushed) as f64 / measured.link * 1e3;
    let pull = |step: &Step| step.pulled_bytes as f64 / measured.link * 1e3;
    let in_time = |step: &Step| 1.0 - step.late as f64 / step.pulled.max(1) as f64;
    let step = of(&|step| ms(step.wall));
    let Measured { compute_s, budget, link, .. } = *measured;
    let room = budget as f64 / spec.image_dtype.bytes() as f64;
    let uses = Uses { forward_s: compute_s, backward_s: compute_s, room: Some(room) };
    let alone = Alone { wire: link, memory: update_bytes_per_s(args)? };
    let predicted = predict(args, spec, &uses, &alone)?;
    let run = simulated(args, spec, &uses)?;
    let predicted_ms = predicted.map(|step| step.wall_s * 1e3);
    let sizes: Vec<u64> = spec.params.iter().map(|param| param.shape.iter().product()).collect();
    // A larger budget than that of the unit in use and the next is filled.
    let filled = sizes.iter().rev().take(run.staying()).sum::<u64>();
    let planned = filled.max(in_use_and_next(&sizes)) * spec.image_dtype.bytes();
    let line = json!({
        "bench": "step",
        "case": format!("{}/{}/delay{}/stage3", args.transport(), args.tier, args.delay),
        "servers": args.server_count(),
        "reserved_bytes": measured.reserved,
        "params": args.params,
        "micro_steps": args.micro_steps,
        "units": measured.units,
        "device_budget": measured.budget,
        "device_peak_bytes": measured.device_peak,
        "planned_device_bytes": planned,
        "link_gb_per_s": measured.link / 1e9,
        "compute_of_transfer": args.compute_of_transfer,
        "rounds": args.rounds,
        "step_ms": step,
        "compute_ms": of(&|step| ms(step.compute)),
        "transfer_ms": of(&transfer),
        "acquired": of(&|step| step.acquired as f64),
        "pulled": of(&|step| step.pulled as f64),
        "pulled_bytes": of(&|step| step.pulled_bytes as f64),
        "predicted_pulled_bytes": run.traffic().pull,
        "late": of(&|step| step.late as f64),
        "waited_ms": of(&|step| ms(step.waited)),
        "pulls_in_time": of(&in_time),
        "hidden": of(&|step| 1.0 - ms(step.waited) / pull(step)),
        "step_over_transfer": of(&|step| ms(step.wall) / transfer(step)),
        "step_over_compute": of(&|step| ms(step.wall) / ms(step.compute)),
        "predicted_ms": predicted_ms,
        "predicted_binding": predicted.map(|step| step.binding),
        "step_over_predicted": predicted_ms.map(|predicted| step / predicted),
    });
    if out.is_json() {
        say!("{line}");
        return Ok(());
    }
    let value = |key: &str| line[key].as_f64().unwrap_or(f64::NAN);
    for (name, key) in [
        ("step", "step_ms"),
        ("compute", "compute_ms"),
        ("transfer alone", "transfer_ms"),
        ("waited", "waited_ms"),
    ] {
        say!("{name:<15} {:9.1} ms", value(key));
    }
    say!("{} units pulled, {} waited for", value("pulled"), value("late"));
    say!(
        "{:.3} of the pulls' time hidden, {:.3} of the pulls in time; step is {:.2} of the transfer, {:.2} of compute",
        value("hidden"),
        value("pulls_in_time"),
        value("step_over_transfer"),
        value("step_over_compute"),
    );
    if let Some(predicted) = predicted {
        prediction::say(step, &predicted);
    }
    Ok(())
}
