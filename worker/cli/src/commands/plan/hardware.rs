//! Formats the results of `longshore plan --probe` as a file for --hardware.

use longshore_proto::Formats;

use crate::bench::probe::Probed;

pub(super) fn file(formats: Formats, probed: &Probed) -> String {
    let mut lines = vec![
        format!(
            "# Measured by `longshore plan --probe` with {} threads: updates of {} moments and {} master weights.",
            probed.threads, formats.state, formats.master
        ),
        format!("memory = \"{}MiB\"", probed.memory >> 20),
        match probed.nvme {
            Some(free) => format!("nvme = \"{}MiB\"", free >> 20),
            None => "# nvme = \"2TB\"  # --probe-dir finds what is free".to_string(),
        },
        "# drive-endurance = \"600TB\"  # what its data sheet says may be written to each server's drives"
            .to_string(),
        "# gpu-memory = \"80GiB\"".to_string(),
        "# gpu-tflops = 300.0".to_string(),
        format!("server-memory = {:.2}", probed.server_memory),
    ];
    match probed.drives {
        Some(drives) => lines.push(format!("drives = {drives:.3}")),
        None => lines.push("# drives = 6.0  # --probe-dir measures it".to_string()),
    }
    if probed.is_loopback {
        lines.push("# Over loopback; --probe-servers measures the link to other hosts.".to_string());
    }
    lines.push(format!("link = {:.3}", probed.link));
    lines.push(format!("round-trip = {:.0}.0", probed.round_trip_us));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::HardwareArgs;

    #[test]
    fn what_a_probe_prints_is_a_file_for_hardware() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("node.toml");
        for drives in [None, Some(2.5)] {
            let probed = Probed {
                threads: 2,
                memory: (37 << 20) + 5,
                nvme: drives.map(|_| 700 << 30),
                server_memory: 12.345,
                drives,
                link: 1.5,
                is_loopback: true,
                round_trip_us: 87.4,
            };
            std::fs::write(&path, file(Formats::default(), &probed)).unwrap();
            let args = HardwareArgs::of_flags(Some(path.clone()), Some(100.0)).with_file().unwrap();
            assert_eq!(args.memory.map(|size| size.0), Some(37 << 20));
            assert_eq!(args.nvme.map(|size| size.0), drives.map(|_| 700 << 30));
            let speeds = args.speeds(drives.is_some()).unwrap().unwrap();
            assert_eq!((speeds.server_memory, speeds.link), (12.35e9, 1.5e9));
            assert_eq!(speeds.drives, drives.unwrap_or(f64::INFINITY) * 1e9);
            assert!((speeds.round_trip_s - 87e-6).abs() < 1e-12);
        }
    }
}
