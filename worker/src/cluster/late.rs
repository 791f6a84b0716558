//! The error of a wait that reached its deadline.

use std::time::Duration;

use longshore_proto::{DECISION_AWAITED, Fault, FaultKind, Step, Version};
use longshore_wire::v1::DescribeResponse;

use super::Cluster;
use crate::error::{Error, Result, TimedOut};

impl Cluster {
    /// Returns `TimedOut` with the cause: the dead server, or the rank and shard that the decision on the step
    /// waits for.
    pub(crate) async fn late(&self, what: &'static str, version: Version, waited: Duration) -> Error {
        let answers = self.on_each(|server| self.glance(server)).await;
        let reason = |(server, answer)| Some((server, self.troubles.of(server).or_else(|| reason(answer))?));
        let reasons = answers.into_iter().filter_map(reason);
        // A dead server explains why another server waits. A missing gradient explains why others lack the
        // decision.
        let worst = reasons.max_by_key(|(_, fault)| {
            (fault.kind == FaultKind::Unavailable, !fault.value.contains(DECISION_AWAITED))
        });
        TimedOut {
            what,
            server: worst.as_ref().map(|(server, _)| self.address(*server).to_string()),
            job: self.job().clone(),
            step: Some(Step(version.0)),
            shard: None,
            version: Some(version),
            waited,
            last: worst.map(|(_, fault)| fault),
        }
        .into()
    }
}

/// Returns why a server does not go on; None while the server itself has work to do.
fn reason(answer: Result<DescribeResponse>) -> Option<Fault> {
    match answer {
        Ok(answer) if answer.waiting_for.is_empty() => None,
        Ok(answer) => {
            let value = format!("waiting for {}", answer.waiting_for);
            Some(Fault::new(FaultKind::Deadline, "the job", value, "moving", "see that worker's log"))
        }
        Err(Error::Call(failed)) => Some(failed.fault),
        Err(_) => None,
    }
}
