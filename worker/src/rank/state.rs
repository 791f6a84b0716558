//! The state of a rank's process, with its links to all servers of this host.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use longshore_proto::{Fault, FaultKind, Incarnation, ServerId, Version};
use longshore_wire::v1::MemfdOffer;

use super::commits::OwnCommits;
use crate::{
    cluster::{Cluster, Met, Transport},
    memfd::Link,
};

pub(crate) struct RankState {
    /// Shared with the cluster.
    incarnation: Arc<AtomicU64>,
    /// The version that this process joined at.
    joined_at: AtomicU64,
    /// Shared with the cluster.
    trained: Arc<AtomicBool>,
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
            trained: Arc::clone(&cluster.trained),
            links: Links::default(),
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

#[derive(Default)]
pub(crate) struct Links(Met<Mutex<LinkSlot>>);

#[derive(Default)]
struct LinkSlot {
    offer: Option<MemfdOffer>,
    link: Option<Arc<Link>>,
}

impl Links {
    fn of(&self, server: ServerId) -> MutexGuard<'_, LinkSlot> {
        self.0.get_or_make(server, Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a server's offer of a link, from its answer to a join.
    pub(super) fn offered(&self, server: ServerId, offer: Option<MemfdOffer>) {
        self.of(server).offer = offer;
    }

    /// Forgets a link that a server does not know. A newer link of another lane is dropped too, and made again.
    pub(super) fn forget(&self, server: ServerId) {
        self.of(server).link = None;
    }

    /// Returns the link with a server, if it works and was made by this incarnation.
    pub(super) fn open(&self, server: ServerId, incarnation: Incarnation) -> Option<Arc<Link>> {
        let link = self.of(server).link.clone();
        link.filter(|link| link.incarnation == incarnation && link.is_open())
    }

    /// Makes a missing link, if one is possible.
    ///
    /// # Errors
    /// The reason why there is no link, if the session requires one.
    pub(super) async fn make(
        &self,
        cluster: &Cluster,
        server: ServerId,
        incarnation: Incarnation,
    ) -> Result<(), Fault> {
        let wanted = cluster.options.transport;
        if !wanted.may_share() || self.open(server, incarnation).is_some() {
            return Ok(());
        }
        let offer = self.of(server).offer.clone();
        let made = match offer {
            Some(offer) => {
                Link::open(&offer, cluster.job().as_str(), cluster.options.rank, incarnation).await
            }
            None => Err(not_offered()),
        };
        let address = cluster.address(server);
        match made {
            Ok(link) => {
                tracing::info!(server = address, transport = "memfd", "payloads go through shared memory");
                self.of(server).link = Some(Arc::new(link));
                Ok(())
            }
            Err(fault) if wanted == Transport::Memfd => Err(fault),
            Err(fault) => {
                tracing::debug!(server = address, %fault, "payloads go through the socket");
                Ok(())
            }
        }
    }
}

fn not_offered() -> Fault {
    let remedy = "start it on this host, without --no-memfd";
    Fault::new(FaultKind::Precondition, "memfd", "not offered by the server", "offered", remedy)
}
