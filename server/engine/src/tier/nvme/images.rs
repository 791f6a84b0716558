//! Images on the drives: whole ones at the start of a job and at recovery, and the parts that workers pull of those that
//! spill, and of frozen weights.

use std::{
    ops::Range,
    sync::{Condvar, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use longshore_proto::{Fault, Version, limits::CHUNK_BYTES};

use super::{
    super::{
        contract::{ImageAge, ImageStore},
        fault::{internal, io},
        record::crc64,
        storage::Durability,
    },
    NvmeTier,
    pager::BlockChecksums,
    recover::{damaged, remedy},
};
use crate::{
    ids::OwnedShard,
    io::{Direction, Part, transfer},
    lock,
    memory::{AllocationError, Region, Slab},
};

/// How many parts of images are read at once. A drive is near its best with four requests of a MiB.
const READERS: usize = 4;
/// How often a reader who waits for its turn checks that the store has not failed.
const LOOK: Duration = Duration::from_millis(200);

/// The buffers between the drives and whoever pulls.
pub(super) struct Readers {
    free: Mutex<Vec<Region>>,
    returned: Condvar,
    /// The bytes of each buffer.
    bytes: usize,
}

impl Readers {
    /// `block` is how many bytes an image's block has; 0 where nothing will be read.
    pub(super) fn allocate(block: usize) -> Result<Readers, AllocationError> {
        let (bytes, count) = if block > 0 { (reader_bytes(block), READERS) } else { (0, 0) };
        let free = Slab::allocate(bytes * count)?.carve_here(&vec![bytes; count]);
        Ok(Readers { free: Mutex::new(free), returned: Condvar::new(), bytes })
    }

    /// The bytes of all buffers.
    pub(super) fn bytes(block: usize) -> usize {
        if block > 0 { READERS * reader_bytes(block) } else { 0 }
    }

    fn give_back(&self, buffer: Region) {
        lock(&self.free).push(buffer);
        self.returned.notify_one();
    }
}

/// The most that a chunk of a pull covers: it may begin and end inside of a block.
fn reader_bytes(block: usize) -> usize {
    CHUNK_BYTES + 2 * block
}

impl NvmeTier {
    /// An image's slot, and the part of a file that holds it.
    fn image_place(&self, owned: OwnedShard, age: ImageAge) -> Option<(usize, Part)> {
        let slots = self.pager.lock().slots;
        let slot = match age {
            ImageAge::Current => Some(slots.image),
            ImageAge::Older => slots.older_image,
        };
        let kept = self.plan().shards[owned.index()].image_bytes > 0
            && self.pager.durability == Durability::EachVersion;
        let part = |slot: u8| (slot as usize, self.plan().image_part(owned, slot));
        slot.filter(|_| kept).map(part)
    }

    /// A buffer of at least so many bytes: one of the few for pulls, or for whole images one of its own.
    fn reader(&self, bytes: usize) -> Result<Region, Fault> {
        if bytes > self.readers.bytes {
            return one_buffer(bytes);
        }
        let mut free = lock(&self.readers.free);
        loop {
            if let Some(buffer) = free.pop() {
                return Ok(buffer);
            }
            if let Some(fault) = self.pager.failure() {
                return Err(fault);
            }
            let waited = self.readers.returned.wait_timeout(free, LOOK);
            free = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The first block of an image, from block `first` on, that differs from its checksum, and the checksum that it
    /// has.
    fn damaged_block(
        &self,
        owned: OwnedShard,
        slot: usize,
        first: usize,
        image: &[u8],
    ) -> Option<(usize, u64)> {
        let checksums = &self.pager.checksums[owned.index()].images[slot][first..];
        let mut blocks = image.chunks(self.plan().image_block()).zip(checksums).enumerate();
        blocks.find_map(|(block, (bytes, checksum))| {
            let found = crc64([bytes]);
            (found != checksum.load(Ordering::Relaxed)).then_some((first + block, found))
        })
    }

    /// Reads the blocks around bytes of a frozen shard, and compares them with their checksums.
    pub(super) fn read_frozen_part(
        &self,
        owned: OwnedShard,
        bytes: Range<usize>,
        read: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Fault> {
        let block = self.plan().image_block();
        let blocks = bytes.start / block..bytes.end.div_ceil(block);
        let (start, length) = (blocks.start * block, blocks.len() * block);
        let buffer = self.reader(length)?;
        let offset = self.plan().state_part(owned, 0).offset + start as u64;
        let buffer = self.transfer_image(owned, Direction::Read, offset, length, buffer)?;
        let whole = &buffer.bytes()[..length];
        let checksums = &self.pager.checksums[owned.index()].state[blocks.clone()];
        let found = whole.chunks(block).map(|block| crc64([block]));
        let damage = blocks.zip(found.zip(checksums)).find_map(|(block, (found, checksum))| {
            (found != checksum.load(Ordering::Relaxed)).then_some((block, found))
        });
        if damage.is_none() {
            read(&whole[bytes.start - start..bytes.end - start]);
        }
        if buffer.bytes().len() == self.readers.bytes {
            self.readers.give_back(buffer);
        }
        damage.map_or(Ok(()), |(block, found)| Err(self.damage(owned, block, found)))
    }

    fn image_damage(&self, owned: OwnedShard, slot: usize, block: usize, found: u64) -> Fault {
        let place = &self.plan().shards[owned.index()];
        let expected = self.pager.checksums[owned.index()].images[slot][block].load(Ordering::Relaxed);
        let previous = self.whole_previous();
        let what = format!("image of {}, block {block} of it, slot {slot}", place.shard);
        let path = self.pager.disks[place.file].path();
        self.pager.fail(damaged(path, what, found, expected, remedy(previous)))
    }

    /// Moves the buffer's first bytes to or from `offset` of the shard's file.
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
    fn store(&self, owned: OwnedShard, age: ImageAge, image: &[u8]) -> Result<(), Fault> {
        if age == ImageAge::Older {
            // The first older image that is stored gets a slot: the one after the current image's.
            let mut state = self.pager.lock();
            let next = state.slots.updated().image;
            state.slots.older_image.get_or_insert(next);
        }
        let Some((slot, part)) = self.image_place(owned, age) else { return Ok(()) };
        let checksums = &self.pager.checksums[owned.index()];
        for (block, checksum) in checksummed_blocks(image, checksums, slot) {
            checksums.images[slot][block].store(checksum, Ordering::Relaxed);
        }
        let mut buffer = one_buffer(image.len())?;
        buffer.bytes_mut().copy_from_slice(image);
        self.transfer_image(owned, Direction::Write, part.offset, image.len(), buffer)?;
        Ok(())
    }

    fn load(&self, owned: OwnedShard, age: ImageAge, image: &mut [u8]) -> Result<bool, Fault> {
        let Some((slot, part)) = self.image_place(owned, age) else { return Ok(false) };
        let buffer = one_buffer(image.len())?;
        let buffer = self.transfer_image(owned, Direction::Read, part.offset, image.len(), buffer)?;
        image.copy_from_slice(buffer.bytes());
        match self.damaged_block(owned, slot, 0, image) {
            Some((block, found)) => Err(self.image_damage(owned, slot, block, found)),
            None => Ok(true),
        }
    }

    /// Reads the blocks around the bytes, and compares them with their checksums.
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
        let block = self.plan().image_block();
        let Some(slot) = self.pager.stored_image(owned, version)? else { return Ok(false) };
        let blocks = bytes.start / block..bytes.end.div_ceil(block);
        let (start, length) = (blocks.start * block, blocks.len() * block);
        let buffer = self.reader(length)?;
        let offset = self.plan().image_part(owned, slot).offset + start as u64;
        let buffer = self.transfer_image(owned, Direction::Read, offset, length, buffer)?;
        let whole = &buffer.bytes()[..length];
        let damage = self.damaged_block(owned, slot as usize, blocks.start, whole);
        // The slot is looked up again: it may have been given to a newer version meanwhile, if nobody should need
        // this one any more.
        let still = self.pager.lock().image_slot(version) == Some(slot);
        if still && damage.is_none() {
            read(&whole[bytes.start - start..bytes.end - start]);
        }
        if buffer.bytes().len() == self.readers.bytes {
            self.readers.give_back(buffer);
        }
        match damage.filter(|_| still) {
            Some((block, found)) => Err(self.image_damage(owned, slot as usize, block, found)),
            None => Ok(still),
        }
    }

    fn forget(&self) {
        self.pager.lock().slots.older_image = None;
    }
}

/// The blocks of a whole image, with their checksums.
fn checksummed_blocks<'a>(
    image: &'a [u8],
    checksums: &'a BlockChecksums,
    slot: usize,
) -> impl Iterator<Item = (usize, u64)> + 'a {
    let bytes = image.len() / checksums.images[slot].len().max(1);
    image.chunks(bytes.max(1)).map(|block| crc64([block])).enumerate()
}

fn one_buffer(bytes: usize) -> Result<Region, Fault> {
    let slab = Slab::allocate(bytes).map_err(|error| internal(error, "allocated"))?;
    Ok(slab.carve_here(&[bytes]).remove(0))
}
