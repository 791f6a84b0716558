//! Payload that goes out past h2. h2 is given blanks of its length, whose frames it makes and counts; at the socket the payload
//! takes the blanks' place.
//!
//! h2 copies what it sends, at least in part, and what another thread may overwrite cannot be copied: see [`SharedBytes`].
//! Blanks are found by their place in the stream, since h2 cuts and copies them as it likes.

use std::{io::IoSlice, sync::Arc};

use bytes::Bytes;
use longshore_memory::{MOST_PARTS, Part, SharedBytes};
use longshore_proto::limits::CHUNK_BYTES;

use super::{
    outlet::Outlet,
    outward::{Cursor, Follows},
    tap::Taps,
};
use crate::{mark::Mark, piece::Piece};

/// The blanks that h2 is given to send. They are never written. Only h2 reads them, and only the few bytes that it copies.
static BLANK: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];

/// A connection's end of an outlet.
pub(super) struct Outgoing {
    pub(super) stream: u32,
    outlet: Arc<Outlet>,
    /// How many bytes of the stream's DATA frames were written.
    at: u64,
    /// The frame that is being written is the stream's last.
    pub(super) over: bool,
    /// The call finds and takes its end by this mark.
    mark: Mark,
    taps: Taps,
}

impl Outgoing {
    /// Returns None if another outlet has this mark.
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
        // The call may not have taken its end; then it is removed here.
        self.taps.meet_outlet(self.mark);
    }
}

/// Replaces blanks by payloads: returns what is to be written for these slices, whose first byte lies at the cursor.
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
    /// A server calls this once for a call whose request begins with this mark. Returns None if the connection's socket
    /// takes no addresses, or if the connection has too many such calls.
    pub fn claim(taps: &Taps, mark: Mark) -> Option<Payloads> {
        taps.meet_outlet(mark).map(|outlet| Payloads { outlet, at: 0 })
    }

    /// Notes the next message before it is sent. `payload` takes the place of the message's own payload, which is a
    /// [`blank`] of the same length.
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

/// A blank as long as `payload`.
///
/// # Panics
/// If `payload` is longer than a chunk.
pub fn blank(payload: &SharedBytes) -> Bytes {
    Bytes::from_static(&BLANK[..payload.len()])
}
