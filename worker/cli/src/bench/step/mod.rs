//! `longshore bench step`: whole steps of a worker whose compute is a timed wait, compared with their bounds.
//!
//! Forward takes a third of the compute, and uses shard after shard as their weights arrive. Backward takes the
//! rest, and each shard's gradient leaves during it, last shard first. Server and ranks are in this process, so
//! its CPU time covers all of them, except servers elsewhere. The report also shows the prediction of the plan's
//! simulator.

mod args;
mod limits;
mod prediction;
mod rank;

use std::{
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use anyhow::Context;
use longshore_engine::threads::available_threads;
use longshore_proto::JobSpec;
use serde_json::json;

pub(crate) use self::args::Args;
use self::{limits::Limits, prediction::predict, rank::Measured};
use super::{host::Hosts, median};
use crate::output::{Output, wrong_use};

pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    args.check().map_err(wrong_use)?;
    let spec = args.spec()?;
    let hosts = Hosts::start(args)?;
    let measured = measure((args, out), &spec, &hosts);
    // The measurement's error comes first: deleting a job that was not opened fails too.
    measured.and(hosts.clear(&spec))
}

fn measure((args, out): (&Args, Output), spec: &JobSpec, hosts: &Hosts) -> anyhow::Result<()> {
    let turns = Arc::new(Barrier::new(args.ranks as usize + 1));
    let ranks: Vec<_> = (0..args.ranks)
        .map(|rank| {
            let (args, spec, turns) = (args.clone(), spec.clone(), turns.clone());
            let (servers, access) = (hosts.addresses.clone(), hosts.access.clone());
            thread::spawn(move || rank::run(&args, spec, (servers, access), rank, &turns))
        })
        .collect();
    let mut limits = Limits::new(args)?;
    limits.measure(false)?;
    // The first round warms up. The steps of the next round follow at once, as steps of a run do.
    for round in 0..=args.rounds {
        turns.wait();
        limits.time_steps(args.steps, || turns.wait());
        if round > 0 {
            limits.measure(true)?;
        }
    }
    let mut measured = Vec::new();
    for rank in ranks {
        measured.push(rank.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?.context("a rank failed")?);
    }
    report((args, out), spec, &measured[0], &limits, hosts.reserved(spec)?)
}

fn report(
    (args, out): (&Args, Output),
    spec: &JobSpec,
    measured: &Measured,
    limits: &Limits,
    reserved: u64,
) -> anyhow::Result<()> {
    let ms = |value: Duration| value.as_secs_f64() * 1e3;
    let of = |value: fn(&rank::Step) -> Duration| {
        median(&measured.steps.iter().map(|step| ms(value(step))).collect::<Vec<_>>())
    };
    let (step, exposed) = (of(|step| step.wall), of(|step| step.exposed));
    let [alone_push, alone_pull, update, cpu] = limits.ms();
    // Each direction of the wire bounds a step by itself. A step of several micro-steps pushes that many times.
    let push = alone_push * f64::from(args.micro_steps) * f64::from(args.ranks);
    let pull = alone_pull * f64::from(args.ranks);
    let bound = push.max(pull).max(update).max(cpu);
    let gb = args.params as f64 * 2.0 / 1e9;
    let update_gb_per_s = limits.update_gb() / update * 1e3;
    let compute_s = args.compute_ms / 1e3 / f64::from(args.micro_steps) / spec.params.len() as f64;
    let wire = args.params as f64 * 2.0 / alone_push.max(alone_pull) * 1e3;
    let predicted = predict(args, spec, compute_s, (wire, update_gb_per_s * 1e9))?;
    let predicted_ms = predicted.map(|step| step.wall_s * 1e3);
    let line = json!({
        "bench": "step",
        "case": format!("{}/{}/delay{}", args.transport(), args.tier, args.delay),
        "servers": args.server_count(),
        "server_link_gb_per_s": args.server_link.map(|speed| speed as f64 / 1e9),
        "reserved_bytes": reserved,
        "threads": available_threads(),
        "params": args.params,
        "ranks": args.ranks,
        "micro_steps": args.micro_steps,
        "clip": args.clip,
        "rounds": args.rounds,
        "compute_ms": args.compute_ms,
        "fill_ms": ms(measured.fill),
        "step_ms": step,
        "exposed_ms": exposed,
        "begin_ms": of(|step| step.timing.begin),
        "weights_ms": of(|step| step.timing.weights),
        "push_ms": of(|step| step.timing.push),
        "commit_ms": of(|step| step.timing.commit),
        "update_ms": of(|step| step.update),
        "push_alone_ms": push,
        "push_gb_per_s": gb * f64::from(args.micro_steps * args.ranks) / push * 1e3,
        "pull_alone_ms": pull,
        "pull_gb_per_s": gb * f64::from(args.ranks) / pull * 1e3,
        "update_alone_ms": update,
        "update_gb_per_s": update_gb_per_s,
        "cpu_over_cores_ms": cpu,
        "bound_ms": bound,
        "step_over_update": step / update,
        "step_over_bound": step / bound,
        "exposed_over_bound": exposed / bound,
        "predicted_ms": predicted_ms,
        "predicted_binding": predicted.map(|step| step.binding),
        "step_over_predicted": predicted_ms.map(|predicted| step / predicted),
    });
    if out.is_json() {
        say!("{line}");
        return Ok(());
    }
    say!("step            {step:9.1} ms, of which exposed {exposed:.1} ms");
    for (name, key) in [
        ("open and fill", "fill_ms"),
        ("held up: begin", "begin_ms"),
        ("  weights", "weights_ms"),
        ("  push", "push_ms"),
        ("  decision", "commit_ms"),
        ("  update", "update_ms"),
        ("alone: push", "push_alone_ms"),
        ("  pull", "pull_alone_ms"),
        ("  update", "update_alone_ms"),
        ("CPU over cores", "cpu_over_cores_ms"),
        ("bound", "bound_ms"),
    ] {
        say!("{name:<15} {:9.1} ms", line[key].as_f64().unwrap_or(f64::NAN));
    }
    say!(
        "step is {:.2} of the bare update, {:.2} of the bound; exposed is {:.2} of the bound",
        step / update,
        step / bound,
        exposed / bound
    );
    if let Some(predicted) = predicted {
        prediction::say(step, &predicted);
    }
    Ok(())
}
