//! Flags of `longshore train`, their defaults, and checks that later checks would not name.

use std::path::PathBuf;

use anyhow::Context;
use longshore_proto::{
    Dtype, Fault, Formats, Hyper, JobName, Lifetime, MasterFormat, Rule, StateFormat, TierKind,
};
use longshore_server::config::ByteSize;
use longshore_worker::{
    DelayCorrection, DeviceChoice,
    loss_scale::{LossScaler, LossScalerOptions},
    session::{Address, GoBack, Transport},
};

use super::gpt::{self, Config, PRESETS};
use crate::access::Access;

/// Flags of `longshore train`.
#[derive(Clone, Debug, clap::Args)]
pub struct Flags {
    /// Optimizer servers, the same and in the same order on every rank [default: one embedded in this process]
    #[arg(long, env = "LONGSHORE_SERVERS", value_delimiter = ',', value_name = "HOST:PORT,...")]
    pub(crate) servers: Vec<String>,
    #[command(flatten)]
    pub(crate) access: Access,
    /// The server that --servers names is embedded in the process that started this one
    #[arg(long, hide = true)]
    pub(crate) embedded: bool,
    /// Another process started this one with the other ranks, and ends it with them
    #[arg(long, hide = true)]
    pub(crate) launched: bool,
    /// Name of the job on the servers; the same command continues it
    #[arg(long, default_value = "default")]
    pub(crate) job: String,
    /// Text to train on: a file or a folder
    #[arg(long, default_value = ".", value_name = "PATH")]
    pub(crate) data: PathBuf,

    /// Model size: tiny, small, gpt2, gpt2-medium, gpt2-large, gpt2-xl, 7b
    #[arg(long, default_value = "tiny", help_heading = "Model")]
    pub(crate) preset: String,
    /// Layers, instead of the preset's
    #[arg(long, help_heading = "Model")]
    pub(crate) layers: Option<usize>,
    /// Width, instead of the preset's
    #[arg(long, help_heading = "Model")]
    pub(crate) width: Option<usize>,
    /// Attention heads, instead of the preset's
    #[arg(long, help_heading = "Model")]
    pub(crate) heads: Option<usize>,
    /// Bytes of a sequence, instead of the preset's
    #[arg(long, help_heading = "Model")]
    pub(crate) context: Option<usize>,

    /// Steps in all
    #[arg(long, default_value_t = 500, help_heading = "Training")]
    pub(crate) steps: u64,
    /// Sequences of each rank and micro-step
    #[arg(long, default_value_t = 16, help_heading = "Training")]
    pub(crate) batch: usize,
    /// Gradients summed before each update
    #[arg(long, default_value_t = 1, help_heading = "Training")]
    pub(crate) micro_steps: u32,
    /// Where the gradients of micro-steps are added up: servers (each is sent), or worker (their mean is sent; takes 4 bytes a
    /// parameter of the worker's memory)
    #[arg(long, value_enum, default_value_t = Accumulator::Servers, help_heading = "Training")]
    pub(crate) accumulate: Accumulator,
    #[arg(long, default_value = "adamw", help = Rule::names(|_| true), help_heading = "Training")]
    pub(crate) optimizer: Rule,
    /// Peak learning rate
    #[arg(long, default_value_t = 3e-3, help_heading = "Training")]
    pub(crate) lr: f64,
    /// Steps over which the learning rate rises
    #[arg(long, default_value_t = 40, help_heading = "Training")]
    pub(crate) lr_warmup_steps: u64,
    /// Part of the learning rate left at the end of its cosine
    #[arg(long, default_value_t = 0.1, help_heading = "Training")]
    pub(crate) lr_floor: f64,
    #[arg(long, default_value_t = 0.1, help_heading = "Training")]
    pub(crate) weight_decay: f64,
    /// SGD's momentum
    #[arg(long, default_value_t = 0.9, help_heading = "Training")]
    pub(crate) momentum: f64,
    /// Largest global gradient norm; 0 does not clip
    #[arg(long, default_value_t = 1.0, help_heading = "Training")]
    pub(crate) clip: f64,
    /// Random numbers: initial weights, batches
    #[arg(long, default_value_t = 1, help_heading = "Training")]
    pub(crate) seed: u64,

    /// 0: exact. 1: each step computes with the weights of the step before last, which hides the whole update
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1), help_heading = "Offloading")]
    pub(crate) delay: u32,
    /// Exact steps before the delay starts
    #[arg(long, default_value_t = longshore_worker::schedule::DEFAULT_WARMUP_STEPS, help_heading = "Offloading")]
    pub(crate) warmup_steps: u64,
    /// The correction of the delay: look-ahead, or none for rules that cannot look ahead [default: look-ahead]
    #[arg(long, help_heading = "Offloading")]
    pub(crate) correction: Option<DelayCorrection>,
    /// Gradients on the wire: bf16, f16 or f32
    #[arg(long, default_value = "bf16", help_heading = "Offloading")]
    pub(crate) gradient_dtype: Dtype,
    /// Weights on the wire: bf16, f16 or f32
    #[arg(long, default_value = "bf16", help_heading = "Offloading")]
    pub(crate) weight_dtype: Dtype,
    /// dynamic, or a number [default: dynamic for f16, else 1]
    #[arg(long, help_heading = "Offloading")]
    pub(crate) loss_scale: Option<String>,
    /// Elements of a shard, a multiple of 65536 [default: the model in 16 shards, at most 4 Mi elements each]
    #[arg(long, help_heading = "Offloading")]
    pub(crate) shard_elements: Option<u64>,
    #[arg(long, default_value = "memory", help = tier_help(), help_heading = "Offloading")]
    pub(crate) tier: TierKind,
    /// Moments on the servers: fp32, bf16, or block8 (8 bits, and a scale for each 256). See docs/update.md
    #[arg(long, default_value = "fp32", value_name = "FORMAT", help_heading = "Offloading")]
    pub(crate) state: StateFormat,
    /// Master weights on the servers: fp32, or bf16 with stochastic rounding
    #[arg(long, default_value = "fp32", value_name = "FORMAT", help_heading = "Offloading")]
    pub(crate) master: MasterFormat,
    /// Where weights and gradients are while the model uses them: auto (a GPU if there is one), host, cuda or cuda:N
    #[arg(long, default_value_t, value_name = "DEVICE", help_heading = "Offloading")]
    pub(crate) device: DeviceChoice,
    /// Servers that hold each shard, 1 or 2: with 2 the loss of a server loses no step, and gradients are pushed to both
    #[arg(long, default_value_t = 1, value_name = "COUNT", help_heading = "Offloading")]
    pub(crate) replicas: u32,
    /// Device memory the model may use, as in 24GiB [default: a GPU's whole memory; no limit on the host]
    #[arg(long, value_name = "SIZE", help_heading = "Offloading")]
    pub(crate) device_budget: Option<ByteSize>,

    /// Data-parallel ranks; without --rank this process starts them all
    #[arg(long, default_value_t = 1, help_heading = "Ranks")]
    pub(crate) world_size: u32,
    /// Run this rank only; start the others by hand
    #[arg(long, env = "LONGSHORE_RANK", help_heading = "Ranks")]
    pub(crate) rank: Option<u32>,
    /// How payloads go: auto, tcp, unix, or memfd (shared memory with servers of this host and user). To an embedded server
    /// tcp is unix too
    #[arg(long, default_value_t = Transport::Auto, help_heading = "Ranks")]
    pub(crate) transport: Transport,
    /// Longest wait, in seconds, for a server or another rank
    #[arg(long, default_value_t = 60, help_heading = "Ranks")]
    pub(crate) deadline_s: u64,

    /// Write a checkpoint every so many steps, and at the end; 0 writes none
    #[arg(long, default_value_t = 0, help_heading = "Checkpoints")]
    pub(crate) checkpoint_every: u64,
    /// Folder for an embedded server's checkpoints; one is written at the end
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub(crate) checkpoint_dir: Option<PathBuf>,
    /// Go back to the newest checkpoint when servers have nothing of the job; when they all have, go on from there
    #[arg(long, help_heading = "Checkpoints")]
    pub(crate) resume: bool,
    /// As --resume, but to this checkpoint, such as an older one
    #[arg(long, value_name = "NAME", help_heading = "Checkpoints")]
    pub(crate) resume_from: Option<String>,
    /// With --resume, when a server has lost its part of a job of tier shm or nvme for good: delete what the others hold
    #[arg(long, help_heading = "Checkpoints")]
    pub(crate) discard_state: bool,
    /// Write the trained weights as safetensors to this folder at the end; an earlier export there is replaced
    #[arg(long, value_name = "DIR", help_heading = "Checkpoints")]
    pub(crate) export: Option<PathBuf>,
    /// Format that --export rounds the weights to: bf16, f16 or f32 [default: bf16]
    #[arg(long, value_name = "DTYPE", requires = "export", help_heading = "Checkpoints")]
    pub(crate) export_dtype: Option<Dtype>,

    /// Validate every so many steps; 0 only at the start and the end
    #[arg(long, default_value_t = 0, help_heading = "Output")]
    pub(crate) eval_every: u64,
    /// Validation batches of 4 sequences
    #[arg(long, default_value_t = 8, help_heading = "Output")]
    pub(crate) eval_batches: usize,
    /// Print a plot of the loss at the end, where stdout is no terminal, too
    #[arg(long, help_heading = "Output")]
    pub(crate) plot: bool,

    /// Update threads of an embedded server [default: all cores]
    #[arg(long, help_heading = "Embedded server")]
    pub(crate) threads: Option<usize>,
    /// Memory of an embedded server, as in 8GiB [default: 80% of what is available]
    #[arg(long, value_name = "SIZE", help_heading = "Embedded server")]
    pub(crate) memory: Option<ByteSize>,
    /// Folders for an embedded server's state with tier nvme, striped over all of them
    #[arg(long, value_delimiter = ',', value_name = "DIR,...", help_heading = "Embedded server")]
    pub(crate) state_dir: Vec<PathBuf>,
    /// Memory in which an embedded server keeps a part of that state, as in 64GiB [default: 0]
    #[arg(long, value_name = "SIZE", help_heading = "Embedded server")]
    pub(crate) resident: Option<ByteSize>,
    /// Folder of a tmpfs for an embedded server's state with tier shm
    #[arg(long, value_name = "DIR", help_heading = "Embedded server")]
    pub(crate) shm_dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Accumulator {
    Servers,
    Worker,
}

fn tier_help() -> String {
    let (all, host, drive) = (TierKind::names(|_| true), Lifetime::Host.tiers(), Lifetime::Drive.tiers());
    format!(
        "Where the servers keep master weights and optimizer state: {all}. {host} survives the server's process, and \
         {drive} a power loss. Without --servers, {host} takes --shm-dir and {drive} --state-dir, and the same command \
         continues a run that was killed"
    )
}

/// Largest number of sequences or of batches. A larger number is a typing error, and products with this one fit in 64
/// bits.
const MOST_SEQUENCES: usize = 1 << 16;
/// Adam's second beta, as is usual for GPTs.
const BETA2: f64 = 0.95;
/// The variable of --tls-dir. With an embedded server the flag is an error. The variable is none, since a user may set
/// it for all commands.
const TLS_DIR: &str = "LONGSHORE_TLS_DIR";

impl Flags {
    pub(crate) fn elsewhere(&mut self) -> (&mut Vec<String>, &mut Access) {
        (&mut self.servers, &mut self.access)
    }

    pub(super) fn hyper(&self) -> Hyper {
        Hyper {
            lr: self.lr,
            beta2: BETA2,
            weight_decay: self.weight_decay,
            momentum: self.momentum,
            ..Hyper::default()
        }
    }

    /// Returns the formats of the state. Stochastic rounding takes the run's seed. An fp32 job has no seed in its
    /// formats, so it may continue with another seed.
    pub(super) fn formats(&self) -> Formats {
        let formats = Formats { state: self.state, master: self.master, seed: self.seed };
        if formats.is_fp32() { Formats::default() } else { formats }
    }

    pub(super) fn device_budget(&self) -> Option<u64> {
        self.device_budget.map(|size| size.0)
    }

    /// Returns the checkpoint to go back to if servers lack the job. None if such a job starts afresh.
    pub(super) fn go_back(&self) -> Option<GoBack> {
        let checkpoint = self.resume_from.clone();
        let goes_back = self.resume || checkpoint.is_some();
        goes_back.then_some(GoBack { checkpoint, discard_state: self.discard_state })
    }

    pub(super) fn model(&self) -> anyhow::Result<Config> {
        let preset = preset(&self.preset)?;
        let config = Config {
            context: self.context.unwrap_or(preset.context),
            width: self.width.unwrap_or(preset.width),
            heads: self.heads.unwrap_or(preset.heads),
            layers: self.layers.unwrap_or(preset.layers),
        };
        config.validate()?;
        Ok(config)
    }

    pub(super) fn scaler(&self) -> Result<LossScaler, Fault> {
        let fixed = match (self.loss_scale.as_deref(), self.gradient_dtype) {
            (Some("dynamic"), _) | (None, Dtype::F16) => None,
            (None, _) => Some(1.0),
            (Some(number), _) => match number.parse::<f64>() {
                Ok(scale) if scale.is_finite() && scale > 0.0 => Some(scale),
                _ => {
                    let remedy = "say dynamic or give the scale";
                    return Err(Fault::invalid(
                        "--loss-scale",
                        number,
                        "dynamic or a number above 0",
                        remedy,
                    ));
                }
            },
        };
        match fixed {
            Some(scale) => LossScaler::fixed(scale),
            None => LossScaler::dynamic(LossScalerOptions::default()),
        }
    }

    /// Checks the flags that later checks would not name.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let positive = |field: &str, value: u64| {
            if value > 0 {
                return Ok(());
            }
            Err(Fault::invalid(field, value, "at least 1", "correct the flag"))
        };
        positive("--steps", self.steps)?;
        positive("--batch", self.batch as u64)?;
        positive("--eval-batches", self.eval_batches as u64)?;
        positive("--deadline-s", self.deadline_s)?;
        for (flag, value) in [("--batch", self.batch), ("--eval-batches", self.eval_batches)] {
            if value > MOST_SEQUENCES {
                let limit = format!("at most {MOST_SEQUENCES}");
                return Err(Fault::invalid(flag, value, limit, "correct the flag"));
            }
        }
        if !self.servers.is_empty() {
            let credentials = self.access.credentials()?;
            self.servers
                .iter()
                .try_for_each(|address| Address::new(address, credentials.as_ref()).map(drop))?;
        }
        if !(self.clip >= 0.0 && self.clip.is_finite()) {
            return Err(Fault::invalid("--clip", self.clip, "finite and at least 0", "0 does not clip"));
        }
        if let Some(rank) = self.rank.filter(|&rank| rank >= self.world_size) {
            let limit = format!("below --world-size, {}", self.world_size);
            return Err(Fault::invalid("--rank", rank, limit, "ranks count from 0"));
        }
        if self.rank.is_some() && self.world_size > 1 && self.servers.is_empty() {
            let remedy = "say where the servers are: ranks of several processes cannot share an embedded one";
            return Err(Fault::invalid("--servers", "absent", "given with --rank", remedy));
        }
        if self.checkpoint_every > 0 && self.servers.is_empty() && self.checkpoint_dir.is_none() {
            let remedy = "say where the embedded server puts its checkpoints";
            return Err(Fault::invalid(
                "--checkpoint-dir",
                "absent",
                "given with --checkpoint-every",
                remedy,
            ));
        }
        self.check_delay()?;
        if self.access.tls_dir.is_some() && self.servers.is_empty() && std::env::var_os(TLS_DIR).is_none() {
            let remedy = "say which servers are meant, or leave --tls-dir out: nothing goes over a network to an embedded server";
            return Err(Fault::invalid("--tls-dir", "given", "given with --servers", remedy));
        }
        self.check_folders()?;
        self.check_going_back()
    }

    fn check_delay(&self) -> Result<(), Fault> {
        if self.delay == 0 && self.correction.is_some() {
            let remedy = "say --delay 1 as well, or leave --correction out";
            return Err(Fault::invalid("--delay", self.delay, "1 with --correction", remedy));
        }
        Ok(())
    }

    /// Checks the storage of an embedded server. State outlives such a server only in a folder that the user names.
    fn check_folders(&self) -> Result<(), Fault> {
        let lifetime = self.tier.properties().lifetime;
        let folders = [
            ("--state-dir", !self.state_dir.is_empty(), Lifetime::Drive),
            ("--shm-dir", self.shm_dir.is_some(), Lifetime::Host),
        ];
        let resident = ("--resident", self.resident.is_some(), Lifetime::Drive);
        for (flag, given, of) in folders.into_iter().chain([resident]) {
            if given && of != lifetime {
                let tiers = of.tiers();
                let remedy = format!("say --tier {tiers} as well, or leave {flag} out");
                return Err(Fault::invalid("--tier", self.tier, format!("{tiers} with {flag}"), remedy));
            }
        }
        let lacking = folders.into_iter().find(|&(_, given, of)| of == lifetime && !given);
        if let Some((flag, ..)) = lacking.filter(|_| self.servers.is_empty()) {
            let limit = format!("given with --tier {} and no --servers", self.tier);
            let remedy = "say where the embedded server keeps the state: the same command then continues a run that was killed";
            return Err(Fault::invalid(flag, "absent", limit, remedy));
        }
        Ok(())
    }

    fn check_going_back(&self) -> Result<(), Fault> {
        self.resume_from.as_ref().map(|name| JobName::parse("--resume-from", name)).transpose()?;
        if self.discard_state && self.go_back().is_none() {
            let limit = "given with --resume or --resume-from";
            let remedy = "say which checkpoint to go back to, or leave --discard-state out";
            return Err(Fault::invalid("--discard-state", "given", limit, remedy));
        }
        Ok(())
    }
}

pub(crate) fn preset(name: &str) -> anyhow::Result<Config> {
    let names = || PRESETS.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
    gpt::preset(name).with_context(|| format!("--preset is {name:?}, but must be one of {}", names()))
}
