//! Unknown names of settings, and the known name nearest to each.

use super::{
    error::ConfigError,
    retired::{self, Retired},
};

/// Refuses an unknown name that starts with `prefix`, so that a mistyped variable is not silently ignored.
pub fn check_variables(
    prefix: &str,
    (known, retired): (&[&str], &[Retired]),
    names: impl IntoIterator<Item = String>,
) -> Result<(), ConfigError> {
    let unknown = names.into_iter().find(|name| name.starts_with(prefix) && !known.contains(&name.as_str()));
    let Some(name) = unknown else { return Ok(()) };
    Err(match retired::instead(name.trim_start_matches(prefix), retired) {
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
