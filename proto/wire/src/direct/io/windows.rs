//! Windows of tapped streams. h2 does not count their bytes, so their windows are returned here.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use super::{Direct, Inward, Stream};
use crate::direct::{outward::Header, socket::Socket};

/// Bytes of window returned at a time, or a quarter of the window if that is less. A quarter then always stays open:
/// this step withholds up to a quarter, and h2 up to half.
const STEP_BYTES: usize = 512 * 1024;

/// Window owed on a connection, and the pending frames that return it.
pub(super) struct Credit {
    pub(super) step: usize,
    pub(super) owed: usize,
    frames: Vec<u8>,
    written: usize,
}

impl Credit {
    pub(super) fn new(window: usize) -> Credit {
        Credit { step: STEP_BYTES.min(window / 4), owed: 0, frames: Vec::new(), written: 0 }
    }

    pub(super) fn is_due(&self) -> bool {
        self.owed >= self.step
    }

    /// Builds WINDOW_UPDATE frames for all that is owed, on the connection and on these streams. Returns the
    /// connection's part.
    pub(super) fn make(&mut self, streams: impl Iterator<Item = (u32, usize)>) -> usize {
        self.frames.clear();
        self.written = 0;
        let owed = std::mem::take(&mut self.owed);
        let connection = (0, owed);
        for (stream, bytes) in std::iter::once(connection).chain(streams) {
            let header = Header { len: 4, kind: Header::WINDOW_UPDATE, flags: 0, stream };
            self.frames.extend_from_slice(&header.write());
            self.frames.extend_from_slice(&(bytes as u32).to_be_bytes());
        }
        owed
    }

    pub(super) fn end(&mut self, last: u32, code: u32) {
        let header = Header { len: 8, kind: Header::GO_AWAY, flags: 0, stream: 0 };
        self.frames.extend_from_slice(&header.write());
        self.frames.extend_from_slice(&last.to_be_bytes());
        self.frames.extend_from_slice(&code.to_be_bytes());
    }

    pub(super) fn rest(&self) -> &[u8] {
        &self.frames[self.written..]
    }

    pub(super) fn advance(&mut self, written: usize) {
        self.written += written;
    }
}

impl<S: Socket> Direct<S> {
    /// Collects the windows that taps have released, and drops closed taps.
    pub(super) fn collect(&mut self) {
        if !self.line.take_changed() {
            return;
        }
        let busy = match self.inward {
            Inward::Divert { stream, .. } => Some(self.streams[stream].id),
            _ => None,
        };
        let owed = &mut self.credit.owed;
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

    /// Writes WINDOW_UPDATE frames if no h2 frame is partly written and enough is owed.
    pub(super) fn give_back(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.poll_updates(context) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }

    pub(super) fn poll_updates(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.credit.rest().is_empty() {
            if !self.outward.is_between_frames() || !self.credit.is_due() {
                return Poll::Ready(Ok(()));
            }
            let taken = |stream: &mut Stream| (stream.id, std::mem::take(&mut stream.owed));
            let open = self.streams.iter_mut().filter(|stream| stream.owed > 0 && !stream.ended);
            let granted = self.credit.make(open.map(taken));
            self.conduct.grant(granted);
        }
        while !self.credit.rest().is_empty() {
            let write = Pin::new(&mut self.socket).poll_write(context, self.credit.rest());
            let count = ready!(write)?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.credit.advance(count);
        }
        Poll::Ready(Ok(()))
    }
}
