//! The state of a rank's process, with its links to all servers of this host.

use std::sync::{
    Arc, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use longshore_proto::{Fault, FaultKind, Incarnation, ServerId, Version};
use longshore_wire::v1::MemfdOffer;

use super::commits::OwnCommits;
use crate::{
    cluster::{Cluster, Met, Transport},
    lock,
    memfd::Link,
};

pub(crate) struct RankState {
    /// The incarnation of this process, or 0 before it has joined. Shared with the cluster.
    incarnation: Arc<AtomicU64>,
    /// The version at which this process joined.
    joined_at: AtomicU64,
    /// True once a pipeline has begun. Shared with the cluster.
    trained: Arc<AtomicBool>,
    /// Links with servers, over which shared memory is passed.
    links: Met<Mutex<LinkSlot>>,
    /// Rank 0's decisions, for servers that restart without them.
    pub(crate) commits: OwnCommits,
}

/// Link with one server, and the server's newest offer of a link.
#[derive(Default)]
struct LinkSlot {
    offer: Option<MemfdOffer>,
    link: Option<Arc<Link>>,
}

impl RankState {
    /// The state before the rank joins.
    pub(crate) fn new(cluster: &Cluster) -> RankState {
        RankState {
            incarnation: Arc::clone(&cluster.incarnation),
            joined_at: AtomicU64::new(0),
            trained: Arc::clone(&cluster.trained),
            links: Met::default(),
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

    fn slot(&self, server: ServerId) -> MutexGuard<'_, LinkSlot> {
        lock(self.links.get_or_make(server, Mutex::default))
    }

    /// Notes a server's offer of a link, from its answer to a join.
    pub(super) fn offered(&self, server: ServerId, offer: Option<MemfdOffer>) {
        self.slot(server).offer = offer;
    }

    /// Returns the link with a server, if it works and was made by this incarnation.
    pub(crate) fn link(&self, server: ServerId) -> Option<Arc<Link>> {
        let link = self.slot(server).link.clone();
        link.filter(|link| link.incarnation == self.incarnation() && link.is_open())
    }

    /// Forgets a link that a server does not know. A newer link of another lane is dropped too, and made again.
    pub(crate) fn forget_link(&self, server: ServerId) {
        self.slot(server).link = None;
    }

    /// Makes a missing link, if one is possible. Lanes call this. A lane notices a dead server by itself, and then
    /// tries again.
    ///
    /// # Errors
    /// The reason why there is no link, if the session requires one.
    pub(crate) async fn relink(&self, cluster: &Cluster, server: ServerId) -> Result<(), Fault> {
        let (wanted, incarnation) = (cluster.options.transport, self.incarnation());
        if !wanted.may_share() || self.link(server).is_some() {
            return Ok(());
        }
        let offer = self.slot(server).offer.clone();
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
                self.slot(server).link = Some(Arc::new(link));
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
