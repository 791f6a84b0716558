//! The flags of `longshore train`, and their defaults.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context;
use longshore_proto::{Dtype, Fault, Formats, Hyper, JobName, MasterFormat, Rule, StateFormat, TierKind};
use longshore_server::config::ByteSize;
use longshore_worker::{
    DeviceChoice,
    loss_scale::LossScalerOptions,
    session::{GoBack, Transport},
};

use super::trace::TraceFlag;
use crate::train::{self, LossScale, LossScaleMode, Settings, gpt};

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    trace: TraceFlag,
    /// Optimizer servers, the same and in the same order on every rank [default: one embedded in this process]
    #[arg(long, env = "LONGSHORE_SERVERS", value_delimiter = ',', value_name = "HOST:PORT,...")]
    servers: Vec<String>,
    /// The server that --servers names is embedded in the process that started this one
    #[arg(long, hide = true)]
    embedded: bool,
    /// Name of the job on the servers; the same command continues it
    #[arg(long, default_value = "default")]
    job: String,
    /// Text to train on: a file or a folder
    #[arg(long, default_value = ".", value_name = "PATH")]
    data: PathBuf,

    /// Model size: tiny, small, gpt2, gpt2-medium, gpt2-large, gpt2-xl, 7b
    #[arg(long, default_value = "tiny", help_heading = "Model")]
    preset: String,
    /// Layers, instead of the preset's
    #[arg(long, help_heading = "Model")]
    layers: Option<usize>,
    /// Width, instead of the preset's
    #[arg(long, help_heading = "Model")]
    width: Option<usize>,
    /// Attention heads, instead of the preset's
    #[arg(long, help_heading = "Model")]
    heads: Option<usize>,
    /// Bytes of a sequence, instead of the preset's
    #[arg(long, help_heading = "Model")]
    context: Option<usize>,

    /// Steps in all
    #[arg(long, default_value_t = 500, help_heading = "Training")]
    steps: u64,
    /// Sequences of each rank and micro-step
    #[arg(long, default_value_t = 16, help_heading = "Training")]
    batch: usize,
    /// Gradients summed before each update
    #[arg(long, default_value_t = 1, help_heading = "Training")]
    micro_steps: u32,
    /// adamw, adam, sgd, lion or adagrad
    #[arg(long, default_value = "adamw", help_heading = "Training")]
    optimizer: Rule,
    /// Peak learning rate
    #[arg(long, default_value_t = 3e-3, help_heading = "Training")]
    lr: f64,
    /// Steps over which the learning rate rises
    #[arg(long, default_value_t = 40, help_heading = "Training")]
    lr_warmup_steps: u64,
    /// Part of the learning rate left at the end of its cosine
    #[arg(long, default_value_t = 0.1, help_heading = "Training")]
    lr_floor: f64,
    #[arg(long, default_value_t = 0.1, help_heading = "Training")]
    weight_decay: f64,
    #[arg(long, default_value_t = 0.9, help_heading = "Training")]
    beta1: f64,
    #[arg(long, default_value_t = 0.95, help_heading = "Training")]
    beta2: f64,
    #[arg(long, default_value_t = 1e-8, help_heading = "Training")]
    eps: f64,
    /// SGD's momentum
    #[arg(long, default_value_t = 0.9, help_heading = "Training")]
    momentum: f64,
    /// Largest global gradient norm; 0 does not clip
    #[arg(long, default_value_t = 1.0, help_heading = "Training")]
    clip: f64,
    /// Use gradients as they come: no norm, no overflow check. Needs --clip 0 and a fixed loss scale, and saves a pass over
    /// each gradient
    #[arg(long, help_heading = "Training")]
    unchecked: bool,
    /// Random numbers: initial weights, batches, the sample
    #[arg(long, default_value_t = 1, help_heading = "Training")]
    seed: u64,

    /// 0: exact. 1: each step computes with the weights of the step before last, which hides the whole update
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1), help_heading = "Offloading")]
    delay: u32,
    /// Exact steps before the delay starts
    #[arg(long, default_value_t = longshore_worker::schedule::DEFAULT_WARMUP_STEPS, help_heading = "Offloading")]
    warmup_steps: u64,
    /// Extrapolate delayed weights by this part of the last update, 0 to 1
    #[arg(long, default_value_t = 0.0, help_heading = "Offloading")]
    compensation: f64,
    /// Gradients on the wire: bf16, f16 or f32
    #[arg(long, default_value = "bf16", help_heading = "Offloading")]
    gradient_dtype: Dtype,
    /// Weights on the wire: bf16, f16 or f32
    #[arg(long, default_value = "bf16", help_heading = "Offloading")]
    weight_dtype: Dtype,
    /// dynamic, or a number [default: dynamic for f16, else 1]
    #[arg(long, help_heading = "Offloading")]
    loss_scale: Option<String>,
    /// First dynamic loss scale
    #[arg(long, default_value_t = 65536.0, help_heading = "Offloading")]
    loss_scale_initial: f64,
    /// Steps without overflow before the loss scale doubles
    #[arg(long, default_value_t = 1000, help_heading = "Offloading")]
    loss_scale_window: u64,
    /// Overflows before the loss scale halves
    #[arg(long, default_value_t = 2, help_heading = "Offloading")]
    loss_scale_hysteresis: u32,
    /// Smallest loss scale; an overflow there pauses the job
    #[arg(long, default_value_t = 1.0, help_heading = "Offloading")]
    loss_scale_min: f64,
    /// Elements of a shard, a multiple of 65536 [default: the model in 16 shards, at most 4 Mi elements each]
    #[arg(long, help_heading = "Offloading")]
    shard_elements: Option<u64>,
    /// Where the servers keep master weights and optimizer state: memory, shm (survives the server's
    /// process), or nvme (their --state-dir). Without --servers, nvme takes --state-dir and shm --shm-dir, and the same
    /// command continues a run that was killed
    #[arg(long, default_value = "memory", help_heading = "Offloading")]
    tier: TierKind,
    /// Moments on the servers: fp32, bf16, or block8 (8 bits, and a scale for each 256). See docs/update.md
    #[arg(long, default_value = "fp32", value_name = "FORMAT", help_heading = "Offloading")]
    state: StateFormat,
    /// Master weights on the servers: fp32, or bf16 with stochastic rounding
    #[arg(long, default_value = "fp32", value_name = "FORMAT", help_heading = "Offloading")]
    master: MasterFormat,
    /// Where weights and gradients are while the model uses them: auto (a GPU if there is one), host, cuda or cuda:N
    #[arg(long, default_value_t, value_name = "DEVICE", help_heading = "Offloading")]
    device: DeviceChoice,
    /// Device memory the model may use, as in 24GiB [default: a GPU's whole memory; no limit on the host]
    #[arg(long, value_name = "SIZE", help_heading = "Offloading")]
    device_budget: Option<ByteSize>,
    /// 2: 16-bit weights stay on the device. 3: each layer is pulled just before use [default: what fits]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=3), help_heading = "Offloading")]
    stage: Option<u32>,

    /// Data-parallel ranks; without --rank this process starts them all
    #[arg(long, default_value_t = 1, help_heading = "Ranks")]
    world_size: u32,
    /// Run this rank only; start the others by hand
    #[arg(long, env = "LONGSHORE_RANK", help_heading = "Ranks")]
    rank: Option<u32>,
    /// How payloads go: auto, tcp, unix, or memfd (shared memory with servers of this host and user)
    #[arg(long, default_value_t = Transport::Auto, help_heading = "Ranks")]
    transport: Transport,
    /// Longest wait, in seconds, for a server or another rank
    #[arg(long, default_value_t = 60, help_heading = "Ranks")]
    deadline_s: u64,
    /// Longest wait, in seconds, for an operator while the job is paused
    #[arg(long, default_value_t = 3600, help_heading = "Ranks")]
    pause_deadline_s: u64,

    /// Write a checkpoint every so many steps, and at the end; 0 writes none
    #[arg(long, default_value_t = 0, help_heading = "Checkpoints")]
    checkpoint_every: u64,
    /// Folder for an embedded server's checkpoints; one is written at the end
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    checkpoint_dir: Option<PathBuf>,
    /// Go back to the newest checkpoint when servers have nothing of the job; when they all have, go on from there
    #[arg(long, help_heading = "Checkpoints")]
    resume: bool,
    /// As --resume, but to this checkpoint, such as an older one
    #[arg(long, value_name = "NAME", help_heading = "Checkpoints")]
    resume_from: Option<String>,
    /// With --resume, when a server has lost its part of a job of tier shm or nvme for good: delete what the others hold
    #[arg(long, help_heading = "Checkpoints")]
    discard_state: bool,
    /// Write the trained weights as safetensors to this folder at the end; an earlier export there is replaced
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    export: Option<PathBuf>,
    /// What they are rounded to: bf16, f16 or f32
    #[arg(long, default_value = "bf16", value_name = "DTYPE", help_heading = "Checkpoints")]
    export_dtype: Dtype,

    /// Validate every so many steps; 0 only at the start and the end
    #[arg(long, default_value_t = 0, help_heading = "Output")]
    eval_every: u64,
    /// Validation batches of 4 sequences
    #[arg(long, default_value_t = 8, help_heading = "Output")]
    eval_batches: usize,
    /// Bytes of text to generate at the end
    #[arg(long, default_value_t = 200, help_heading = "Output")]
    sample_bytes: usize,
    /// What the sample starts with
    #[arg(long, default_value = "fn ", help_heading = "Output")]
    prompt: String,
    #[arg(long, default_value_t = 0.8, help_heading = "Output")]
    temperature: f64,
    /// One JSON object a line on stdout
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// With --json, on every rank: the checksum of the weights that each step computed with
    #[arg(long, hide = true, requires = "json", help_heading = "Output")]
    step_weights: bool,

    /// Update threads of an embedded server [default: all cores]
    #[arg(long, help_heading = "Embedded server")]
    threads: Option<usize>,
    /// Memory of an embedded server, as in 8GiB [default: 80% of what is available]
    #[arg(long, value_name = "SIZE", help_heading = "Embedded server")]
    memory: Option<ByteSize>,
    /// Folders for an embedded server's state with tier nvme, striped over all of them
    #[arg(long, value_delimiter = ',', value_name = "DIR,...", help_heading = "Embedded server")]
    state_dir: Vec<PathBuf>,
    /// Memory in which it keeps a part of that state, as in 64GiB [default: 0]
    #[arg(long, value_name = "SIZE", help_heading = "Embedded server")]
    resident: Option<ByteSize>,
    /// Folder of a tmpfs for an embedded server's state with tier shm
    #[arg(long, value_name = "DIR", help_heading = "Embedded server")]
    shm_dir: Option<PathBuf>,
}

impl Args {
    pub(super) fn trace(&self) -> Option<&Path> {
        self.trace.trace.as_deref()
    }
}

pub(super) fn run(args: Args) -> anyhow::Result<()> {
    train::run(&settings(args)?)
}

fn settings(args: Args) -> anyhow::Result<Settings> {
    let model = model(&args)?;
    check(&args)?;
    let formats = formats(&args);
    Ok(Settings {
        job: JobName::parse("--job", &args.job)?,
        resume: resume(&args)?,
        loss_scale: loss_scale(&args)?,
        servers: args.servers,
        embedded: args.embedded,
        data: args.data,
        model,
        steps: args.steps,
        batch: args.batch,
        micro_steps: args.micro_steps,
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
        unchecked: args.unchecked,
        delay: args.delay,
        delay_warmup_steps: args.warmup_steps,
        compensation: args.compensation,
        gradient_dtype: args.gradient_dtype,
        image_dtype: args.weight_dtype,
        seed: args.seed,
        shard_elements: args.shard_elements,
        tier: args.tier,
        device: args.device,
        formats,
        device_budget: args.device_budget.map(|size| size.0),
        stage: args.stage,
        checkpoint_dir: args.checkpoint_dir,
        checkpoint_every: args.checkpoint_every,
        export: args.export,
        export_dtype: args.export_dtype,
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
        json: args.json,
        step_weights: args.step_weights,
    })
}

/// The formats of the state. Rounding takes the run's seed; an fp32 job may go on with another seed.
fn formats(args: &Args) -> Formats {
    let formats = Formats { state: args.state, master: args.master, seed: args.seed };
    if formats.is_fp32() { Formats::default() } else { formats }
}

pub(super) fn preset(name: &str) -> anyhow::Result<gpt::Config> {
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

/// Checks what no later check would name by its flag.
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
    check_folders(args)
}

/// Checks the folders of an embedded server. It has no port to be found again by, so what should outlive it needs a
/// folder.
fn check_folders(args: &Args) -> Result<(), Fault> {
    let given = [
        ("--state-dir", !args.state_dir.is_empty(), TierKind::Nvme),
        ("--shm-dir", args.shm_dir.is_some(), TierKind::Shm),
    ];
    for (flag, given, tier) in given {
        if args.tier == tier && !given && args.servers.is_empty() {
            let limit = format!("given with --tier {tier} and no --servers");
            let remedy = "say where the embedded server keeps the state: the same command then continues a run that was killed";
            return Err(Fault::invalid(flag, "absent", limit, remedy));
        }
        if args.tier != tier && given {
            let remedy = format!("say --tier {tier} as well, or leave {flag} out");
            return Err(Fault::invalid("--tier", args.tier, format!("{tier} with {flag}"), remedy));
        }
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
