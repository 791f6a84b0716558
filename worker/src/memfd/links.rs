//! The links with all servers: made where they can be, made again where they broke.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use longshore_proto::{Fault, FaultKind};
use longshore_wire::{memfd::STALE, v1::MemfdOffer};

use super::Link;
use crate::session::{Core, Transport};

/// How often a link that a session must have is tried before its first push: a server may die once or twice, but a host on
/// which there can be no link is said soon.
const TRIES: usize = 3;

/// By server.
pub(crate) struct Links(Vec<Mutex<State>>);

#[derive(Default)]
struct State {
    offer: Option<MemfdOffer>,
    link: Option<Arc<Link>>,
}

impl Links {
    pub(crate) fn new(servers: usize) -> Links {
        Links((0..servers).map(|_| Mutex::default()).collect())
    }

    fn of(&self, server: usize) -> MutexGuard<'_, State> {
        self.0[server].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a server said when it was joined.
    pub(crate) fn offered(&self, server: usize, offer: Option<MemfdOffer>) {
        self.of(server).offer = offer;
    }

    /// A server does not know the link. Forgetting a newer one too costs no more than making it again.
    pub(crate) fn forget(&self, server: usize) {
        self.of(server).link = None;
    }
}

impl Core {
    /// The link with a server, if there is one that works.
    pub(crate) fn link(&self, server: usize) -> Option<Arc<Link>> {
        let link = self.links.of(server).link.clone();
        link.filter(|link| link.incarnation == self.incarnation() && link.is_open())
    }

    /// Makes a link where there can be one and is none.
    ///
    /// # Errors
    /// Why there is none, if the session was told to have one.
    pub(crate) async fn relink(&self, server: usize) -> Result<(), Fault> {
        for _ in 1..TRIES {
            match self.try_link(server).await {
                // The server may have died since it was joined. A lane finds that out by itself, and tries again for ever.
                Err(fault) if fault.field == STALE && self.lanes.get().is_none() => {
                    self.renew_offer(server).await
                }
                other => return other,
            }
        }
        self.try_link(server).await
    }

    /// Joins a server again that has restarted, for it listens elsewhere then.
    async fn renew_offer(&self, server: usize) {
        if let Err(error) = self.rejoin(server).await {
            tracing::debug!(server = self.peers[server].address, %error, "no link");
        }
    }

    async fn try_link(&self, server: usize) -> Result<(), Fault> {
        let wanted = self.options.transport;
        if !matches!(wanted, Transport::Auto | Transport::Memfd) || self.link(server).is_some() {
            return Ok(());
        }
        let offer = self.links.of(server).offer.clone();
        let made = match offer {
            Some(offer) => {
                Link::open(&offer, self.job().as_str(), self.options.rank, self.incarnation()).await
            }
            None => {
                let remedy = "start it on this host, without --no-memfd";
                Err(Fault::new(
                    FaultKind::Precondition,
                    "memfd",
                    "not offered by the server",
                    "offered",
                    remedy,
                ))
            }
        };
        let address = &self.peers[server].address;
        match made {
            Ok(link) => {
                tracing::info!(server = address, transport = "memfd", "payloads go through shared memory");
                self.links.of(server).link = Some(Arc::new(link));
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
