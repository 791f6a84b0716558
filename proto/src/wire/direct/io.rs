//! The socket as h2 sees it, without the DATA frames of tapped streams.

#[cfg(test)]
mod tests;

use std::{
    io::{self, IoSlice, IoSliceMut},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

use super::{
    mark::{Mark, START_BYTES},
    outward::{HEADER_BYTES, Header, Outward, PREFACE},
    socket::Socket,
    tap::{Line, Mode, Tap, Taps, Want},
};

/// Where frames' headers and what else is copied arrive.
const BUFFER_BYTES: usize = 16 * 1024;
/// Read behind the end of a payload: the next message's head with the headers of its frames takes about 130 bytes, and
/// what is read beyond is payload that must be copied.
const GAP_BYTES: usize = 256;
/// Windows are given back in steps of this, or of a quarter where that is less: h2 holds back up to half of it, and so a
/// quarter is always open.
const STEP_BYTES: usize = 512 * 1024;
/// Read for taps before others get their turn on this thread.
const TURN_BYTES: usize = 4 * 1024 * 1024;
/// Taps of one connection; further streams pass through h2.
const TAPS_MOST: usize = 64;

/// Which end of the connection this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Taps requests that begin with a mark.
    Server,
    /// Taps answers to requests that begin with a mark.
    Client,
}

/// See the module above.
pub struct Direct<S> {
    socket: S,
    side: Side,
    /// Most that a peer which keeps to its windows has under way.
    window: usize,
    /// So much is given back at a time.
    step: usize,
    taps: Taps,
    line: Arc<Line>,
    streams: Vec<Stream>,
    inward: Inward,
    outward: Outward,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// A frame for h2 that did not come from the socket.
    made: Vec<u8>,
    /// Taken from the connection's window, not yet given back.
    owed: usize,
    /// WINDOW_UPDATE frames on their way, and how much of them is written.
    updates: Vec<u8>,
    written: usize,
}

struct Stream {
    id: u32,
    tap: Arc<Tap>,
    owed: usize,
    /// Its last frame has come: it has no window any more.
    ended: bool,
}

/// Where in the frames the socket is.
enum Inward {
    Preface,
    Header,
    /// Goes to h2.
    Pass {
        left: usize,
    },
    /// No HTTP/2, or its end.
    Raw,
    Divert {
        stream: usize,
        left: usize,
        padding: usize,
    },
}

impl<S: Socket> Direct<S> {
    /// `window`: the larger of the windows that h2 has been told to give.
    pub fn new(socket: S, side: Side, window: usize, taps: Taps) -> Direct<S> {
        socket.size_buffers();
        let (inward, outward) = match side {
            Side::Server => (Inward::Preface, Outward::default()),
            Side::Client => (Inward::Header, Outward::after_preface(PREFACE.len())),
        };
        Direct {
            socket,
            side,
            window,
            step: STEP_BYTES.min(window / 4),
            taps,
            line: Arc::default(),
            streams: Vec::new(),
            inward,
            outward,
            buffer: vec![0; BUFFER_BYTES].into(),
            start: 0,
            end: 0,
            made: Vec::new(),
            owed: 0,
            updates: Vec::new(),
            written: 0,
        }
    }

    fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Reads at least until `least` bytes are buffered; false at the end of the stream.
    fn fill(&mut self, context: &mut Context<'_>, least: usize) -> Poll<io::Result<bool>> {
        while self.end - self.start < least {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            // Where a payload may follow little is read, so that it need not be copied.
            let most = if self.streams.is_empty() { BUFFER_BYTES } else { least.max(GAP_BYTES) };
            let room = &mut self.buffer[self.end..most];
            let count = ready!(poll_read(&self.socket, context, room))?;
            if count == 0 {
                return Poll::Ready(Ok(false));
            }
            self.end += count;
        }
        Poll::Ready(Ok(true))
    }

    /// Reads on until something for h2 has come.
    fn poll_inward(&mut self, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut turn = TURN_BYTES;
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
                    if !ready!(self.header(context))? {
                        self.inward = Inward::Raw;
                    }
                }
                Inward::Pass { left: 0 } => self.inward = Inward::Header,
                Inward::Pass { left } => {
                    let now = ready!(self.pass(context, out, left))?;
                    // At the end of the stream it stays so.
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
                        // The end of the stream: h2 finds it too.
                        return Poll::Ready(Ok(()));
                    }
                    turn = turn.saturating_sub(now);
                    self.inward = if left > 0 {
                        Inward::Divert { stream, left: left - now, padding }
                    } else {
                        Inward::Divert { stream, left, padding: padding - now }
                    };
                    if self.owed >= self.step {
                        self.give_back(context)?;
                    }
                }
            }
        }
    }

    /// Decides on the next frame; false when there is none.
    fn header(&mut self, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        if !ready!(self.fill(context, HEADER_BYTES))? {
            return Poll::Ready(Ok(false));
        }
        let Some(bytes) = self.buffered().first_chunk() else { return Poll::Ready(Ok(false)) };
        let header = Header::read(bytes);
        let stream = self.streams.iter().position(|stream| stream.id == header.stream);
        let pass = Inward::Pass { left: HEADER_BYTES + header.len };
        let Some(stream) = stream else {
            let may_begin = self.side == Side::Server
                && header.kind == Header::DATA
                && header.flags & Header::PADDED == 0
                && header.len >= START_BYTES
                && self.streams.len() < TAPS_MOST;
            if may_begin {
                if !ready!(self.fill(context, HEADER_BYTES + START_BYTES))? {
                    return Poll::Ready(Ok(false));
                }
                if let Some(mark) = Mark::find(&self.buffered()[HEADER_BYTES..]) {
                    self.tap(header.stream, mark);
                }
            }
            self.inward = pass;
            return Poll::Ready(Ok(true));
        };
        match header.kind {
            Header::DATA => return self.data(context, stream, header),
            Header::RESET => self.streams[stream].tap.close(),
            _ => {}
        }
        self.inward = pass;
        Poll::Ready(Ok(true))
    }

    /// A DATA frame of a tapped stream.
    fn data(&mut self, context: &mut Context<'_>, stream: usize, header: Header) -> Poll<io::Result<bool>> {
        let padded = header.flags & Header::PADDED != 0;
        let prefix = HEADER_BYTES + usize::from(padded);
        if padded && !ready!(self.fill(context, prefix))? {
            return Poll::Ready(Ok(false));
        }
        let padding = if padded { usize::from(self.buffered()[HEADER_BYTES]) } else { 0 };
        let wrong = usize::from(padded) + padding > header.len;
        if wrong || self.streams[stream].tap.state().is_closed() {
            self.inward = Inward::Pass { left: HEADER_BYTES + header.len };
            return Poll::Ready(Ok(true));
        }
        self.start += prefix;
        self.take(stream, usize::from(padded));
        self.streams[stream].ended = header.flags & Header::END_STREAM != 0;
        let left = header.len - usize::from(padded) - padding;
        self.inward = Inward::Divert { stream, left, padding };
        Poll::Ready(Ok(true))
    }

    fn tap(&mut self, id: u32, mark: Mark) {
        let tap = Arc::new(Tap::on(&self.line));
        if mark.is_of_request() && self.taps.offer(mark, Arc::clone(&tap)) {
            self.streams.push(Stream { id, tap, owed: 0, ended: false });
        }
    }

    fn finish_frame(&mut self, stream: usize) {
        let Stream { id, ended, .. } = self.streams[stream];
        if ended {
            let end = Header { len: 0, kind: Header::DATA, flags: Header::END_STREAM, stream: id };
            self.made.extend_from_slice(&end.write());
        }
        self.inward = Inward::Header;
    }

    /// Some bytes of a frame that h2 gets.
    fn pass(
        &mut self,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
        left: usize,
    ) -> Poll<io::Result<usize>> {
        let room = out.remaining().min(left);
        if self.start == self.end {
            if room >= BUFFER_BYTES {
                let count = ready!(poll_read(&self.socket, context, out.initialize_unfilled_to(room)))?;
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

    /// Some bytes of a tapped stream, to where its sink wants them.
    fn divert(&mut self, context: &mut Context<'_>, stream: usize, left: usize) -> Poll<io::Result<usize>> {
        let tap = Arc::clone(&self.streams[stream].tap);
        while self.start == self.end {
            let want = tap.state().want();
            match want {
                Want::Sink(Mode::Direct(payload)) => {
                    if let Some(count) = ready!(self.read_direct(context, stream, left.min(payload)))? {
                        return Poll::Ready(Ok(count));
                    }
                }
                // Its fields only: the payload behind them is to be read to its place.
                Want::Sink(Mode::Fields) => {
                    if !ready!(self.fill(context, 1))? {
                        return Poll::Ready(Ok(0));
                    }
                }
                Want::Sink(_) | Want::Keep | Want::Discard => {
                    let most = left.min(BUFFER_BYTES);
                    let count = ready!(poll_read(&self.socket, context, &mut self.buffer[..most]))?;
                    if count == 0 {
                        return Poll::Ready(Ok(0));
                    }
                    (self.start, self.end) = (0, count);
                }
            }
        }
        let now = left.min(self.end - self.start);
        let bytes = &self.buffer[self.start..self.start + now];
        let mut state = tap.state();
        let taken = match state.want() {
            Want::Sink(_) => state.put(bytes),
            Want::Discard => now,
            Want::Keep => {
                state.keep(bytes);
                0
            }
        };
        if state.kept_bytes() > self.window {
            return Poll::Ready(Err(io::Error::other("the peer sent more than its window")));
        }
        drop(state);
        self.start += now;
        self.take(stream, taken);
        Poll::Ready(Ok(now))
    }

    /// Payload from the socket to its place; behind its end, what comes next into the buffer. None when it has no place
    /// any more.
    fn read_direct(
        &mut self,
        context: &mut Context<'_>,
        stream: usize,
        most: usize,
    ) -> Poll<io::Result<Option<usize>>> {
        let Direct { socket, streams, buffer, .. } = self;
        loop {
            let mut beyond = 0;
            let mut read = |place: &mut [u8]| {
                let room = place.len();
                let gap = if room == most { GAP_BYTES } else { 0 };
                let mut places = [IoSliceMut::new(place), IoSliceMut::new(&mut buffer[..gap])];
                let count = socket.try_read_into(&mut places)?;
                beyond = count.saturating_sub(room);
                Ok(count - beyond)
            };
            let outcome = streams[stream].tap.state().read(most, &mut read);
            match outcome {
                Ok(count) => {
                    (self.start, self.end) = (0, beyond);
                    self.take(stream, count.unwrap_or(0));
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready!(socket.poll_readable(context))?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn discard(&mut self, context: &mut Context<'_>, stream: usize, most: usize) -> Poll<io::Result<usize>> {
        if !ready!(self.fill(context, 1))? {
            return Poll::Ready(Ok(0));
        }
        let now = most.min(self.end - self.start);
        self.start += now;
        self.take(stream, now);
        Poll::Ready(Ok(now))
    }

    fn take(&mut self, stream: usize, bytes: usize) {
        self.owed += bytes;
        self.streams[stream].owed += bytes;
    }

    /// Collects what taps have given back, and lets go of those that were closed.
    fn collect(&mut self) {
        if !self.line.take_changed() {
            return;
        }
        let busy = match self.inward {
            Inward::Divert { stream, .. } => Some(self.streams[stream].id),
            _ => None,
        };
        let owed = &mut self.owed;
        self.streams.retain_mut(|stream| {
            let mut state = stream.tap.state();
            let released = state.take_released();
            *owed += released;
            stream.owed += released;
            !state.is_closed() || busy == Some(stream.id)
        });
        if let Inward::Divert { stream, .. } = &mut self.inward {
            *stream = self.streams.iter().position(|stream| Some(stream.id) == busy).unwrap_or(0);
        }
    }

    /// Writes WINDOW_UPDATE frames, where one frame of h2's has ended and enough has been taken.
    fn give_back(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.poll_updates(context) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }

    fn poll_updates(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.written == self.updates.len() {
            if !self.outward.is_between_frames() || self.owed < self.step {
                return Poll::Ready(Ok(()));
            }
            self.make_updates();
        }
        while self.written < self.updates.len() {
            let rest = &self.updates[self.written..];
            let count = ready!(Pin::new(&mut self.socket).poll_write(context, rest))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.written += count;
        }
        Poll::Ready(Ok(()))
    }

    fn make_updates(&mut self) {
        (self.written, self.owed) = (0, {
            self.updates.clear();
            push_update(&mut self.updates, 0, self.owed);
            0
        });
        for stream in &mut self.streams {
            let owed = std::mem::take(&mut stream.owed);
            if owed > 0 && !stream.ended {
                push_update(&mut self.updates, stream.id, owed);
            }
        }
    }
}

fn push_update(updates: &mut Vec<u8>, stream: u32, bytes: usize) {
    let header = Header { len: 4, kind: Header::WINDOW_UPDATE, flags: 0, stream };
    updates.extend_from_slice(&header.write());
    updates.extend_from_slice(&(bytes as u32).to_be_bytes());
}

fn poll_read(socket: &impl Socket, context: &mut Context<'_>, place: &mut [u8]) -> Poll<io::Result<usize>> {
    loop {
        match socket.try_read_into(&mut [IoSliceMut::new(place)]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                ready!(socket.poll_readable(context))?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return Poll::Ready(other),
        }
    }
}

impl<S: Socket> AsyncRead for Direct<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.line.register(context.waker());
        this.collect();
        let polled = this.poll_inward(context, out);
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
        let count = ready!(Pin::new(&mut this.socket).poll_write_vectored(context, slices))?;
        let marks = this.side == Side::Client && !this.taps.is_empty();
        let mut left = count;
        for slice in slices {
            let now = left.min(slice.len());
            left -= now;
            let Direct { outward, taps, streams, line, .. } = this;
            outward.follow(&slice[..now], marks, |id, mark| {
                if let Some(tap) = taps.meet(mark) {
                    tap.join(line);
                    streams.push(Stream { id, tap, owed: 0, ended: false });
                }
            });
        }
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

/// A server's calls find their taps in their request's extensions.
impl<S: Socket> Connected for Direct<S> {
    type ConnectInfo = Taps;

    fn connect_info(&self) -> Taps {
        self.taps.clone()
    }
}
