//! What `Direct` needs of a socket beyond reading and writing: to read into several places at once.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::AsFd,
    pin::Pin,
    task::{Context, Poll, ready},
};

use longshore_memory::{Part, write_parts};
use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpStream, UnixStream},
};

/// The send buffer over loopback. Left alone it grows to 4 MiB, and what is copied in has left the cache when it is
/// copied out: a push then took 0.52 s of CPU time a GB, and takes 0.39 with this. Between hosts the kernel decides,
/// since there the buffer must hold what is on the wire.
pub const LOOPBACK_BYTES: usize = 256 * 1024;
/// The send buffer of a Unix socket, as far as net.core.wmem_max allows. With its default of 208 KiB sender and
/// receiver wait for each other, at 0.80 of a raw socket's speed; with this it is 0.96.
pub const UNIX_BYTES: usize = 1024 * 1024;

/// TCP or Unix.
pub trait Socket: AsyncRead + AsyncWrite + Unpin + Send {
    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Reads what is there into the first place, then into the next.
    ///
    /// # Errors
    /// `WouldBlock` where nothing is there: [`Socket::poll_readable`] tells when to ask again.
    fn try_read_into(&self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Whether [`Socket::poll_write_parts`] works: whether it is the kernel that reads what is sent, and not this process.
    fn takes_addresses(&self) -> bool {
        false
    }

    /// Writes parts one after the other; tells how many bytes it took.
    fn poll_write_parts(&mut self, _: &mut Context<'_>, _: &[Part<'_>]) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    /// Sets how much may be under way in the kernel, where the kernel should not decide.
    fn size_buffers(&self);
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
    ($type:ty, $buffer:expr) => {
        impl Socket for $type {
            fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.poll_read_ready(context)
            }

            fn try_read_into(&self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                let mut count = None;
                let outcome = self.try_io(Interest::READABLE, || read_all(self, places, &mut count));
                match count {
                    Some(count) => Ok(count),
                    None => outcome.map(|()| 0),
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
                let Some(bytes) = $buffer(self) else { return };
                if let Err(error) = set_socket_send_buffer_size(self, bytes) {
                    tracing::debug!(%error, "the send buffer stays as it is");
                }
            }
        }
    };
}

socket!(TcpStream, |socket: &TcpStream| {
    let local = socket.peer_addr().is_ok_and(|peer| peer.ip().is_loopback());
    local.then_some(LOOPBACK_BYTES)
});
socket!(UnixStream, |_: &UnixStream| Some(UNIX_BYTES));

/// What a client dialled.
#[derive(Debug)]
pub enum Dialled {
    Tcp(TcpStream),
    Unix(UnixStream),
}

macro_rules! either {
    ($self:expr, $socket:ident => $then:expr) => {
        match $self {
            Dialled::Tcp($socket) => $then,
            Dialled::Unix($socket) => $then,
        }
    };
}

impl Socket for Dialled {
    fn poll_readable(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, socket => socket.poll_readable(context))
    }

    fn try_read_into(&self, places: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        either!(self, socket => socket.try_read_into(places))
    }

    fn size_buffers(&self) {
        either!(self, socket => socket.size_buffers());
    }
}

impl AsyncRead for Dialled {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_read(context, buffer))
    }
}

impl AsyncWrite for Dialled {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self.get_mut(), socket => Pin::new(socket).poll_shutdown(context))
    }
}
