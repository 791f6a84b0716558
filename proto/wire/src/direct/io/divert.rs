//! The DATA frames of tapped streams: passed to their sinks, kept, or discarded.

use std::{
    io::{self, IoSliceMut},
    sync::Arc,
    task::{Context, Poll, ready},
};

use super::{BUFFER_BYTES, Direct, GAP_BYTES, Inward, Stream, poll_read};
use crate::{
    direct::{
        outward::Header,
        socket::Socket,
        tap::{Tap, Want},
    },
    sink::Mode,
};

impl<S: Socket> Direct<S> {
    /// Moves some bytes of a tapped stream to its sink.
    pub(super) fn divert(
        &mut self,
        context: &mut Context<'_>,
        stream: usize,
        left: usize,
    ) -> Poll<io::Result<usize>> {
        let tap = Arc::clone(&self.streams[stream].tap);
        while self.start == self.end {
            let want = tap.state().want();
            match want {
                Want::Sink(Mode::Direct(payload)) => {
                    if let Some(count) = ready!(self.read_direct(context, stream, &tap, left.min(payload)))? {
                        return Poll::Ready(Ok(count));
                    }
                }
                // Only fields are buffered, since the payload behind them is read to its place.
                Want::Sink(Mode::Fields) => {
                    if !ready!(self.fill(context, 1))? {
                        return Poll::Ready(Ok(0));
                    }
                }
                Want::Sink(_) | Want::Keep | Want::Discard => {
                    let most = left.min(BUFFER_BYTES);
                    let count = ready!(poll_read(&mut self.socket, context, &mut self.buffer[..most]))?;
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
        drop(state);
        self.start += now;
        self.take(stream, taken);
        Poll::Ready(Ok(now))
    }

    /// Reads payload from the socket to its place, and bytes beyond its end into the buffer. None if the
    /// payload no longer has a place.
    fn read_direct(
        &mut self,
        context: &mut Context<'_>,
        stream: usize,
        tap: &Tap,
        most: usize,
    ) -> Poll<io::Result<Option<usize>>> {
        let Direct { socket, buffer, .. } = self;
        let mut beyond = 0;
        let mut read = |place: &mut [u8]| {
            let room = place.len();
            let gap = if room == most { GAP_BYTES } else { 0 };
            let mut places = [IoSliceMut::new(place), IoSliceMut::new(&mut buffer[..gap])];
            let Poll::Ready(count) = socket.poll_read_into(context, &mut places) else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            let count = count?;
            beyond = count.saturating_sub(room);
            Ok(count - beyond)
        };
        let outcome = tap.state().read(most, &mut read);
        match outcome {
            Ok(count) => {
                (self.start, self.end) = (0, beyond);
                self.take(stream, count.unwrap_or(0));
                Poll::Ready(Ok(count))
            }
            // The socket has noted the task, and wakes it once bytes are there.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    pub(super) fn discard(
        &mut self,
        context: &mut Context<'_>,
        stream: usize,
        most: usize,
    ) -> Poll<io::Result<usize>> {
        if !ready!(self.fill(context, 1))? {
            return Poll::Ready(Ok(0));
        }
        let now = most.min(self.end - self.start);
        self.start += now;
        self.take(stream, now);
        Poll::Ready(Ok(now))
    }

    pub(super) fn take(&mut self, stream: usize, bytes: usize) {
        self.credit.owed += bytes;
        self.streams[stream].owed += bytes;
    }

    pub(super) fn finish_frame(&mut self, stream: usize) {
        let Stream { id, ended, .. } = self.streams[stream];
        if ended {
            let end = Header { len: 0, kind: Header::DATA, flags: Header::END_STREAM, stream: id };
            self.made.extend_from_slice(&end.write());
        }
        if self.streams[stream].tap.state().is_closed() {
            // A closed stream is kept to the end of its frame.
            self.line.note();
        }
        self.inward = Inward::Header;
    }
}
