//! Compares the `nvme` tier with its drives. A bare loop of a step's reads and writes takes turns with a step of the
//! tier. The update of that step only touches every byte.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use longshore_engine::{
    io::Engine,
    threads::{ThreadPool, available_threads},
    tier::{
        Storage,
        nvme::{StorageMeasurement, bench},
    },
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{job, median, param};
use crate::{
    output::{Output, wrong_use},
    sizes::{human, parse_count},
};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folders of the drives to measure, as a server's --state-dir has them
    #[arg(long, value_delimiter = ',', required = true, value_name = "DIR,...")]
    dir: Vec<PathBuf>,
    /// Parameters, as in 500M: 24 bytes of each drive space for one
    #[arg(long, default_value = "100M", value_name = "N", value_parser = parse_count)]
    params: u64,
    /// Steps of each case; medians are shown
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Parts of the state kept in memory, each a case: 0 to 1
    #[arg(long, value_delimiter = ',', default_value = "0,0.5", value_name = "PART,...")]
    resident: Vec<f64>,
}

struct Case {
    engine: Engine,
    resident: f64,
}

impl Case {
    fn name(&self) -> String {
        let engine = match self.engine {
            Engine::Threads => "threads",
            _ => "io_uring",
        };
        format!("{engine}/resident-{}", self.resident)
    }
}

pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    if let Some(part) = args.resident.iter().find(|part| !(0.0..=1.0).contains(*part)) {
        return Err(wrong_use(anyhow!("--resident is {part}, but must be between 0 and 1")));
    }
    if !out.is_json() {
        say!("{}", head());
    }
    for case in cases(&args.resident) {
        let measurements = measure(&case, &args.dir, args.params, args.rounds.into())?;
        let measured = json(&case, &measurements, args.params);
        out.result(|| measured.clone(), || line(&case, &measured));
    }
    Ok(())
}

/// Returns the GB a second that the store reads and writes together in the folders `dirs`, with no resident state.
pub(crate) fn gb_per_s(dirs: &[PathBuf], params: u64, rounds: u64) -> anyhow::Result<f64> {
    let case = Case { engine: Engine::Auto, resident: 0.0 };
    let measurements = measure(&case, dirs, params, rounds)?;
    let speeds: Vec<f64> = measurements.iter().map(StorageMeasurement::step_gb_per_second).collect();
    Ok(median(&speeds))
}

fn measure(
    case: &Case,
    dirs: &[PathBuf],
    params: u64,
    rounds: u64,
) -> anyhow::Result<Vec<StorageMeasurement>> {
    let spec = job("bench-storage", vec![param("all", params)])?;
    let pool = ThreadPool::new(available_threads()).context("starting the update threads")?;
    // Each case gets new folders inside the given folders, and removes them afterwards.
    let folders = dirs.iter().map(|dir| folder_in("--dir", dir)).collect::<anyhow::Result<Vec<_>>>()?;
    let storage = Storage {
        dirs: folders.iter().map(|folder| folder.path().to_path_buf()).collect(),
        engine: case.engine,
        resident_bytes: (params as f64 * 12.0 * case.resident) as u64,
        ..Storage::default()
    };
    Ok(bench(&spec, &storage, &pool, rounds)?)
}

/// Makes a temporary folder inside a folder that `flag` named. Dropping the value removes the temporary folder.
pub(super) fn folder_in(flag: &str, dir: &Path) -> anyhow::Result<TempDir> {
    tempfile::tempdir_in(dir).map_err(|error| {
        let remedy = "name folders of the drives to measure that are there and writable";
        anyhow!("{flag} is {} ({error}), but must be a folder that can be written: {remedy}", dir.display())
    })
}

/// Returns the cases: first the engine with threads, then the default engine with each resident part. Resident state
/// saves reads.
fn cases(resident: &[f64]) -> Vec<Case> {
    let threads = Case { engine: Engine::Threads, resident: 0.0 };
    let auto = resident.iter().map(|&resident| Case { engine: Engine::Auto, resident });
    [threads].into_iter().chain(auto).collect()
}

fn head() -> String {
    format!(
        "{:<34} {:>7} {:>10} {:>12} {:>13} {:>9} {:>9} {:>8} {:>10}",
        "case", "GB/s", "drive GB/s", "of the drive", "min..max", "CPU-s/GB", "drive's", "step s", "moved"
    )
}

fn line(case: &Case, measured: &Value) -> String {
    let of = |key: &str| measured[key].as_f64().unwrap_or(f64::NAN);
    format!(
        "{:<34} {:>7.2} {:>10.2} {:>12.2} {:>13} {:>9.3} {:>9.3} {:>8.3} {:>10}",
        case.name(),
        of("gb_per_s"),
        of("limit_gb_per_s"),
        of("fraction"),
        format!("{:.2}..{:.2}", of("min_fraction"), of("max_fraction")),
        of("cpu_s_per_gb"),
        of("limit_cpu_s_per_gb"),
        of("step_s"),
        human(of("bytes") as u64)
    )
}

/// Returns medians over the rounds.
fn json(case: &Case, measurements: &[StorageMeasurement], params: u64) -> Value {
    let all = |value: fn(&StorageMeasurement) -> f64| measurements.iter().map(value).collect::<Vec<f64>>();
    let fractions = all(StorageMeasurement::fraction);
    json!({
        "bench": "storage", "case": case.name(), "threads": available_threads(),
        "gb_per_s": median(&all(StorageMeasurement::step_gb_per_second)),
        "limit_gb_per_s": median(&all(StorageMeasurement::raw_gb_per_second)),
        "fraction": median(&fractions),
        "min_fraction": fractions.iter().copied().fold(f64::INFINITY, f64::min),
        "max_fraction": fractions.iter().copied().fold(0.0, f64::max),
        "cpu_s_per_gb": median(&all(|round| round.step_cpu_seconds * 1e9 / round.bytes as f64)),
        "limit_cpu_s_per_gb": median(&all(|round| round.raw_cpu_seconds * 1e9 / round.bytes as f64)),
        "step_s": median(&all(|round| round.step_seconds)),
        "resident": case.resident, "params": params,
        "bytes": measurements.first().map_or(0, |round| round.bytes), "rounds": measurements.len(),
    })
}
