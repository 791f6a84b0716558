//! The flags of `longshore bench step`.

use std::path::PathBuf;

use anyhow::ensure;
use longshore_proto::{
    Formats, JobSpec, Lifetime, MasterFormat, StateFormat, TierKind,
    limits::{BLOCK_ELEMENTS, DEFAULT_SHARD_ELEMENTS, MAX_SHARDS},
};
use longshore_server::config::Spill;
use longshore_worker::session::Transport;

use crate::{
    access::Access,
    bench::{job, param},
    sizes::parse_count,
};

/// Longest compute of a step, one hour. A longer time is a typing error.
const MOST_COMPUTE_MS: f64 = 3_600_000.0;

#[derive(clap::Args, Clone)]
pub(crate) struct Args {
    /// Parameters, as in 200M
    #[arg(long, default_value = "200M", value_name = "N", value_parser = parse_count)]
    pub(super) params: u64,
    /// Data-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(super) ranks: u32,
    /// Servers that run elsewhere, for instance behind links of a given speed [default: one in this process]
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT,...", conflicts_with = "state_dir")]
    pub(in crate::bench) servers: Vec<String>,
    #[command(flatten)]
    pub(in crate::bench) access: Access,
    /// How payloads go: tcp, unix or memfd [default: memfd, or tcp with --servers]
    #[arg(long)]
    transport: Option<Transport>,
    /// Connections of a rank to the server
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub(super) connections: usize,
    /// Where the server keeps the state: memory, or nvme
    #[arg(long, default_value = "memory")]
    pub(super) tier: TierKind,
    /// Folders for the nvme tier
    #[arg(long, value_delimiter = ',', value_name = "DIR,...")]
    pub(in crate::bench) state_dir: Vec<PathBuf>,
    /// Part of an nvme job on the drives: state or all. With --servers it is as they were started
    #[arg(long, default_value = "state", value_name = "WHAT")]
    pub(in crate::bench) spill: Spill,
    /// Moments: fp32, bf16 or block8
    #[arg(long, default_value = "fp32", value_name = "FORMAT")]
    pub(super) state: StateFormat,
    /// Master weights: fp32 or bf16
    #[arg(long, default_value = "fp32", value_name = "FORMAT")]
    pub(super) master: MasterFormat,
    /// Servers that hold each shard: 1 or 2
    #[arg(long, default_value_t = 1, value_name = "COUNT", requires = "servers")]
    replicas: u32,
    /// 0: exact. 1: each step computes with the weights of the step before last
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1))]
    pub(super) delay: u32,
    /// Gradients summed before each update
    #[arg(long, default_value_t = 1)]
    pub(super) micro_steps: u32,
    /// Largest global gradient norm; 0 does not clip
    #[arg(long, default_value_t = 1.0)]
    pub(super) clip: f64,
    /// Bytes a second of each rank's link, each way, as in 1G [default: as fast as it is]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(super) link: Option<u64>,
    /// For the prediction: bytes a second of each server's link, each way, as in 100M. No link gets slower
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(super) server_link: Option<u64>,
    /// For the prediction: bytes a second that each server's memory moves in updates [default: what the update alone is
    /// measured with here, divided by the number of servers]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(super) server_memory: Option<u64>,
    /// For the prediction, with --tier nvme: bytes a second that each server's drives read and write together
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub(super) drives: Option<u64>,
    /// Elements of a shard. A step streams shard after shard
    #[arg(long, default_value_t = DEFAULT_SHARD_ELEMENTS, value_name = "N")]
    pub(super) shard_elements: u64,
    /// Compute of a step, a third of it forward
    #[arg(long, default_value_t = 0.0, value_name = "MS")]
    pub(super) compute_ms: f64,
    /// Rounds of steps and limits by turns; medians are shown
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub(super) rounds: usize,
    /// Steps of a round
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub(super) steps: usize,
}

impl Args {
    pub(crate) fn elsewhere(&mut self) -> (&mut Vec<String>, &mut Access) {
        (&mut self.servers, &mut self.access)
    }

    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(self.params > 0, "--params must be at least 1");
        ensure!((1..=64).contains(&self.ranks), "--ranks must be in 1..=64");
        ensure!((1..=64).contains(&self.connections), "--connections must be in 1..=64");
        ensure!(self.rounds > 0 && self.steps > 0, "--rounds and --steps must be at least 1");
        ensure!(
            (0.0..=MOST_COMPUTE_MS).contains(&self.compute_ms),
            "--compute-ms must be in 0..={MOST_COMPUTE_MS}"
        );
        ensure!(self.clip >= 0.0 && self.clip.is_finite(), "--clip must be at least 0");
        ensure!(self.tier.properties().lifetime != Lifetime::Host, "--tier must be memory or nvme");
        ensure!(
            self.link.is_none() || self.transport() != Transport::Memfd,
            "--link needs --transport tcp or unix: shared memory has no link"
        );
        ensure!(self.transport() != Transport::Auto, "--transport must be tcp, unix or memfd");
        ensure!(
            self.shard_elements > 0 && self.shard_elements.is_multiple_of(BLOCK_ELEMENTS),
            "--shard-elements is {}, but must be a multiple of {BLOCK_ELEMENTS}",
            self.shard_elements
        );
        // The limit is checked before the list of parameters takes memory.
        let shards = self.params.div_ceil(self.shard_elements);
        ensure!(shards <= MAX_SHARDS, "--params are {shards} shards, but must be at most {MAX_SHARDS}");
        Ok(())
    }

    pub(in crate::bench) fn transport(&self) -> Transport {
        let usual = if self.servers.is_empty() { Transport::Memfd } else { Transport::Tcp };
        self.transport.unwrap_or(usual)
    }

    pub(super) fn formats(&self) -> Formats {
        Formats { state: self.state, master: self.master, seed: 0 }
    }

    pub(super) fn server_count(&self) -> usize {
        self.servers.len().max(1)
    }

    pub(super) fn spec(&self) -> anyhow::Result<JobSpec> {
        // A tensor per shard, since a step streams shards.
        let cut = self.shard_elements;
        let params = (0..self.params.div_ceil(cut)).map(|index| {
            let elements = cut.min(self.params - index * cut);
            param(format!("layer{index}"), elements.next_multiple_of(BLOCK_ELEMENTS))
        });
        Ok(JobSpec {
            world_size: self.ranks,
            micro_steps: self.micro_steps,
            max_delay: self.delay,
            shard_elements: cut,
            tier: self.tier,
            formats: self.formats(),
            replicas: self.replicas,
            ..job("bench-step", params.collect())?
        })
    }
}
