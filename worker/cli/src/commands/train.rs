//! Flags of `longshore train`, and their defaults.

mod settings;

use std::path::PathBuf;

use longshore_proto::{Dtype, MasterFormat, Rule, StateFormat, TierKind};
use longshore_server::config::ByteSize;
use longshore_worker::{DelayCorrection, DeviceChoice, session::Transport};

pub(super) use self::settings::{preset, run};
use super::trace::TraceFlag;
use crate::access::Access;

#[derive(clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    trace: TraceFlag,
    /// Optimizer servers, the same and in the same order on every rank [default: one embedded in this process]
    #[arg(long, env = "LONGSHORE_SERVERS", value_delimiter = ',', value_name = "HOST:PORT,...")]
    servers: Vec<String>,
    #[command(flatten)]
    access: Access,
    /// The server that --servers names is embedded in the process that started this one
    #[arg(long, hide = true)]
    embedded: bool,
    /// Another process started this one with the other ranks, and ends it with them
    #[arg(long, hide = true)]
    launched: bool,
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
    /// Where the gradients of micro-steps are added up: servers (each is sent), or worker (their mean is sent; takes 4 bytes a
    /// parameter of the worker's memory)
    #[arg(long, value_enum, default_value_t = Accumulator::Servers, help_heading = "Training")]
    accumulate: Accumulator,
    /// adamw, adam, sgd, lion, adagrad or nadam
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
    /// Random numbers: initial weights, batches, the sample
    #[arg(long, default_value_t = 1, help_heading = "Training")]
    seed: u64,

    /// 0: exact. 1: each step computes with the weights of the step before last, which hides the whole update
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1), help_heading = "Offloading")]
    delay: u32,
    /// Exact steps before the delay starts
    #[arg(long, default_value_t = longshore_worker::schedule::DEFAULT_WARMUP_STEPS, help_heading = "Offloading")]
    warmup_steps: u64,
    /// The correction of the delay: look-ahead, or none (for lion, adagrad and nadam) [default: look-ahead]
    #[arg(long, help_heading = "Offloading")]
    correction: Option<DelayCorrection>,
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

    /// Data-parallel ranks; without --rank this process starts them all
    #[arg(long, default_value_t = 1, help_heading = "Ranks")]
    world_size: u32,
    /// Run this rank only; start the others by hand
    #[arg(long, env = "LONGSHORE_RANK", help_heading = "Ranks")]
    rank: Option<u32>,
    /// How payloads go: auto, tcp, unix, or memfd (shared memory with servers of this host and user). To an embedded server
    /// tcp is unix too
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
    /// Format that --export rounds the weights to: bf16, f16 or f32 [default: bf16]
    #[arg(long, value_name = "DTYPE", requires = "export", help_heading = "Checkpoints")]
    export_dtype: Option<Dtype>,

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
    /// Print a plot of the loss at the end, where stdout is no terminal, too
    #[arg(long, help_heading = "Output")]
    plot: bool,
    /// With --json, on every rank: the checksum of the weights that each step computed with
    #[arg(long, hide = true, help_heading = "Output")]
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
    /// Memory in which an embedded server keeps a part of that state, as in 64GiB [default: 0]
    #[arg(long, value_name = "SIZE", help_heading = "Embedded server")]
    resident: Option<ByteSize>,
    /// Folder of a tmpfs for an embedded server's state with tier shm
    #[arg(long, value_name = "DIR", help_heading = "Embedded server")]
    shm_dir: Option<PathBuf>,
}

impl Args {
    pub(super) fn elsewhere(&mut self) -> (&mut Vec<String>, &mut Access) {
        (&mut self.servers, &mut self.access)
    }

    pub(super) fn trace(&self) -> &TraceFlag {
        &self.trace
    }
}

/// The side that adds up the gradients of a step's micro-steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Accumulator {
    Servers,
    Worker,
}
