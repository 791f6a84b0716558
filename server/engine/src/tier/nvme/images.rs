//! Images on the drives. Loads and recovery move whole images. Pulls read parts of spilled images and of frozen
//! weights, on their own threads.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use longshore_proto::{Fault, Version};

use super::{
    super::{
        contract::{ImageAge, ImageStore},
        fault::{internal, io},
        record::crc64,
    },
    NvmeTier,
    parts::{Fetch, InUse, Kept, PART_BYTES, PartOf},
    recover::{damaged, remedy},
};
use crate::{
    ids::OwnedShard,
    io::{Direction, Part, Request, transfer},
    memory::{Region, Slab},
};

/// Number of parts of one range that are read at once. A drive is near its best with four requests of a MiB.
const AT_ONCE: usize = 4;

impl NvmeTier {
    /// An image's slot, and the part of a file that holds it.
    fn image_place(&self, owned: OwnedShard, age: ImageAge) -> Option<(usize, Part)> {
        let slots = self.pager.lock().slots;
        let slot = match age {
            ImageAge::Current => Some(slots.image),
            ImageAge::Older => slots.older_image,
        };
        let kept = self.plan().shards[owned.index()].image_bytes > 0;
        let part = |slot: u8| (slot as usize, self.plan().image_part(owned, slot));
        slot.filter(|_| kept).map(part)
    }

    /// The first block of an image, from block `first` on, that differs from its checksum, and its actual checksum.
    fn damaged_block(
        &self,
        owned: OwnedShard,
        slot: usize,
        first: usize,
        image: &[u8],
    ) -> Option<(usize, u64)> {
        let checksums = &self.pager.checksums[owned.index()].images[slot][first..];
        self.differing(checksums, image).map(|(block, found)| (first + block, found))
    }

    /// The first block that differs from its checksum, and its actual checksum.
    fn differing(&self, checksums: &[AtomicU64], bytes: &[u8]) -> Option<(usize, u64)> {
        let mut blocks = bytes.chunks(self.plan().image_block).zip(checksums).enumerate();
        blocks.find_map(|(block, (bytes, checksum))| {
            let found = crc64([bytes]);
            (found != checksum.load(Ordering::Relaxed)).then_some((block, found))
        })
    }

    /// Hands bytes of a frozen shard to `read`, part by part.
    pub(super) fn read_frozen_part(
        &self,
        owned: OwnedShard,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Fault> {
        for (part, within) in parts_of(bytes.clone()) {
            self.parts_ahead((owned, Kept::Frozen), part..bytes.end.div_ceil(PART_BYTES));
            let taken = self.part(PartOf { owned, kept: Kept::Frozen, part })?;
            if !taken.is_checked() {
                let (first, whole) =
                    (part * self.part_blocks(), &taken.bytes()[..self.part_bytes(owned, part)]);
                let checksums = &self.pager.checksums[owned.index()].state[first..];
                if let Some((block, found)) = self.differing(checksums, whole) {
                    return Err(self.damage(owned, first + block, found));
                }
                taken.checked();
            }
            read(&taken.bytes()[within]);
        }
        Ok(())
    }

    /// Prefetches the first of some parts, as far as there is room.
    fn parts_ahead(&self, (owned, kept): (OwnedShard, Kept), parts: Range<usize>) {
        let fetches = parts.take(AT_ONCE).filter_map(|part| self.reads.ahead(PartOf { owned, kept, part }));
        fetches.for_each(|fetch| self.fetch(fetch));
    }

    pub(super) fn frozen_ahead(&self, owned: OwnedShard, bytes: Range<usize>) {
        self.parts_ahead((owned, Kept::Frozen), parts_with(&bytes));
    }

    fn part(&self, part: PartOf) -> Result<InUse<'_>, Fault> {
        self.reads.take(part, |fetch| self.fetch(fetch), || self.pager.hopeless())
    }

    fn part_blocks(&self) -> usize {
        PART_BYTES / self.plan().image_block
    }

    fn part_bytes(&self, owned: OwnedShard, part: usize) -> usize {
        PART_BYTES.min(self.plan().pulled_bytes(owned) - part * PART_BYTES)
    }

    fn fetch(&self, Fetch { part: PartOf { owned, kept, part }, buffer, place }: Fetch) {
        let start = match kept {
            Kept::Image { slot, .. } => self.plan().image_part(owned, slot).offset,
            Kept::Frozen => self.plan().state_part(owned, 0).offset,
        };
        let range = 0..self.part_bytes(owned, part);
        let parts = vec![Part { offset: start + (part * PART_BYTES) as u64, range }];
        let disk = &self.pager.disks[self.plan().shards[owned.index()].file];
        let (pager, reads, path) = (Arc::clone(&self.pager), Arc::clone(&self.reads), disk.path().to_owned());
        self.pager.asked(owned);
        let done = Box::new(move |buffer: Region, result: std::io::Result<()>| {
            pager.answered(owned);
            let whole = result.is_ok();
            if let Err(error) = result {
                pager.fail(io("read", &path)(error));
            }
            reads.arrived(place, buffer, whole);
        });
        disk.submit(Request { direction: Direction::Read, parts, buffer, done });
    }

    fn image_damage(&self, owned: OwnedShard, slot: usize, block: usize, found: u64) -> Fault {
        let place = &self.plan().shards[owned.index()];
        let expected = self.pager.checksums[owned.index()].images[slot][block].load(Ordering::Relaxed);
        let previous = self.whole_previous();
        let what = format!("image of {}, block {block} of it, slot {slot}", place.shard);
        let path = self.pager.disks[place.file].path();
        self.pager.fail(damaged(path, what, found, expected, remedy(previous)))
    }

    fn transfer_image(
        &self,
        owned: OwnedShard,
        direction: Direction,
        offset: u64,
        bytes: usize,
        buffer: Region,
    ) -> Result<Region, Fault> {
        let disk = &self.pager.disks[self.plan().shards[owned.index()].file];
        let (buffer, result) = transfer(&**disk, direction, vec![Part { offset, range: 0..bytes }], buffer);
        let doing = if direction == Direction::Read { "read" } else { "write" };
        result.map_err(|error| self.pager.fail(io(doing, disk.path())(error)))?;
        buffer.ok_or_else(|| internal("a lost buffer", "given back"))
    }
}

impl ImageStore for NvmeTier {
    fn store(&self, owned: OwnedShard, age: ImageAge, start: usize, blocks: &[u8]) -> Result<(), Fault> {
        if age == ImageAge::Older {
            // The first older image that is stored gets a slot: the one after the current image's.
            let mut state = self.pager.lock();
            let next = state.slots.updated().image;
            state.slots.older_image.get_or_insert(next);
        }
        let Some((slot, part)) = self.image_place(owned, age) else { return Ok(()) };
        let block_bytes = self.plan().image_block;
        self.pager.lacks_table(owned, slot as u8);
        let checksums = &self.pager.checksums[owned.index()].images[slot][start / block_bytes..];
        for (checksum, block) in checksums.iter().zip(blocks.chunks(block_bytes)) {
            checksum.store(crc64([block]), Ordering::Relaxed);
        }
        let mut buffer = one_buffer(blocks.len().min(PART_BYTES))?;
        for (index, piece) in blocks.chunks(PART_BYTES).enumerate() {
            buffer.bytes_mut()[..piece.len()].copy_from_slice(piece);
            let offset = part.offset + (start + index * PART_BYTES) as u64;
            buffer = self.transfer_image(owned, Direction::Write, offset, piece.len(), buffer)?;
        }
        Ok(())
    }

    fn load(&self, owned: OwnedShard, age: ImageAge, image: &mut [u8]) -> Result<bool, Fault> {
        let Some((slot, part)) = self.image_place(owned, age) else { return Ok(false) };
        let mut buffer = one_buffer(image.len().min(PART_BYTES))?;
        for (index, piece) in image.chunks_mut(PART_BYTES).enumerate() {
            let offset = part.offset + (index * PART_BYTES) as u64;
            buffer = self.transfer_image(owned, Direction::Read, offset, piece.len(), buffer)?;
            piece.copy_from_slice(&buffer.bytes()[..piece.len()]);
        }
        match self.damaged_block(owned, slot, 0, image) {
            Some((block, found)) => Err(self.image_damage(owned, slot, block, found)),
            None => Ok(true),
        }
    }

    fn read(
        &self,
        owned: OwnedShard,
        version: Version,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, Fault> {
        if !self.plan().spilled {
            return Ok(false);
        }
        let Some(slot) = self.pager.stored_image(owned, version)? else { return Ok(false) };
        let kept = Kept::Image { version, slot };
        for (part, within) in parts_of(bytes.clone()) {
            self.parts_ahead((owned, kept), part..bytes.end.div_ceil(PART_BYTES));
            let taken = self.part(PartOf { owned, kept, part })?;
            let (first, whole) = (part * self.part_blocks(), &taken.bytes()[..self.part_bytes(owned, part)]);
            let damage = match taken.is_checked() {
                true => None,
                false => self.damaged_block(owned, slot as usize, first, whole),
            };
            // The slot is looked up again: a newer version may have taken it since the read.
            if self.pager.lock().image_slot(version) != Some(slot) {
                return Ok(false);
            }
            if let Some((block, found)) = damage {
                return Err(self.image_damage(owned, slot as usize, block, found));
            }
            taken.checked();
            read(&whole[within]);
        }
        Ok(true)
    }

    fn read_ahead(&self, owned: OwnedShard, version: Version, bytes: Range<usize>) {
        let slot = if self.plan().spilled { self.pager.image_at_rest(owned, version) } else { None };
        let Some(slot) = slot else { return };
        self.parts_ahead((owned, Kept::Image { version, slot }), parts_with(&bytes));
    }

    fn forget(&self) {
        self.reads.forget();
        self.pager.lock().slots.older_image = None;
    }
}

fn parts_with(bytes: &Range<usize>) -> Range<usize> {
    bytes.start / PART_BYTES..bytes.end.div_ceil(PART_BYTES)
}

/// Returns the parts of [`parts_with`], each with the wanted range of its own bytes.
fn parts_of(bytes: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    parts_with(&bytes).map(move |part| {
        let start = part * PART_BYTES;
        (part, bytes.start.max(start) - start..bytes.end.min(start + PART_BYTES) - start)
    })
}

/// Allocates a buffer of a part, outside the server's budget.
fn one_buffer(bytes: usize) -> Result<Region, Fault> {
    let slab = Slab::allocate(bytes).map_err(|error| internal(error, "allocated"))?;
    Ok(slab.carve_here(&[bytes]).remove(0))
}
