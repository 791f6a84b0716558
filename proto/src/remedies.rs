//! Remedies for a job that makes no progress. The status page and `longshore top` print the same text.

pub const FAILED: &str = "see that server's log";
pub const LOADING: &str = "rank 0 or a restore brings them";
pub const PAUSED: &str = "`longshore resume` lets it go on";
pub const STALLED: &str =
    "see whether that rank's process runs, and start it again if not: it goes on from here";
pub const CHECKPOINT_FAILED: &str = "put that right: the next checkpoint takes its place";

/// Returns the remedy for a pause, or nothing if the reason already names the command.
pub fn of_pause(reason: &str) -> &'static str {
    if reason.contains("longshore resume") { "" } else { PAUSED }
}
