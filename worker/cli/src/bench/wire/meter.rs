//! Wall and CPU time of a piece of work. Both ends run in this process, so its CPU time covers both.

use std::time::{Duration, Instant};

use crate::bench::process_cpu;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    bytes: u64,
    wall: Duration,
    cpu: Duration,
}

impl Sample {
    /// Runs `work`, and adds its times and the `bytes` that it moved.
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

    pub(super) fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / 1e9 / self.wall.as_secs_f64()
    }

    pub(super) fn cpu_s_per_gb(&self) -> f64 {
        self.cpu.as_secs_f64() / (self.bytes as f64 / 1e9)
    }
}
