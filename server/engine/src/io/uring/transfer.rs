//! A request cut into transfers, and a transfer as an entry of the ring.

use std::io;

use io_uring::{opcode, squeue::Entry, types::Fd};

use super::super::{Direction, Request, TRANSFER_BYTES};
use crate::memory::Mapping;

/// The kernel registers at most 1 GiB as one buffer.
pub(super) const REGISTERED_BYTES: usize = 1 << 30;

/// A request whose transfers are under way.
pub(super) struct Active {
    pub(super) request: Request,
    /// Start of the next transfer: index of the part, and byte in the part.
    pub(super) next: (usize, usize),
    pub(super) in_flight: u32,
    pub(super) error: Option<io::Error>,
}

/// Entry of the ring.
#[derive(Clone, Copy)]
pub(super) struct Transfer {
    pub(super) active: usize,
    /// The offset in the file, and the range in the buffer.
    pub(super) offset: u64,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Active {
    pub(super) fn cut(&mut self, index: usize) -> Option<Transfer> {
        if self.error.is_some() {
            return None;
        }
        let part = self.request.parts.get(self.next.0)?;
        let at = self.next.1;
        let len = (part.range.len() - at).min(TRANSFER_BYTES);
        let transfer =
            Transfer { active: index, offset: part.offset + at as u64, start: part.range.start + at, len };
        let whole = at + len == part.range.len();
        self.next = if whole { (self.next.0 + 1, 0) } else { (self.next.0, at + len) };
        Some(transfer)
    }
}

/// Returns the entry of the ring that moves the bytes, as registered memory if possible.
pub(super) fn entry(
    fd: i32,
    direction: Direction,
    bytes: &mut [u8],
    offset: u64,
    registered: Option<&Mapping>,
) -> Entry {
    let (start, len) = (bytes.as_mut_ptr(), bytes.len() as u32);
    let index = registered.and_then(|mapping| {
        let from = (start as usize).checked_sub(mapping.start())?;
        let last = (from + bytes.len()).checked_sub(1)?;
        let same = from / REGISTERED_BYTES == last / REGISTERED_BYTES;
        (same && last < mapping.len()).then_some((from / REGISTERED_BYTES) as u16)
    });
    match (direction, index) {
        (Direction::Read, None) => opcode::Read::new(Fd(fd), start, len).offset(offset).build(),
        (Direction::Read, Some(index)) => {
            opcode::ReadFixed::new(Fd(fd), start, len, index).offset(offset).build()
        }
        (Direction::Write, None) => opcode::Write::new(Fd(fd), start, len).offset(offset).build(),
        (Direction::Write, Some(index)) => {
            opcode::WriteFixed::new(Fd(fd), start, len, index).offset(offset).build()
        }
    }
}
