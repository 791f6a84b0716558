//! The worker's end of a link: the socket over which a server and this rank share memory. A server's images are mapped
//! through the link. The rank's state owns the links, and lanes and fetches use them.

use std::{collections::HashMap, ops::Range, os::fd::OwnedFd, sync::Arc, time::Duration};

use longshore_memory::Foreign;
use longshore_proto::{Fault, FaultKind, Incarnation, Rank};
use longshore_wire::{
    fault_from_wire,
    memfd::{Socket, boot_id, map, stale, uid},
    v1::{
        MemfdAnswer, MemfdHello, MemfdMemory, MemfdOffer, MemfdRequest, memfd_answer::Answer,
        memfd_request::Request,
    },
};
use tokio::{sync::Mutex, time::timeout};

use super::Extent;

/// The longest wait for an answer. Servers answer at once: they map memory, and touch none.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most bytes of one job's images on one server: more than any host's memory.
const MOST_IMAGE_BYTES: u64 = 1 << 46;

pub(crate) struct Link {
    pub(crate) id: u64,
    /// The incarnation of this rank that the link was made for.
    pub(crate) incarnation: Incarnation,
    /// The server's images, if it shares them.
    pub(crate) images: Option<Arc<Foreign>>,
    exchange: Mutex<Exchange>,
    socket: Socket,
}

#[derive(Default)]
struct Exchange {
    /// The server's number of each extent.
    memories: HashMap<u64, u32>,
    /// True if an answer was not awaited. The next question would take it for its own answer.
    broken: bool,
}

impl Link {
    /// Returns why this process cannot link with the server of this offer; None if it can try.
    fn hindrance(offer: &MemfdOffer) -> Option<Fault> {
        let fault = |field: &str, value: String, limit: String| {
            let remedy = "use --transport tcp, or run worker and server on one host as one user";
            Some(Fault::new(FaultKind::Precondition, field, value, limit, remedy))
        };
        if boot_id().as_deref() != Some(&offer.boot_id) {
            return fault("memfd.boot_id", offer.boot_id.clone(), "this host's".into());
        }
        if offer.uid != uid() {
            return fault("memfd.uid", offer.uid.to_string(), format!("{}, this process's", uid()));
        }
        None
    }

    pub(crate) async fn open(
        offer: &MemfdOffer,
        job: &str,
        rank: Rank,
        incarnation: Incarnation,
    ) -> Result<Link, Fault> {
        if let Some(fault) = Link::hindrance(offer) {
            return Err(fault);
        }
        // Containers of one host may share a kernel without sharing this socket.
        let socket = Socket::connect(&offer.socket).map_err(|error| broken(&error))?;
        if socket.peer_uid().map_err(|error| broken(&error))? != uid() {
            return Err(stale("another user's", "of this user"));
        }
        let hello = MemfdHello { job: job.into(), rank: rank.0, incarnation: incarnation.0 };
        let (answer, descriptor) = ask(&socket, Request::Hello(hello), None).await?;
        let Answer::Welcome(welcome) = answer else { return Err(stale("no welcome", "welcomed")) };
        let images = match (welcome.image_bytes, descriptor) {
            (0, _) | (_, None) => None,
            (bytes, Some(images)) => Some(Arc::new(map(&images, bytes, MOST_IMAGE_BYTES)?)),
        };
        Ok(Link { id: welcome.link, incarnation, images, exchange: Mutex::default(), socket })
    }

    /// Returns true if the server still has this link.
    pub(crate) fn is_open(&self) -> bool {
        // A question under way holds the lock, and its own caller will notice a closed link.
        self.exchange.try_lock().map_or(true, |exchange| !exchange.broken && self.socket.is_open())
    }

    /// Returns the server's number of an extent. If the server does not have the extent yet, the link passes it first.
    pub(crate) async fn memory(&self, extent: &Extent) -> Result<u32, Fault> {
        let mut exchange = self.exchange.lock().await;
        if let Some(&memory) = exchange.memories.get(&extent.id) {
            return Ok(memory);
        }
        if exchange.broken {
            return Err(stale("broken", "an open link"));
        }
        exchange.broken = true;
        let request = Request::Memory(MemfdMemory { bytes: extent.bytes() });
        let (answer, _) = ask(&self.socket, request, Some(extent)).await?;
        let Answer::Taken(taken) = answer else { return Err(stale("no answer", "the memory's number")) };
        exchange.broken = false;
        exchange.memories.insert(extent.id, taken.memory);
        Ok(taken.memory)
    }
}

async fn ask(
    socket: &Socket,
    request: Request,
    extent: Option<&Extent>,
) -> Result<(Answer, Option<OwnedFd>), Fault> {
    let asked = async {
        socket.send(&MemfdRequest { request: Some(request) }, extent).await?;
        socket.receive::<MemfdAnswer>().await
    };
    let answer = match timeout(PATIENCE, asked).await {
        Ok(answer) => answer.map_err(|error| broken(&error))?,
        Err(_) => return Err(broken(&"no answer")),
    };
    let Some(packet) = answer else { return Err(broken(&"closed")) };
    match packet.message.answer {
        Some(Answer::Refusal(fault)) => Err(fault_from_wire(fault)),
        Some(answer) => Ok((answer, packet.descriptor)),
        None => Err(broken(&"an answer of another version")),
    }
}

fn broken(cause: &dyn std::fmt::Display) -> Fault {
    stale(cause, "an open link")
}

/// A server's images of the job, mapped read-only while this value lives. The server's next process has other
/// memory.
pub struct ImageMemory(Arc<Foreign>);

impl ImageMemory {
    pub(crate) fn new(images: Arc<Foreign>) -> ImageMemory {
        ImageMemory(images)
    }

    /// The address range in this process: whole pages.
    pub fn addresses(&self) -> Range<usize> {
        let (start, bytes) = (self.0.address(0, self.0.len()), self.0.len() as usize);
        start..start + bytes
    }
}
