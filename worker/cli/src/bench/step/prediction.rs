//! Predicts the step time of the bench with the simulator of `longshore plan`, from speeds measured beside the
//! steps.

use longshore_engine::tier;
use longshore_proto::{JobSpec, Placement, ServerId};
use longshore_worker::Transport;

use super::Args;
use crate::plan::{DriveTraffic, Hardware, Run, Step, Unit};

/// Returns the predicted step; None if the job is on drives of unknown speed. `compute_s` is a unit's compute in a
/// micro-step. `wire` and `memory` are bytes a second, each measured alone. `wire` is the speed of the slower
/// direction.
pub(super) fn predict(
    args: &Args,
    spec: &JobSpec,
    compute_s: f64,
    (wire, memory): (f64, f64),
) -> anyhow::Result<Option<Step>> {
    let run = simulated(args, spec, compute_s)?;
    let drives = match args.drives {
        Some(speed) => speed as f64,
        None if run.drives.update > 0.0 => return Ok(None),
        None => f64::INFINITY,
    };
    // In shared memory servers read gradients in place, and a worker maps images: the update's memory traffic already
    // includes both.
    let is_mapped = args.transport() == Transport::Memfd;
    let alone_link = if is_mapped { f64::INFINITY } else { wire };
    let hardware = Hardware {
        // Units carry their own compute time.
        gpu_flops: f64::INFINITY,
        link: args.link.map_or(alone_link, |speed| speed as f64),
        server_link: args.server_link.map_or(f64::INFINITY, |speed| speed as f64),
        server_memory: args.server_memory.map_or(memory / run.servers, |speed| speed as f64),
        drives,
        fabric: f64::INFINITY,
        round_trip_s: 0.0,
    };
    Ok(Some(run.step(&hardware)))
}

/// Forward takes a third of a unit's compute.
fn simulated(args: &Args, spec: &JobSpec, compute_s: f64) -> anyhow::Result<Run> {
    let unit = |elements: u64| Unit {
        elements: elements as f64,
        trained: 1.0,
        forward_s: compute_s / 3.0,
        backward_s: compute_s * 2.0 / 3.0,
    };
    let units = spec.params.iter().map(|param| unit(param.shape.iter().product())).collect();
    Ok(Run::of(spec, units, args.server_count() as f64, false, on_drives(args, spec)?))
}

fn on_drives(args: &Args, spec: &JobSpec) -> anyhow::Result<DriveTraffic> {
    let layout = spec.validate()?;
    let owned = Placement::striped(vec!["bench".into()], layout.shards()).owned(ServerId(0));
    let storage = tier::Storage { spill: args.spill, ..tier::Storage::default() };
    Ok(DriveTraffic::of(spec, &layout, &owned, &storage))
}

pub(super) fn say(measured_ms: f64, predicted: &Step) {
    let predicted_ms = predicted.wall_s * 1e3;
    say!(
        "the plan says {predicted_ms:.1} ms, bound by {}: the step is {:.2} of it",
        predicted.binding.says(),
        measured_ms / predicted_ms
    );
}
