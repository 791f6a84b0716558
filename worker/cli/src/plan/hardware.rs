//! The hardware of a plan, from flags, or from a TOML file with the flags' names.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use longshore_server::config::ByteSize;
use serde::Deserialize;

use super::schedule::Hardware;

const GIGA: f64 = 1e9;

/// Speeds and sizes. Flags win over the file.
#[derive(Clone, Debug, Default, clap::Args, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct HardwareArgs {
    /// A TOML file with what the flags below say, under their names
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    hardware: Option<PathBuf>,
    /// DRAM that each server may use, as `longshored --memory`: says whether the job fits
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<ByteSize>,
    /// Space that each server has in its state directories: says whether the job fits
    #[arg(long, value_name = "SIZE")]
    pub(crate) nvme: Option<ByteSize>,
    /// Bytes that each server's drives may be written with, as in 600TB: how many days that is
    #[arg(long, value_name = "SIZE", requires = "step_s")]
    pub(crate) drive_endurance: Option<ByteSize>,
    /// Memory of each GPU: says which stage fits, and the largest model that does
    #[arg(long, value_name = "SIZE")]
    pub(crate) gpu_memory: Option<ByteSize>,
    /// 10^12 operations a second that each GPU reaches in training: with it, steps are predicted
    #[arg(long, value_name = "TFLOPS")]
    gpu_tflops: Option<f64>,
    /// GB/s between each GPU and the servers, in each direction
    #[arg(long, value_name = "GB/S")]
    link: Option<f64>,
    /// GB/s between each server and all GPUs, in each direction [default: --link]
    #[arg(long, value_name = "GB/S")]
    server_link: Option<f64>,
    /// GB/s that a server's memory moves in updates, as `longshore bench update` says
    #[arg(long, value_name = "GB/S")]
    server_memory: Option<f64>,
    /// GB/s that a server's drives read and write together, as `longshore bench storage` says
    #[arg(long, value_name = "GB/S")]
    drives: Option<f64>,
    /// GB/s between each GPU and the others: with it, ranks exchange slices of gradients and weights among themselves
    #[arg(long, value_name = "GB/S")]
    fabric: Option<f64>,
    /// Microseconds of a round trip to a server
    #[arg(long, value_name = "US")]
    round_trip: Option<f64>,
}

impl HardwareArgs {
    pub(crate) fn with_file(&self) -> anyhow::Result<HardwareArgs> {
        let Some(path) = &self.hardware else { return Ok(self.clone()) };
        let file = HardwareArgs::of_file(path).with_context(|| format!("--hardware {}", path.display()))?;
        Ok(HardwareArgs {
            hardware: None,
            memory: self.memory.or(file.memory),
            nvme: self.nvme.or(file.nvme),
            drive_endurance: self.drive_endurance.or(file.drive_endurance),
            gpu_memory: self.gpu_memory.or(file.gpu_memory),
            gpu_tflops: self.gpu_tflops.or(file.gpu_tflops),
            link: self.link.or(file.link),
            server_link: self.server_link.or(file.server_link),
            server_memory: self.server_memory.or(file.server_memory),
            drives: self.drives.or(file.drives),
            fabric: self.fabric.or(file.fabric),
            round_trip: self.round_trip.or(file.round_trip),
        })
    }

    fn of_file(path: &Path) -> anyhow::Result<HardwareArgs> {
        Ok(toml::from_str(&std::fs::read_to_string(path)?)?)
    }

    pub(crate) fn has_fabric(&self) -> bool {
        self.fabric.is_some()
    }

    /// Returns all speeds, if steps are to be predicted.
    ///
    /// # Errors
    /// If a needed speed is missing, or a speed is not above 0.
    pub(crate) fn speeds(&self, needs_drives: bool) -> anyhow::Result<Option<Hardware>> {
        for (flag, value) in [
            ("gpu-tflops", self.gpu_tflops),
            ("link", self.link),
            ("server-link", self.server_link),
            ("server-memory", self.server_memory),
            ("drives", self.drives),
            ("fabric", self.fabric),
        ] {
            let is_right = value.is_none_or(|value| value > 0.0 && value.is_finite());
            ensure!(is_right, "--{flag} is {}, but must be above 0", value.unwrap_or_default());
        }
        let round_trip_us = self.round_trip.unwrap_or(0.0);
        let is_right = round_trip_us >= 0.0 && round_trip_us.is_finite();
        ensure!(is_right, "--round-trip is {round_trip_us}, but must be at least 0");
        let Some(tflops) = self.gpu_tflops else { return Ok(None) };
        let needed = |flag: &str, value: Option<f64>| {
            value.with_context(|| {
                format!("--{flag} is missing: with --gpu-tflops steps are predicted, which needs it")
            })
        };
        let link = needed("link", self.link)?;
        let drives = if needs_drives { needed("drives", self.drives)? } else { f64::INFINITY };
        Ok(Some(Hardware {
            gpu_flops: tflops * 1e12,
            link: link * GIGA,
            server_link: self.server_link.unwrap_or(link) * GIGA,
            server_memory: needed("server-memory", self.server_memory)? * GIGA,
            drives: drives * GIGA,
            fabric: self.fabric.unwrap_or(f64::INFINITY) * GIGA,
            round_trip_s: round_trip_us * 1e-6,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_wins_over_the_file_and_unknown_names_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hardware.toml");
        std::fs::write(
            &path,
            "gpu-tflops = 50.0\nlink = 10.0\nserver-memory = 200.0\ngpu-memory = \"32GiB\"\n\
             memory = \"512GiB\"\nnvme = \"2TB\"\ndrive-endurance = \"600TB\"\n",
        )
        .unwrap();
        let flags = HardwareArgs { link: Some(20.0), nvme: Some(ByteSize(1 << 40)), ..Default::default() };
        let args = HardwareArgs { hardware: Some(path.clone()), ..flags };
        let args = args.with_file().unwrap();
        let speeds = args.speeds(false).unwrap().unwrap();
        assert_eq!((speeds.link, speeds.server_link, speeds.gpu_flops), (20e9, 20e9, 50e12));
        assert_eq!(args.gpu_memory.unwrap().0, 32 << 30);
        let sizes = [args.memory, args.nvme, args.drive_endurance].map(|size| size.unwrap().0);
        assert_eq!(sizes, [512 << 30, 1 << 40, 600_000_000_000_000]);
        let said = format!("{:#}", args.speeds(true).unwrap_err());
        assert!(said.contains("--drives is missing"), "{said}");
        std::fs::write(&path, "gpu-flops = 50.0\n").unwrap();
        let said = HardwareArgs { hardware: Some(path), ..Default::default() }.with_file().unwrap_err();
        assert!(format!("{said:#}").contains("gpu-flops"), "{said:#}");
        let wrong = HardwareArgs { link: Some(0.0), ..Default::default() };
        assert!(wrong.speeds(false).unwrap_err().to_string().contains("--link is 0"));
    }
}
