//! Makes a run's settings from its flags. Checks the flags that later checks would not name.

use std::time::Duration;

use anyhow::Context;
use longshore_proto::{Dtype, Fault, Formats, Hyper, JobName, Lifetime};
use longshore_worker::{
    loss_scale::LossScalerOptions,
    session::{Address, GoBack},
};

use super::{Accumulator, Args};
use crate::{
    output::Output,
    train::{self, LossScale, LossScaleMode, Settings, gpt},
    wrong_use::wrong_use,
};

pub(in crate::commands) fn run(args: Args, out: Output) -> anyhow::Result<()> {
    train::run(&settings(args, out).map_err(wrong_use)?)
}

fn settings(args: Args, out: Output) -> anyhow::Result<Settings> {
    let model = model(&args)?;
    check(&args)?;
    let formats = formats(&args);
    Ok(Settings {
        job: JobName::parse("--job", &args.job)?,
        resume: resume(&args)?,
        loss_scale: loss_scale(&args)?,
        servers: args.servers,
        access: args.access,
        embedded: args.embedded,
        launched: args.launched,
        data: args.data,
        model,
        steps: args.steps,
        batch: args.batch,
        micro_steps: args.micro_steps,
        accumulate_on_worker: args.accumulate == Accumulator::Worker,
        world_size: args.world_size,
        rank: args.rank,
        rule: args.optimizer,
        hyper: Hyper {
            lr: args.lr,
            beta1: args.beta1,
            beta2: args.beta2,
            eps: args.eps,
            weight_decay: args.weight_decay,
            momentum: args.momentum,
            ..Hyper::default()
        },
        lr_warmup_steps: args.lr_warmup_steps,
        lr_floor: args.lr_floor,
        clip: (args.clip > 0.0).then_some(args.clip),
        delay: args.delay,
        delay_warmup_steps: args.warmup_steps,
        correction: args.correction.unwrap_or_default(),
        gradient_dtype: args.gradient_dtype,
        image_dtype: args.weight_dtype,
        seed: args.seed,
        shard_elements: args.shard_elements,
        tier: args.tier,
        device: args.device,
        formats,
        device_budget: args.device_budget.map(|size| size.0),
        checkpoint_dir: args.checkpoint_dir,
        checkpoint_every: args.checkpoint_every,
        export: args.export,
        export_dtype: args.export_dtype.unwrap_or(Dtype::Bf16),
        eval_every: args.eval_every,
        eval_batches: args.eval_batches,
        sample_bytes: args.sample_bytes,
        prompt: args.prompt,
        temperature: args.temperature,
        transport: args.transport,
        deadline: Duration::from_secs(args.deadline_s),
        pause_deadline: Duration::from_secs(args.pause_deadline_s),
        threads: args.threads,
        memory: args.memory.map(|size| size.0),
        state_dirs: args.state_dir,
        resident: args.resident.map_or(0, |size| size.0),
        shm_dir: args.shm_dir,
        json: out.is_json(),
        errors_as_json: out.errors_are_json(),
        plot: args.plot,
        step_weights: args.step_weights,
    })
}

/// Returns the formats of the state. Stochastic rounding takes the run's seed. An fp32 job has no seed in its
/// formats, so it may continue with another seed.
fn formats(args: &Args) -> Formats {
    let formats = Formats { state: args.state, master: args.master, seed: args.seed };
    if formats.is_fp32() { Formats::default() } else { formats }
}

pub(in crate::commands) fn preset(name: &str) -> anyhow::Result<gpt::Config> {
    let names = || gpt::PRESETS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    gpt::preset(name).with_context(|| format!("--preset is {name:?}, but must be one of {}", names()))
}

fn model(args: &Args) -> anyhow::Result<gpt::Config> {
    let preset = preset(&args.preset)?;
    let config = gpt::Config {
        context: args.context.unwrap_or(preset.context),
        width: args.width.unwrap_or(preset.width),
        heads: args.heads.unwrap_or(preset.heads),
        layers: args.layers.unwrap_or(preset.layers),
    };
    config.validate()?;
    Ok(config)
}

fn resume(args: &Args) -> Result<Option<GoBack>, Fault> {
    let checkpoint = args.resume_from.clone();
    checkpoint.as_ref().map(|name| JobName::parse("--resume-from", name)).transpose()?;
    if args.resume || checkpoint.is_some() {
        return Ok(Some(GoBack { checkpoint, discard_state: args.discard_state }));
    }
    if args.discard_state {
        let remedy = "say which checkpoint to go back to, or leave --discard-state out";
        return Err(Fault::invalid(
            "--discard-state",
            "given",
            "given with --resume or --resume-from",
            remedy,
        ));
    }
    Ok(None)
}

/// Checks the flags that later checks would not name.
fn check(args: &Args) -> Result<(), Fault> {
    let positive = |field: &str, value: u64| {
        if value > 0 {
            return Ok(());
        }
        Err(Fault::invalid(field, value, "at least 1", "correct the flag"))
    };
    positive("--steps", args.steps)?;
    positive("--batch", args.batch as u64)?;
    positive("--eval-batches", args.eval_batches as u64)?;
    positive("--deadline-s", args.deadline_s)?;
    if !args.servers.is_empty() {
        let credentials = args.access.credentials()?;
        args.servers.iter().try_for_each(|address| Address::new(address, credentials.as_ref()).map(drop))?;
    }
    if !(args.clip >= 0.0 && args.clip.is_finite()) {
        return Err(Fault::invalid("--clip", args.clip, "finite and at least 0", "0 does not clip"));
    }
    if let Some(rank) = args.rank.filter(|&rank| rank >= args.world_size) {
        let limit = format!("below --world-size, {}", args.world_size);
        return Err(Fault::invalid("--rank", rank, limit, "ranks count from 0"));
    }
    if args.rank.is_some() && args.world_size > 1 && args.servers.is_empty() {
        let remedy = "say where the servers are: ranks of several processes cannot share an embedded one";
        return Err(Fault::invalid("--servers", "absent", "given with --rank", remedy));
    }
    if args.checkpoint_every > 0 && args.servers.is_empty() && args.checkpoint_dir.is_none() {
        let remedy = "say where the embedded server puts its checkpoints";
        return Err(Fault::invalid("--checkpoint-dir", "absent", "given with --checkpoint-every", remedy));
    }
    check_delay(args)?;
    if args.access.tls_dir.is_some() && args.servers.is_empty() && std::env::var_os(TLS_DIR).is_none() {
        let remedy = "say which servers are meant, or leave --tls-dir out: nothing goes over a network to an embedded server";
        return Err(Fault::invalid("--tls-dir", "given", "given with --servers", remedy));
    }
    check_folders(args)
}

/// The variable of --tls-dir. A user who sets it for all commands may train on an embedded server too.
const TLS_DIR: &str = "LONGSHORE_TLS_DIR";

/// Checks the flag that means something only with a delay.
fn check_delay(args: &Args) -> Result<(), Fault> {
    if args.delay == 0 && args.correction.is_some() {
        let remedy = "say --delay 1 as well, or leave --correction out";
        return Err(Fault::invalid("--delay", args.delay, "1 with --correction", remedy));
    }
    Ok(())
}

/// Checks the storage of an embedded server. Its state outlives it only in a folder that the user names.
fn check_folders(args: &Args) -> Result<(), Fault> {
    let lifetime = args.tier.properties().lifetime;
    let folders = [
        ("--state-dir", !args.state_dir.is_empty(), Lifetime::Drive),
        ("--shm-dir", args.shm_dir.is_some(), Lifetime::Host),
    ];
    for (flag, given, of) in
        [("--resident", args.resident.is_some(), Lifetime::Drive)].into_iter().chain(folders)
    {
        if given && of != lifetime {
            let tiers = of.tiers();
            let remedy = format!("say --tier {tiers} as well, or leave {flag} out");
            return Err(Fault::invalid("--tier", args.tier, format!("{tiers} with {flag}"), remedy));
        }
    }
    let lacking = folders.into_iter().find(|&(_, given, of)| of == lifetime && !given);
    if let Some((flag, ..)) = lacking.filter(|_| args.servers.is_empty()) {
        let limit = format!("given with --tier {} and no --servers", args.tier);
        let remedy = "say where the embedded server keeps the state: the same command then continues a run that was killed";
        return Err(Fault::invalid(flag, "absent", limit, remedy));
    }
    Ok(())
}

fn loss_scale(args: &Args) -> Result<LossScale, Fault> {
    let text = args.loss_scale.as_deref();
    let mode = match (text, args.gradient_dtype) {
        (Some("dynamic"), _) | (None, Dtype::F16) => LossScaleMode::Dynamic,
        (None, _) => LossScaleMode::Fixed(1.0),
        (Some(number), _) => match number.parse::<f64>() {
            Ok(scale) if scale.is_finite() && scale > 0.0 => LossScaleMode::Fixed(scale),
            _ => {
                let remedy = "say dynamic or give the scale";
                return Err(Fault::invalid("--loss-scale", number, "dynamic or a number above 0", remedy));
            }
        },
    };
    let options = LossScalerOptions {
        initial: args.loss_scale_initial,
        window: args.loss_scale_window,
        hysteresis: args.loss_scale_hysteresis,
        min: args.loss_scale_min,
        ..LossScalerOptions::default()
    };
    Ok(LossScale { mode, options })
}
