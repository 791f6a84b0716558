//! What the slow tests do more of than those of every day.

use std::env;

/// Whether the slow tests run.
pub fn runs() -> bool {
    env::var_os("LONGSHORE_SOAK").is_some()
}

/// The second number where the slow tests run, otherwise the first.
pub fn pick<T>(quick: T, soak: T) -> T {
    if runs() { soak } else { quick }
}
