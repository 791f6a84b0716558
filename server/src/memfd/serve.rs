//! The server's side of a link's socket: the worker's hello, the memories that it passes, and the link's end.

use std::{io, sync::Arc, time::Duration};

use longshore_engine::memory::{Foreign, SharedFile};
use longshore_proto::{Fault, FaultKind};
use longshore_wire::{
    fault_to_wire,
    memfd::{Listener, MAX_MEMORY_BYTES, Packet, Socket, map, uid},
    v1::{MemfdAnswer, MemfdRequest, MemfdTaken, MemfdWelcome, memfd_answer::Answer, memfd_request::Request},
};
use tokio::{sync::Semaphore, task::JoinSet, time::timeout};

use super::{Link, Links};
use crate::{
    jobs::{JobHandle, Jobs},
    log::Seldom,
};

/// Largest number of sockets at once; further sockets are closed. Each costs a descriptor, and a process has some
/// thousands.
const MAX_SOCKETS: usize = 512;
/// Longest wait for a message. A worker says hello on connecting, and reads answers at once.
const PATIENCE: Duration = Duration::from_secs(5);
/// Pause after the process has run out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves links until dropped.
pub(crate) async fn serve(listener: Listener, links: Arc<Links>, jobs: Arc<Jobs>) {
    let places = Arc::new(Semaphore::new(MAX_SOCKETS));
    let mut sockets = JoinSet::new();
    let (short, full) = (Seldom::default(), Seldom::default());
    loop {
        let socket = match listener.accept().await {
            Ok(socket) => socket,
            Err(error) => {
                short.say(|| tracing::warn!(%error, "could not accept a link"));
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        while sockets.try_join_next().is_some() {}
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            full.say(|| tracing::warn!(MAX_SOCKETS, "too many links at once"));
            continue;
        };
        let (links, jobs) = (Arc::clone(&links), Arc::clone(&jobs));
        sockets.spawn(async move {
            let _place = place;
            if let Err(error) = attend(&socket, &links, &jobs).await {
                tracing::debug!(%error, "a link broke");
            }
        });
    }
}

/// Serves one socket from its first message to its end.
async fn attend(socket: &Socket, links: &Links, jobs: &Jobs) -> io::Result<()> {
    let (link, handle) = match timeout(PATIENCE, greet(socket, links, jobs)).await?? {
        Ok(greeted) => greeted,
        Err(fault) => return refuse(socket, &fault).await,
    };
    let open = Open { links, link };
    tracing::info!(job = %handle.job.spec().name, transport = "memfd", link = ?open.link, "rank linked");
    welcome(socket, &open.link, &handle).await?;
    // Without this handle, a deleted job is freed although a worker is still connected.
    drop(handle);
    while let Some(packet) = socket.receive::<MemfdRequest>().await? {
        match memory(packet).and_then(|memory| open.link.take(memory)) {
            Ok(memory) => answer(socket, Answer::Taken(MemfdTaken { memory }), None).await?,
            Err(fault) => refuse(socket, &fault).await?,
        }
    }
    Ok(())
}

/// Guard that closes the link with its socket.
struct Open<'a> {
    links: &'a Links,
    link: Arc<Link>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.links.close(&self.link);
        tracing::debug!(link = ?self.link, "link closed");
    }
}

type Greeted = Result<(Arc<Link>, Arc<JobHandle>), Fault>;

async fn greet(socket: &Socket, links: &Links, jobs: &Jobs) -> io::Result<Greeted> {
    let peer = socket.peer_uid()?;
    if peer != uid() {
        let remedy = "run worker and server as the same user, or use --transport tcp";
        return Ok(Err(Fault::new(FaultKind::Precondition, "memfd.uid", peer, uid(), remedy)));
    }
    let packet = socket.receive::<MemfdRequest>().await?;
    Ok(match packet.and_then(|packet| packet.message.request) {
        Some(Request::Hello(hello)) => links.open(jobs, &hello),
        _ => Err(Fault::invalid("memfd.request", "not a hello", "a hello first", "say hello")),
    })
}

async fn welcome(socket: &Socket, link: &Link, handle: &JobHandle) -> io::Result<()> {
    let images = handle.job.images.shared();
    let image_bytes = images.map_or(0, SharedFile::bytes);
    answer(socket, Answer::Welcome(MemfdWelcome { link: link.id, image_bytes }), images).await
}

/// Maps the memory passed with a message.
fn memory(packet: Packet<MemfdRequest>) -> Result<Foreign, Fault> {
    let Some(Request::Memory(memory)) = packet.message.request else {
        return Err(Fault::invalid(
            "memfd.request",
            "not a memory",
            "a memory after the hello",
            "pass memory",
        ));
    };
    let Some(descriptor) = packet.descriptor else {
        let remedy = "pass it by SCM_RIGHTS with the message";
        return Err(Fault::invalid("memfd.descriptor", "absent", "beside the message", remedy));
    };
    map(&descriptor, memory.bytes, MAX_MEMORY_BYTES)
}

async fn refuse(socket: &Socket, fault: &Fault) -> io::Result<()> {
    tracing::debug!(%fault, "refused over a link");
    answer(socket, Answer::Refusal(fault_to_wire(fault)), None).await
}

async fn answer(socket: &Socket, answer: Answer, images: Option<&SharedFile>) -> io::Result<()> {
    timeout(PATIENCE, socket.send(&MemfdAnswer { answer: Some(answer) }, images)).await?
}
