//! A tap: one stream whose DATA frames do not pass through h2, between the connection's task and that of the call.

use std::{
    collections::{HashMap, VecDeque},
    io, mem,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::Waker,
};

use bytes::{Bytes, BytesMut};
use tokio::sync::Notify;

use super::outlet::Outlet;
use crate::{
    mark::Mark,
    sink::{Mode, Read, Sink},
};

/// The size of the pieces in which kept bytes are gathered, so that many small frames take no more memory than large
/// ones.
const PIECE_BYTES: usize = 64 * 1024;

/// How a call's task reaches the connection's.
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

    /// Whether a tap has something to say since this was last called.
    pub(super) fn take_changed(&self) -> bool {
        self.changed.swap(false, Ordering::AcqRel)
    }

    /// Makes the connection look at its taps when it is polled again.
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

/// See the module.
#[derive(Default)]
pub struct Tap(Mutex<TapState>);

#[derive(Default)]
pub(super) struct TapState {
    sink: Option<Box<dyn Sink>>,
    /// What came while the sink could not take it, oldest first; `front` comes before the rest.
    front: Bytes,
    kept: VecDeque<BytesMut>,
    kept_bytes: usize,
    /// Nobody wants what still comes.
    closed: bool,
    /// How many kept bytes were taken meanwhile. Their window is to be given back.
    released: usize,
    line: Option<Arc<Line>>,
}

/// What to do with the bytes of a frame.
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

    /// Hands bytes to the sink and keeps what it leaves. Returns how many it took.
    pub(super) fn put(&mut self, bytes: &[u8]) -> usize {
        let Some(sink) = &mut self.sink else { return 0 };
        let mut rest = Bytes::copy_from_slice(bytes);
        sink.put(&mut rest);
        let taken = bytes.len() - rest.len();
        self.keep(&rest);
        taken
    }

    /// None when the call has let go of the tap meanwhile.
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
                // It has its full size from the start: a piece that grows takes up to twice its bytes.
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

    /// Gives the sink what was kept, until it stalls.
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

    /// Discards what came and what still comes.
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

/// The taps of a connection (on a server) or a channel (on a client) that one side has made and the other has not met
/// yet.
#[derive(Clone, Default)]
pub struct Taps(Arc<Meeting>);

#[derive(Default)]
struct Meeting {
    waiting: Mutex<HashMap<Mark, Arc<Tap>>>,
    /// Likewise, of calls whose answer is large.
    outlets: Mutex<HashMap<Mark, Arc<Outlet>>>,
    vouched: AtomicBool,
    vouching: Notify,
}

impl Taps {
    /// Called on a client, before the call with this mark is made.
    pub fn expect(&self, mark: Mark, sink: Box<dyn Sink>) -> Claim {
        let tap = Arc::new(Tap::default());
        tap.state().sink = Some(sink);
        self.offer(mark, Arc::clone(&tap));
        Claim { tap, taps: self.clone(), mark }
    }

    /// Called once on a server, where a call's request begins with this mark.
    pub fn claim(&self, mark: Mark) -> Option<Claim> {
        self.meet(mark).map(|tap| Claim { tap, taps: self.clone(), mark })
    }

    /// Called on a server: the connection is a rank's that was admitted, and so is what it may have under way.
    pub fn vouch(&self) {
        self.0.vouched.store(true, Ordering::Release);
        self.0.vouching.notify_waiters();
    }

    pub fn is_vouched(&self) -> bool {
        self.0.vouched.load(Ordering::Acquire)
    }

    /// Waits until somebody vouches for the connection.
    pub async fn vouched(&self) {
        let mut vouching = pin!(self.0.vouching.notified());
        vouching.as_mut().enable();
        if !self.is_vouched() {
            vouching.await;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0.waiting).is_empty()
    }

    /// Returns false when the mark is taken.
    pub(super) fn offer(&self, mark: Mark, tap: Arc<Tap>) -> bool {
        let mut waiting = lock(&self.0.waiting);
        let free = !waiting.contains_key(&mark);
        if free {
            waiting.insert(mark, tap);
        }
        free
    }

    pub(super) fn meet(&self, mark: Mark) -> Option<Arc<Tap>> {
        lock(&self.0.waiting).remove(&mark)
    }

    /// On a server; false when the mark is taken.
    pub(super) fn offer_outlet(&self, mark: Mark, outlet: Arc<Outlet>) -> bool {
        let mut outlets = lock(&self.0.outlets);
        let free = !outlets.contains_key(&mark);
        if free {
            outlets.insert(mark, outlet);
        }
        free
    }

    pub(super) fn meet_outlet(&self, mark: Mark) -> Option<Arc<Outlet>> {
        lock(&self.0.outlets).remove(&mark)
    }
}

/// The call's end of a tap. Once it is dropped, what still comes on the stream goes to h2 again, which discards it.
pub struct Claim {
    tap: Arc<Tap>,
    taps: Taps,
    mark: Mark,
}

impl Claim {
    /// Begins with what has come since the marked frame.
    pub fn install(&self, sink: Box<dyn Sink>) {
        self.tap.state().sink = Some(sink);
        self.resume();
    }

    /// Called after a stall: gives the sink what was kept.
    pub fn resume(&self) {
        self.tap.state().drain();
        self.tap.tell();
    }

    /// Whether the sink has got all that came.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
