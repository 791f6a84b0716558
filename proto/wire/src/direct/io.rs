//! The socket as h2 sees it, without the DATA frames of tapped streams.

mod divert;
mod frames;
mod inward;
mod patience;
#[cfg(test)]
mod tests;
mod traits;
mod windows;

use std::{
    io::{self, IoSliceMut},
    net::IpAddr,
    sync::Arc,
    task::{Context, Poll, ready},
};

use longshore_proto::limits::{UNFINISHED_SHARE_BYTES, WINDOW_BYTES};
use tokio::io::ReadBuf;

pub use self::traits::Connection;
use self::{inward::Inward, patience::Patience};
use super::{
    bounds::{Bounds, Guest, Standing},
    conduct::Conduct,
    credit::Credit,
    outgoing::Outgoing,
    outward::{Outward, PREFACE},
    socket::Socket,
    tap::{Line, Tap, Taps},
};
use crate::mark::Mark;

/// The size of the buffer that receives frames' headers, and whatever else is copied.
const BUFFER_BYTES: usize = 16 * 1024;
/// How much is read behind the end of a payload. The next message's head takes about 130 bytes with the headers of
/// its frames, and what is read beyond it is payload that must be copied.
const GAP_BYTES: usize = 256;
/// How much is read for taps before other connections get their turn on this thread.
const TURN_BYTES: usize = 4 * 1024 * 1024;
/// How much is read in one turn from a stranger's connection. After each turn it is checked how much the connection
/// makes the server hold.
const STRANGER_TURN_BYTES: usize = UNFINISHED_SHARE_BYTES;
/// How much a frame counts in a turn beside its bytes.
const FRAME_TURN_BYTES: usize = 512;
/// How many taps a connection may have. Further streams pass through h2.
const TAPS_MOST: usize = 64;

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It taps requests that begin with a mark.
    Server,
    /// It taps answers to requests that begin with a mark.
    Client,
}

/// See the module above.
pub struct Direct<S> {
    socket: S,
    side: Side,
    taps: Taps,
    line: Arc<Line>,
    streams: Vec<Stream>,
    /// Answers whose payload goes out past h2.
    outlets: Vec<Outgoing>,
    inward: Inward,
    /// How many bytes of the current frame still go to h2.
    passing: usize,
    outward: Outward,
    conduct: Conduct,
    /// Present on a server.
    guest: Option<Guest>,
    patience: Patience,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// A frame for h2 that did not come from the socket.
    made: Vec<u8>,
    credit: Credit,
}

struct Stream {
    id: u32,
    mark: Mark,
    tap: Arc<Tap>,
    owed: usize,
    /// Its last frame has come, so it has no window any more.
    ended: bool,
}

impl<S: Socket> Direct<S> {
    /// A server's end of a connection, held to the limits of one; and what the server knows of it.
    /// `address` is the peer's, unless it came by the Unix socket.
    pub fn serve(socket: S, bounds: &Arc<Bounds>, address: Option<IpAddr>) -> (Direct<S>, Arc<Standing>) {
        let guest = Guest::new(bounds, address);
        let standing = Arc::clone(&guest.standing);
        let mut direct = Direct::new(socket, Side::Server, WINDOW_BYTES, standing.taps.clone());
        direct.line = Arc::clone(&standing.line);
        direct.guest = Some(guest);
        direct.conduct = Conduct::of_stranger();
        (direct, standing)
    }

    /// `window` is the larger of the windows that h2 has been told to give.
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
            conduct: Conduct::new(),
            guest: None,
            patience: Patience::default(),
            buffer: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
            made: Vec::new(),
            credit: Credit::new(window),
        }
    }

    fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Reads until at least `least` bytes are buffered. Returns false at the end of the stream.
    fn fill(&mut self, context: &mut Context<'_>, least: usize) -> Poll<io::Result<bool>> {
        while self.end - self.start < least {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            // Where a payload may follow little is read, so that the payload need not be copied.
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

    /// Reads on until something for h2 has come.
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
                    // At the end of the stream this stays so.
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
                        // This is the end of the stream, and h2 finds it too.
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
