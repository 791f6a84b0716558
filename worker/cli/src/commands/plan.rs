//! `longshore plan`: the memory that a job takes of servers and GPUs, and the time of its steps. The numbers for
//! servers come from the arithmetic by which a server admits a job.

mod gpus;
mod job;

use std::path::PathBuf;

use anyhow::ensure;
use longshore_engine::{admission::Need, tier::DEFAULT_BUFFERS};
use longshore_proto::{
    Dtype, MasterFormat, Placement, ServerId, StateFormat, TierKind,
    limits::{DEFAULT_SHARD_ELEMENTS, PROCESS_BYTES},
};
use longshore_server::config::{ByteSize, Spill};
use serde_json::json;

use crate::{
    access::Access,
    bench::probe::{self, ProbeArgs},
    output::{Output, wrong_use},
    plan::{DriveTraffic, HardwareArgs, Model},
    sizes::{human, parse_count},
};

/// Largest number of state folders. A larger number is a typing error, and each folder becomes a path.
const MOST_STATE_DIRS: usize = 1024;

#[derive(Clone, clap::Args)]
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
    #[arg(long, default_value = "memory", help = format!("Where the state lives: {}", TierKind::names(|_| true)))]
    tier: TierKind,
    /// Folders of each server's nvme tier
    #[arg(long, default_value_t = 1, value_name = "N")]
    state_dirs: usize,
    /// As `longshored --spill`
    #[arg(long, default_value = "state", value_name = "WHAT")]
    spill: Spill,
    /// As `longshored --resident`
    #[arg(long, value_name = "SIZE")]
    resident: Option<ByteSize>,
    /// As `longshored --storage-buffers`
    #[arg(long, default_value_t = DEFAULT_BUFFERS, value_name = "N")]
    storage_buffers: usize,
    /// Seconds a step will take: how much a day writes
    #[arg(long, value_name = "SECONDS")]
    step_s: Option<f64>,
    #[command(flatten)]
    gpus: gpus::Args,
    #[command(flatten)]
    probe: ProbeArgs,
}

/// Requirements of the job on the server that owns most of it.
struct Requirements {
    parameters: u64,
    need: Need,
    /// The most parameters that servers hold with the memory and drives of --memory and --nvme.
    most: Option<u64>,
    /// Bytes to or from one rank in a step, each way. Each micro-step pushes this many bytes.
    wire: u64,
    daily: Option<f64>,
    endurance_days: Option<f64>,
    gpus: gpus::Plan,
    short: Vec<String>,
}

pub(super) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    if args.probe.probe {
        let probed = probe::run(&args.probe, args.formats())?;
        out.result(|| probed.json(), || probed.file(args.formats()));
        return Ok(());
    }
    let args = &args.with_file().map_err(wrong_use)?;
    let plan = Requirements::of(args, &args.model()?).map_err(wrong_use)?;
    if out.is_json() {
        say!("{}", plan.json(args));
    } else {
        plan.print(args);
    }
    ensure!(plan.short.is_empty(), "{}", plan.short.join("; "));
    Ok(())
}

impl Args {
    pub(super) fn elsewhere(&mut self) -> (&mut Vec<String>, &mut Access) {
        self.probe.elsewhere()
    }

    fn with_file(&self) -> anyhow::Result<Args> {
        let mut all = self.clone();
        all.gpus.hardware = self.gpus.hardware.with_file()?;
        Ok(all)
    }

    fn hardware(&self) -> &HardwareArgs {
        &self.gpus.hardware
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.servers > 0, "--servers must be at least 1");
        let dirs = 1..=MOST_STATE_DIRS;
        ensure!(dirs.contains(&self.state_dirs), "--state-dirs must be from 1 to {MOST_STATE_DIRS}");
        ensure!(self.shard_elements > 0, "--shard-elements must be at least 1");
        let positive = self.step_s.is_none_or(|seconds| seconds > 0.0 && seconds.is_finite());
        ensure!(positive, "--step-s must be above 0");
        Ok(())
    }
}

impl Requirements {
    /// Computes the requirements from the arguments alone. So every error is an error of the arguments.
    fn of(args: &Args, model: &Model) -> anyhow::Result<Requirements> {
        args.check()?;
        let spec = args.spec(model)?;
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
        // Shards are dealt in turn, so the first server has the most. Frozen shards take less, and come last, so with
        // frozen shards another server may need more.
        let first = of_server(0);
        let others = if args.frozen() > 0 { 1..args.servers } else { 1..1 };
        let (need, elements, on_drives) = others
            .map(of_server)
            .fold(first, |most, other| if other.0.total() > most.0.total() { other } else { most });
        let daily = args.step_s.map(|seconds| need.written as f64 * 86_400.0 / seconds);
        let HardwareArgs { memory, nvme, drive_endurance, .. } = *args.hardware();
        let rated = daily.zip(drive_endurance).filter(|(daily, _)| *daily > 0.0);
        let mut short = Vec::new();
        for (what, takes, has) in [("memory", need.total(), memory), ("nvme", need.disk, nvme)] {
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
        let job = gpus::Job {
            spec: &spec,
            parameters,
            frozen: args.frozen() as f64 / parameters as f64,
            is_sliced: args.is_sliced(),
            servers: args.servers,
            shards: layout.shards(),
            drives: on_drives,
        };
        let gpus = gpus::Plan::of(&args.gpus, model, &job)?;
        short.extend(gpus.short());
        Ok(Requirements {
            gpus,
            parameters,
            wire: (elements * args.dtype.bytes()).div_ceil(if args.is_sliced() {
                spec.world_size.into()
            } else {
                1
            }),
            endurance_days: rated.map(|(daily, rated)| rated.0 as f64 / daily),
            most: args.most_parameters()?,
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
        if let Some(most) = self.most {
            say!(
                "  most    {:>9.1}B   parameters are what {} such server(s) hold",
                most as f64 / 1e9,
                args.servers
            );
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
        if let (Some(days), Some(rated)) = (self.endurance_days, args.hardware().drive_endurance) {
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
            "most_parameters": self.most, "wire_bytes_per_step": self.wire, "disk_bytes": need.disk,
            "disk_written_bytes_per_step": need.written,
            "disk_written_bytes_per_day": self.daily, "drive_endurance_days": self.endurance_days,
            "gpus": self.gpus.json(), "short": self.short,
        })
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::limits::{MAX_ELEMENTS, MAX_SHARD_ELEMENTS};

    use super::*;

    fn planned(flags: &[&str]) -> Requirements {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            args: Args,
        }
        let command: Command = clap::Parser::parse_from([&["plan"], flags].concat());
        let args = command.args.with_file().unwrap();
        Requirements::of(&args, &args.model().unwrap()).unwrap()
    }

    #[test]
    fn what_a_server_has_is_read_from_the_file_and_flags_win() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.toml");
        std::fs::write(&path, "memory = \"8GiB\"\nnvme = \"1TB\"\ndrive-endurance = \"600TB\"\n").unwrap();
        let file =
            ["--params", "1B", "--tier", "nvme", "--step-s", "10", "--hardware", path.to_str().unwrap()];
        let plan = planned(&file);
        assert!(plan.short.is_empty() && plan.most.is_some(), "{:?}", plan.short);
        let days = 600e12 / (plan.need.written as f64 * 8640.0);
        assert!((plan.endurance_days.unwrap() / days - 1.0).abs() < 1e-9, "{:?}", plan.endurance_days);
        let less = planned(&[&file[..], &["--memory", "1GiB"]].concat());
        assert!(less.short[0].contains("--memory is 1.00 GiB"), "{:?}", less.short);
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
    fn the_most_parameters_fit_and_one_shard_more_does_not() {
        for flags in [&["--memory", "64GiB"][..], &["--tier", "nvme", "--nvme", "1TB", "--servers", "3"]] {
            let most = planned(&[&["--params", "1B"], flags].concat()).most.unwrap();
            let with = |params: u64| planned(&[&["--params", &params.to_string()], flags].concat()).short;
            assert!(most > 0 && with(most).is_empty(), "{flags:?}: {most}");
            assert!(!with(most + 3 * DEFAULT_SHARD_ELEMENTS).is_empty(), "{flags:?}: {most}");
        }
        // Servers with more memory than any job: the result is the largest job.
        let shard = MAX_SHARD_ELEMENTS.to_string();
        let flags = ["--params", "1B", "--shard-elements", &shard, "--memory", "1024TiB"];
        assert_eq!(planned(&flags).most, Some(MAX_ELEMENTS));
        assert_eq!(planned(&["--params", "1B"]).most, None);
    }

    /// A larger budget of weights holds more units and needs fewer pulls, as in the worker.
    #[test]
    fn a_gpu_with_more_memory_keeps_more_units() {
        let of = |memory: &str| {
            let plan = planned(&["--params", "7B", "--gpu-memory", memory]).gpus.json();
            let stage = plan["stages"][1].clone();
            let (staying, units) =
                (stage["staying_units"].as_u64().unwrap(), stage["units"].as_u64().unwrap());
            (
                staying,
                units,
                stage["pulled_bytes_per_step"].as_f64().unwrap(),
                stage["weight_bytes"].as_u64().unwrap(),
            )
        };
        let (least, units, most_pulled, weights) = of("1GB");
        let (more, _, pulled, peak) = of("8GB");
        let (all, _, once, _) = of("32GB");
        assert!(
            least >= 2 && least < more && more < all && all == units,
            "{least}, {more}, {all} of {units}"
        );
        assert!(most_pulled > pulled && pulled > once, "{most_pulled}, {pulled}, {once}");
        assert!((once / 14e9 - 1.0).abs() < 0.01 && most_pulled < 2.0 * once, "{once}");
        // The minimum is the same for all budgets.
        assert_eq!(weights, peak);
    }

    #[test]
    fn hosts_keep_gradients_until_nobody_can_need_them() {
        let retained = |flags: &[&str]| {
            planned(&[&["--params", "1B"], flags].concat()).gpus.json()["retained_gradient_bytes"]
                .as_u64()
                .unwrap()
        };
        let step = 2_000_000_000;
        assert_eq!(retained(&[]), step);
        assert_eq!(retained(&["--dtype", "f32"]), 2 * step);
        assert_eq!(retained(&["--micro-steps", "4"]), 4 * step);
        assert_eq!(retained(&["--frozen", "900M"]), step / 10);
        assert_eq!(retained(&["--world-size", "8", "--fabric", "100"]), step / 8);
        assert_eq!(retained(&["--tier", "nvme"]), 2 * step);
        assert_eq!(retained(&["--delay", "1"]), 2 * step);
        assert_eq!(retained(&["--delay", "1", "--tier", "nvme"]), 3 * step);
    }
}
