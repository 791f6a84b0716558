//! What `Direct` needs of a socket beyond reading and writing, and which sockets have it.

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

/// The send buffer over loopback. Left alone it grows to 4 MiB, and what is copied in has left the cache when it is
/// copied out: a push then took 0.52 s of CPU time a GB, and takes 0.39 with this. Between hosts the kernel decides,
/// since there the buffer must hold what is on the wire.
pub const LOOPBACK_BYTES: usize = 256 * 1024;
/// How much the kernel holds of what has not been sent yet, between hosts. Weights and gradients travel at once in delayed
/// steps, and the window that one end gives back waits behind what its socket has taken already. Left alone that is up to 4 MiB: on
/// a link of 25 MB/s gradients waited 0.16 s for their window, and a step took 1.45 times as long as the bytes need.
pub(crate) const UNSENT_BYTES: u32 = 128 * 1024;
/// The send buffer of a Unix socket, as far as net.core.wmem_max allows. With its default of 208 KiB sender and
/// receiver wait for each other, at 0.80 of a raw socket's speed; with this it is 0.96.
pub const UNIX_BYTES: usize = 1024 * 1024;

/// A byte stream that [`Direct`](super::Direct) can lie on: TCP, a Unix socket, or what wraps one of them.
///
/// For what wraps a socket, such as TLS ([`Secured`](crate::tls::Secured)), the provided methods are enough to be right, since
/// they read through [`AsyncRead`] straight to the payload's place. It should pass [`Socket::size_buffers`] on to the socket below,
/// and say true in [`AsyncWrite::is_write_vectored`] where it takes several slices with one call, since each message is a
/// small head and a large payload.
pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send {
    /// Reads the bytes that are there into the first place, then into the next, and returns how many they were: 0 at the end
    /// of the stream. If it returns `Pending` nothing was taken, and the task is woken once bytes are there. A stream that can
    /// fill only one place leaves the others as they are.
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

    /// Whether [`Socket::poll_write_parts`] works. It does if the kernel reads what is sent, and not this process.
    fn takes_addresses(&self) -> bool {
        false
    }

    /// Writes parts one after the other. Returns how many bytes it took.
    fn poll_write_parts(&mut self, _: &mut Context<'_>, _: &[Part<'_>]) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Bounds what the kernel buffers of what is sent, where the kernel should not decide it.
    fn size_buffers(&self) {}

    /// The name that the other end has proved by a certificate: its first DNS name, or nothing where it has none. None where
    /// no certificate was shown.
    fn certificate(&self) -> Option<Arc<str>> {
        None
    }

    /// When that certificate expires.
    fn expires(&self) -> Option<SystemTime> {
        None
    }
}

/// Reads. A read that was not filled has emptied the socket, and the next one would only be told so; its answer is
/// given in advance, which saves that system call.
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
