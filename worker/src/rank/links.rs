//! Links with all servers of this host: made when a server offers one, and made again after a break.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use longshore_proto::{Fault, FaultKind, Incarnation, ServerId};
use longshore_wire::v1::MemfdOffer;

use crate::{
    cluster::{ByServer, Cluster, Transport},
    memfd::Link,
};

pub(crate) struct Links(ByServer<Mutex<LinkSlot>>);

#[derive(Default)]
struct LinkSlot {
    offer: Option<MemfdOffer>,
    link: Option<Arc<Link>>,
}

impl Links {
    pub(super) fn new(servers: usize) -> Links {
        Links(ByServer::new(servers, |_| Mutex::default()))
    }

    fn of(&self, server: ServerId) -> MutexGuard<'_, LinkSlot> {
        self.0[server].lock().unwrap_or_else(PoisonError::into_inner)
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
