//! Requirements of `Direct` on a socket beyond reading and writing, and their implementation for TCP and Unix sockets.

use std::{
    io::{self, IoSliceMut},
    os::fd::AsFd,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::SystemTime,
};

use longshore_memory::{Part, write_parts};
use rustix::net::sockopt::set_socket_send_buffer_size;
use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpStream, UnixStream},
};

/// Send buffer over loopback. By default it grows to 4 MiB, and copied bytes leave the cache before they are copied
/// out. A push then took 0.52 s of CPU time a GB, against 0.39 with this value. Between hosts the kernel decides, since
/// there the buffer must hold the bytes in flight.
pub const LOOPBACK_BYTES: usize = 256 * 1024;
/// Limit of unsent bytes in the kernel, between hosts. Weights and gradients travel at once in delayed steps. A
/// WINDOW_UPDATE of one end queues behind the bytes that its socket has taken. The default is up to 4 MiB. On a link of
/// 25 MB/s gradients then waited 0.16 s for their window. A step took 1.45 times as long as its bytes need.
pub(crate) const UNSENT_BYTES: u32 = 128 * 1024;
/// Send buffer of a Unix socket, as far as net.core.wmem_max allows. At its default of 208 KiB sender and receiver wait
/// for each other, and reach 0.80 of a raw socket's speed. With this value they reach 0.96.
pub const UNIX_BYTES: usize = 1024 * 1024;

/// A certificate that the peer has proved to be its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// First DNS name; empty if there is none.
    pub name: String,
    /// SHA-256 of the DER, as `openssl x509 -fingerprint -sha256` prints it.
    pub sha256: [u8; 32],
}

/// A byte stream below [`Direct`](super::Direct): TCP, a Unix socket, or a wrapper of either.
///
/// The provided methods suit a wrapper such as TLS ([`Secured`](crate::tls::Secured)). Their reads go through
/// [`AsyncRead`] straight to the payload's place. A wrapper should forward [`Socket::size_buffers`] to the socket
/// below. [`AsyncWrite::is_write_vectored`] should return true if one call takes several slices: each message is a
/// small head and a large payload.
pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send {
    /// Reads available bytes into the first place, then into the next. Returns their number, which is 0 at the end of
    /// the stream. `Pending` means that no byte was taken, and the task wakes once bytes are there. A stream that can
    /// fill only one place leaves the others unchanged.
    fn poll_read_into(
        &mut self,
        context: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        let Some(place) = places.iter_mut().find(|place| !place.is_empty()) else {
            return Poll::Ready(Ok(0));
        };
        let mut buffer = ReadBuf::new(place);
        ready!(Pin::new(self).poll_read(context, &mut buffer))?;
        Poll::Ready(Ok(buffer.filled().len()))
    }

    /// Returns whether [`Socket::poll_write_parts`] works, which needs the kernel to read the sent bytes instead of
    /// this process.
    fn takes_addresses(&self) -> bool {
        false
    }

    /// Writes parts in order. Returns the number of bytes taken.
    fn poll_write_parts(&mut self, _: &mut Context<'_>, _: &[Part<'_>]) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Bounds the kernel's send buffer where its default is wrong.
    fn size_buffers(&self) {}

    fn certificate(&self) -> Option<Arc<Certificate>> {
        None
    }

    fn expires(&self) -> Option<SystemTime> {
        None
    }
}

/// The socket that a client dialled, of whatever kind.
pub type Dialled = Box<dyn Socket>;

impl Socket for Dialled {
    fn poll_read_into(
        &mut self,
        context: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        self.as_mut().poll_read_into(context, places)
    }

    fn size_buffers(&self) {
        self.as_ref().size_buffers();
    }
}

/// Reads into `places`. A short read has emptied the socket, so WouldBlock is reported in advance, which saves a system
/// call.
fn read_all(socket: impl AsFd, places: &mut [IoSliceMut<'_>], count: &mut Option<usize>) -> io::Result<()> {
    let room: usize = places.iter().map(|place| place.len()).sum();
    let read = rustix::io::readv(socket, places)?;
    *count = Some(read);
    if read > 0 && read < room { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
}

macro_rules! socket {
    ($type:ty, $bound:expr) => {
        impl Socket for $type {
            fn poll_read_into(
                &mut self,
                context: &mut Context<'_>,
                places: &mut [IoSliceMut<'_>],
            ) -> Poll<io::Result<usize>> {
                loop {
                    let mut count = None;
                    let outcome = self.try_io(Interest::READABLE, || read_all(&*self, places, &mut count));
                    match (count, outcome) {
                        (Some(count), _) => return Poll::Ready(Ok(count)),
                        (None, Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                            ready!(self.poll_read_ready(context))?;
                        }
                        (None, Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                        (None, outcome) => return Poll::Ready(outcome.map(|()| 0)),
                    }
                }
            }

            fn takes_addresses(&self) -> bool {
                true
            }

            fn poll_write_parts(
                &mut self,
                context: &mut Context<'_>,
                parts: &[Part<'_>],
            ) -> Poll<io::Result<usize>> {
                loop {
                    ready!(self.poll_write_ready(context))?;
                    match self.try_io(Interest::WRITABLE, || write_parts(&*self, parts)) {
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        other => return Poll::Ready(other),
                    }
                }
            }

            fn size_buffers(&self) {
                if let Err(error) = $bound(self) {
                    tracing::debug!(%error, "the send buffer stays as it is");
                }
            }
        }
    };
}

socket!(TcpStream, |socket: &TcpStream| {
    if socket.peer_addr()?.ip().to_canonical().is_loopback() {
        set_socket_send_buffer_size(socket, LOOPBACK_BYTES).map_err(io::Error::from)
    } else {
        SockRef::from(socket).set_tcp_notsent_lowat(UNSENT_BYTES)
    }
});
socket!(UnixStream, |socket: &UnixStream| set_socket_send_buffer_size(socket, UNIX_BYTES));
