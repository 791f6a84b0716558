//! State that pulls share: `Pulls` in a session, `Reading` for one version, `FeedInner` between a feed's readers and
//! fetches.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use longshore_proto::{Fault, FaultKind, Incarnation, Reads, ServerId, Step, Version, fault::READS};
use tokio::sync::Notify;

use super::{
    store::{Segment, Store},
    turns::{Hurry, Turns},
};
use crate::{
    cluster::{Cluster, Met},
    device::BufferPool,
    error::{Error, Result, TimedOut},
    lock,
    memfd::ImageMemory,
    meter::Meter,
    rank::RankState,
};

pub(crate) struct Pulls {
    pub(super) cluster: Arc<Cluster>,
    pub(super) rank: Arc<RankState>,
    pub(super) pool: BufferPool,
    pub(crate) meter: Meter,
    /// For each server, a queue per connection, in which pulls take turns.
    turns: Met<Vec<Arc<Turns>>>,
}

impl Pulls {
    pub(crate) fn new(cluster: Arc<Cluster>, rank: Arc<RankState>) -> Pulls {
        let pool = BufferPool::tight(cluster.options.host_budget.clone(), "weights under way");
        Pulls { cluster, rank, pool, meter: Meter::default(), turns: Met::default() }
    }

    /// Returns the queue of pulls of a connection.
    pub(super) fn turns(&self, server: ServerId, connection: usize) -> &Arc<Turns> {
        let connections = self.cluster.options.connections;
        let turns = self.turns.get_or_make(server, || (0..connections).map(|_| Arc::default()).collect());
        &turns[connection]
    }

    /// The most bytes of weights in this host's memory since the session began or [`Pulls::start_over`].
    pub(crate) fn most_held(&self) -> u64 {
        self.pool.most()
    }

    /// Frees the memory of weights that have no reader any more.
    pub(crate) fn start_over(&self) {
        self.pool.empty();
    }

    /// Returns true if all weights are readable in servers' memory, and take none here.
    pub(crate) fn are_lent(&self) -> bool {
        self.cluster.servers().all(|server| self.lends(server))
    }

    /// Memory of servers of this host that holds weights.
    pub(crate) fn image_memory(&self) -> Vec<ImageMemory> {
        let images = |server| self.rank.link(server).and_then(|link| link.images.clone());
        self.cluster.servers().filter_map(images).map(ImageMemory::new).collect()
    }

    /// Returns true if a server's weights are readable in its memory.
    pub(super) fn lends(&self, server: ServerId) -> bool {
        // Weights of replicated shards must not be lost with the server that lends them.
        self.cluster.spec().replicas == 1 && self.rank.link(server).is_some_and(|link| link.images.is_some())
    }
}

/// A step's use of one version, shared by all pulls of its weights and by the gradient computed with them. A step back
/// reuses a version's number, so a reading refuses slices that were made by two decisions.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    version: Version,
    /// Incarnation of the decider; 0 until a server has reported it.
    decided_by: Arc<AtomicU64>,
}

impl Reading {
    pub(crate) fn new(version: Version) -> Reading {
        Reading { version, decided_by: Arc::default() }
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Returns the `reads` field of contributions that are computed with this version.
    pub(crate) fn reads(&self) -> Reads {
        Reads { version: self.version, decided_by: Incarnation(self.decided_by.load(Relaxed)) }
    }

    /// Notes the decider that a server reports for its slices; 0 if the server does not know.
    ///
    /// # Errors
    /// `Conflict` if another decision made the earlier slices.
    pub(super) fn found(&self, decided_by: u64) -> Result<(), Fault> {
        let first = match decided_by {
            0 => return Ok(()),
            _ => self.decided_by.compare_exchange(0, decided_by, Relaxed, Relaxed),
        };
        match first {
            Err(earlier) if earlier != decided_by => {
                let value = format!("{} as decided by {earlier} and by {decided_by}", self.version);
                let remedy = "join again: the first of the two was taken back";
                Err(Fault::new(FaultKind::Conflict, READS, value, "of one decision", remedy))
            }
            _ => Ok(()),
        }
    }
}

/// The part of a feed that readers and fetches share.
pub(super) struct FeedInner {
    pub(super) pulls: Arc<Pulls>,
    pub(super) reading: Reading,
    pub(super) store: Store,
    /// Raised once a reader waits for this feed.
    pub(super) hurry: Arc<Hurry>,
    changed: Notify,
    failure: Mutex<Option<Error>>,
    /// The last fault that a server sent instead of weights.
    noted: Mutex<Option<(ServerId, Fault)>>,
}

impl FeedInner {
    pub(super) fn new(pulls: Arc<Pulls>, reading: Reading, store: Store) -> FeedInner {
        let (failure, noted) = (Mutex::new(None), Mutex::new(None));
        let hurry = Arc::default();
        FeedInner { pulls, reading, store, hurry, changed: Notify::new(), failure, noted }
    }

    pub(super) fn arrived(&self, bytes: u64) {
        self.pulls.meter.moved(bytes);
        self.changed.notify_waiters();
    }

    pub(super) fn fail(&self, error: Error) {
        lock(&self.failure).get_or_insert(error);
        self.changed.notify_waiters();
    }

    pub(super) fn noted(&self, server: ServerId, fault: Fault) {
        tracing::debug!(server = self.pulls.cluster.address(server), %fault, version = self.reading.version().0, "pulling again");
        *lock(&self.noted) = Some((server, fault));
    }

    fn check(&self) -> Result<()> {
        lock(&self.failure).clone().map_or(Ok(()), Err)
    }

    pub(super) async fn whole(&self, segments: &[Segment]) -> Result<()> {
        loop {
            let changed = self.changed.notified();
            self.check()?;
            if segments.iter().all(Segment::is_whole) {
                return Ok(());
            }
            changed.await;
        }
    }

    /// Returns the error of a wait for `segments` that reached its deadline.
    pub(super) fn late(&self, segments: &[Segment], waited: Duration) -> Error {
        let cluster = &self.pulls.cluster;
        let segment = segments.iter().find(|segment| !segment.is_whole());
        let shard = segment.map(|segment| segment.shard);
        let step = Step(self.reading.version().0);
        let server = shard.map(|shard| cluster.owner_at(shard, step));
        let noted = lock(&self.noted).clone();
        let noted = noted.filter(|(from, _)| Some(*from) == server).map(|(_, fault)| fault);
        TimedOut {
            what: "weights",
            server: server.map(|server| cluster.address(server).to_string()),
            job: cluster.job().clone(),
            step: None,
            shard,
            version: Some(self.reading.version()),
            waited,
            last: server.and_then(|server| cluster.troubles.of(server)).or(noted),
        }
        .into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_of_two_decisions_are_told_apart() {
        let reading = Reading::new(Version(3));
        assert_eq!(reading.reads(), Reads { version: Version(3), decided_by: Incarnation(0) });
        for known in [0, 8, 0, 8] {
            assert_eq!(reading.clone().found(known), Ok(()));
        }
        assert_eq!(reading.reads().decided_by, Incarnation(8));
        assert_eq!(reading.found(9).unwrap_err().field, READS);
        assert_eq!(reading.reads().decided_by, Incarnation(8));
    }
}
