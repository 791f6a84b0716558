//! Chooses the version that several servers are asked for while training goes on.

use longshore_proto::{Fault, FaultKind};
use longshore_wire::v1::DescribeResponse;

/// Number of tries to find a version that all servers can still give.
pub const TRIES: u32 = 8;

/// Returns how far ahead of the newest version to ask. Servers reach a version one after the other, and a server that
/// is past the asked version refuses. Each further try asks for a version further ahead.
///
/// The first try asks for a version that is there, since a job without training has no other.
fn lead(tried: u32) -> u64 {
    match tried {
        0 => 0,
        _ => 1 << (tried - 1),
    }
}

/// Returns the version to ask all servers for, from their descriptions. Once all ranks have left, no later version
/// than the newest will come.
pub fn asked_version<'a>(answers: impl IntoIterator<Item = &'a DescribeResponse>, tried: u32) -> u64 {
    let (mut newest, mut have_left) = (0, true);
    for answer in answers {
        newest = newest.max(answer.progress.as_ref().map_or(0, |progress| progress.version));
        have_left &= answer.ranks.iter().all(|rank| rank.left);
    }
    if have_left { newest } else { newest + lead(tried) }
}

/// Returns true if a server is past the version, or if no rank will make it.
pub fn has_passed(fault: &Fault) -> bool {
    fault.kind == FaultKind::Precondition && fault.field == "version"
}

/// Returns true if a server makes as many checkpoints as it can at once: another try has room soon.
pub fn is_busy(fault: &Fault) -> bool {
    fault.kind == FaultKind::Exhausted && fault.field == "checkpoints"
}

#[cfg(test)]
mod tests {
    use longshore_wire::v1::{JobProgress, RankStatus};

    use super::*;

    #[test]
    fn a_job_that_its_ranks_have_left_is_asked_for_its_newest_version() {
        let answer = |version, left| DescribeResponse {
            progress: Some(JobProgress { version, ..Default::default() }),
            ranks: vec![RankStatus { left, ..Default::default() }],
            ..Default::default()
        };
        assert_eq!(asked_version(&[answer(7, false), answer(8, false)], 0), 8);
        assert_eq!(asked_version(&[answer(7, false), answer(8, false)], 3), 12);
        assert_eq!(asked_version(&[answer(8, true), answer(8, false)], 1), 9);
        assert_eq!(asked_version(&[answer(8, true), answer(8, true)], 3), 8);
    }
}
