//! Benches of `longshore bench`, and their report. Each round measures a case together with its limit on the same
//! machine. On a shared host, memory, disks and loopback change speed by a factor of two within minutes. A rate
//! means something only beside a limit measured at the same time.

mod arrays;
mod host;
pub(crate) mod probe;
pub(crate) mod step;
pub(crate) mod storage;
pub(crate) mod update;
pub(crate) mod wire;

use std::time::Duration;

use longshore_proto::{JobName, JobSpec, Param};
use rustix::time::{ClockId, clock_gettime};

/// Returns the base job of a bench: AdamW, bf16 both ways, one rank, exact. Each bench changes the fields that it
/// varies.
pub(crate) fn job(name: &str, params: Vec<Param>) -> anyhow::Result<JobSpec> {
    Ok(JobSpec::new(JobName::parse("job", name)?, params))
}

pub(crate) fn param(name: impl Into<String>, elements: u64) -> Param {
    Param { name: name.into(), shape: vec![elements], group: 0 }
}

/// A case, with its own time and its limit's time in each round.
pub(crate) struct Measured {
    pub(crate) bench: &'static str,
    pub(crate) case: String,
    pub(crate) threads: usize,
    pub(crate) bytes: u64,
    pub(crate) params: u64,
    pub(crate) times: Vec<f64>,
    pub(crate) limits: Vec<f64>,
}

impl Measured {
    fn rate(&self, seconds: f64) -> f64 {
        self.bytes as f64 / seconds / 1e9
    }

    pub(crate) fn gb_per_s(&self) -> f64 {
        self.rate(median(&self.times))
    }

    pub(crate) fn min_gb_per_s(&self) -> f64 {
        self.rate(self.times.iter().copied().fold(0.0, f64::max))
    }

    pub(crate) fn max_gb_per_s(&self) -> f64 {
        self.rate(self.times.iter().copied().fold(f64::INFINITY, f64::min))
    }

    pub(crate) fn limit_gb_per_s(&self) -> f64 {
        self.rate(median(&self.limits))
    }

    /// Ratio of the case to its limit: the median over the rounds. In each round, case and limit run in direct
    /// succession.
    pub(crate) fn fraction(&self) -> f64 {
        let ratios: Vec<f64> =
            self.times.iter().zip(&self.limits).map(|(time, limit)| limit / time).collect();
        median(&ratios)
    }

    pub(crate) fn ns_per_param(&self) -> f64 {
        median(&self.times) * 1e9 / self.params as f64
    }

    fn row(&self) -> String {
        line([
            self.case.clone(),
            self.threads.to_string(),
            format!("{:.1}", self.gb_per_s()),
            format!("{:.1}..{:.1}", self.min_gb_per_s(), self.max_gb_per_s()),
            format!("{:.1}", self.limit_gb_per_s()),
            format!("{:.2}", self.fraction()),
            format!("{:.3}", self.ns_per_param()),
        ])
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "bench": self.bench,
            "case": self.case,
            "threads": self.threads,
            "gb_per_s": self.gb_per_s(),
            "min_gb_per_s": self.min_gb_per_s(),
            "max_gb_per_s": self.max_gb_per_s(),
            "limit_gb_per_s": self.limit_gb_per_s(),
            "fraction": self.fraction(),
            "ns_per_param": self.ns_per_param(),
            "params": self.params,
            "bytes": self.bytes,
            "rounds": self.times.len(),
        })
    }
}

/// Returns the head of a table of measurements. The table is Markdown, so that it can be pasted into a page.
fn head() -> String {
    let names = ["case", "threads", "GB/s", "min..max", "limit GB/s", "of the limit", "ns/param"];
    line(names.map(str::to_string)) + "\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
}

fn line([case, threads, rate, range, limit, fraction, time]: [String; 7]) -> String {
    format!(
        "| {case:<54} | {threads:>7} | {rate:>6} | {range:>14} | {limit:>10} | {fraction:>12} | {time:>8} |"
    )
}

/// CPU time of all threads of this process. Both ends of a bench run here, so the time covers both.
fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        odd if odd % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fraction_pairs_rounds_and_rates_use_medians() {
        // The host is half as fast in one round, whose ratio stays the same.
        let measured = Measured {
            bench: "update",
            case: "adamw".to_string(),
            threads: 1,
            bytes: 4_000_000_000,
            params: 1_000_000_000,
            times: vec![2.0, 1.0, 1.25],
            limits: vec![1.6, 0.9, 1.0],
        };
        assert!((measured.fraction() - 0.8).abs() < 1e-12);
        assert_eq!((measured.gb_per_s(), measured.ns_per_param()), (3.2, 1.25));
        assert_eq!((measured.min_gb_per_s(), measured.max_gb_per_s()), (2.0, 4.0));
        assert_eq!(measured.limit_gb_per_s(), 4.0);
        assert_eq!(measured.json()["rounds"], 3);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}
