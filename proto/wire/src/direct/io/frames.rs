//! Headers of incoming frames: the peer's limits, and the route of each frame.

use std::{
    io,
    sync::Arc,
    task::{Context, Poll, ready},
};

use super::{Direct, Inward, Side, Stream, TAPS_MOST};
use crate::{
    direct::{
        conduct::{Breach, CALL_BYTES},
        outgoing::Outgoing,
        outward::{HEADER_BYTES, Header},
        socket::Socket,
        tap::Tap,
    },
    mark::{Mark, START_BYTES},
};

impl<S: Socket> Direct<S> {
    /// Reads the next frame's header. Returns None at the end of the stream.
    pub(super) fn header(&mut self, context: &mut Context<'_>) -> Poll<io::Result<Option<Header>>> {
        if !ready!(self.fill(context, HEADER_BYTES))? {
            return Poll::Ready(Ok(None));
        }
        let Some(bytes) = self.buffered().first_chunk() else { return Poll::Ready(Ok(None)) };
        let header = Header::read(bytes);
        self.patience.greeted = true;
        let is_stranger = self.is_stranger();
        let mut conduct = self.conduct.follow(&header, self.guest.as_ref().filter(|_| is_stranger));
        if let Some(guest) = &mut self.guest {
            let begins = header.kind == Header::HEADERS && guest.begins(header.stream);
            match header.kind {
                Header::HEADERS if !guest.call(header.stream) => conduct = Err(Breach::Excess),
                Header::HEADERS if begins && guest.is_to_pay(is_stranger) => {
                    conduct = conduct.and(self.conduct.useless(CALL_BYTES, is_stranger.then_some(guest)));
                }
                Header::RESET => guest.hang_up(header.stream),
                _ => {}
            }
        }
        match conduct {
            Ok(()) => Poll::Ready(Ok(Some(header))),
            Err(breach) => Poll::Ready(Err(self.cut_off(context, breach))),
        }
    }

    /// Logs the breach, and returns the error that ends h2's connection.
    pub(super) fn cut_off(&mut self, context: &mut Context<'_>, breach: Breach) -> io::Error {
        tracing::debug!(?breach, "connection cut off");
        self.say_good_bye(context, breach as u32);
        io::Error::other(breach.text())
    }

    /// Sends GOAWAY with this code, unless an h2 frame is partly written or the peer takes no bytes.
    pub(super) fn say_good_bye(&mut self, context: &mut Context<'_>, code: u32) {
        self.inward = Inward::Over;
        if self.outward.is_between_frames() {
            self.credit.end(self.guest.as_ref().map_or(0, |guest| guest.last), code);
            let _ = self.poll_updates(context);
        }
    }

    /// Chooses the route of a frame. Returns false if the stream ends inside it.
    pub(super) fn frame(&mut self, context: &mut Context<'_>, header: Header) -> Poll<io::Result<bool>> {
        let stream = self.streams.iter().position(|stream| stream.id == header.stream);
        let pass = Inward::Pass { left: HEADER_BYTES + header.len };
        self.passing = HEADER_BYTES + header.len;
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
            if header.kind == Header::RESET {
                self.outlets.iter_mut().filter(|of| of.stream == header.stream).for_each(|of| of.over = true);
            }
            self.inward = pass;
            return Poll::Ready(Ok(true));
        };
        match header.kind {
            Header::DATA => return self.data(context, stream, header),
            Header::RESET => {
                let Stream { mark, tap, .. } = &self.streams[stream];
                // The call may not have claimed its tap yet, so the tap is removed from the waiting ones.
                self.taps.meet(*mark);
                tap.close();
                self.line.note();
            }
            _ => {}
        }
        self.inward = pass;
        Poll::Ready(Ok(true))
    }

    /// Takes a DATA frame of a tapped stream.
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
        if !mark.is_of_request() {
            let may_go_past = self.socket.takes_addresses() && self.outlets.len() < TAPS_MOST;
            self.outlets.extend(may_go_past.then(|| Outgoing::offer(id, mark, &self.taps)).flatten());
            return;
        }
        let tap = Arc::new(Tap::on(&self.line));
        if self.taps.offer(mark, Arc::clone(&tap)) {
            self.streams.push(Stream { id, mark, tap, owed: 0, ended: false });
        }
    }
}
