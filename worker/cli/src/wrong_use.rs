//! Errors of arguments that the parser cannot see. The program ends with the code of wrong arguments for them.

use std::fmt;

/// Wrong arguments: nothing was tried. It is shown as the error inside.
#[derive(Debug)]
pub(crate) struct WrongUse(pub(crate) anyhow::Error);

impl fmt::Display for WrongUse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for WrongUse {}

/// Takes an error for one of arguments.
pub(crate) fn wrong_use(error: impl Into<anyhow::Error>) -> anyhow::Error {
    WrongUse(error.into()).into()
}
