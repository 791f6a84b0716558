//! The traits of `Direct` that h2 and tonic call.

use std::{
    any::Any,
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use super::{Direct, Side, Stream};
use crate::direct::{
    bounds::Bounds,
    ledger::{Account, Owner},
    outgoing::fill_blanks,
    outward::Seen,
    socket::{Certificate, Socket},
    tap::Taps,
};

impl<S: Socket> AsyncRead for Direct<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.line.register(context.waker());
        // A peer that sends without end must not starve the others.
        let turn = ready!(tokio::task::coop::poll_proceed(context));
        this.collect();
        ready!(this.poll_patience(context))?;
        let polled = this.poll_inward(context, out);
        if polled.is_ready() {
            turn.made_progress();
        }
        this.give_back(context)?;
        polled
    }
}

impl<S: Socket> AsyncWrite for Direct<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_updates(context))?;
        let count = if this.outlets.is_empty() {
            ready!(Pin::new(&mut this.socket).poll_write_vectored(context, slices))?
        } else {
            let parts = fill_blanks(this.outward.cursor(), slices, &this.outlets);
            ready!(this.socket.poll_write_parts(context, &parts))?
        };
        let marks = this.side == Side::Client && !this.taps.is_empty();
        let Direct { outward, taps, streams, outlets, line, conduct, guest, .. } = this;
        conduct.sent(count);
        let mut left = count;
        for slice in slices {
            let now = left.min(slice.len());
            left -= now;
            outward.follow(&slice[..now], marks, |seen| match seen {
                Seen::Marked(id, mark) => {
                    if let Some(tap) = taps.meet(mark) {
                        tap.join(line);
                        streams.push(Stream { id, mark, tap, owed: 0, ended: false });
                    }
                }
                Seen::Granted(bytes) => conduct.grant(bytes),
                Seen::Data(id, bytes) => {
                    outlets.iter_mut().filter(|of| of.stream == id).for_each(|of| of.advance(bytes));
                }
                Seen::Ended(id) => {
                    guest.iter_mut().for_each(|guest| guest.hang_up(id));
                    outlets.iter_mut().filter(|of| of.stream == id).for_each(|of| of.over = true);
                }
            });
        }
        outlets.retain(|of| !of.over || outward.is_inside_data_of(of.stream));
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_updates(context))?;
        Pin::new(&mut this.socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}

/// Data of a call's connection. A server's calls find it in their request's extensions.
#[derive(Clone)]
pub struct Connection {
    pub taps: Taps,
    /// Bytes that the connection makes the server hold.
    pub account: Arc<Account>,
    /// See [`Socket::certificate`].
    pub certificate: Option<Arc<Certificate>>,
    /// Values kept until the connection and its calls end.
    kept: Arc<Mutex<Kept>>,
}

/// Values that a server keeps with a connection.
pub type Kept = Vec<Box<dyn Any + Send>>;

impl Connection {
    /// Returns a call's connection. None if the call did not come through a [`Direct`].
    pub fn of(extensions: &http::Extensions) -> Option<&Connection> {
        extensions.get()
    }

    /// Returns the values that the server keeps with the connection, and may extend.
    pub fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Socket> Direct<S> {
    /// Returns the values kept with the connection, which calls find by [`Connection::kept`].
    pub fn kept(&self) -> &Arc<Mutex<Kept>> {
        &self.kept
    }
}

impl<S: Socket> Connected for Direct<S> {
    type ConnectInfo = Connection;

    fn connect_info(&self) -> Connection {
        let guest = self.guest.as_ref().map(|guest| Arc::clone(&guest.standing.account));
        Connection {
            taps: self.taps.clone(),
            account: guest.unwrap_or_else(|| Bounds::default().account(Owner::Local)),
            certificate: self.socket.certificate(),
            kept: Arc::clone(&self.kept),
        }
    }
}
