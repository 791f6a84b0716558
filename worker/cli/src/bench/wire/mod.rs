//! Compares push and pull with raw sockets. All cases take turns in each round, since clocks, caches and
//! neighbours on the host change within seconds. Compare only medians of the same run.

mod case;
mod ours;
mod raw;
mod tls;

use anyhow::ensure;
use longshore_engine::threads::available_threads;
use longshore_proto::limits::DATA_CONNECTIONS;
use serde_json::json;

use self::case::{Case, Sample};
pub(super) use self::ours::BenchRank;
pub(crate) use self::ours::JOB;
use crate::output::{Output, wrong_use};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Connections of a worker to a server, and of the raw sockets [default: 2, or 1 with fewer than four cores: each
    /// keeps one busy at either end]
    #[arg(long, default_value_t = default_connections(), hide_default_value = true, value_name = "N")]
    connections: usize,
    /// Payload of one sample, in MiB; memory needed is about ten times this
    #[arg(long, default_value_t = 256, value_name = "MIB")]
    megabytes: usize,
    /// Samples of each case
    #[arg(long, default_value_t = 9, value_name = "N")]
    rounds: usize,
    /// Only these cases, and the raw ones they are compared with; all by default
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    cases: Vec<String>,
}

pub(super) fn default_connections() -> usize {
    (available_threads() / 2).clamp(1, DATA_CONNECTIONS)
}

fn check(args: &Args) -> anyhow::Result<()> {
    ensure!((1..=64).contains(&args.connections), "--connections must be in 1..=64");
    ensure!((1..=16384).contains(&args.megabytes), "--megabytes must be in 1..=16384");
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    Ok(())
}

pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    check(args).map_err(wrong_use)?;
    let bytes = args.megabytes << 20;
    let mut cases = raw::cases(args.connections, bytes)?;
    cases.extend(ours::cases(args.connections, bytes)?);
    if !args.cases.is_empty() {
        let wanted = |case: &Case| args.cases.iter().any(|name| name == case.name);
        let limits: Vec<_> = cases.iter().filter(|case| wanted(case)).filter_map(|case| case.limit).collect();
        cases.retain(|case| wanted(case) || limits.contains(&case.name));
        ensure!(!cases.is_empty(), "--cases names none of them");
    }
    for round in 0..=args.rounds {
        for case in &mut cases {
            case.round(round)?;
        }
    }
    report(&cases, (args, out));
    Ok(())
}

fn report(cases: &[Case], (args, out): (&Args, Output)) {
    if !out.is_json() {
        say!("{:<12} {:>10} {:>9} {:>9} {:>9}", "case", "GB/s", "of raw", "CPU-s/GB", "of raw");
    }
    for case in cases {
        let (rate, cpu) = (case.median(Sample::gb_per_s), case.median(Sample::cpu_s_per_gb));
        let limit = cases.iter().find(|other| Some(other.name) == case.limit);
        let limit_rate = limit.map(|limit| limit.median(Sample::gb_per_s));
        let limit_cpu = limit.map(|limit| limit.median(Sample::cpu_s_per_gb));
        if out.is_json() {
            let line = json!({
                "bench": "wire",
                "case": case.name,
                "threads": args.connections,
                "megabytes": args.megabytes,
                "rounds": args.rounds,
                "gb_per_s": rate,
                "limit_gb_per_s": limit_rate,
                "fraction": limit_rate.map(|limit| rate / limit),
                "cpu_s_per_gb": cpu,
                "limit_cpu_s_per_gb": limit_cpu,
                "cpu_ratio": limit_cpu.map(|limit| cpu / limit),
            });
            say!("{line}");
        } else {
            let ratio = |limit: Option<f64>, value: f64| {
                limit.map_or(String::new(), |limit| format!("{:.2}", value / limit))
            };
            let (of_rate, of_cpu) = (ratio(limit_rate, rate), ratio(limit_cpu, cpu));
            say!("{:<12} {rate:>10.2} {of_rate:>9} {cpu:>9.3} {of_cpu:>9}", case.name);
        }
    }
}
