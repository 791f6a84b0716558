//! Lengths of time as people write them: 90s, 30min, 24h, 7d, or never.

use std::{str::FromStr, time::Duration};

/// After how long without use a job is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub enum IdleLimit {
    Never,
    After(Duration),
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no time: write never, or a whole number above 0 and one of s, min, h, d, as in 24h")]
pub struct IdleLimitError {
    text: String,
}

impl FromStr for IdleLimit {
    type Err = IdleLimitError;

    fn from_str(text: &str) -> Result<IdleLimit, IdleLimitError> {
        let error = || IdleLimitError { text: text.to_string() };
        let trimmed = text.trim();
        if trimmed == "never" {
            return Ok(IdleLimit::Never);
        }
        let split = trimmed.find(|c: char| !c.is_ascii_digit()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let seconds: u64 = match unit.trim() {
            "s" => 1,
            "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err(error()),
        };
        let number: u32 = number.parse().map_err(|_| error())?;
        if number == 0 {
            return Err(error());
        }
        Ok(IdleLimit::After(Duration::from_secs(u64::from(number) * seconds)))
    }
}

impl TryFrom<String> for IdleLimit {
    type Error = IdleLimitError;

    fn try_from(text: String) -> Result<IdleLimit, IdleLimitError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_written() {
        let after = |seconds| Ok(IdleLimit::After(Duration::from_secs(seconds)));
        for (text, limit) in [
            ("90s", after(90)),
            ("30min", after(1800)),
            (" 24 h", after(86_400)),
            ("7d", after(604_800)),
            ("never", Ok(IdleLimit::Never)),
        ] {
            assert_eq!(text.parse(), limit);
        }
        for text in ["", "24", "h", "-1h", "0s", "1.5h", "99999999999d", "1 fortnight"] {
            assert!(text.parse::<IdleLimit>().is_err(), "{text}");
        }
    }
}
