//! Payloads through shared memory: links with workers of this host, and the memory each may refer to.
//!
//! The server copies a chunk into its slot and checks the copy. A lent gradient is read in place, at most until the
//! step's update is done. The worker changes neither before the server is done with it. In the other direction the
//! worker maps the server's images.

mod link;
mod serve;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, Weak},
};

use longshore_proto::{Fault, Incarnation, Rank};
use longshore_wire::{
    memfd::{Listener, boot_id, stale, uid},
    v1,
};

pub(crate) use self::{
    link::{Link, Payload},
    serve::serve,
};
use crate::{
    jobs::{JobHandle, Jobs},
    lock::lock,
};

/// All links of a server, keyed by the id that the worker uses.
pub(crate) struct Links {
    links: Mutex<HashMap<u64, Arc<Link>>>,
    offer: Option<v1::MemfdOffer>,
}

impl Links {
    /// Creates the table and listens for links, unless `wanted` is false or this host lacks support. The caller must
    /// be inside a tokio runtime.
    pub(crate) fn new(wanted: bool) -> (Arc<Links>, Option<Listener>) {
        let made = wanted.then(listen).and_then(|made| {
            made.inspect_err(|error| tracing::info!(%error, "no payloads through shared memory")).ok()
        });
        let (offer, listener) = made.unzip();
        (Arc::new(Links { links: Mutex::default(), offer }), listener)
    }

    pub(crate) fn offer(&self) -> Option<v1::MemfdOffer> {
        self.offer.clone()
    }

    /// Opens a link for a rank's current process. An earlier link of the rank is removed.
    fn open(&self, jobs: &Jobs, hello: &v1::MemfdHello) -> Result<(Arc<Link>, Arc<JobHandle>), Fault> {
        let handle = jobs.get(&hello.job)?;
        let (rank, incarnation) = (Rank(hello.rank), Incarnation(hello.incarnation));
        handle.job.protocol.check_rank(rank, incarnation)?;
        let link = Arc::new(Link::new(random()?, Arc::downgrade(&handle), rank, incarnation));
        let mut links = lock(&self.links);
        links.retain(|_, other| !other.is_of(&handle, rank));
        links.insert(link.id, Arc::clone(&link));
        Ok((link, handle))
    }

    fn close(&self, link: &Link) {
        lock(&self.links).remove(&link.id);
    }

    /// Returns the link with this id. The link must belong to the job of `handle`.
    pub(crate) fn find(&self, id: u64, handle: &Arc<JobHandle>) -> Result<Arc<Link>, Fault> {
        let link = lock(&self.links).get(&id).cloned();
        link.filter(|link| Weak::ptr_eq(&link.job, &Arc::downgrade(handle)))
            .ok_or_else(|| stale(id, "an open link of this job"))
    }

    pub(crate) fn linked(&self, handle: &Arc<JobHandle>, rank: Rank) -> bool {
        lock(&self.links).values().any(|link| link.is_of(handle, rank))
    }
}

fn listen() -> std::io::Result<(v1::MemfdOffer, Listener)> {
    let no_boot_id = || std::io::Error::other("the kernel gives no boot id");
    let boot_id = boot_id().ok_or_else(no_boot_id)?;
    let name = random().map_err(std::io::Error::other)?;
    let socket = format!("longshore-{}-{name:016x}", std::process::id());
    let listener = Listener::bind(socket.as_bytes())?;
    Ok((v1::MemfdOffer { socket: socket.into(), boot_id, uid: uid() }, listener))
}

/// Returns an unguessable number, never 0.
fn random() -> Result<u64, Fault> {
    let mut bytes = [0; 8];
    let flags = rustix::rand::GetRandomFlags::empty();
    match rustix::rand::getrandom(&mut bytes, flags) {
        Ok(8) => Ok(u64::from_le_bytes(bytes).max(1)),
        _ => Err(stale("no random numbers", "given by the kernel")),
    }
}
