//! The version being read: its number, and the decision that made it, as servers report.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use longshore_proto::{Fault, FaultKind, Incarnation, Reads, Version, fault::READS};

/// Shared by all pulls of one step, and by the gradient computed with their weights. A step back reuses a
/// version's number. So a reading makes sure that no two slices come from two decisions.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    version: Version,
    /// Incarnation of the decider; 0 until a server has reported it.
    decided_by: Arc<AtomicU64>,
}

impl Reading {
    pub(crate) fn new(version: Version) -> Reading {
        Reading { version, decided_by: Arc::default() }
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Returns the `reads` field of contributions that are computed with this version.
    pub(crate) fn reads(&self) -> Reads {
        Reads { version: self.version, decided_by: Incarnation(self.decided_by.load(Relaxed)) }
    }

    /// Notes the decider that a server reports for its slices; 0 if the server does not know.
    ///
    /// # Errors
    /// `Conflict` if another decision made the earlier slices.
    pub(super) fn found(&self, decided_by: u64) -> Result<(), Fault> {
        let first = match decided_by {
            0 => return Ok(()),
            _ => self.decided_by.compare_exchange(0, decided_by, Relaxed, Relaxed),
        };
        match first {
            Err(earlier) if earlier != decided_by => {
                let value = format!("{} as decided by {earlier} and by {decided_by}", self.version);
                let remedy = "join again: the first of the two was taken back";
                Err(Fault::new(FaultKind::Conflict, READS, value, "of one decision", remedy))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_two_decisions_are_told_apart() {
        let reading = Reading::new(Version(3));
        assert_eq!(reading.reads(), Reads { version: Version(3), decided_by: Incarnation(0) });
        for known in [0, 8, 0, 8] {
            assert_eq!(reading.clone().found(known), Ok(()));
        }
        assert_eq!(reading.reads().decided_by, Incarnation(8));
        assert_eq!(reading.found(9).unwrap_err().field, READS);
        assert_eq!(reading.reads().decided_by, Incarnation(8));
    }
}
