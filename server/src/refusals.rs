//! What this process has refused, by kind: an alert tells by it that bytes were damaged, and an operator that somebody may not.

use std::sync::atomic::{AtomicU64, Ordering};

use longshore_proto::{Fault, FaultKind};
use longshore_wire as wire;
use tonic::Status;

/// In the order of [`FaultKind::ALL`].
static REFUSED: [AtomicU64; FaultKind::ALL.len()] = [const { AtomicU64::new(0) }; _];

/// Counts a refused call or chunk. It is called once for each, at the place that refuses it.
pub(crate) fn count(fault: &Fault) {
    if let Some(kind) = FaultKind::ALL.iter().position(|kind| *kind == fault.kind) {
        REFUSED[kind].fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts a refused call, and makes its status.
pub(crate) fn status(fault: &Fault) -> Status {
    count(fault);
    wire::status(fault)
}

/// How many there were of each kind.
pub(crate) fn counts() -> impl Iterator<Item = (FaultKind, u64)> {
    FaultKind::ALL.iter().zip(&REFUSED).map(|(kind, count)| (*kind, count.load(Ordering::Relaxed)))
}
