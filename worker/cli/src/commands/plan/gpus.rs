//! The GPUs' side of a plan: memory of a GPU, time of a step, and its bottleneck.

use anyhow::ensure;
use longshore_proto::JobSpec;
use serde_json::{Value, json};

use crate::{
    plan::{
        Division, DriveTraffic, HardwareArgs, Model, Peak, Run, Stage, Step, Traffic, Unit, WIDTH, Workload,
        enough_servers, largest,
    },
    sizes::human,
};

/// GPT-2's vocabulary, for models of which only the number of parameters is known.
pub(super) const VOCABULARY: u64 = 50_257;
/// The most servers that a plan considers.
const MOST_SERVERS: u32 = 4096;

#[derive(Clone, clap::Args)]
pub(super) struct Args {
    /// Sequences of a micro-step of each GPU
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    sequences: u32,
    /// Tokens of a sequence
    #[arg(long, default_value_t = 2048, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    context: u32,
    /// Keep all activations, instead of computing a block's inside again in backward
    #[arg(long)]
    keep_activations: bool,
    /// Have the inputs of blocks, which backward computes from, wait in the memory of each GPU's host
    #[arg(long, conflicts_with = "keep_activations")]
    offload_activations: bool,
    /// Weights that a GPU pulls and drops together at stage 3
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    units: Division,
    #[command(flatten)]
    pub(super) hardware: HardwareArgs,
}

struct Of {
    stage: Stage,
    peak: Peak,
    largest: Option<u64>,
    /// Number of units that stay resident from forward to backward at stage 3, and of all units.
    staying: (usize, usize),
    traffic: Traffic,
    /// The step, and the smallest number of servers that does not slow the step down.
    step: Option<(Step, u32)>,
}

pub(super) struct Plan {
    gpus: u32,
    memory: Option<u64>,
    stages: [Of; 2],
    /// Bytes of gradients that each GPU's host retains.
    retained: u64,
    until: &'static str,
}

/// The planned job, as its servers have it.
pub(super) struct Job<'a> {
    pub(super) spec: &'a JobSpec,
    pub(super) parameters: u64,
    /// Frozen part of the parameters, from 0 to 1.
    pub(super) frozen: f64,
    pub(super) is_sliced: bool,
    pub(super) servers: u32,
    /// Servers beyond this number would own nothing.
    pub(super) shards: u32,
    pub(super) drives: DriveTraffic,
}

impl Plan {
    pub(super) fn of(args: &Args, model: &Model, job: &Job<'_>) -> anyhow::Result<Plan> {
        let (hardware, spec) = (&args.hardware, job.spec);
        let work = Workload {
            sequences: args.sequences.into(),
            context: args.context.into(),
            checkpointing: !args.keep_activations,
            offloading: args.offload_activations,
            versions: 1 + u64::from(spec.max_delay),
            trained: 1.0 - job.frozen,
            division: args.units,
        };
        let memory = hardware.gpu_memory.map(|size| size.0);
        let speeds = hardware.speeds(job.drives.update > 0.0)?;
        ensure!(
            speeds.is_none() || model.transformer.is_some(),
            "--gpu-tflops is given, but nothing says how much this model computes: put its config.json beside it"
        );
        let vocabulary = model.transformer.map_or(VOCABULARY, |transformer| transformer.vocabulary);
        // The transformer that stands for --params only comes near that number of parameters.
        let scale = job.parameters as f64 / model.elements() as f64;
        let stages = [Stage::Two, Stage::Three].map(|stage| {
            let flops = speeds.map_or(f64::INFINITY, |speeds| speeds.gpu_flops);
            let units = units(model, scale, &work, flops);
            let peak = Peak::of(model, &work, stage).scaled(scale);
            let run = Run {
                stage,
                room: room(&peak, memory),
                activations: peak.on_host as f64,
                ..Run::of(spec, units, job.servers.into(), job.is_sliced, job.drives)
            };
            let most = MOST_SERVERS.min(job.shards);
            let step = speeds.map(|speeds| (run.step(&speeds), enough_servers(&run, &speeds, most)));
            Of {
                stage,
                peak,
                staying: (run.staying(), run.units.len()),
                traffic: run.traffic(),
                largest: memory.map(|memory| largest(memory, vocabulary, &work, stage)),
                step,
            }
        });
        let (retained, until) = retained(job);
        Ok(Plan { gpus: spec.world_size, memory, stages, retained, until })
    }

    pub(super) fn short(&self) -> Option<String> {
        let (least, has) = (self.stages.iter().map(|of| of.peak.total()).min()?, self.memory?);
        (least > has).then(|| {
            format!(
                "--gpu-memory is {}, but a GPU needs {} at the least: give smaller --units, fewer --sequences or a shorter --context",
                human(has),
                human(least)
            )
        })
    }

    pub(super) fn print(&self) {
        say!("each of {} GPU(s), in 16 bits:", self.gpus);
        for of in &self.stages {
            self.print_stage(of);
        }
        let on_host = self.stages[0].peak.on_host;
        say!("its host, beside servers that run there:");
        say!("  DRAM    {:>10}   gradients, kept until their step is {}", human(self.retained), self.until);
        if on_host > 0 {
            say!("          {:>10}   activations that wait for backward", human(on_host));
        }
    }

    fn print_stage(&self, of: &Of) {
        let fits = match self.memory {
            Some(memory) if of.peak.total() > memory => format!("; does not fit {}", human(memory)),
            Some(memory) => format!("; fits {}", human(memory)),
            None => String::new(),
        };
        say!("  stage {} {:>10}   at its peak{fits}", number(of.stage), human(of.peak.total()));
        say!("          {:>10}   weights", human(of.peak.weights));
        say!("          {:>10}   gradients on their way", human(of.peak.gradients));
        match of.peak.activations {
            Some(bytes) => say!("          {:>10}   activations, about", human(bytes)),
            None => say!("          {:>10}   activations: the model's sizes are not known", "?"),
        }
        if let (Stage::Three, Some(_)) = (of.stage, self.memory) {
            let (staying, all) = of.staying;
            say!(
                "          {staying:>10}   of {all} units stay from forward to backward in what it has left"
            );
        }
        let Traffic { push, pull, server_in, server_out, fabric, activations } = of.traffic;
        let bytes = |bytes: f64| human(bytes as u64);
        say!("          {:>10}   pushed a step, {} pulled", bytes(push), bytes(pull));
        say!(
            "          {:>10}   come to each server a step, {} leave it",
            bytes(server_in),
            bytes(server_out)
        );
        if fabric > 0.0 {
            say!("          {:>10}   exchanged with other GPUs a step, each way", bytes(fabric));
        }
        if activations > 0.0 {
            say!(
                "          {:>10}   of activations go to its host a step, and come back",
                bytes(activations)
            );
        }
        if let Some(elements) = of.largest {
            say!("          {:>9.1}B   parameters are the most that fit", elements as f64 / 1e9);
        }
        let Some((step, enough)) = &of.step else { return };
        say!(
            "          {:>8.3} s   a step, of which exposed {:.3} s; what binds is {}, for {:.3} s",
            step.wall_s,
            step.exposed_s(),
            step.binding.says(),
            step.binding_s
        );
        say!(
            "          {enough:>10}   server(s) are enough: more make a step shorter by less than a hundredth"
        );
    }

    pub(super) fn json(&self) -> Value {
        let stage = |of: &Of| {
            let step = of.step.as_ref();
            json!({
                "stage": number(of.stage), "peak_bytes": of.peak.total(), "weight_bytes": of.peak.weights,
                "gradient_bytes": of.peak.gradients, "activation_bytes": of.peak.activations,
                "host_activation_bytes": of.peak.on_host, "units": of.staying.1,
                "staying_units": (of.stage == Stage::Three).then_some(of.staying.0),
                "fits": self.memory.map(|memory| of.peak.total() <= memory), "largest_parameters": of.largest,
                "pushed_bytes_per_step": of.traffic.push, "pulled_bytes_per_step": of.traffic.pull,
                "server_received_bytes_per_step": of.traffic.server_in,
                "server_sent_bytes_per_step": of.traffic.server_out, "fabric_bytes_per_step": of.traffic.fabric,
                "activation_bytes_per_step": of.traffic.activations,
                "step_s": step.map(|(step, _)| step.wall_s), "exposed_s": step.map(|(step, _)| step.exposed_s()),
                "binding": step.map(|(step, _)| step.binding), "binding_s": step.map(|(step, _)| step.binding_s),
                "enough_servers": step.map(|(_, enough)| enough),
            })
        };
        json!({"gpus": self.gpus, "retained_gradient_bytes": self.retained, "stages": self.stages.iter().map(stage).collect::<Vec<_>>()})
    }
}

fn number(stage: Stage) -> u32 {
    match stage {
        Stage::Two => 2,
        Stage::Three => 3,
    }
}

/// Returns sizes and times of the units. A token takes 2 operations per element in forward and 4 in backward (Kaplan et
/// al., 2020). Recomputing the forward pass in backward adds 2. Half of the 4 make the gradient of parameters, which
/// frozen parameters lack.
fn units(model: &Model, scale: f64, work: &Workload, flops: f64) -> Vec<Unit> {
    let tokens = (work.sequences * work.context) as f64;
    let active = model.active() as f64 / model.elements() as f64;
    let backward = 2.0 + 2.0 * work.trained + if work.checkpointing { 2.0 } else { 0.0 };
    let unit = |elements: u64| {
        let elements = elements as f64 * scale;
        let second = elements * active * tokens / flops;
        Unit { elements, trained: work.trained, forward_s: 2.0 * second, backward_s: backward * second }
    };
    model.unit_elements(work.division).into_iter().map(unit).collect()
}

/// Elements of weights that fit on a device at stage 3, beside gradients and activations. A worker needs at least the
/// units of its peak.
fn room(peak: &Peak, memory: Option<u64>) -> f64 {
    let beside = peak.total() - peak.weights;
    let left = memory.map_or(0, |memory| memory.saturating_sub(beside));
    left.max(peak.weights) as f64 / WIDTH as f64
}

/// The most bytes of gradients that a rank's host retains, and the event that frees them. Gradients of a step stay
/// until all servers have its commit, or on drives until the step is durable.
///
/// A step begins once the version that it reads is decided: a delay adds a step. On drives a version is decided once the
/// version before is durable: drives add another step.
fn retained(Job { spec, parameters, frozen, is_sliced, .. }: &Job<'_>) -> (u64, &'static str) {
    let ranks = if *is_sliced { f64::from(spec.world_size) } else { 1.0 };
    let trained = *parameters as f64 * (1.0 - frozen) / ranks;
    let step = (trained * spec.gradient_dtype.bytes() as f64).ceil() as u64 * u64::from(spec.micro_steps);
    let durable_later = spec.properties().durable_later;
    let steps = 1 + u64::from(spec.max_delay) + u64::from(durable_later);
    (steps * step, if durable_later { "durable, at most" } else { "decided, at most" })
}
