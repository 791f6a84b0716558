//! The state of a rank's process.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use longshore_proto::{Incarnation, ServerId, Version};

use super::{commits::OwnCommits, links::Links};
use crate::{cluster::Cluster, memfd::Link};

pub(crate) struct RankState {
    /// Shared with the cluster.
    incarnation: Arc<AtomicU64>,
    /// The version that this process joined at.
    joined_at: AtomicU64,
    /// True once a pipeline has begun. From then on a server that waits for weights has lost the job's state.
    trained: AtomicBool,
    /// Links with servers, over which shared memory is passed.
    pub(super) links: Links,
    /// Rank 0's decisions, for servers that restart without them.
    pub(crate) commits: OwnCommits,
}

impl RankState {
    /// The state before the rank joins.
    pub(crate) fn new(cluster: &Cluster) -> RankState {
        RankState {
            incarnation: Arc::clone(&cluster.incarnation),
            joined_at: AtomicU64::new(0),
            trained: AtomicBool::new(false),
            links: Links::new(cluster.servers().len()),
            commits: OwnCommits::default(),
        }
    }

    /// The incarnation of this process, or 0 before it has joined.
    pub(crate) fn incarnation(&self) -> Incarnation {
        Incarnation(self.incarnation.load(Relaxed))
    }

    pub(crate) fn has_joined(&self) -> bool {
        self.incarnation() != Incarnation(0)
    }

    pub(crate) fn set_incarnation(&self, incarnation: Incarnation) {
        self.incarnation.store(incarnation.0, Relaxed);
    }

    pub(crate) fn joined_at(&self) -> Version {
        Version(self.joined_at.load(Relaxed))
    }

    pub(crate) fn set_joined_at(&self, version: Version) {
        self.joined_at.store(version.0, Relaxed);
    }

    pub(crate) fn has_trained(&self) -> bool {
        self.trained.load(Relaxed)
    }

    pub(crate) fn begin_training(&self) {
        self.trained.store(true, Relaxed);
    }

    /// Returns the link with a server, if it works.
    pub(crate) fn link(&self, server: ServerId) -> Option<Arc<Link>> {
        self.links.open(server, self.incarnation())
    }

    /// Forgets a link that a server does not know.
    pub(crate) fn forget_link(&self, server: ServerId) {
        self.links.forget(server);
    }
}
