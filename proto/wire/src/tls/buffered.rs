//! A socket that is read in large pieces. rustls asks for 4 KiB at a time, which would be four system calls a record.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Two records.
const BUFFER_BYTES: usize = 32 * 1024;

/// Bytes that were read and not taken lie between `start` and `end`.
#[derive(Debug)]
pub(super) struct Buffered<S> {
    pub(super) socket: S,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<S> Buffered<S> {
    pub(super) fn new(socket: S) -> Buffered<S> {
        Buffered { socket, buffer: vec![0; BUFFER_BYTES].into(), start: 0, end: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Buffered<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.start == this.end {
            let mut buffer = ReadBuf::new(&mut this.buffer);
            ready!(Pin::new(&mut this.socket).poll_read(context, &mut buffer))?;
            (this.start, this.end) = (0, buffer.filled().len());
        }
        let now = out.remaining().min(this.end - this.start);
        out.put_slice(&this.buffer[this.start..this.start + now]);
        this.start += now;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Buffered<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().socket).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}
