//! State that the readers of a feed and its fetches share: arrivals, and the reasons of delays.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use longshore_proto::{Fault, ServerId};
use tokio::sync::Notify;

use super::{
    Pulls, Reading,
    store::{Segment, Store},
    turns::Hurry,
};
use crate::error::{Error, Result, TimedOut};

/// The part of a feed that readers and fetches share.
pub(super) struct FeedInner {
    pub(super) pulls: Arc<Pulls>,
    pub(super) reading: Reading,
    pub(super) store: Store,
    /// Set while a reader waits.
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
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.changed.notify_waiters();
    }

    pub(super) fn noted(&self, server: ServerId, fault: Fault) {
        tracing::debug!(server = self.pulls.cluster.address(server), %fault, version = self.reading.version().0, "pulling again");
        *self.noted.lock().unwrap_or_else(PoisonError::into_inner) = Some((server, fault));
    }

    fn check(&self) -> Result<()> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), Err)
    }

    pub(super) async fn whole(&self, segments: &[Segment]) -> Result<()> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
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
        let server = shard.map(|shard| cluster.owner(shard));
        let noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner).clone();
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
