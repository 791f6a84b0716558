//! Longer settings for the slow tests.

use std::env;

/// Returns whether the slow tests run.
pub fn runs() -> bool {
    env::var_os("LONGSHORE_SOAK").is_some()
}

/// Returns `soak` where the slow tests run, otherwise `quick`.
pub fn pick<T>(quick: T, soak: T) -> T {
    if runs() { soak } else { quick }
}
