//! Audit lines (target `audit`): one for each operator's call, and one for each call that an identity may not make.

use http::HeaderMap;
use longshore_proto::Fault;
use tonic::{Code, Status};

use super::caller::Caller;

const REFUSED: &str = "refused";
/// Outcome of a call whose effects may be done, or still in progress.
const UNKNOWN: &str = "unknown";

/// Audit record of a call in progress. A record dropped before the answer means that the caller gave up, or that the
/// server closed the connection. Work already begun continues.
pub(super) struct Record {
    caller: Caller,
    noted: bool,
}

impl Record {
    pub(super) fn of(caller: &Caller) -> Record {
        Record { caller: caller.clone(), noted: false }
    }

    /// Logs the outcome from the answer's headers. A stream that fails later counts as answered.
    pub(super) fn answered(mut self, answer: &HeaderMap) {
        self.noted = true;
        let status = Status::from_header_map(answer).filter(|status| status.code() != Code::Ok);
        match status.as_ref().map(|status| (status.message(), is_denial(status.code()))) {
            Some((why, true)) => denied(&self.caller, why),
            _ if !self.caller.is_audited() => {}
            Some((why, false)) => line(&self.caller, REFUSED, Some(why)),
            None => line(&self.caller, "answered", None),
        }
    }

    /// Logs that the call was ended, since its caller lost the permission.
    pub(super) fn revoked(mut self, fault: &Fault) {
        self.noted = true;
        denied(&self.caller, &fault.to_string());
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if self.noted || !self.caller.is_audited() {
            return;
        }
        match self.caller.was_permitted() {
            true => line(&self.caller, UNKNOWN, Some("the call or its connection ended before the answer")),
            false => line(&self.caller, "given up", None),
        }
    }
}

/// Logs a call refused before any of its message was read.
pub(super) fn refused(caller: &Caller, fault: &Fault) {
    line(caller, REFUSED, Some(&fault.to_string()));
}

/// Logs, once a stream, that a message was refused because of its sender. The stream's answer tells only the caller.
pub(crate) fn note_refused_message(caller: &Caller, fault: &Fault) {
    if caller.is_first_refusal() {
        denied(caller, &fault.to_string());
    }
}

fn denied(caller: &Caller, why: &str) {
    // Messages that were permitted earlier in the call may have taken effect.
    line(caller, if caller.was_permitted() { UNKNOWN } else { REFUSED }, Some(why));
}

/// Writes a line. `given up` is the outcome of a call that had no effect.
fn line(caller: &Caller, outcome: &str, why: Option<&str>) {
    let (who, call) = (caller.who(), caller.call());
    // Attackers choose job names too, so the name is quoted.
    let job = caller.job().unwrap_or_default();
    match why {
        None => tracing::info!(target: "audit", who, call, ?job, outcome),
        Some(why) => tracing::info!(target: "audit", who, call, ?job, outcome, why),
    }
}

fn is_denial(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::Unauthenticated)
}
