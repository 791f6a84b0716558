//! `longshore bench shares`: two jobs that update without pause on one server's threads or drives, each alone and beside the
//! other.
//!
//! Each job is a thread that updates its shards as a server's compute thread does, in the same groups, so that nothing but the
//! sharing of the threads is measured. With drives it takes steps of the `nvme` tier's store, whose update only touches every
//! byte.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use longshore_engine::{
    threads::{Account, ThreadPool, available_threads},
    tier::{
        Storage,
        nvme::{BenchStore, FIRST_STEPS},
    },
};
use longshore_proto::{JobSpec, TierKind};
use serde_json::json;
use tempfile::TempDir;

use super::{
    arrays::{Arrays, fitting},
    job, median, param,
    storage::folder_in,
    update::{Update, step},
};
use crate::{output::Output, sizes::parse_count};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Parameters of the small job
    #[arg(long, default_value = "16M", value_name = "N", value_parser = parse_count)]
    small: u64,
    /// Parameters of the large job
    #[arg(long, default_value = "200M", value_name = "N", value_parser = parse_count)]
    large: u64,
    /// Weight of the small job, as `share` in identities.toml
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    small_share: u32,
    /// Weight of the large job
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    large_share: u32,
    /// Update threads [default: all cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Have both jobs' state on drives: folders as a server's --state-dir has them. The drives do not know of weights
    #[arg(long, value_delimiter = ',', value_name = "DIR,...", conflicts_with_all = ["small_share", "large_share"])]
    state_dir: Vec<PathBuf>,
    /// Seconds of each of the three measurements
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
}

struct Job {
    name: &'static str,
    work: Work,
    /// Its weight as a part of both jobs' together.
    part: f64,
}

/// What a job's steps update.
enum Work {
    Memory {
        arrays: Arrays,
        account: Arc<Account>,
    },
    Drives {
        store: Box<BenchStore>,
        /// They are removed after the store, which lies in them.
        _folders: Vec<TempDir>,
    },
}

impl Work {
    fn in_memory(params: u64, share: u32, pool: &ThreadPool) -> anyhow::Result<Work> {
        let available = longshore_server::config::available_memory();
        let arrays = Arrays::allocate(fitting(Some(params), available)?, pool)?;
        Ok(Work::Memory { arrays, account: Account::new(share) })
    }

    fn on_drives(params: u64, dirs: &[PathBuf], pool: &ThreadPool) -> anyhow::Result<Work> {
        let spec = JobSpec { tier: TierKind::Nvme, ..job("bench-shares", vec![param("all", params)])? };
        let folders =
            dirs.iter().map(|dir| folder_in("--state-dir", dir)).collect::<anyhow::Result<Vec<_>>>()?;
        let dirs = folders.iter().map(|folder| folder.path().to_path_buf()).collect();
        let mut store = BenchStore::make(&spec, &Storage { dirs, ..Storage::default() })?;
        for _ in 0..FIRST_STEPS {
            store.step(pool)?;
        }
        Ok(Work::Drives { store: Box::new(store), _folders: folders })
    }

    fn step(&mut self, pool: &ThreadPool) -> anyhow::Result<()> {
        match self {
            Work::Memory { arrays, account } => step(arrays, pool, account, Update::plain()),
            Work::Drives { store, .. } => store.step(pool)?,
        }
        Ok(())
    }
}

pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let pool = ThreadPool::new(args.threads.unwrap_or_else(available_threads))?;
    let all = f64::from(args.small_share) + f64::from(args.large_share);
    let job = |name, params, share: u32| -> anyhow::Result<Job> {
        let work = match args.state_dir.is_empty() {
            true => Work::in_memory(params, share, &pool)?,
            false => Work::on_drives(params, &args.state_dir, &pool)?,
        };
        Ok(Job { name, work, part: f64::from(share) / all })
    };
    let mut jobs = [job("small", args.small, args.small_share)?, job("large", args.large, args.large_share)?];
    let time = Duration::from_secs(args.seconds);
    let mut alone = Vec::new();
    for job in &mut jobs {
        alone.extend(measure(&pool, std::slice::from_mut(job), time)?);
    }
    let beside = measure(&pool, &mut jobs, time)?;
    if !out.is_json() {
        say!("{} threads, {} s each", pool.threads(), args.seconds);
    }
    for ((job, alone), beside) in jobs.iter().zip(alone).zip(beside) {
        tell(args, out, job, pool.threads(), (alone, beside));
    }
    Ok(())
}

fn tell(args: &Args, out: Output, job: &Job, threads: usize, (alone, beside): (f64, f64)) {
    let tier = if args.state_dir.is_empty() { TierKind::Memory } else { TierKind::Nvme };
    // Where both always have work, a job that gets its part takes this many times as long.
    let fair = alone / job.part;
    let (slower, over) = (beside / alone, beside / fair);
    out.result(
        || {
            json!({
                "bench": "shares", "case": job.name, "tier": tier.to_string(), "threads": threads, "part": job.part,
                "alone_ms": alone * 1e3, "beside_ms": beside * 1e3, "slower": slower, "over_fair": over,
            })
        },
        || {
            format!(
                "{:<6} a step alone {:8.2} ms, beside the other {:8.2} ms: {slower:.2} times; {over:.2} of a fair share's",
                job.name,
                alone * 1e3,
                beside * 1e3
            )
        },
    );
}

/// Updates all of these jobs side by side for so long. Returns the median of each one's steps, in seconds.
fn measure(pool: &ThreadPool, jobs: &mut [Job], time: Duration) -> anyhow::Result<Vec<f64>> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = &over;
        let running: Vec<_> = jobs
            .iter_mut()
            .map(|job| {
                scope.spawn(move || -> anyhow::Result<f64> {
                    pool.adopt_caller();
                    let mut steps = Vec::new();
                    while !over.load(Ordering::Relaxed) || steps.len() < 3 {
                        let begun = Instant::now();
                        job.work.step(pool)?;
                        steps.push(begun.elapsed().as_secs_f64());
                    }
                    // The first one warms up, and the last one may have been alone.
                    Ok(median(&steps[1..steps.len() - 1]))
                })
            })
            .collect();
        thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        let ended =
            |_| Err(anyhow::anyhow!("a job's thread ended by a panic: report it with the text above"));
        running.into_iter().map(|job| job.join().unwrap_or_else(ended)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_is_measured_alone_and_beside_the_other() {
        let pool = ThreadPool::new(2).unwrap();
        let folder = TempDir::new().unwrap();
        let drives = [folder.path().to_path_buf()];
        let memory = || Work::in_memory(1 << 17, 1, &pool).unwrap();
        let on_drives = || Work::on_drives(1 << 17, &drives, &pool).unwrap();
        for works in [[memory(), memory()], [on_drives(), on_drives()]] {
            let mut jobs = works.map(|work| Job { name: "a job", work, part: 0.5 });
            let times = measure(&pool, &mut jobs, Duration::from_millis(20)).unwrap();
            assert!(times.len() == 2 && times.iter().all(|&time| time > 0.0), "{times:?}");
        }
        assert!(folder.path().read_dir().unwrap().next().is_none(), "folders are left");
    }
}
