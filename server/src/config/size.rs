//! Byte sizes in text, and the memory this process may use.

use std::{fs, path::Path, str::FromStr};

/// A number of bytes, written `512GiB`, `10GB` or `4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub struct ByteSize(pub u64);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a size: write a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB, as in 512GiB"
)]
pub struct SizeError {
    text: String,
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<ByteSize, SizeError> {
        let error = || SizeError { text: text.to_string() };
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let factor = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1u64,
            "kb" => 1000,
            "mb" => 1000_u64.pow(2),
            "gb" => 1000_u64.pow(3),
            "tb" => 1000_u64.pow(4),
            "kib" | "k" => 1 << 10,
            "mib" | "m" => 1 << 20,
            "gib" | "g" => 1 << 30,
            "tib" | "t" => 1 << 40,
            _ => return Err(error()),
        };
        let value: f64 = number.parse().map_err(|_| error())?;
        let bytes = value * factor as f64;
        if !(0.0..9e18).contains(&bytes) {
            return Err(error());
        }
        Ok(ByteSize(bytes as u64))
    }
}

impl TryFrom<String> for ByteSize {
    type Error = SizeError;

    fn try_from(text: String) -> Result<ByteSize, SizeError> {
        text.parse()
    }
}

fn meminfo(field: &str) -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let rest = meminfo.lines().find_map(|line| line.strip_prefix(field))?;
    rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Returns the bytes this process may use: the smaller of the host's available memory and the cgroup's limit.
pub fn available_memory() -> u64 {
    let host = meminfo("MemAvailable:").unwrap_or(1 << 30);
    group_memory().map_or(host, |group| group.min(host))
}

/// Returns the total bytes: the smaller of the host's memory and the cgroup's limit. None if the kernel reports
/// neither.
pub fn total_memory() -> Option<u64> {
    let host = meminfo("MemTotal:");
    host.into_iter().chain(group_memory()).min()
}

/// Returns the lowest limit of this process's cgroup and its ancestors.
fn group_memory() -> Option<u64> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let root = Path::new("/sys/fs/cgroup");
    let groups = root.join(own);
    let second = groups.ancestors().filter(|path| path.starts_with(root)).map(|path| path.join("memory.max"));
    // Path of the limit in cgroups version 1.
    let first = root.join("memory/memory.limit_in_bytes");
    second.chain([first]).filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_at_least_as_much_as_is_available() {
        assert!(total_memory().unwrap() >= available_memory());
    }

    #[test]
    fn sizes_are_read_as_written() {
        for (text, bytes) in
            [("4096", 4096), ("1.5KiB", 1536), ("2GB", 2_000_000_000), ("512 GiB", 512 << 30)]
        {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)));
        }
        for text in ["", "GiB", "-1", "1 parsec", "1e30TiB"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }
}
