//! Steps of each job that a reader of `/status.json` lacks.

use std::collections::HashMap;

/// The last step that the reader has, for each job. `?after=STEP` sets it for all jobs, `?after=JOB:STEP` for one. A
/// job without either is reported from its first kept step.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Wanted {
    all: u64,
    of: HashMap<String, u64>,
}

impl Wanted {
    /// Parses a query. Invalid values are ignored, so the reader gets more steps than asked for.
    pub(super) fn of(query: &str) -> Wanted {
        let mut wanted = Wanted::default();
        for value in query.split('&').filter_map(|pair| pair.strip_prefix("after=")) {
            // Browsers escape the colon as %3A. Characters of a job's name are never escaped.
            match value.split_once(':').or_else(|| value.split_once("%3A")) {
                Some((job, step)) => {
                    wanted.of.extend(step.parse().ok().map(|step| (job.to_string(), step)));
                }
                None => wanted.all = value.parse().unwrap_or(wanted.all),
            }
        }
        wanted
    }

    pub(super) fn after(&self, job: &str) -> u64 {
        self.of.get(job).copied().unwrap_or(self.all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_job_has_the_step_that_is_said_of_it() {
        let of = |query: &str| {
            let wanted = Wanted::of(query);
            (wanted.after("a"), wanted.after("b.c"), wanted.after("d"))
        };
        assert_eq!(of("after=a:7&after=b.c%3A9"), (7, 9, 0));
        assert_eq!(of("after=4"), (4, 4, 4));
        assert_eq!(of("after=4&after=a:0&after=b.c:-1&x=9&after=d:"), (0, 4, 4));
        assert_eq!(of(""), (0, 0, 0));
    }
}
