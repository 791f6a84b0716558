//! The last steps of a job as one server saw them, with the speeds that the status page draws.

use longshore_wire::v1::{DecidedStep, DescribeResponse};

/// Steps over which a speed is a mean, as on the page.
const MEAN_OF: usize = 8;

/// Returns the last `most` steps, oldest first.
pub(super) fn steps(answer: &DescribeResponse, most: usize) -> Vec<serde_json::Value> {
    let known = &answer.steps;
    // Speeds span consecutive steps: after a step back or a server's restart they begin anew.
    let mut begin = 0;
    let all = known.iter().enumerate().map(|(at, step)| {
        if at > 0 && !follows(&known[at - 1], step) {
            begin = at;
        }
        begin = begin.max(at.saturating_sub(MEAN_OF));
        object(step, &Speeds::over(&known[begin..=at], answer.update_bytes))
    });
    let mut all: Vec<_> = all.collect();
    all.split_off(all.len().saturating_sub(most))
}

fn follows(before: &DecidedStep, step: &DecidedStep) -> bool {
    step.step == before.step + 1
        && step.seconds.is_some()
        && step.pushed_bytes >= before.pushed_bytes
        && step.pulled_bytes >= before.pulled_bytes
        && step.update_seconds >= before.update_seconds
}

#[derive(Debug, PartialEq)]
struct Speeds {
    pushed: Option<f64>,
    pulled: Option<f64>,
    /// Bytes of host memory that updates moved, per second of the updates' own time.
    updated: Option<f64>,
}

impl Speeds {
    /// Returns the mean speeds from the first of `steps` to the last. A step is recorded at its decision, before its
    /// update, so the last step's update does not count.
    fn over(steps: &[DecidedStep], update_bytes: u64) -> Speeds {
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

fn object(step: &DecidedStep, speeds: &Speeds) -> serde_json::Value {
    serde_json::json!({
        "step": step.step,
        "unix_ms": step.unix_ms,
        "seconds": step.seconds,
        "skipped": step.skipped,
        // A skipped step has no norm.
        "norm": (!step.skipped).then_some(step.norm),
        "loss_scale": step.loss_scale,
        "learning_rate": step.learning_rate,
        "loss": step.loss,
        "exposed_seconds": step.exposed_seconds,
        "pushed_per_s": speeds.pushed,
        "pulled_per_s": speeds.pulled,
        "update_per_s": speeds.updated,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> DecidedStep {
        DecidedStep {
            step,
            seconds: Some(0.5),
            pushed_bytes: 1000 * step,
            pulled_bytes: 500 * step,
            update_seconds: 0.25 * step as f64,
            ..DecidedStep::default()
        }
    }

    fn said(steps: Vec<DecidedStep>, most: usize) -> Vec<serde_json::Value> {
        super::steps(&DescribeResponse { steps, update_bytes: 4000, ..DescribeResponse::default() }, most)
    }

    #[test]
    fn speeds_are_means_over_the_steps_before() {
        let all = said((1..=20).map(step).collect(), 512);
        assert_eq!((all.len(), all[0]["pushed_per_s"].as_f64()), (20, None));
        let speeds = ["pushed_per_s", "pulled_per_s", "update_per_s"].map(|name| all[19][name].as_f64());
        assert_eq!(speeds, [Some(2000.0), Some(1000.0), Some(16_000.0)]);
        // The oldest of the eight steps before decides how long a fast step shows.
        let mut fast: Vec<DecidedStep> = (1..=20).map(step).collect();
        fast[5..].iter_mut().for_each(|step| step.pushed_bytes += 8000);
        let all = said(fast, 512);
        let pushed = |at: usize| all[at]["pushed_per_s"].as_f64();
        assert_eq!([pushed(4), pushed(12), pushed(13)], [Some(2000.0), Some(4000.0), Some(2000.0)]);
        assert_eq!(said((1..=20).map(step).collect(), 3)[0]["step"], 18);
    }

    #[test]
    fn no_speed_goes_over_a_break() {
        let mut steps: Vec<DecidedStep> = (1..=4).map(step).collect();
        // The server restarted, so its counters begin anew.
        steps[2] = DecidedStep { seconds: None, pushed_bytes: 0, ..step(3) };
        steps[3] = DecidedStep { pushed_bytes: 700, skipped: true, ..step(4) };
        let all = said(steps, 512);
        let pushed: Vec<Option<f64>> = all.iter().map(|step| step["pushed_per_s"].as_f64()).collect();
        assert_eq!(pushed, [None, Some(2000.0), None, Some(1400.0)]);
        assert!(all[3]["norm"].is_null() && all[2]["norm"].is_number());
    }
}
