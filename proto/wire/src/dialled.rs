//! The socket type of clients, over all kinds of sockets that an address may name.

use std::{
    io::{self, IoSlice, IoSliceMut},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
};

use crate::{direct::Socket, tls::Secured};

/// The socket that a client dialled.
#[derive(Debug)]
pub enum Dialled {
    Tcp(TcpStream),
    Tls(Box<Secured>),
    Unix(UnixStream),
}

macro_rules! either {
    ($self:expr, $socket:ident => $then:expr) => {
        match $self {
            Dialled::Tcp($socket) => $then,
            Dialled::Tls($socket) => $then,
            Dialled::Unix($socket) => $then,
        }
    };
}

impl Socket for Dialled {
    fn poll_read_into(
        &mut self,
        context: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, socket => socket.poll_read_into(context, places))
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
