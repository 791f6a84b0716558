//! The socket as h2 sees it, without the DATA frames of tapped streams. Runs on the connection's task.

mod divert;
mod frames;
mod patience;
#[cfg(test)]
mod tests;
mod windows;

use std::{
    any::Any,
    io::{self, IoSlice, IoSliceMut},
    mem,
    net::IpAddr,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, ready},
};

use longshore_proto::limits::{UNFINISHED_SHARE_BYTES, WINDOW_BYTES};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use self::{patience::Patience, windows::Credit};
use super::{
    bounds::{Bounds, Guest, Standing},
    conduct::Conduct,
    ledger::{Account, Owner},
    lock,
    outgoing::{Outgoing, fill_blanks},
    outward::{Header, Outward, PREFACE, Seen},
    socket::{Certificate, Socket},
    tap::{Line, Tap, Taps},
};
use crate::{mark::Mark, memfd::uid};

/// Size of the buffer for frame headers and copied bytes.
const BUFFER_BYTES: usize = 16 * 1024;
/// Bytes read beyond the end of a payload. The next message's head takes about 130 bytes with the headers of its
/// frames. A longer read would reach into the next payload, and those bytes must be copied.
const GAP_BYTES: usize = 256;
/// Bytes read for taps before other connections of this thread get their turn.
const TURN_BYTES: usize = 4 * 1024 * 1024;
/// Bytes read in one turn from a stranger's connection. After each turn the server checks how much the connection
/// makes it hold.
const STRANGER_TURN_BYTES: usize = UNFINISHED_SHARE_BYTES;
/// Bytes that a frame counts in a turn, beside its own bytes.
const FRAME_TURN_BYTES: usize = 512;
/// Largest number of taps of a connection. Further streams pass through h2.
const TAPS_MOST: usize = 64;

/// Role of this process on the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Taps requests that begin with a mark.
    Server,
    /// Taps answers to requests that begin with a mark.
    Client,
}

/// A socket that diverts marked payloads around h2; see the module [`direct`](crate::direct).
pub struct Direct<S> {
    socket: S,
    side: Side,
    taps: Taps,
    line: Arc<Line>,
    streams: Vec<Stream>,
    /// Answers whose payload bypasses h2.
    outlets: Vec<Outgoing>,
    inward: Inward,
    /// Bytes of the current frame, header included, that go to h2.
    passing: usize,
    outward: Outward,
    /// True until the current write has been flushed; see [`Direct::poll_gathered`].
    is_gathered: bool,
    conduct: Conduct,
    /// The connection's end of its standing on a server. None on a client.
    guest: Option<Guest>,
    patience: Patience,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// A frame for h2 that did not come from the socket.
    made: Vec<u8>,
    credit: Credit,
    /// See [`Connection::kept`].
    kept: Arc<Mutex<Kept>>,
}

struct Stream {
    id: u32,
    mark: Mark,
    tap: Arc<Tap>,
    owed: usize,
    /// The stream's last frame has come, so its window no longer matters.
    ended: bool,
}

/// Meaning of the socket's next bytes.
enum Inward {
    Preface,
    Header,
    /// An allowed header. The route of its frame is not chosen yet.
    Frame(Header),
    /// Bytes for h2.
    Pass {
        left: usize,
    },
    /// Bytes of another protocol than HTTP/2, or the end of the stream.
    Raw,
    Divert {
        stream: usize,
        left: usize,
        padding: usize,
    },
    /// Reading has stopped.
    Over,
}

impl<S: Socket> Direct<S> {
    /// Returns a server's end of a connection, with its limits, and the server's view of it. `address` is the peer's
    /// address, or None for the Unix socket.
    pub fn serve(socket: S, bounds: &Arc<Bounds>, address: Option<IpAddr>) -> (Direct<S>, Arc<Standing>) {
        let guest = Guest::new(bounds, address);
        let standing = Arc::clone(&guest.standing);
        let mut direct = Direct::new(socket, Side::Server, WINDOW_BYTES, standing.taps.clone());
        direct.line = Arc::clone(&standing.line);
        direct.guest = Some(guest);
        direct.conduct = Conduct::of_stranger();
        (direct, standing)
    }

    /// `window` is the larger of the windows that h2 is configured to grant.
    pub fn new(socket: S, side: Side, window: usize, taps: Taps) -> Direct<S> {
        socket.size_buffers();
        let (inward, outward) = match side {
            Side::Server => (Inward::Preface, Outward::default()),
            Side::Client => (Inward::Header, Outward::after_preface(PREFACE.len())),
        };
        Direct {
            socket,
            side,
            taps,
            line: Arc::default(),
            streams: Vec::new(),
            outlets: Vec::new(),
            inward,
            passing: 0,
            outward,
            is_gathered: false,
            conduct: Conduct::new(),
            guest: None,
            patience: Patience::default(),
            buffer: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
            made: Vec::new(),
            credit: Credit::new(window),
            kept: Arc::default(),
        }
    }

    /// Returns the values kept with the connection, which calls find by [`Connection::kept`].
    pub fn kept(&self) -> &Arc<Mutex<Kept>> {
        &self.kept
    }

    fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Reads until at least `least` bytes are buffered. Returns false at the end of the stream.
    fn fill(&mut self, context: &mut Context<'_>, least: usize) -> Poll<io::Result<bool>> {
        while self.end - self.start < least {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            // Reads stay small while a payload may follow, so that the payload need not be copied.
            let most = if self.streams.is_empty() { BUFFER_BYTES } else { least.max(GAP_BYTES) };
            let room = &mut self.buffer[self.end..most];
            let count = ready!(poll_read(&mut self.socket, context, room))?;
            if count == 0 {
                return Poll::Ready(Ok(false));
            }
            self.end += count;
        }
        Poll::Ready(Ok(true))
    }

    /// Reads until bytes for h2 have come.
    fn poll_inward(&mut self, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut turn = if self.is_stranger() { STRANGER_TURN_BYTES } else { TURN_BYTES };
        loop {
            if !self.made.is_empty() {
                let now = self.made.len().min(out.remaining());
                out.put_slice(&self.made[..now]);
                self.made.drain(..now);
                return Poll::Ready(Ok(()));
            }
            match self.inward {
                Inward::Preface => {
                    let whole = ready!(self.fill(context, PREFACE.len()))?;
                    let is_http2 = whole && self.buffered().starts_with(PREFACE);
                    self.inward = if is_http2 { Inward::Pass { left: PREFACE.len() } } else { Inward::Raw };
                }
                Inward::Header => {
                    self.inward = match ready!(self.header(context))? {
                        Some(header) => Inward::Frame(header),
                        None => Inward::Raw,
                    };
                    turn = turn.saturating_sub(FRAME_TURN_BYTES);
                }
                Inward::Frame(header) => {
                    if !ready!(self.frame(context, header))? {
                        self.inward = Inward::Raw;
                    }
                }
                Inward::Over => return Poll::Ready(Ok(())),
                Inward::Pass { left: 0 } => self.inward = Inward::Header,
                Inward::Pass { left } => {
                    let now = ready!(self.pass(context, out, left))?;
                    // At the end of the stream `now` is 0 and the state stays.
                    self.inward = Inward::Pass { left: left - now };
                    return Poll::Ready(Ok(()));
                }
                Inward::Raw => {
                    return self.pass(context, out, usize::MAX).map_ok(|_| ());
                }
                Inward::Divert { stream, left: 0, padding: 0 } => self.finish_frame(stream),
                Inward::Divert { stream, left, padding } => {
                    if turn == 0 {
                        context.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    let now = if left > 0 {
                        ready!(self.divert(context, stream, left))?
                    } else {
                        ready!(self.discard(context, stream, padding))?
                    };
                    if now == 0 {
                        // The stream has ended. The crate h2 finds the end with its next read.
                        return Poll::Ready(Ok(()));
                    }
                    turn = turn.saturating_sub(now);
                    self.inward = if left > 0 {
                        Inward::Divert { stream, left: left - now, padding }
                    } else {
                        Inward::Divert { stream, left, padding: padding - now }
                    };
                    if self.credit.is_due() {
                        self.give_back(context)?;
                    }
                }
            }
        }
    }

    /// Before the first write after a flush, gives other tasks of this thread their turn once. Their frames then join
    /// that write. Otherwise h2 flushes a call's headers before its message is queued, and each write wakes the peer.
    fn poll_gathered(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if mem::replace(&mut self.is_gathered, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }

    /// Gives h2 some bytes of a frame.
    fn pass(
        &mut self,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
        left: usize,
    ) -> Poll<io::Result<usize>> {
        let most = if self.is_stranger() { STRANGER_TURN_BYTES } else { usize::MAX };
        let room = out.remaining().min(left).min(most);
        if self.start == self.end {
            if room >= BUFFER_BYTES {
                let count = ready!(poll_read(&mut self.socket, context, out.initialize_unfilled_to(room)))?;
                out.advance(count);
                return Poll::Ready(Ok(count));
            }
            if !ready!(self.fill(context, 1))? {
                return Poll::Ready(Ok(0));
            }
        }
        let now = room.min(self.end - self.start);
        out.put_slice(&self.buffer[self.start..self.start + now]);
        self.start += now;
        Poll::Ready(Ok(now))
    }
}

fn poll_read(
    socket: &mut impl Socket,
    context: &mut Context<'_>,
    place: &mut [u8],
) -> Poll<io::Result<usize>> {
    socket.poll_read_into(context, &mut [IoSliceMut::new(place)])
}

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
        ready!(this.poll_gathered(context));
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
        ready!(Pin::new(&mut this.socket).poll_flush(context))?;
        this.is_gathered = false;
        Poll::Ready(Ok(()))
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
    /// Returns the connection of a caller in the server's own process, which has no socket.
    pub(crate) fn local(bounds: &Arc<Bounds>) -> Connection {
        let account = bounds.account(Owner::User(uid()));
        Connection { taps: Taps::default(), account, certificate: None, kept: Arc::default() }
    }

    /// Returns a call's connection. None if the call did not come through a [`Direct`].
    pub fn of(extensions: &http::Extensions) -> Option<&Connection> {
        extensions.get()
    }

    /// Returns the values that the server keeps with the connection, and may extend.
    pub fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
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
