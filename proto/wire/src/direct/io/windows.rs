//! Windows of tapped streams. h2 does not count their bytes, so their windows are returned here.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use super::{Direct, Inward, Stream};
use crate::direct::socket::Socket;

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
