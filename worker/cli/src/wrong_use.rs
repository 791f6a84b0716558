//! Errors of arguments that the parser cannot see. The program ends with the exit code of wrong arguments.

use std::fmt;

/// Wrong arguments: nothing was tried. Displayed as the inner error.
#[derive(Debug)]
pub(crate) struct WrongUse(pub(crate) anyhow::Error);

impl fmt::Display for WrongUse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for WrongUse {}

/// Marks an error as one of arguments.
pub(crate) fn wrong_use(error: impl Into<anyhow::Error>) -> anyhow::Error {
    WrongUse(error.into()).into()
}
