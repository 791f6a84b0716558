//! The newest decided versions, each with the loss scale of the steps that read it.

use std::{collections::BTreeMap, time::Duration};

use longshore_proto::{Fault, FaultKind, Step, Version};
use longshore_wire::v1::DescribeResponse;
use tokio::sync::watch;

use crate::{
    cluster::{Cluster, Impatience},
    error::{Error, Result, TimedOut},
};

/// How many versions are kept: one being read, one decided, one delayed, and one for a slow reader of this board.
const KEPT: u64 = 4;

pub(super) struct Board {
    scales: watch::Sender<BTreeMap<Version, f64>>,
}

impl Board {
    pub(super) fn new(known: impl IntoIterator<Item = (Version, f64)>) -> Board {
        Board { scales: watch::Sender::new(known.into_iter().collect()) }
    }

    /// Notes that a version is decided, and the loss scale of steps that read it. If it was posted before, nothing
    /// changes.
    pub(super) fn post(&self, version: Version, loss_scale: f64) {
        self.scales.send_modify(|scales| {
            scales.entry(version).or_insert(loss_scale);
            let oldest = scales.keys().next_back().map_or(0, |newest| newest.0.saturating_sub(KEPT - 1));
            scales.retain(|version, _| version.0 >= oldest);
        });
    }

    pub(super) fn scale(&self, version: Version) -> Option<f64> {
        self.scales.borrow().get(&version).copied()
    }

    /// The newest decided version.
    pub(super) fn newest(&self) -> Version {
        self.scales.borrow().keys().next_back().copied().unwrap_or_default()
    }

    /// Waits until `version` is decided, also while the job is paused, and returns its loss scale.
    pub(super) async fn wait(&self, cluster: &Cluster, version: Version) -> Result<f64> {
        let mut scales = self.scales.subscribe();
        let known = async { scales.wait_for(|scales| scales.contains_key(&version)).await.map(|_| ()) };
        let what = format!("the decision that makes {version}");
        let known = cluster.waits.patiently(cluster.options.deadline, known);
        match cluster.watched(&what, known).await {
            // The sender is `self`, so the wait ends only with the version known.
            Ok(_) => Ok(self.scale(version).unwrap_or(1.0)),
            Err(Impatience::Failed(error)) => Err(error),
            Err(Impatience::Elapsed(waited)) => Err(late(cluster, version, waited).await),
        }
    }
}

/// The longest time to ask the servers whom they wait for, once the deadline has passed.
const ASKING: Duration = Duration::from_secs(1);

/// Names the server that is gone, or the rank and shard that the decision waits for.
async fn late(cluster: &Cluster, version: Version, waited: Duration) -> Error {
    let answers = cluster.on_each(|server| cluster.describe(server, false, ASKING)).await;
    let reason = |(server, answer)| Some((server, cluster.troubles.of(server).or_else(|| reason(answer))?));
    let reasons = answers.into_iter().filter_map(reason);
    // A server that is gone explains why another one waits.
    let worst = reasons.max_by_key(|(_, fault)| fault.kind == FaultKind::Unavailable);
    TimedOut {
        what: "the decision that makes a version",
        server: worst.as_ref().map(|(server, _)| cluster.address(*server).to_string()),
        job: cluster.job().clone(),
        step: Some(Step(version.0)),
        shard: None,
        version: Some(version),
        waited,
        last: worst.map(|(_, fault)| fault),
    }
    .into()
}

/// Why a server does not go on; None when its shards are complete.
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
