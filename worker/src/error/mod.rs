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
pub enum Error {
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    #[error(transparent)]
    Untrusted(Box<Untrusted>),
    #[error(transparent)]
    Call(Box<CallFailed>),
    #[error(transparent)]
    Refused(Box<ChunkRefused>),
    #[error(transparent)]
    StateLost(#[from] StateLost),
    #[error(transparent)]
    Fenced(Box<Fenced>),
    #[error(transparent)]
    Outdated(Box<Outdated>),
    #[error(transparent)]
    VersionsDiffer(#[from] VersionsDiffer),
    #[error(transparent)]
    NotRestored(Box<NotRestored>),
    #[error(transparent)]
    StateKept(Box<StateKept>),
    #[error(transparent)]
    NoCheckpoint(#[from] NoCheckpoint),
    #[error(transparent)]
    OtherCheckpoints(#[from] OtherCheckpoints),
    #[error(transparent)]
    OtherFilling(#[from] OtherFilling),
    #[error(transparent)]
    TimedOut(Box<TimedOut>),
    #[error(transparent)]
    StillPaused(#[from] StillPaused),
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    #[error(transparent)]
    Gradient(#[from] GradientError),
    #[error(transparent)]
    Shortage(#[from] Shortage),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    MissingBlock(#[from] MissingBlock),
    #[error(transparent)]
    Misuse(#[from] Misuse),
    #[error(transparent)]
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
