//! Formats byte counts for people, and parses counts that people write.

/// Formats bytes with three significant digits and a binary unit: `1.50 GiB`.
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

/// Parses `200M`, `1.5B` or plain digits.
pub(crate) fn parse_count(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" => 1.0,
        "k" => 1e3,
        "m" => 1e6,
        "b" | "g" => 1e9,
        "t" => 1e12,
        _ => return Err(format!("{unit:?} is not a unit: write K, M, B or T, as in 200M")),
    };
    let value = number.parse::<f64>().map_err(|_| format!("{text:?} is not a number, as in 200M"))? * factor;
    if !(1.0..=1e16).contains(&value) {
        return Err(format!("{text} is not between 1 and 10000T"));
    }
    Ok(value as u64)
}

#[cfg(test)]
mod tests {
    #[test]
    fn counts_are_read_as_written() {
        for (text, count) in [
            ("65536", 65536),
            ("200M", 200_000_000),
            ("1.5b", 1_500_000_000),
            ("4k", 4000),
            ("10000T", 10_000_000_000_000_000),
        ] {
            assert_eq!(super::parse_count(text), Ok(count));
        }
        for text in ["", "M", "0", "-1", "1 apple", "1e30"] {
            assert!(super::parse_count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn three_digits_and_a_unit() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (10 << 20, "10.0 MiB"), (200 << 30, "200 GiB")]
        {
            assert_eq!(super::human(bytes), text);
        }
    }
}
