//! A case of the bench, measured again and again, with its samples.

use std::time::{Duration, Instant};

use crate::bench::{median, process_cpu};

pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) limit: Option<&'static str>,
    sample: Box<dyn FnMut() -> anyhow::Result<Sample>>,
    samples: Vec<Sample>,
}

impl Case {
    pub(super) fn new(
        name: &'static str,
        limit: Option<&'static str>,
        sample: impl FnMut() -> anyhow::Result<Sample> + 'static,
    ) -> Case {
        Case { name, limit, sample: Box::new(sample), samples: Vec::new() }
    }

    pub(super) fn median(&self, value: impl Fn(&Sample) -> f64) -> f64 {
        median(&self.samples.iter().map(value).collect::<Vec<f64>>())
    }

    pub(super) fn round(&mut self, round: usize) -> anyhow::Result<()> {
        let sample = (self.sample)()?;
        // The first round warms up: it touches memory, and lets windows and socket buffers grow.
        if round > 0 {
            self.samples.push(sample);
        }
        Ok(())
    }
}

/// Wall and CPU time of a piece of work. Both ends run in this process, so its CPU time covers both.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::bench) struct Sample {
    bytes: u64,
    wall: Duration,
    cpu: Duration,
}

impl Sample {
    pub(super) fn time<T>(
        &mut self,
        bytes: usize,
        work: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let (wall, cpu) = (Instant::now(), process_cpu());
        let result = work()?;
        self.wall += wall.elapsed();
        self.cpu += process_cpu().saturating_sub(cpu);
        self.bytes += bytes as u64;
        Ok(result)
    }

    pub(in crate::bench) fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.wall.as_secs_f64()
    }

    pub(super) fn cpu_s_per_gb(&self) -> f64 {
        self.cpu.as_secs_f64() / (self.bytes as f64 / 1e9)
    }
}
