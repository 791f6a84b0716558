//! Speeds of a job's steps as one server saw them. `status` and `top` show the speeds that the status page draws.

use longshore_wire::v1::DecidedStep;

/// Steps over which a speed is a mean, as on the page.
pub(crate) const MEAN_OF: usize = 8;

/// Mean speeds in bytes a second.
pub(crate) struct Speeds {
    pub(crate) pushed: Option<f64>,
    pub(crate) pulled: Option<f64>,
    /// Bytes of host memory that updates moved, per second of the updates' own time.
    pub(crate) updated: Option<f64>,
}

impl Speeds {
    /// Returns the mean speeds over the last consecutive steps. After a step back or a server's restart they begin anew.
    ///
    /// A step is recorded at its decision, before its update, so the last step's update does not count.
    pub(crate) fn of(steps: &[DecidedStep], update_bytes: u64) -> Speeds {
        let pairs = steps.windows(2).rev().take(MEAN_OF);
        let consecutive = pairs.take_while(|pair| follows(&pair[0], &pair[1])).count();
        let steps = &steps[steps.len().saturating_sub(consecutive + 1)..];
        let [first, .., last] = steps else { return Speeds { pushed: None, pulled: None, updated: None } };
        let spent: f64 = steps[1..].iter().filter_map(|step| step.seconds).sum();
        let speed = |then: u64, now: u64| (spent > 0.0).then(|| (now - then) as f64 / spent);
        let busy = last.update_seconds - first.update_seconds;
        let updates = steps[..steps.len() - 1].iter().filter(|step| !step.skipped).count();
        Speeds {
            pushed: speed(first.pushed_bytes, last.pushed_bytes),
            pulled: speed(first.pulled_bytes, last.pulled_bytes),
            updated: (busy > 0.0 && updates > 0).then(|| updates as f64 * update_bytes as f64 / busy),
        }
    }
}

fn follows(before: &DecidedStep, step: &DecidedStep) -> bool {
    step.step == before.step + 1
        && step.seconds.is_some()
        && step.pushed_bytes >= before.pushed_bytes
        && step.pulled_bytes >= before.pulled_bytes
        && step.update_seconds >= before.update_seconds
}
