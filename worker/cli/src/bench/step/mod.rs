//! `longshore bench step`: whole steps of a worker whose compute is a timed wait, beside what bounds them.
//!
//! Forward takes a third of the compute, and uses shard after shard as their weights arrive. Backward takes the rest,
//! and each shard's gradient leaves during it, last shard first. Server and ranks are in this process, so its CPU time
//! is that of all.

mod args;
mod limits;
mod rank;
mod units;

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Barrier},
    thread,
    time::Duration,
};

use anyhow::Context;
use longshore_engine::threads::available_threads;
use longshore_server::{Config, Server, config::StorageConfig};
use longshore_worker::session::Transport;
use serde_json::json;

pub(crate) use self::args::Args;
use self::{limits::Limits, rank::Measured};
use super::median;

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    args.check()?;
    let spec = args.spec()?;
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("bench.sock");
    let defaults = Config::default_on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let storage =
        StorageConfig { state_dirs: args.state_dir.clone(), spill: args.spill, ..StorageConfig::default() };
    let config = Config { listen_unix: Some(socket.clone()), storage, ..defaults };
    let runtime = longshore_server::runtime("server")?;
    let server = runtime.block_on(Server::start(config))?;
    let address = match args.transport {
        Transport::Unix => format!("unix:{}", socket.display()),
        _ => server.address().to_string(),
    };
    if args.stage == 3 {
        let measured = units::run(args, spec, address)?;
        units::report(args, &measured);
        drop((server, runtime));
        return Ok(());
    }
    let turns = Arc::new(Barrier::new(args.ranks as usize + 1));
    let ranks: Vec<_> = (0..args.ranks)
        .map(|rank| {
            let (args, spec, address, turns) = (args.clone(), spec.clone(), address.clone(), turns.clone());
            thread::spawn(move || rank::run(&args, spec, address, rank, &turns))
        })
        .collect();
    let mut limits = Limits::new(args)?;
    // The first round warms up.
    for round in 0..=args.rounds {
        turns.wait();
        limits.time_steps(args.steps, || turns.wait());
        limits.measure(round > 0)?;
    }
    let mut measured = Vec::new();
    for rank in ranks {
        measured.push(rank.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?.context("a rank failed")?);
    }
    report(args, &measured[0], &limits);
    drop((server, runtime));
    Ok(())
}

fn report(args: &Args, measured: &Measured, limits: &Limits) {
    let ms = |value: Duration| value.as_secs_f64() * 1e3;
    let of = |value: fn(&rank::Step) -> Duration| {
        median(&measured.steps.iter().map(|step| ms(value(step))).collect::<Vec<_>>())
    };
    let (step, exposed) = (of(|step| step.wall), of(|step| step.exposed));
    let [push, pull, update, cpu] = limits.ms();
    // Each direction of the wire bounds a step by itself. A step of several micro-steps pushes as many times.
    let push = push * f64::from(args.micro_steps) * f64::from(args.ranks);
    let pull = pull * f64::from(args.ranks);
    let bound = push.max(pull).max(update).max(cpu);
    let gb = args.params as f64 * 2.0 / 1e9;
    let line = json!({
        "bench": "step",
        "case": format!("{}/{}/delay{}", args.transport, args.tier, args.delay),
        "threads": available_threads(),
        "params": args.params,
        "ranks": args.ranks,
        "micro_steps": args.micro_steps,
        "clip": args.clip,
        "unchecked": args.unchecked,
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
        "update_gb_per_s": args.params as f64 * 28.0 / 1e9 / update * 1e3,
        "cpu_over_cores_ms": cpu,
        "bound_ms": bound,
        "step_over_update": step / update,
        "step_over_bound": step / bound,
        "exposed_over_bound": exposed / bound,
    });
    if args.json {
        say!("{line}");
        return;
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
}
