//! What an operator can do about a job that does not train as it should. The status page and `longshore top` say the same.

pub const FAILED: &str = "see that server's log";
pub const LOADING: &str = "rank 0 or a restore brings them";
pub const PAUSED: &str = "`longshore resume` lets it go on";
pub const STALLED: &str =
    "see whether that rank's process runs, and start it again if not: it goes on from here";
pub const CHECKPOINT_FAILED: &str = "put that right: the next checkpoint takes its place";

/// What to do about a pause for this reason. Nothing is added where the reason says it already.
pub fn of_pause(reason: &str) -> &'static str {
    if reason.contains("longshore resume") { "" } else { PAUSED }
}
