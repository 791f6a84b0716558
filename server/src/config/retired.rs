//! Errors about names of settings. The error for a mistyped name states the nearest existing name. The error for a name
//! of an earlier release states its replacement.
//!
//! Flag, key and variable of one retired setting share its row. A row stays for one release.

use std::env;

use clap::{
    Arg, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};

use super::ConfigError;

/// Flag name without dashes, and its replacement.
pub type Retired = (&'static str, &'static str);

/// Retired settings of `longshored`.
pub(crate) const SETTINGS: [Retired; 4] = [
    ("durability", DURABILITY),
    ("idle-limit", IDLE_LIMIT),
    ("otlp", "scrape the metrics of --http, or write one process's stages with `longshore train --trace`"),
    ("storage-io", "leave it out: io_uring is taken where the kernel allows it, and threads elsewhere"),
];

/// `longshore plan` prints this text, too.
pub const DURABILITY: &str =
    "leave it out: each version is durable; open jobs whose state need not be with the tier memory";
/// `identities.toml` is refused with this text, too.
pub(crate) const IDLE_LIMIT: &str = "leave it out: `longshore status` and the metric longshore_job_idle_seconds say for how long a job idles; \
                                     `longshore checkpoint`, then `longshore delete`, give its memory back";

pub(super) fn instead(name: &str, retired: &[Retired]) -> Option<&'static str> {
    let name = name.trim_start_matches('-').to_lowercase().replace('_', "-");
    retired.iter().find(|(flag, _)| *flag == name).map(|(_, instead)| *instead)
}

/// Adds the sentence about the replacement to the parser's error about a retired flag. Other errors are returned
/// unchanged.
pub fn explain(error: clap::Error, retired: &[Retired]) -> clap::Error {
    let flag = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(flag))) => flag,
        _ => return error,
    };
    match instead(flag, retired) {
        Some(instead) => {
            clap::Error::raw(ErrorKind::UnknownArgument, format!("{flag} is no longer there: {instead}\n"))
        }
        None => error,
    }
}

/// Adds to the parser's error about a wrong value the variable that the value comes from. Other errors are returned
/// unchanged.
pub fn name_variable(mut error: clap::Error, mut command: Command) -> clap::Error {
    // The text of an argument needs what `build` fills in.
    command.build();
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let (Some(flag), Some(value)) = (text(ContextKind::InvalidArg), text(ContextKind::InvalidValue)) else {
        return error;
    };
    let argument = command.get_arguments().find(|argument| argument.to_string() == flag);
    let variable = argument.and_then(Arg::get_env).filter(|&name| env::var_os(name) == Some(value.into()));
    if let Some(variable) = variable {
        let named = format!("{flag} ({})", variable.display());
        error.insert(ContextKind::InvalidArg, ContextValue::String(named));
    }
    error
}

/// Refuses an unknown name that starts with `prefix`, so that a mistyped variable is not silently ignored.
pub fn check_variables(
    prefix: &str,
    (known, retired): (&[&str], &[Retired]),
    names: impl IntoIterator<Item = String>,
) -> Result<(), ConfigError> {
    let unknown = names.into_iter().find(|name| name.starts_with(prefix) && !known.contains(&name.as_str()));
    let Some(name) = unknown else { return Ok(()) };
    Err(match instead(name.trim_start_matches(prefix), retired) {
        Some(instead) => ConfigError::RetiredVariable { name, instead },
        None => ConfigError::UnknownVariable { nearest: nearest(&name, known.iter().copied()), name },
    })
}

/// Returns the candidate nearest to a mistyped name, if its similarity exceeds 0.5.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let scored = candidates
        .into_iter()
        .map(|candidate| (strsim::normalized_damerau_levenshtein(name, candidate), candidate));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 > 0.5).then(|| best.1.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retired_flag_says_what_to_do() {
        let command = Command::new("longshored").arg(Arg::new("log").long("log"));
        let refused = |flag: &str| {
            let error = command.clone().try_get_matches_from(["longshored", flag]).unwrap_err();
            explain(error, &SETTINGS).to_string()
        };
        for flag in ["--otlp", "--otlp=http://collector:4317"] {
            assert!(refused(flag).contains("--otlp is no longer there: scrape"), "{}", refused(flag));
        }
        assert!(refused("--logg").contains("--log"), "{}", refused("--logg"));
    }
}
