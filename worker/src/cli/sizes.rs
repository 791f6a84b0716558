//! Byte counts as people read them.

/// Three significant digits and a binary unit: `1.50 GiB`.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    #[test]
    fn three_digits_and_a_unit() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"), (200 << 30, "200 GiB")]
        {
            assert_eq!(super::human(bytes), text);
        }
    }
}
