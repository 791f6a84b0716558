//! The last steps of a job as one server saw them, with the speeds that the status page draws.

use longshore_wire::v1::{DecidedStep, DescribeResponse};

use crate::speeds::Speeds;

/// Returns the last `most` steps, oldest first.
pub(super) fn steps(answer: &DescribeResponse, most: usize) -> Vec<serde_json::Value> {
    let known = &answer.steps;
    let last = known.len().saturating_sub(most)..known.len();
    last.map(|at| object(&known[at], &Speeds::of(&known[..=at], answer.update_bytes))).collect()
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
