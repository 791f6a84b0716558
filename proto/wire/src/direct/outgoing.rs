//! Payload that bypasses h2 on the way out. The crate h2 gets blanks of the same length, and frames and counts them. At
//! the socket the payload replaces the blanks.
//!
//! Payloads of h2 are copied at least in part. Memory that another thread may overwrite cannot be copied: see
//! [`SharedBytes`]. Blanks are found by their position in the stream, since h2 cuts and copies them freely.

use std::{
    collections::VecDeque,
    io::IoSlice,
    ops::Range,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use longshore_memory::{MOST_PARTS, Part, SharedBytes};
use longshore_proto::limits::CHUNK_BYTES;

use super::{
    lock,
    outward::{Cursor, Follows},
    tap::Taps,
};
use crate::mark::{Mark, Piece};

/// The blanks that h2 sends. No thread writes them, and h2 reads only the few bytes that it copies.
static BLANK: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];

/// Waiting payloads of one stream, by their position among the bytes of its DATA frames. The call's task fills the
/// outlet, and the connection's task drains it.
#[derive(Default)]
pub(super) struct Outlet(Mutex<VecDeque<(Range<u64>, SharedBytes)>>);

impl Outlet {
    /// Adds a payload for the position `range`, which must lie behind all earlier ones.
    fn put(&self, range: Range<u64>, payload: SharedBytes) {
        lock(&self.0).push_back((range, payload));
    }

    /// Returns a run of bytes from `at` on, at most `most`, with one source: a payload, or h2. The result is the run's
    /// length, and its payload if it has one.
    fn find(&self, at: u64, most: usize) -> (usize, Option<SharedBytes>) {
        let held = lock(&self.0);
        let end = at + most as u64;
        match held.iter().find(|(range, _)| at < range.end) {
            Some((range, bytes)) if range.start <= at => {
                let within = (at - range.start) as usize..(end.min(range.end) - range.start) as usize;
                (within.len(), Some(bytes.slice(within)))
            }
            Some((range, _)) => ((end.min(range.start) - at) as usize, None),
            None => (most, None),
        }
    }

    /// Drops the payloads before `at`, which have been written.
    fn written(&self, at: u64) {
        let mut held = lock(&self.0);
        while held.front().is_some_and(|(range, _)| range.end <= at) {
            held.pop_front();
        }
    }
}

/// A connection's end of an outlet.
pub(super) struct Outgoing {
    pub(super) stream: u32,
    outlet: Arc<Outlet>,
    /// Bytes written of the stream's DATA frames.
    at: u64,
    /// The frame in progress is the stream's last.
    pub(super) over: bool,
    /// Mark by which the call finds its end of the outlet.
    mark: Mark,
    taps: Taps,
}

impl Outgoing {
    /// Offers an outlet for the stream. Returns None if another outlet has this mark.
    pub(super) fn offer(stream: u32, mark: Mark, taps: &Taps) -> Option<Outgoing> {
        let outlet = Arc::new(Outlet::default());
        let offered = taps.offer_outlet(mark, Arc::clone(&outlet));
        offered.then(|| Outgoing { stream, outlet, at: 0, over: false, mark, taps: taps.clone() })
    }

    pub(super) fn advance(&mut self, bytes: usize) {
        self.at += bytes as u64;
        self.outlet.written(self.at);
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        // Removes the call's end of the outlet, if the call has not taken that end.
        self.taps.meet_outlet(self.mark);
    }
}

/// Replaces blanks by payloads. Returns the parts to write for these slices, whose first byte lies at the cursor.
pub(super) fn fill_blanks<'a>(
    mut cursor: Cursor,
    slices: &'a [IoSlice<'_>],
    outlets: &[Outgoing],
) -> Vec<Part<'a>> {
    let mut at: Vec<u64> = outlets.iter().map(|of| of.at).collect();
    let mut parts = Vec::new();
    for slice in slices {
        let mut rest: &[u8] = slice;
        while !rest.is_empty() && parts.len() < MOST_PARTS {
            let (now, what) = cursor.step(rest);
            let (mut now, later) = rest.split_at(now);
            rest = later;
            let of = match what {
                Follows::Payload(stream) => outlets.iter().position(|of| of.stream == stream),
                Follows::Header(_) => None,
            };
            while let Some(of) = of.filter(|_| !now.is_empty()) {
                let (count, instead) = outlets[of].outlet.find(at[of], now.len());
                let (same, after) = now.split_at(count);
                parts.push(instead.map_or(Part::Own(same), Part::Shared));
                at[of] += count as u64;
                now = after;
            }
            parts.extend((!now.is_empty()).then_some(Part::Own(now)));
        }
    }
    parts
}

/// The call's end of an outlet, which must see all of the call's messages.
pub struct Payloads {
    outlet: Arc<Outlet>,
    at: u64,
}

impl Payloads {
    /// Takes the outlet of a call whose request begins with this mark; a server calls this once a call. Returns None if
    /// the connection's socket takes no addresses, or if too many calls of the connection have outlets.
    pub fn claim(taps: &Taps, mark: Mark) -> Option<Payloads> {
        taps.meet_outlet(mark).map(|outlet| Payloads { outlet, at: 0 })
    }

    /// Registers the next message before it is sent. `payload` replaces the message's own payload, which is a [`blank`]
    /// of the same length.
    pub fn follow(&mut self, message: &Piece, payload: Option<SharedBytes>) {
        self.at += message.head.len() as u64;
        let end = self.at + message.payload.len() as u64;
        if let Some(payload) = payload {
            debug_assert_eq!(
                payload.len(),
                message.payload.len(),
                "a blank is as long as what takes its place"
            );
            self.outlet.put(self.at..end, payload);
        }
        self.at = end;
    }
}

/// Returns a blank as long as `payload`.
///
/// # Panics
/// If `payload` is longer than a chunk.
pub fn blank(payload: &SharedBytes) -> Bytes {
    Bytes::from_static(&BLANK[..payload.len()])
}
