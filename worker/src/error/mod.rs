//! Failures of the worker library. Each failure is a struct that callers can match on, and names a remedy.
//!
//! All are `Clone`: a session keeps its background failure, and every later call returns it.

mod call;
mod local;
mod state;

use longshore_proto::Fault;

pub use self::{
    call::{
        CallFailed, ChunkRefused, Fenced, Interrupted, MissingBlock, Outdated, StillPaused, TimedOut,
        Unreachable, Untrusted,
    },
    local::{DeviceError, Environment, GradientError, Invalid, Misuse, Shortage},
    state::{
        NoCheckpoint, NotRestored, OtherCheckpoints, OtherFilling, StateKept, StateLost, VersionsDiffer,
    },
};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Large variants are boxed, so that a `Result` stays small.
#[derive(Clone, Debug, thiserror::Error)]
#[error(transparent)]
pub enum Error {
    Invalid(#[from] Invalid),
    Unreachable(#[from] Unreachable),
    Untrusted(Box<Untrusted>),
    Call(Box<CallFailed>),
    Refused(Box<ChunkRefused>),
    StateLost(#[from] StateLost),
    Fenced(Box<Fenced>),
    Outdated(Box<Outdated>),
    VersionsDiffer(#[from] VersionsDiffer),
    NotRestored(Box<NotRestored>),
    StateKept(Box<StateKept>),
    NoCheckpoint(#[from] NoCheckpoint),
    OtherCheckpoints(#[from] OtherCheckpoints),
    OtherFilling(#[from] OtherFilling),
    TimedOut(Box<TimedOut>),
    StillPaused(#[from] StillPaused),
    Interrupted(#[from] Interrupted),
    Gradient(#[from] GradientError),
    Shortage(#[from] Shortage),
    Device(#[from] DeviceError),
    MissingBlock(#[from] MissingBlock),
    Misuse(#[from] Misuse),
    Environment(#[from] Environment),
}

macro_rules! boxed {
    ($($variant:ident($inner:ident)),*) => {
        $(impl From<$inner> for Error {
            fn from(error: $inner) -> Error {
                Error::$variant(Box::new(error))
            }
        })*
    };
}

boxed!(
    Call(CallFailed),
    Refused(ChunkRefused),
    Fenced(Fenced),
    Outdated(Outdated),
    NotRestored(NotRestored),
    StateKept(StateKept),
    Untrusted(Untrusted),
    TimedOut(TimedOut)
);

impl From<Fault> for Error {
    /// Converts a fault that was found on this side, before anything is sent. A server's fault needs the server's
    /// address: `CallFailed`.
    fn from(fault: Fault) -> Error {
        Error::Invalid(Invalid(fault))
    }
}
