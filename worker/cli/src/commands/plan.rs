//! `longshore plan`: what a job will take of its servers, by the arithmetic they admit jobs with; of its GPUs; and how long
//! its steps will be.

mod gpus;

use std::path::PathBuf;

use anyhow::{Context, ensure};
use longshore_engine::{
    admission::Need,
    tier::{self, Storage, nvme::DEFAULT_BUFFERS},
};
use longshore_proto::{
    Dtype, Formats, JobName, JobSpec, MasterFormat, Param, Partition, Placement, Rank, Rule, ServerId,
    StateFormat, TierKind,
    limits::{DEFAULT_SHARD_ELEMENTS, MAX_SHARDS, PROCESS_BYTES},
};
use longshore_server::config::{ByteSize, Durability, Spill};
use longshore_worker::DelayCorrection;
use serde_json::json;

use super::train::preset;
use crate::{
    access::Access,
    bench::probe::{self, ProbeArgs, Probed},
    output::Output,
    plan::{DriveTraffic, Model, Tensor, Transformer},
    sizes::{human, parse_count},
    train::gpt::{Gpt, VOCABULARY},
};

#[derive(clap::Args)]
pub(super) struct Args {
    /// Parameters, as in 7B: a transformer whose width is 128 times its layers
    #[arg(long, value_name = "N", value_parser = parse_count, required_unless_present_any = ["preset", "model", "probe"])]
    params: Option<u64>,
    /// A model of `longshore train`, instead of --params
    #[arg(long, value_name = "NAME", conflicts_with = "params")]
    preset: Option<String>,
    /// A Hugging Face model, instead of --params: its folder, its config.json, its safetensors or their index
    #[arg(long, value_name = "PATH", conflicts_with_all = ["params", "preset"])]
    model: Option<PathBuf>,
    /// So many of the parameters are frozen, as the base of a LoRA run is: servers keep weights of them alone
    #[arg(long, value_name = "N", value_parser = parse_count)]
    frozen: Option<u64>,
    /// Servers that share it
    #[arg(long, default_value_t = 1, value_name = "N")]
    servers: u32,
    /// Data-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N")]
    world_size: u32,
    /// Gradients of a rank that the servers sum before each update: 1 where workers add up theirs
    #[arg(long, default_value_t = 1, value_name = "N")]
    micro_steps: u32,
    /// 0: exact. 1: each step computes with the weights of the step before last
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1))]
    delay: u32,
    /// As `longshore train --correction`: worker-local takes more of the servers
    #[arg(long, default_value = "look-ahead", value_name = "CORRECTION")]
    correction: DelayCorrection,
    /// Elements of a shard
    #[arg(long, default_value_t = DEFAULT_SHARD_ELEMENTS, value_name = "N")]
    shard_elements: u64,
    /// Gradients and weights on the wire: bf16, f16 or f32
    #[arg(long, default_value = "bf16", value_name = "DTYPE")]
    dtype: Dtype,
    /// Moments: fp32, bf16 or block8
    #[arg(long, default_value = "fp32", value_name = "FORMAT")]
    state: StateFormat,
    /// Master weights: fp32 or bf16
    #[arg(long, default_value = "fp32", value_name = "FORMAT")]
    master: MasterFormat,
    /// Where the state lives: memory, shm or nvme
    #[arg(long, default_value = "memory")]
    tier: TierKind,
    /// Folders of each server's nvme tier
    #[arg(long, default_value_t = 1, value_name = "N")]
    state_dirs: usize,
    /// As `longshored --spill`
    #[arg(long, value_enum, default_value_t)]
    spill: Spill,
    /// As `longshored --resident`
    #[arg(long, value_name = "SIZE")]
    resident: Option<ByteSize>,
    /// As `longshored --storage-buffers`
    #[arg(long, default_value_t = DEFAULT_BUFFERS, value_name = "N")]
    storage_buffers: usize,
    /// As `longshored --durability`
    #[arg(long, value_enum, default_value_t)]
    durability: Durability,
    /// DRAM that each server may use, as `longshored --memory`: says whether the job fits
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteSize>,
    /// Space that each server has in its state directories: says whether the job fits
    #[arg(long, value_name = "SIZE")]
    nvme: Option<ByteSize>,
    /// Seconds a step will take: how much a day writes
    #[arg(long, value_name = "SECONDS")]
    step_s: Option<f64>,
    /// What each server's drives may be written with, as in 600TB: how many days that is
    #[arg(long, value_name = "SIZE", requires = "step_s")]
    drive_endurance: Option<ByteSize>,
    #[command(flatten)]
    gpus: gpus::Args,
    #[command(flatten)]
    probe: ProbeArgs,
}

/// What the job takes of the server with most of it.
struct Requirements {
    parameters: u64,
    need: Need,
    /// The bytes to or from one rank in a step, each way. Where gradients are pushed it is those of each micro-step.
    wire: u64,
    /// The bytes written a day.
    daily: Option<f64>,
    endurance_days: Option<f64>,
    gpus: gpus::Plan,
    short: Vec<String>,
}

/// Prints the plan. The result is an error when the job does not fit.
pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    if args.probe.probe {
        let probed = probe::run(&args.probe, args.formats())?;
        out.result(|| probed.json(), || hardware_file(args.formats(), &probed));
        return Ok(());
    }
    let plan = Requirements::of(args)?;
    if out.is_json() {
        say!("{}", plan.json(args));
    } else {
        plan.print(args);
    }
    ensure!(plan.short.is_empty(), "{}", plan.short.join("; "));
    Ok(())
}

/// What was measured, as a file for --hardware.
fn hardware_file(formats: Formats, probed: &Probed) -> String {
    let mut lines = vec![
        format!(
            "# Measured by `longshore plan --probe` with {} threads: updates of {} moments and {} master weights.",
            probed.threads, formats.state, formats.master
        ),
        "# gpu-memory = \"80GiB\"".to_string(),
        "# gpu-tflops = 300.0".to_string(),
        format!("server-memory = {:.2}", probed.server_memory),
    ];
    match probed.drives {
        Some(drives) => lines.push(format!("drives = {drives:.3}")),
        None => lines.push("# drives = 6.0  # --probe-dir measures it".to_string()),
    }
    if probed.is_loopback {
        lines.push("# Over loopback; --probe-servers measures the link to other hosts.".to_string());
    }
    lines.push(format!("link = {:.3}", probed.link));
    lines.push(format!("round-trip = {:.0}.0", probed.round_trip_us));
    lines.join("\n")
}

impl Args {
    pub(super) fn elsewhere(&mut self) -> (&mut Vec<String>, &mut Access) {
        self.probe.elsewhere()
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.servers > 0 && self.state_dirs > 0, "--servers and --state-dirs must be at least 1");
        ensure!(self.shard_elements > 0, "--shard-elements must be at least 1");
        ensure!(
            self.spill == Spill::State || self.durability == Durability::EachVersion,
            "--spill {} needs --durability each-version: no image is kept on the drives otherwise",
            if self.spill == Spill::All { "all" } else { "images" }
        );
        let positive = self.step_s.is_none_or(|seconds| seconds > 0.0 && seconds.is_finite());
        ensure!(positive, "--step-s must be above 0");
        Ok(())
    }

    fn formats(&self) -> Formats {
        Formats { state: self.state, master: self.master, seed: 0 }
    }

    fn frozen(&self) -> u64 {
        self.frozen.unwrap_or(0)
    }

    fn model(&self) -> anyhow::Result<Model> {
        if let Some(path) = &self.model {
            return crate::plan::read(path);
        }
        if let Some(name) = &self.preset {
            let config = preset(name)?;
            let shapes = Gpt::new(config)?
                .params()
                .iter()
                .map(|param| {
                    let shape: Vec<u64> = param.shape.iter().map(|&size| size as u64).collect();
                    Tensor::new(param.name.clone(), &shape)
                })
                .collect();
            let (layers, width) = (config.layers as u64, config.width as u64);
            let transformer = Transformer { layers, width, vocabulary: VOCABULARY as u64, experts: (1, 1) };
            return Ok(Model { tensors: shapes, transformer: Some(transformer) });
        }
        Ok(Model::of_about(self.params.context("--params, --preset or --model is needed")?, gpus::VOCABULARY))
    }

    fn spec(&self, model: &Model) -> anyhow::Result<JobSpec> {
        // Of --params the number counts, and not that of the transformer which comes nearest.
        let elements = self.params.unwrap_or_else(|| model.elements());
        // Tensors are cut where shards are: how parameters are divided into tensors changes nothing.
        let cut = self.shard_elements;
        // This is checked before they are listed.
        ensure!(
            elements.div_ceil(cut) <= MAX_SHARDS,
            "{elements} parameters in shards of {cut} are more than {MAX_SHARDS} shards: give a larger --shard-elements"
        );
        ensure!(
            self.frozen() < elements,
            "--frozen is {}, but must be below {elements}, the parameters: at least one is trained",
            self.frozen()
        );
        let cuts =
            |elements: u64| (0..elements.div_ceil(cut)).map(move |index| (elements - index * cut).min(cut));
        let trained: Vec<u64> = cuts(elements - self.frozen()).collect();
        let partitions = self.partitions(trained.len() as u64)?;
        let params = trained.into_iter().chain(cuts(self.frozen())).enumerate();
        let params =
            params.map(|(index, size)| Param { name: format!("p{index}"), shape: vec![size], group: 0 });
        Ok(JobSpec {
            name: JobName::parse("job", "plan")?,
            params: params.collect(),
            groups: vec!["all".into()],
            rule: Rule::AdamW,
            gradient_dtype: self.dtype,
            image_dtype: self.dtype,
            world_size: self.world_size,
            micro_steps: self.micro_steps,
            max_delay: self.delay,
            shard_elements: cut,
            tier: self.tier,
            formats: self.formats(),
            unchecked: false,
            partitions,
            worker_local: self.delay > 0 && matches!(self.correction, DelayCorrection::WorkerLocal(_)),
            leave_out: false,
        })
    }

    /// Whether ranks exchange slices of weights and gradients among themselves, so that each element has one contributor.
    fn is_sliced(&self) -> anyhow::Result<bool> {
        Ok(self.world_size > 1 && self.gpus.has_fabric()?)
    }

    /// Who contributes to so many trained tensors, and to the frozen ones behind them. Ranks that exchange slices have a
    /// part of the trained ones each.
    fn partitions(&self, trained: u64) -> anyhow::Result<Vec<Partition>> {
        let ranks = u64::from(self.world_size);
        let mut partitions = Vec::new();
        if self.is_sliced()? {
            ensure!(
                trained >= ranks,
                "{ranks} ranks exchange slices of {trained} shards, but each has one at least: give smaller --shard-elements"
            );
            let of_rank = |rank: u64| Partition {
                first: (rank * trained / ranks) as u32,
                ranks: vec![Rank(rank as u32)],
            };
            partitions.extend((0..ranks).map(of_rank));
        } else if self.frozen() > 0 {
            partitions.push(Partition::whole(self.world_size));
        }
        if self.frozen() > 0 {
            partitions.push(Partition::frozen(trained as u32));
        }
        Ok(partitions)
    }

    fn storage(&self) -> Storage {
        Storage {
            // Only how many folders there are counts.
            dirs: (0..self.state_dirs).map(|index| index.to_string().into()).collect(),
            resident_bytes: self.resident.map_or(0, |size| size.0),
            buffers: self.storage_buffers,
            durability: self.durability.into(),
            spill: self.spill.into(),
            ..tier::Storage::default()
        }
    }
}

impl Requirements {
    fn of(args: &Args) -> anyhow::Result<Requirements> {
        args.check()?;
        let model = args.model()?;
        let spec = args.spec(&model)?;
        let layout = spec.validate()?;
        // Opening the job checks this too.
        ensure!(
            args.servers <= layout.shards(),
            "--servers is {}, but must be at most {}, the job's shards: name fewer servers, or give smaller --shard-elements",
            args.servers,
            layout.shards()
        );
        let servers = (0..args.servers).map(|server| server.to_string()).collect();
        let placement = Placement::striped(servers, layout.shards());
        let of_server = |server: u32| {
            let owned = placement.owned(ServerId(server));
            let need = Need::of(&spec, &layout, &owned, &args.storage());
            let trained = owned.iter().filter(|&&shard| !layout.is_frozen(shard));
            let elements = trained.map(|&shard| layout.shard_len(shard)).sum::<u64>();
            (need, elements, DriveTraffic::of(&spec, &layout, &owned, &args.storage()))
        };
        // Shards are dealt in turn, so the first server has the most. Frozen ones take less than others, and come last.
        let first = of_server(0);
        let others = if args.frozen() > 0 { 1..args.servers } else { 1..1 };
        let (need, elements, on_drives) = others
            .map(of_server)
            .fold(first, |most, other| if other.0.total() > most.0.total() { other } else { most });
        let daily = args.step_s.map(|seconds| need.written as f64 * 86_400.0 / seconds);
        let rated = daily.zip(args.drive_endurance).filter(|(daily, _)| *daily > 0.0);
        let mut short = Vec::new();
        for (what, takes, has) in [("memory", need.total(), args.memory), ("nvme", need.disk, args.nvme)] {
            if let Some(has) = has.filter(|has| has.0 < takes) {
                short.push(format!(
                    "--{what} is {}, but a server needs {}: it is short of {}",
                    human(has.0),
                    human(takes),
                    human(takes - has.0)
                ));
            }
        }
        let parameters: u64 = spec.params.iter().map(|param| param.shape[0]).sum();
        let frozen = args.frozen() as f64 / parameters as f64;
        let gpus = gpus::Plan::of(&args.gpus, &model, &spec, args.servers, (frozen, on_drives))?;
        Ok(Requirements {
            gpus,
            parameters,
            wire: (elements * args.dtype.bytes()).div_ceil(if args.is_sliced()? {
                spec.world_size.into()
            } else {
                1
            }),
            endurance_days: rated.map(|(daily, rated)| rated.0 as f64 / daily),
            need,
            daily,
            short,
        })
    }

    fn print(&self, args: &Args) {
        let Requirements { need, .. } = self;
        say!(
            "{} parameters{} on {} server(s), tier {}; each server:",
            self.parameters,
            if args.frozen() > 0 { format!(" ({} frozen)", args.frozen()) } else { String::new() },
            args.servers,
            args.tier
        );
        let parts = [
            ("state", need.state),
            ("buffers", need.buffers),
            ("weights for workers", need.images),
            ("gradients", need.contributions),
            ("sums of gradients", need.accumulators),
            ("connections", need.transfers),
        ];
        say!("  DRAM    {:>10}   longshored --memory {}", human(need.total()), need.total());
        for (what, bytes) in parts.into_iter().filter(|(_, bytes)| *bytes > 0) {
            say!("          {:>10}   {what}", human(bytes));
        }
        say!(
            "  process {:>10}   beside that: code, threads, and what the allocator keeps",
            human(PROCESS_BYTES)
        );
        say!("  wire    {:>10}   a step to each rank, and from it for each micro-step", human(self.wire));
        if need.disk > 0 {
            self.print_drives(args);
        }
        self.gpus.print();
    }

    fn print_drives(&self, args: &Args) {
        let Requirements { need, .. } = self;
        say!("  drives  {:>10}   reserved in {} folder(s)", human(need.disk), args.state_dirs);
        say!("          {:>10}   written a step", human(need.written));
        if let Some(daily) = self.daily {
            say!("          {:>10}   written a day", human(daily as u64));
        }
        if let (Some(days), Some(rated)) = (self.endurance_days, args.drive_endurance) {
            say!("          the rated {} in {days:.0} days", human(rated.0));
        }
    }

    fn json(&self, args: &Args) -> serde_json::Value {
        let Requirements { need, .. } = self;
        json!({
            "parameters": self.parameters, "frozen": args.frozen(), "servers": args.servers, "tier": args.tier.to_string(),
            "memory_bytes": need.total(), "state_bytes": need.state, "buffer_bytes": need.buffers,
            "image_bytes": need.images, "contribution_bytes": need.contributions,
            "accumulator_bytes": need.accumulators, "transfer_bytes": need.transfers, "process_bytes": PROCESS_BYTES,
            "wire_bytes_per_step": self.wire, "disk_bytes": need.disk,
            "disk_written_bytes_per_step": need.written,
            "disk_written_bytes_per_day": self.daily, "drive_endurance_days": self.endurance_days,
            "gpus": self.gpus.json(), "short": self.short,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::HardwareArgs;

    #[test]
    fn what_a_probe_prints_is_a_file_for_hardware() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.toml");
        for drives in [None, Some(2.5)] {
            let probed = Probed {
                threads: 2,
                server_memory: 12.345,
                drives,
                link: 1.5,
                is_loopback: true,
                round_trip_us: 87.4,
            };
            std::fs::write(&path, hardware_file(Formats::default(), &probed)).unwrap();
            let args = HardwareArgs::of_flags(Some(path.clone()), Some(100.0)).with_file().unwrap();
            let speeds = args.speeds(drives.is_some()).unwrap().unwrap();
            assert_eq!((speeds.server_memory, speeds.link), (12.35e9, 1.5e9));
            assert_eq!(speeds.drives, drives.unwrap_or(f64::INFINITY) * 1e9);
            assert!((speeds.round_trip_s - 87e-6).abs() < 1e-12);
        }
    }

    fn planned(flags: &[&str]) -> Requirements {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            args: Args,
        }
        let command: Command = clap::Parser::parse_from([&["plan"], flags].concat());
        Requirements::of(&command.args).unwrap()
    }

    #[test]
    fn ranks_that_exchange_slices_contribute_once_to_each_element() {
        let alone = planned(&["--params", "100M"]);
        let all = planned(&["--params", "100M", "--world-size", "8"]);
        let sliced = planned(&["--params", "100M", "--world-size", "8", "--fabric", "100"]);
        assert_eq!(sliced.need.contributions, alone.need.contributions);
        assert_eq!(sliced.need.accumulators, 0);
        assert_eq!(all.need.contributions, 8 * alone.need.contributions);
        assert!(all.need.accumulators > 0);
        assert_eq!(sliced.wire * 8, all.wire);
    }

    #[test]
    fn a_frozen_base_has_no_gradients_on_a_gpu() {
        let whole = planned(&["--params", "1B", "--gpu-memory", "32GiB"]).gpus.json();
        let frozen = planned(&["--params", "1B", "--frozen", "990M", "--gpu-memory", "32GiB"]).gpus.json();
        for stage in 0..2 {
            let of = |plan: &serde_json::Value, key: &str| plan["stages"][stage][key].as_u64().unwrap();
            assert_eq!(of(&whole, "weight_bytes"), of(&frozen, "weight_bytes"));
            let share = of(&frozen, "gradient_bytes") as f64 / of(&whole, "gradient_bytes") as f64;
            assert!((share - 0.01).abs() < 1e-6, "{share}");
        }
    }
}
