//! A line for the record (target `audit`) of each operator's call, and of each call that an identity may not make.

use http::HeaderMap;
use longshore_proto::Fault;
use tonic::{Code, Status};

use super::caller::Caller;

/// Notes what became of a call, by the headers of its answer. A stream that fails later was answered.
pub(super) fn note(caller: &Caller, answer: &HeaderMap) {
    let status = Status::from_header_map(answer).filter(|status| status.code() != Code::Ok);
    let denied = status.as_ref().is_some_and(|status| is_denial(status.code()));
    if caller.is_audited() || denied {
        line(caller, status.as_ref().map(Status::message));
    }
}

/// Notes a call that was refused before anything of it was read.
pub(super) fn refused(caller: &Caller, fault: &Fault) {
    line(caller, Some(&fault.to_string()));
}

fn line(caller: &Caller, why: Option<&str>) {
    let (who, call) = (caller.who(), caller.call());
    // An attacker names jobs too: the name is quoted.
    let job = caller.job().unwrap_or_default();
    match why {
        None => tracing::info!(target: "audit", who, call, ?job, outcome = "answered"),
        Some(why) => tracing::info!(target: "audit", who, call, ?job, outcome = "refused", why),
    }
}

fn is_denial(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::Unauthenticated)
}
