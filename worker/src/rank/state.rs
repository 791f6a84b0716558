//! What a rank's process knows of itself.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use longshore_proto::{Incarnation, ServerId, Version};

use super::{commits::OwnCommits, links::Links};
use crate::memfd::Link;

pub(crate) struct RankState {
    incarnation: AtomicU64,
    /// The version that was joined at.
    joined_at: AtomicU64,
    /// A pipeline has begun. From then on a server that waits for weights has lost them.
    trained: AtomicBool,
    /// Shared memory with servers, made as this process.
    pub(super) links: Links,
    /// Rank 0's decisions, for a server that restarted behind them.
    pub(crate) commits: OwnCommits,
}

impl RankState {
    /// The state before the rank has joined.
    pub(crate) fn new(servers: usize) -> RankState {
        RankState {
            incarnation: AtomicU64::new(0),
            joined_at: AtomicU64::new(0),
            trained: AtomicBool::new(false),
            links: Links::new(servers),
            commits: OwnCommits::default(),
        }
    }

    /// 0 before it has joined.
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

    /// The link with a server, if there is one that works.
    pub(crate) fn link(&self, server: ServerId) -> Option<Arc<Link>> {
        self.links.open(server, self.incarnation())
    }

    /// A server does not know the link.
    pub(crate) fn forget_link(&self, server: ServerId) {
        self.links.forget(server);
    }
}
