//! State that the trainer, the driver and the watcher of a pipeline share: decided versions and outcomes.

use std::{collections::BTreeMap, sync::Mutex};

use longshore_proto::Version;
use longshore_wire::v1::Wanted;
use tokio::sync::watch;

use super::outcome::Outcomes;
use crate::{
    cluster::{Cluster, Impatience},
    error::Result,
};

pub(super) struct PipelineInner {
    pub(super) board: Board,
    /// Versions whose pause has ended, with the loss scale to continue with. The watcher posts them. The driver waits
    /// for such a version after a decision that paused the job at the smallest loss scale.
    pub(super) resumed: Board,
    pub(super) outcomes: Outcomes,
    /// Trainer's bytes in the newest commit that a rank other than 0 has seen since it joined.
    pub(super) trainer: Mutex<Option<Vec<u8>>>,
    /// The servers that an operator wants the job to have, as far as the watcher has heard.
    pub(super) wanted: watch::Sender<Wanted>,
}

/// Number of versions whose loss scale is kept. Steps of a delayed job use up to three; the fourth is for a reader
/// that comes late.
const KEPT: u64 = 4;

pub(super) struct Board {
    scales: watch::Sender<BTreeMap<Version, f64>>,
}

impl Board {
    pub(super) fn new(known: impl IntoIterator<Item = (Version, f64)>) -> Board {
        Board { scales: watch::Sender::new(known.into_iter().collect()) }
    }

    /// Posts a decided version, with the loss scale of the steps that read it. A version that was posted before is
    /// unchanged.
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

    /// Returns the loss scale of `version` once it is decided. A version that is no longer kept gets the scale of the
    /// next kept version. A successor of this process has then made steps, and servers refuse this process's gradients.
    pub(super) async fn known(&self, version: Version) -> f64 {
        let mut scales = self.scales.subscribe();
        // The sender is `self`, so this wait ends only with the version on the board.
        let scales = scales.wait_for(|scales| scales.range(version..).next().is_some()).await;
        scales.ok().and_then(|scales| scales.range(version..).next().map(|(_, &scale)| scale)).unwrap_or(1.0)
    }

    /// Waits until `version` is decided, also while the job is paused. Returns its loss scale.
    pub(super) async fn wait(&self, cluster: &Cluster, version: Version) -> Result<f64> {
        let what = format!("the decision that makes {version}");
        let known = cluster.patiently(self.known(version));
        match cluster.watched(&what, known).await {
            Ok(scale) => Ok(scale),
            Err(Impatience::Failed(error)) => Err(error),
            Err(Impatience::Elapsed(waited)) => {
                Err(cluster.late("the decision that makes a version", version, waited).await)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_version_that_is_no_longer_kept_is_known() {
        let board = Board::new([(Version(7), 1.0)]);
        (8..8 + 2 * KEPT).for_each(|version| board.post(Version(version), version as f64));
        assert_eq!(board.scale(Version(8)), None);
        assert_eq!(board.known(Version(8)).await, (8 + KEPT) as f64);
        assert_eq!(board.known(board.newest()).await, (7 + 2 * KEPT) as f64);
    }
}
