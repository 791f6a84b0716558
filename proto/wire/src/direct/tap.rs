//! A tap: one stream whose DATA frames bypass h2, shared by the connection's task and the call's task.

use std::{
    collections::{HashMap, VecDeque},
    io, mem,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
};

use bytes::{Bytes, BytesMut};

use super::{lock, outgoing::Outlet};
use crate::{
    mark::Mark,
    sink::{Mode, Read, Sink},
};

/// Size of the pieces in which kept bytes are gathered. Pieces keep small frames from taking more memory than large
/// frames.
const PIECE_BYTES: usize = 64 * 1024;

/// Signal from a call's task to the connection's task.
#[derive(Default)]
pub(super) struct Line {
    waker: Mutex<Option<Waker>>,
    changed: AtomicBool,
}

impl Line {
    pub(super) fn register(&self, waker: &Waker) {
        let mut held = lock(&self.waker);
        if held.as_ref().is_none_or(|held| !held.will_wake(waker)) {
            *held = Some(waker.clone());
        }
    }

    /// Returns whether a tap has changed since the last call.
    pub(super) fn take_changed(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel)
    }

    /// Makes the connection check its taps at its next poll.
    pub(super) fn note(&self) {
        self.changed.store(true, Ordering::Release);
    }

    pub(super) fn wake(&self) {
        self.note();
        if let Some(waker) = lock(&self.waker).as_ref() {
            waker.wake_by_ref();
        }
    }
}

/// A tap on one stream; see the module.
#[derive(Default)]
pub struct Tap(Mutex<TapState>);

#[derive(Default)]
pub(super) struct TapState {
    sink: Option<Box<dyn Sink>>,
    /// Bytes that the sink could not take yet, oldest first; `front` precedes the rest.
    front: Bytes,
    kept: VecDeque<BytesMut>,
    kept_bytes: usize,
    /// Further bytes are discarded.
    closed: bool,
    /// Kept bytes that the sink has taken since, whose window must be returned.
    released: usize,
    line: Option<Arc<Line>>,
}

/// Treatment of a frame's bytes.
pub(super) enum Want {
    Sink(Mode),
    Keep,
    Discard,
}

impl TapState {
    pub(super) fn want(&mut self) -> Want {
        if self.closed {
            return Want::Discard;
        }
        match &mut self.sink {
            Some(sink) if self.kept_bytes == 0 => match sink.mode() {
                Mode::Stalled => Want::Keep,
                mode => Want::Sink(mode),
            },
            _ => Want::Keep,
        }
    }

    /// Hands bytes to the sink and keeps those that the sink did not take. Returns the number of taken bytes.
    pub(super) fn put(&mut self, bytes: &[u8]) -> usize {
        let Some(sink) = &mut self.sink else { return 0 };
        let mut rest = Bytes::copy_from_slice(bytes);
        sink.put(&mut rest);
        let taken = bytes.len() - rest.len();
        self.keep(&rest);
        taken
    }

    /// Reads payload into the sink's place. None if the call has dropped the tap.
    pub(super) fn read(&mut self, most: usize, read: &mut Read<'_>) -> io::Result<Option<usize>> {
        self.sink.as_mut().map(|sink| sink.read(most, read)).transpose()
    }

    pub(super) fn keep(&mut self, mut bytes: &[u8]) {
        self.kept_bytes += bytes.len();
        while !bytes.is_empty() {
            match self.kept.back_mut() {
                Some(last) if last.len() < PIECE_BYTES => {
                    let (part, rest) = bytes.split_at(bytes.len().min(PIECE_BYTES - last.len()));
                    last.extend_from_slice(part);
                    bytes = rest;
                }
                // A piece is allocated at full size: growth takes up to twice its bytes.
                _ => self.kept.push_back(BytesMut::with_capacity(PIECE_BYTES)),
            }
        }
    }

    pub(super) fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }

    pub(super) fn take_released(&mut self) -> usize {
        mem::take(&mut self.released)
    }

    /// Gives the sink the kept bytes, until it stalls.
    fn drain(&mut self) {
        let Some(sink) = &mut self.sink else { return };
        while self.kept_bytes > 0 && sink.mode() != Mode::Stalled {
            if self.front.is_empty() {
                self.front = self.kept.pop_front().unwrap_or_default().freeze();
            }
            let before = self.front.len();
            sink.put(&mut self.front);
            let taken = before - self.front.len();
            self.kept_bytes -= taken;
            self.released += taken;
        }
    }

    fn close(&mut self) {
        self.closed = true;
        self.sink = None;
        self.front = Bytes::new();
        self.kept.clear();
        self.released += mem::take(&mut self.kept_bytes);
    }
}

impl Tap {
    pub(super) fn on(line: &Arc<Line>) -> Tap {
        Tap(Mutex::new(TapState { line: Some(Arc::clone(line)), ..TapState::default() }))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, TapState> {
        lock(&self.0)
    }

    pub(super) fn join(&self, line: &Arc<Line>) {
        self.state().line = Some(Arc::clone(line));
    }

    /// Discards kept and future bytes.
    pub(super) fn close(&self) {
        self.state().close();
    }

    fn tell(&self) {
        let line = self.state().line.clone();
        if let Some(line) = line {
            line.wake();
        }
    }
}

/// Taps that the call's or the connection's task has created, and that the other task has not taken yet. A server has
/// them for each connection, a client for each channel.
#[derive(Clone, Default)]
pub struct Taps(Arc<Meeting>);

#[derive(Default)]
struct Meeting {
    waiting: Mutex<HashMap<Mark, Arc<Tap>>>,
    /// Outlets that the call has not taken yet, of calls whose answer is large.
    outlets: Mutex<HashMap<Mark, Arc<Outlet>>>,
}

impl Taps {
    /// Creates a tap on a client, before the call with this mark is made.
    pub fn expect(&self, mark: Mark, sink: Box<dyn Sink>) -> Claim {
        let tap = Arc::new(Tap::default());
        tap.state().sink = Some(sink);
        self.offer(mark, Arc::clone(&tap));
        Claim { tap, taps: self.clone(), mark }
    }

    /// Takes the tap of a call, once, on a server, if the call's request begins with this mark.
    pub fn claim(&self, mark: Mark) -> Option<Claim> {
        self.meet(mark).map(|tap| Claim { tap, taps: self.clone(), mark })
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0.waiting).is_empty()
    }

    /// Returns false if the mark is taken.
    pub(super) fn offer(&self, mark: Mark, tap: Arc<Tap>) -> bool {
        offer(&self.0.waiting, mark, tap)
    }

    pub(super) fn meet(&self, mark: Mark) -> Option<Arc<Tap>> {
        lock(&self.0.waiting).remove(&mark)
    }

    /// Offers an outlet on a server. Returns false if the mark is taken.
    pub(super) fn offer_outlet(&self, mark: Mark, outlet: Arc<Outlet>) -> bool {
        offer(&self.0.outlets, mark, outlet)
    }

    pub(super) fn meet_outlet(&self, mark: Mark) -> Option<Arc<Outlet>> {
        lock(&self.0.outlets).remove(&mark)
    }
}

/// The call's end of a tap. After drop, further bytes of the stream go to h2, which discards them.
pub struct Claim {
    tap: Arc<Tap>,
    taps: Taps,
    mark: Mark,
}

impl Claim {
    /// Installs the sink, which first gets the bytes since the marked frame.
    pub fn install(&self, sink: Box<dyn Sink>) {
        self.tap.state().sink = Some(sink);
        self.resume();
    }

    /// Gives the sink the kept bytes after a stall.
    pub fn resume(&self) {
        self.tap.state().drain();
        self.tap.tell();
    }

    pub fn is_drained(&self) -> bool {
        self.tap.state().kept_bytes == 0
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.taps.meet(self.mark);
        self.tap.close();
        self.tap.tell();
    }
}

fn offer<T>(waiting: &Mutex<HashMap<Mark, Arc<T>>>, mark: Mark, offered: Arc<T>) -> bool {
    let mut waiting = lock(waiting);
    let free = !waiting.contains_key(&mark);
    if free {
        waiting.insert(mark, offered);
    }
    free
}
