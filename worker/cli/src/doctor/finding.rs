//! Findings of checks.

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) what: String,
    pub(crate) grade: Grade,
    pub(crate) said: String,
    /// Empty if nothing needs to be done.
    pub(crate) remedy: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grade {
    Good,
    /// Works, but slower, for fewer jobs, or not for long.
    Warning,
    /// Does not work.
    Bad,
}

impl Grade {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Grade::Good => "ok",
            Grade::Warning => "warning",
            Grade::Bad => "bad",
        }
    }
}

pub(super) fn good(what: impl Into<String>, said: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade: Grade::Good, said: said.into(), remedy: String::new() }
}

pub(super) fn warning(
    what: impl Into<String>,
    said: impl Into<String>,
    remedy: impl Into<String>,
) -> Finding {
    Finding { what: what.into(), grade: Grade::Warning, said: said.into(), remedy: remedy.into() }
}

pub(super) fn bad(what: impl Into<String>, said: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { what: what.into(), grade: Grade::Bad, said: said.into(), remedy: remedy.into() }
}
