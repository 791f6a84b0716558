//! Predicts the step time of the bench with the simulator of `longshore plan`, from speeds measured beside the
//! steps.

use longshore_engine::tier;
use longshore_proto::{JobSpec, Placement, ServerId};
use longshore_worker::Transport;

use super::Args;
use crate::plan::{DriveTraffic, Hardware, Run, Step, Unit};

/// Speeds measured alone, in bytes a second.
pub(super) struct Alone {
    /// Speed of the slower direction of the wire.
    pub(super) wire: f64,
    pub(super) memory: f64,
}

/// Seconds that a use of a unit takes, in forward and in backward.
pub(super) struct Uses {
    pub(super) forward_s: f64,
    pub(super) backward_s: f64,
}

/// Returns the predicted step; None if the job is on drives of unknown speed.
pub(super) fn predict(
    args: &Args,
    spec: &JobSpec,
    uses: &Uses,
    alone: &Alone,
) -> anyhow::Result<Option<Step>> {
    let run = simulated(args, spec, uses)?;
    let drives = match args.drives {
        Some(speed) => speed as f64,
        None if run.drives.update > 0.0 => return Ok(None),
        None => f64::INFINITY,
    };
    // In shared memory servers read gradients in place, and a worker maps images: the update's traffic already has
    // both.
    let is_mapped = args.transport() == Transport::Memfd;
    let alone_link = if is_mapped { f64::INFINITY } else { alone.wire };
    let hardware = Hardware {
        // Units carry their own compute time.
        gpu_flops: f64::INFINITY,
        link: args.link.map_or(alone_link, |speed| speed as f64),
        server_link: args.server_link.map_or(f64::INFINITY, |speed| speed as f64),
        server_memory: args.server_memory.map_or(alone.memory / run.servers, |speed| speed as f64),
        drives,
        fabric: f64::INFINITY,
        round_trip_s: 0.0,
    };
    Ok(Some(run.step(&hardware)))
}

fn simulated(args: &Args, spec: &JobSpec, uses: &Uses) -> anyhow::Result<Run> {
    let unit = |elements: u64| Unit {
        elements: elements as f64,
        trained: 1.0,
        forward_s: uses.forward_s,
        backward_s: uses.backward_s,
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
