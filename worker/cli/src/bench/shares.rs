//! `longshore bench shares`: two jobs that update without pause on one server's threads, each alone and beside the other.
//!
//! Each job is a thread that updates its shards as a server's compute thread does, in the same groups, so that nothing but the
//! sharing of the threads is measured.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use longshore_engine::threads::{Account, ThreadPool, available_threads};
use serde_json::json;

use super::{
    arrays::{Arrays, fitting},
    median,
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
    /// Seconds of each of the three measurements
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
}

struct Job {
    name: &'static str,
    arrays: Arrays,
    account: Arc<Account>,
    /// Its weight as a part of both jobs' together.
    part: f64,
}

pub(crate) fn run(args: &Args, out: Output) -> anyhow::Result<()> {
    let pool = ThreadPool::new(args.threads.unwrap_or_else(available_threads))?;
    let available = longshore_server::config::available_memory();
    let all = f64::from(args.small_share) + f64::from(args.large_share);
    let job = |name, params, share: u32| -> anyhow::Result<Job> {
        let arrays = Arrays::allocate(fitting(Some(params), available)?, &pool)?;
        Ok(Job { name, arrays, account: Account::new(share), part: f64::from(share) / all })
    };
    let mut jobs = [job("small", args.small, args.small_share)?, job("large", args.large, args.large_share)?];
    let time = std::time::Duration::from_secs(args.seconds);
    let mut alone = Vec::new();
    for job in &mut jobs {
        alone.push(measure(&pool, std::slice::from_mut(job), time)[0]);
    }
    let beside = measure(&pool, &mut jobs, time);
    if !out.is_json() {
        say!("{} threads, {} s each", pool.threads(), args.seconds);
    }
    for ((job, alone), beside) in jobs.iter().zip(alone).zip(beside) {
        // Where both always have work, a job that gets its part of the threads takes this many times as long.
        let fair = alone / job.part;
        let (slower, over) = (beside / alone, beside / fair);
        out.result(
            || {
                json!({
                    "bench": "shares", "case": job.name, "threads": pool.threads(), "part": job.part,
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
    Ok(())
}

/// Updates all of these jobs side by side for so long. Returns the median of each one's steps, in seconds.
fn measure(pool: &ThreadPool, jobs: &mut [Job], time: std::time::Duration) -> Vec<f64> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = &over;
        let running: Vec<_> = jobs
            .iter_mut()
            .map(|job| {
                scope.spawn(move || {
                    pool.adopt_caller();
                    let mut steps = Vec::new();
                    while !over.load(Ordering::Relaxed) || steps.len() < 3 {
                        let begun = Instant::now();
                        step(&mut job.arrays, pool, &job.account, Update::plain());
                        steps.push(begun.elapsed().as_secs_f64());
                    }
                    // The first one warms up, and the last one may have been alone.
                    median(&steps[1..steps.len() - 1])
                })
            })
            .collect();
        thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        running.into_iter().map(|job| job.join().unwrap_or(f64::NAN)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_is_measured_alone_and_beside_the_other() {
        let pool = ThreadPool::new(2).unwrap();
        let job = |name| Job {
            name,
            arrays: Arrays::allocate(1 << 17, &pool).unwrap(),
            account: Account::new(1),
            part: 0.5,
        };
        let mut jobs = [job("a"), job("b")];
        let times = measure(&pool, &mut jobs, std::time::Duration::from_millis(20));
        assert!(times.len() == 2 && times.iter().all(|&time| time > 0.0), "{times:?}");
    }
}
