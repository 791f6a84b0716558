//! Rules for a peer's frames: valid sizes, bounded headers, few useless frames, and no bytes beyond the window.
//!
//! The crate h2 checks some of these rules, for the frames that it sees. But h2 does not see the frames of tapped
//! streams, holds megabytes of headers, and answers any number of pings. For a frame of the wrong size h2 reports
//! PROTOCOL_ERROR, not FRAME_SIZE_ERROR.

use std::time::Instant;

use longshore_proto::limits::{CHUNK_BYTES, MAX_HEADER_BLOCK_BYTES};

use super::{allowances::Allowance, bounds::Guest, outward::Header};

/// Window of every connection before the first WINDOW_UPDATE.
const FIRST_WINDOW_BYTES: i64 = 65_535;
/// Cost of a useless frame, as PING, SETTINGS, PRIORITY, RST_STREAM or empty DATA. A connection earns [`SPARE_BYTES`]
/// a second. Each byte sent to the peer earns one more, since the peer may answer each piece with a
/// WINDOW_UPDATE. So 20,000 useless frames a second are too many; gRPC's own pings and resets come to some hundreds. A
/// stranger's connection begins with [`STRANGER_BYTES`], and then draws on its address's allowance.
const USELESS_BYTES: u64 = 1024;
/// Cost of a call for which [`Guest::is_to_pay`] is true.
pub(super) const CALL_BYTES: u64 = 8 * USELESS_BYTES;
/// Cost of a reset, which allows an address 256 resets a second. With 512 a second, concurrent training took up to 1.13
/// times as long.
const RESET_BYTES: u64 = 16 * USELESS_BYTES;
const SPARE_BYTES: u64 = 20 * 1024 * 1024;
/// Allowance of a stranger's new connection: 64 frames. gRPC sends about ten when a connection begins.
const STRANGER_BYTES: u64 = 64 * USELESS_BYTES;

/// Reason for ending a connection, with its HTTP/2 error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breach {
    /// The peer sent more than the window.
    FlowControl = 3,
    FrameSize = 6,
    /// The peer exceeded a limit: ENHANCE_YOUR_CALM.
    Excess = 11,
}

impl Breach {
    pub(super) fn text(self) -> &'static str {
        match self {
            Breach::FlowControl => "the peer sent more than its window",
            Breach::FrameSize => "the peer sent a frame of a size that its kind cannot have",
            Breach::Excess => "the peer asked for more than one connection may",
        }
    }
}

/// Checker of one connection's frames.
pub(super) struct Conduct {
    /// Bytes that the peer may still send.
    pub(super) window: i64,
    /// Bytes so far of the header block in progress.
    block: usize,
    /// Allowance of useless frames.
    spare: Allowance,
}

impl Conduct {
    pub(super) fn new() -> Conduct {
        Conduct { window: FIRST_WINDOW_BYTES, block: 0, spare: Allowance::new(SPARE_BYTES, SPARE_BYTES) }
    }

    /// Returns the rules for a peer that is not yet known to be a rank.
    pub(super) fn of_stranger() -> Conduct {
        Conduct { spare: Allowance::new(STRANGER_BYTES, SPARE_BYTES), ..Conduct::new() }
    }

    pub(super) fn grant(&mut self, bytes: usize) {
        self.window = self.window.saturating_add(bytes as i64);
    }

    pub(super) fn sent(&mut self, bytes: usize) {
        self.spare.add(bytes as u64);
    }

    /// Checks the peer's next frame. `stranger` is Some if the connection is no rank's.
    pub(super) fn follow(&mut self, header: &Header, stranger: Option<&Guest>) -> Result<(), Breach> {
        if !has_right_size(header) {
            return Err(Breach::FrameSize);
        }
        match header.kind {
            Header::DATA => {
                self.window -= header.len as i64;
                if self.window < 0 {
                    return Err(Breach::FlowControl);
                }
                let useful = header.len > 0 || header.flags & Header::END_STREAM != 0;
                if useful { Ok(()) } else { self.useless(USELESS_BYTES, stranger) }
            }
            Header::HEADERS => self.headers(header),
            Header::CONTINUATION => {
                self.headers(header)?;
                self.useless(USELESS_BYTES, stranger)
            }
            Header::RESET => self.useless(RESET_BYTES, stranger),
            _ => self.useless(USELESS_BYTES + 4 * header.len as u64, stranger),
        }
    }

    fn headers(&mut self, header: &Header) -> Result<(), Breach> {
        self.block += header.len;
        if self.block > MAX_HEADER_BLOCK_BYTES {
            return Err(Breach::Excess);
        }
        if header.flags & Header::END_HEADERS != 0 {
            self.block = 0;
        }
        Ok(())
    }

    /// Charges `bytes` of useless traffic.
    pub(super) fn useless(&mut self, bytes: u64, stranger: Option<&Guest>) -> Result<(), Breach> {
        if self.spare.spend(bytes) {
            return Ok(());
        }
        let of_address = stranger.and_then(|guest| guest.take(bytes));
        let taken = of_address.unwrap_or_else(|| self.spare.take(bytes, Instant::now()));
        if taken { Ok(()) } else { Err(Breach::Excess) }
    }
}

fn has_right_size(&Header { len, kind, flags, .. }: &Header) -> bool {
    let of_its_kind = match kind {
        Header::PRIORITY => len == 5,
        Header::RESET | Header::WINDOW_UPDATE => len == 4,
        Header::SETTINGS if flags & Header::ACK != 0 => len == 0,
        Header::SETTINGS => len.is_multiple_of(6),
        Header::PING => len == 8,
        Header::GO_AWAY => len >= 8,
        _ => true,
    };
    of_its_kind && len <= CHUNK_BYTES
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{super::bounds::Bounds, *};

    fn header(kind: u8, flags: u8, len: usize) -> Header {
        Header { len, kind, flags, stream: 1 }
    }

    #[test]
    fn frames_have_the_size_of_their_kind() {
        let wrong = [
            header(Header::DATA, 0, CHUNK_BYTES + 1),
            header(Header::HEADERS, Header::END_HEADERS, CHUNK_BYTES + 1),
            header(Header::PRIORITY, 0, 4),
            header(Header::RESET, 0, 5),
            header(Header::SETTINGS, 0, 7),
            header(Header::SETTINGS, Header::ACK, 6),
            header(Header::PING, 0, 9),
            header(Header::GO_AWAY, 0, 7),
            header(Header::WINDOW_UPDATE, 0, 3),
            header(77, 0, CHUNK_BYTES + 1),
        ];
        for header in wrong {
            assert_eq!(Conduct::new().follow(&header, None), Err(Breach::FrameSize), "{header:?}");
        }
        let right = [header(Header::SETTINGS, 0, 36), header(Header::PING, 1, 8), header(77, 0, 500)];
        assert!(right.iter().all(|header| Conduct::new().follow(header, None).is_ok()));
    }

    #[test]
    fn the_window_is_the_connections() {
        let mut conduct = Conduct::new();
        conduct.grant(40_000);
        for _ in 0..7 {
            assert_eq!(conduct.follow(&header(Header::DATA, 0, 15_000), None), Ok(()));
        }
        assert_eq!(conduct.follow(&header(Header::DATA, 0, 600), None), Err(Breach::FlowControl));
    }

    #[test]
    fn headers_end_before_they_are_too_long() {
        let mut conduct = Conduct::new();
        for _ in 0..100 {
            assert_eq!(conduct.follow(&header(Header::HEADERS, 0, 20_000), None), Ok(()));
            assert_eq!(
                conduct.follow(&header(Header::CONTINUATION, Header::END_HEADERS, 9000), None),
                Ok(())
            );
        }
        assert_eq!(conduct.follow(&header(Header::HEADERS, 0, 20_000), None), Ok(()));
        assert_eq!(conduct.follow(&header(Header::CONTINUATION, 0, 20_000), None), Err(Breach::Excess));
    }

    #[test]
    fn useless_frames_are_few() {
        for useless in [header(Header::PING, 0, 8), header(Header::DATA, 0, 0), header(Header::RESET, 0, 4)] {
            let mut conduct = Conduct::new();
            let taken = (0..1_000_000).take_while(|_| conduct.follow(&useless, None).is_ok()).count();
            assert!((1000..200_000).contains(&taken), "{taken} of {useless:?}");
        }
    }

    #[test]
    fn strangers_of_one_address_share_what_is_useless() {
        let bounds = Arc::new(Bounds::default());
        let taken = |address: [u8; 4]| {
            let guest = Guest::new(&bounds, Some(address.into()));
            let mut conduct = Conduct::of_stranger();
            let ping = header(Header::PING, 0, 8);
            (0..1_000_000).take_while(|_| conduct.follow(&ping, Some(&guest)).is_ok()).count()
        };
        let (first, next) = (taken([10, 0, 0, 1]), taken([10, 0, 0, 1]));
        assert!((3000..100_000).contains(&first), "{first}");
        // The next connection has its own allowance, and the refill that the address got so far.
        assert!((60..first / 2).contains(&next), "{next} after {first}");
        // A rank's connection does not draw on the address's allowance.
        let mut rank = Conduct::of_stranger();
        rank.sent(1 << 30);
        let ping = header(Header::PING, 0, 8);
        assert!((0..10_000).all(|_| rank.follow(&ping, None).is_ok()));
    }

    #[test]
    fn who_is_sent_much_may_answer_much() {
        let mut conduct = Conduct::new();
        for _ in 0..1_000_000 {
            conduct.sent(16 * 1024);
            assert_eq!(conduct.follow(&header(Header::WINDOW_UPDATE, 0, 4), None), Ok(()));
        }
    }
}
