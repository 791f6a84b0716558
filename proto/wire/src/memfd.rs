//! Payloads through shared memory (longshore/v1/memfd.proto): the socket that passes descriptors. Its packets are
//! sequenced: one message in each, with at most one descriptor beside it.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net,
    },
};

use longshore_memory::{Foreign, ForeignError};
use longshore_proto::fault::{Fault, FaultKind};
use prost::Message;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recvmsg,
    sendmsg, socket_with,
};
use tokio::{
    io::Interest,
    net::{UnixListener, UnixStream},
};

/// Largest piece of a worker's memory that one message passes.
pub const MAX_MEMORY_BYTES: u64 = 1 << 30;
/// Largest number of pieces of one link. Together they hold up to a tebibyte of gradients that one process retains.
pub const MAX_MEMORIES: usize = 1024;

/// Room for a hello with the longest job name, or for a fault. A longer packet is no message of this protocol.
const MOST_BYTES: usize = 16 * 1024;
/// Links that may wait to be accepted, as when all ranks of a host start at the same moment.
const BACKLOG: i32 = 1024;
const NAME_BYTES: usize = 64;

/// A received message, with its descriptor.
pub struct Packet<M> {
    pub message: M,
    pub descriptor: Option<OwnedFd>,
}

/// An end of a link, created inside a tokio runtime. The socket is SEQPACKET, since a stream does not keep packets
/// apart. Its type is `UnixStream`, which tokio lets stand for any Unix socket.
pub struct Socket(UnixStream);

/// Listener for links.
pub struct Listener(UnixListener);

/// Parses a packet's bytes as a message.
///
/// # Errors
/// `Invalid` if the bytes are no such message.
pub fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, Fault> {
    let invalid = |value: String| {
        let remedy = "speak longshore/v1/memfd.proto of the same version";
        Fault::invalid("memfd.message", value, format!("a message of at most {MOST_BYTES} bytes"), remedy)
    };
    if bytes.len() > MOST_BYTES {
        return Err(invalid(format!("{} bytes", bytes.len())));
    }
    M::decode(bytes).map_err(|error| invalid(error.to_string()))
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

impl Listener {
    /// Listens under an abstract name, invisible in the file system. The kernel removes the name with the process.
    pub fn bind(name: &[u8]) -> io::Result<Listener> {
        let socket = socket()?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        listen(&socket, BACKLOG)?;
        Ok(Listener(UnixListener::from_std(net::UnixListener::from(socket))?))
    }

    pub async fn accept(&self) -> io::Result<Socket> {
        let (accepted, _) = self.0.accept().await?;
        Ok(Socket(accepted))
    }
}

impl Socket {
    pub fn connect(name: &[u8]) -> io::Result<Socket> {
        if name.is_empty() || name.len() > NAME_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no name of a socket"));
        }
        let socket = socket()?;
        // Connecting between Unix sockets never waits for the peer: a full backlog is an error.
        connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        Ok(Socket(UnixStream::from_std(net::UnixStream::from(socket))?))
    }

    /// Returns the effective user of the peer's process, as the kernel reports it.
    pub fn peer_uid(&self) -> io::Result<u32> {
        Ok(self.0.peer_cred()?.uid())
    }

    pub async fn send<M: Message>(&self, message: &M, descriptor: Option<impl AsFd>) -> io::Result<()> {
        let bytes = message.encode_to_vec();
        let passed: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !passed.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&passed));
            }
            sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
            Ok(())
        };
        self.0.async_io(Interest::WRITABLE, send).await
    }

    /// Returns the next message, or None once the peer has closed.
    pub async fn receive<M: Message + Default>(&self) -> io::Result<Option<Packet<M>>> {
        let (bytes, descriptor) = self.0.async_io(Interest::READABLE, || packet(&self.0)).await?;
        if bytes.is_empty() {
            return Ok(None);
        }
        let invalid = |fault: Fault| io::Error::new(io::ErrorKind::InvalidData, fault.to_string());
        Ok(Some(Packet { message: decode(&bytes).map_err(invalid)?, descriptor }))
    }

    /// Returns whether the peer is still open. The peer sends only answers, so unrequested bytes also count as
    /// closed.
    pub fn is_open(&self) -> bool {
        let mut byte = [0u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(&self.0, &mut byte, flags), Err(rustix::io::Errno::AGAIN))
    }
}

/// Receives one packet, with the first of its descriptors. Further descriptors are closed at once.
fn packet(socket: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0; MOST_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a packet longer than any message"));
    }
    bytes.truncate(got.bytes);
    Ok((bytes, descriptors.into_iter().next()))
}

/// Returns the id of the running kernel. Processes with the same id share a host, or are containers of it.
pub fn boot_id() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_string())
}

pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Maps the memory that the peer passed.
///
/// # Errors
/// `Invalid`, naming the violated requirement: see [`Foreign::map`].
pub fn map(descriptor: impl AsFd, bytes: u64, most: u64) -> Result<Foreign, Fault> {
    let remedy = "pass a memfd_create file sealed with F_SEAL_SHRINK and F_SEAL_GROW";
    let invalid = |error: ForeignError| Fault::invalid("memfd.memory", error.found, error.limit, remedy);
    Foreign::map(descriptor, bytes, most).map_err(invalid)
}

/// Returns the fault of a missing or closed link, and of memory that does not match the request. The sender should
/// make a new link.
pub fn stale(value: impl std::fmt::Display, limit: &str) -> Fault {
    Fault::new(FaultKind::Precondition, STALE, value, limit, "link again, or send payloads inline")
}

/// Field of [`stale`].
pub const STALE: &str = "memfd.link";

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read};

    use super::*;
    use crate::v1::{MemfdMemory, MemfdRequest, memfd_request::Request};

    #[tokio::test]
    async fn a_message_and_its_descriptor_arrive_and_the_end_is_seen() {
        let name = format!("longshore-test-{}", std::process::id());
        let listener = Listener::bind(name.as_bytes()).unwrap();
        let sender = Socket::connect(name.as_bytes()).unwrap();
        let receiver = listener.accept().await.unwrap();
        assert_eq!(receiver.peer_uid().unwrap(), uid());
        let mut file = tempfile::NamedTempFile::new().unwrap();
        std::io::Write::write_all(&mut file, b"gradient").unwrap();
        let request = MemfdRequest { request: Some(Request::Memory(MemfdMemory { bytes: 7 })) };
        sender.send(&request, Some(File::open(file.path()).unwrap())).await.unwrap();
        sender.send(&request, None::<OwnedFd>).await.unwrap();
        let packet = receiver.receive::<MemfdRequest>().await.unwrap().unwrap();
        assert_eq!(packet.message, request);
        let mut text = String::new();
        File::from(packet.descriptor.unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "gradient");
        let packet = receiver.receive::<MemfdRequest>().await.unwrap().unwrap();
        assert!(packet.descriptor.is_none());
        assert!(receiver.is_open() && sender.is_open());
        drop(sender);
        assert!(!receiver.is_open());
        assert!(receiver.receive::<MemfdRequest>().await.unwrap().is_none());
    }

    #[test]
    fn what_is_no_message_is_refused_by_name() {
        assert_eq!(decode::<MemfdRequest>(&[0xFF; 7]).unwrap_err().field, "memfd.message");
        assert_eq!(decode::<MemfdRequest>(&vec![0; MOST_BYTES + 1]).unwrap_err().field, "memfd.message");
    }
}
