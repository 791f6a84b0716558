//! The one shape of an error that crosses the wire: field, value, limit and remedy.

use std::fmt;

use crate::{legible::legible, named::named};

/// Field of a conflict: the decision was made from other contributions than the server has.
pub const ORIGIN: &str = "commit.origin";
/// Field of a conflict: the contribution was computed with a version that was taken back.
pub const READS: &str = "push.reads";
/// Field of a conflict: another rank computes the same step with another version.
pub const READS_VERSION: &str = "push.reads_version";
/// Field of a commit's fault while the commit waits for gradients of ranks that have joined again.
pub const OWED: &str = "commit.gradients";
/// Limit in the fault of a missing job, if the server has deleted that job since the server started.
pub const DELETED: &str = "open on this server, which has deleted it";
/// End of the remedy in the fault of a job that has left this server.
pub const MOVED: &str = "to which the job has moved";

/// Largest size of each of a fault's four texts on the wire. Each text is sent twice, in message and details. The eight
/// copies fit the 16 KiB of headers that gRPC libraries accept.
const MOST_TEXT_BYTES: usize = 1024;

/// Class of a fault, from which a caller decides whether to retry. `wire::status` maps it to a gRPC
/// code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The request is invalid in every state.
    Invalid,
    /// The request contradicts a request that was already accepted.
    Conflict,
    /// The request names something that does not exist.
    NotFound,
    /// The request is wrong in the present state of the job or server, and may be right in another state.
    Precondition,
    /// The caller has not shown who it is.
    Unauthenticated,
    /// The caller may not do this, or not to this job.
    Forbidden,
    /// A newer incarnation has taken the rank.
    Fenced,
    /// The request needs more memory, places or disk than is free.
    Exhausted,
    /// The request was not completed in time.
    Deadline,
    /// Bytes differ from their checksum.
    Corrupt,
    /// The server is stopping, or is not reachable.
    Unavailable,
    /// A defect or a failed device on the server.
    Internal,
}

// Clients read these names from the wire and the documentation, so no name may change.
named!(FaultKind;
    Invalid = "INVALID",
    Conflict = "CONFLICT",
    NotFound = "NOT_FOUND",
    Precondition = "PRECONDITION",
    Unauthenticated = "UNAUTHENTICATED",
    Forbidden = "FORBIDDEN",
    Fenced = "FENCED",
    Exhausted = "EXHAUSTED",
    Deadline = "DEADLINE",
    Corrupt = "CORRUPT",
    Unavailable = "UNAVAILABLE",
    Internal = "INTERNAL",
);

impl FaultKind {
    pub fn from_name(name: &str) -> Option<FaultKind> {
        FaultKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    pub field: String,
    pub value: String,
    pub limit: String,
    pub remedy: String,
}

impl Fault {
    pub fn new(
        kind: FaultKind,
        field: impl Into<String>,
        value: impl fmt::Display,
        limit: impl fmt::Display,
        remedy: impl Into<String>,
    ) -> Fault {
        Fault {
            kind,
            field: field.into(),
            value: value.to_string(),
            limit: limit.to_string(),
            remedy: remedy.into(),
        }
    }

    pub fn invalid(
        field: impl Into<String>,
        value: impl fmt::Display,
        limit: impl fmt::Display,
        remedy: impl Into<String>,
    ) -> Fault {
        Fault::new(FaultKind::Invalid, field, value, limit, remedy)
    }

    /// Returns the fault with each text cut to the size that a server sends and keeps. A value may quote megabytes of a
    /// message.
    pub fn cut(&self) -> Fault {
        let cut = |text: &String| match text.len() {
            ..=MOST_TEXT_BYTES => text.clone(),
            bytes => format!("{}... ({bytes} bytes)", &text[..text.floor_char_boundary(MOST_TEXT_BYTES)]),
        };
        let Fault { kind, field, value, limit, remedy } = self;
        Fault { kind: *kind, field: cut(field), value: cut(value), limit: cut(limit), remedy: cut(remedy) }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [field, value, limit, remedy] =
            [&self.field, &self.value, &self.limit, &self.remedy].map(|text| legible(text));
        write!(f, "{field} is {value}, but must be {limit}: {remedy}")
    }
}

impl std::error::Error for Fault {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_one_line_and_is_sent_cut() {
        let fault = Fault::invalid("a", "x\u{1b}[2J\n2026-01-01 INFO audit: who=operator", "b", "c");
        assert_eq!(
            fault.to_string(),
            "a is x\\u001b[2J\\n2026-01-01 INFO audit: who=operator, but must be b: c"
        );
        let long = Fault::invalid("a", "é".repeat(1 << 20), "b", "c".repeat(MOST_TEXT_BYTES));
        let cut = long.cut();
        assert!(
            cut.value.len() < MOST_TEXT_BYTES + 32 && cut.value.ends_with("é... (2097152 bytes)"),
            "{cut}"
        );
        assert_eq!(Fault { value: long.value.clone(), ..cut }, long);
    }
}
