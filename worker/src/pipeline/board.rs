//! What is known of decided versions: how a step learns the loss scale it must use.

use std::{collections::BTreeMap, time::Duration};

use longshore_proto::{Fault, FaultKind, Step, Version};
use tokio::sync::watch;

use crate::{
    error::{Error, Result, TimedOut},
    session::{Core, Impatience},
};

/// Versions kept: one being read, one decided, one delayed, and one for a slow reader of this board.
const KEPT: u64 = 4;

pub(super) struct Board {
    scales: watch::Sender<BTreeMap<Version, f64>>,
}

impl Board {
    pub(super) fn new(known: impl IntoIterator<Item = (Version, f64)>) -> Board {
        Board { scales: watch::Sender::new(known.into_iter().collect()) }
    }

    /// A version is decided; steps that read it use this loss scale. The first word stands.
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

    /// Waits until `version` is decided, and while the job is paused.
    pub(super) async fn wait(&self, core: &Core, version: Version) -> Result<f64> {
        let mut scales = self.scales.subscribe();
        let known = async { scales.wait_for(|scales| scales.contains_key(&version)).await.map(|_| ()) };
        match core.patiently(core.options.deadline, known).await {
            // The sender is `self`, so the wait ends only with the version known.
            Ok(_) => Ok(self.scale(version).unwrap_or(1.0)),
            Err(Impatience::Failed(error)) => Err(error),
            Err(Impatience::Elapsed(waited)) => Err(late(core, version, waited).await),
        }
    }
}

/// Longest time to ask the servers whom they wait for, once the deadline has passed.
const ASKING: Duration = Duration::from_secs(5);

/// Names the rank and shard that the decision waits for, if a server can be asked.
async fn late(core: &Core, version: Version, waited: Duration) -> Error {
    let mut missing = None;
    for server in 0..core.peers.len() {
        let Ok(answer) = core.describe(server, false, ASKING).await else { continue };
        // Shards are complete where nothing is waited for.
        if !answer.waiting_for.is_empty() {
            missing = Some((server, answer.waiting_for));
            break;
        }
    }
    let said = |waiting: &str| {
        let value = format!("waiting for {waiting}");
        Fault::new(FaultKind::Deadline, "the job", value, "moving", "see that worker's log")
    };
    TimedOut {
        what: "the decision that makes a version",
        server: missing.as_ref().map(|(server, _)| core.peers[*server].address.clone()),
        job: core.job().clone(),
        step: Some(Step(version.0)),
        shard: None,
        version: Some(version),
        waited,
        last: missing.as_ref().map(|(_, waiting)| said(waiting)),
    }
    .into()
}
