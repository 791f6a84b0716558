//! A line for the record (target `audit`) of each operator's call, and of each call that an identity may not make.

use http::HeaderMap;
use longshore_proto::Fault;
use tonic::{Code, Status};

use super::caller::Caller;

/// A call on its way to its answer. Where it is dropped before, its caller has given it up or the server has ended its connection, which
/// ends no work that it has begun.
pub(super) struct Record {
    caller: Caller,
    noted: bool,
}

/// What became of a call.
enum Outcome<'a> {
    Answered,
    /// With the reason.
    Refused(&'a str),
    /// It ended before anything was done.
    GivenUp,
    /// It ended before its answer, for this reason. What it had begun may be done, or still go on.
    Unknown(&'a str),
}

impl Record {
    pub(super) fn of(caller: &Caller) -> Record {
        Record { caller: caller.clone(), noted: false }
    }

    /// Notes what became of the call, by the headers of its answer. A stream that fails later was answered.
    pub(super) fn answered(mut self, answer: &HeaderMap) {
        self.noted = true;
        let status = Status::from_header_map(answer).filter(|status| status.code() != Code::Ok);
        match status.as_ref().map(|status| (status.message(), is_denial(status.code()))) {
            Some((why, true)) => denied(&self.caller, why),
            _ if !self.caller.is_audited() => {}
            Some((why, false)) => line(&self.caller, Outcome::Refused(why)),
            None => line(&self.caller, Outcome::Answered),
        }
    }

    /// Notes that the call was ended, since its caller may make it no longer.
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
        line(
            &self.caller,
            match self.caller.was_permitted() {
                true => Outcome::Unknown("the call or its connection ended before the answer"),
                false => Outcome::GivenUp,
            },
        );
    }
}

/// Notes a call that was refused before anything of it was read.
pub(super) fn refused(caller: &Caller, fault: &Fault) {
    line(caller, Outcome::Refused(&fault.to_string()));
}

/// Notes that a message of a stream was refused for who sent it, once a stream: the stream's answer says so to the caller alone.
pub(crate) fn note_refused_message(caller: &Caller, fault: &Fault) {
    if caller.is_first_refusal() {
        denied(caller, &fault.to_string());
    }
}

fn denied(caller: &Caller, why: &str) {
    // What was permitted before may have been done.
    line(caller, if caller.was_permitted() { Outcome::Unknown(why) } else { Outcome::Refused(why) });
}

fn line(caller: &Caller, outcome: Outcome<'_>) {
    let (who, call) = (caller.who(), caller.call());
    // An attacker names jobs too: the name is quoted.
    let job = caller.job().unwrap_or_default();
    let (outcome, why) = match outcome {
        Outcome::Answered => ("answered", None),
        Outcome::Refused(why) => ("refused", Some(why)),
        Outcome::GivenUp => ("given up", None),
        Outcome::Unknown(why) => ("unknown", Some(why)),
    };
    match why {
        None => tracing::info!(target: "audit", who, call, ?job, outcome),
        Some(why) => tracing::info!(target: "audit", who, call, ?job, outcome, why),
    }
}

fn is_denial(code: Code) -> bool {
    matches!(code, Code::PermissionDenied | Code::Unauthenticated)
}
