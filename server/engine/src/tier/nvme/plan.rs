//! Place of every byte of an `nvme` store: shards over directories, each directory's file, and the slots of a version.

use std::ops::Range;

use longshore_proto::{
    JobSpec, Layout, ShardId, Version,
    limits::{BLOCK_ELEMENTS, MAX_DELAY},
};

use serde::{Deserialize, Serialize};

use super::super::{
    Shape, StateMut, StateRef,
    folder::ALL_PLACES,
    record::{RECORD_BYTES, SECTOR, crc64},
};
use crate::{ids::OwnedShard, io::Part};

/// Number of slots of a shard's state. An update writes the slot that does not hold the last durable version.
pub(super) const STATE_SLOTS: u8 = 2;
/// Number of slots of an image. The next version takes one. Workers pull the other two, or need them after a crash of a
/// delayed job.
pub(super) const IMAGE_SLOTS: u8 = 3;
/// Number of copies of each record in a directory, by version parity: one damaged sector must not cost a version.
pub(super) const RECORD_COPIES: usize = 2;

/// Layout of a directory's file, `data`. Every shard of the job has a place in one of the files. The first places are
/// of the shards that the store is made with, whose space is reserved then. The other places are holes until their
/// shards come. Offsets are multiples of 4 KiB.
///
/// ```text
/// records      [version parity 0: copy, copy] [version parity 1: copy, copy]     4 MiB each, framed (tier/record.rs)
/// tables       [state slot 0] [state slot 1] [image slot 0] [1] [2]              CRC-64 of each block
/// state slots  [slot 0: shard, shard, ...] [slot 1: shard, shard, ...]
/// image slots  [slot 0: shard, ...] [1] [2]                                      delayed jobs, and where images spill
/// frozen       shard, shard, ...                                                 no slots: no step writes them
/// ```
///
/// A shard's state is its master weights, first and second moments, then padding to a whole sector. A frozen shard has
/// its weights instead. Each array is a sequence of blocks ([`Shape`]); an array that the job lacks takes no bytes. A
/// block's checksum covers its part of all arrays, in this order. Checksums lie outside their slots, so that a lost or
/// misplaced write shows. A table's own checksum lies in the record.
///
/// **Why this order.** A step first writes all shards' state and images into slots that the last durable version does
/// not use. Then follow their tables, a flush of every file, the record twice in each file, and another flush. Until
/// then the last durable version is untouched, since it has other slots, tables and records. The record overwrites the
/// record of two versions back, so that the last durable version's record is whole at any instant. The next step is
/// decided only after the last flush. A skipped step writes only a record, which names the same slots. The record also
/// has digests of shards that were fetched meanwhile ([`Apart`]).
///
/// Slots of one parity lie together, so that a step reads one sequential run and writes another.
#[derive(Clone, Debug)]
pub(super) struct StorePlan {
    /// Places of the shards, by shard.
    pub(super) shards: Vec<ShardExtent>,
    /// The shards that have a place, in the order of their places.
    pub(super) order: Vec<OwnedShard>,
    pub(super) files: Vec<FilePlan>,
    /// True if images are stored beside the state.
    pub(super) images: bool,
    /// True if images live here alone.
    pub(super) spilled: bool,
    /// The bytes of one block of images and of frozen weights.
    pub(super) image_block: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ShardExtent {
    pub(super) shard: ShardId,
    /// True if the store was made with the shard.
    pub(super) opened: bool,
    /// Position in [`StorePlan::order`]. None in a store of format 1 that was made without the shard.
    pub(super) position: Option<usize>,
    pub(super) file: usize,
    pub(super) elements: usize,
    pub(super) shape: Shape,
    /// True if no step changes the shard, which then has neither slots nor images.
    pub(super) frozen: bool,
    pub(super) state_bytes: usize,
    /// Bytes of an image; 0 unless images are stored.
    pub(super) image_bytes: usize,
    /// Offset in a slot of the file, or among the file's frozen shards.
    state_at: u64,
    image_at: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct FilePlan {
    /// The file's shards, in the order of their places.
    pub(super) owned: Vec<OwnedShard>,
    pub(super) blocks: usize,
    state_bytes: u64,
    image_bytes: u64,
    frozen_bytes: u64,
}

fn stores_images(spec: &JobSpec, spilled: bool) -> bool {
    spilled || spec.max_delay >= MAX_DELAY
}

/// Returns the bytes of a shard's state and of its image, in one slot.
fn slot_bytes(spec: &JobSpec, layout: &Layout, shard: ShardId, images: bool) -> (usize, usize) {
    let (shape, elements) = (Shape::of_shard(spec, layout, shard), layout.shard_len(shard) as usize);
    let image =
        if images && !layout.is_frozen(shard) { elements * spec.image_dtype.bytes() as usize } else { 0 };
    // The state is padded, since 8-bit moments do not fill whole sectors.
    (shape.bytes(elements).next_multiple_of(SECTOR), image)
}

/// Returns the bytes of all slots of a shard.
pub(super) fn shard_space(spec: &JobSpec, layout: &Layout, shard: ShardId, spilled: bool) -> u64 {
    let (state, image) = slot_bytes(spec, layout, shard, stores_images(spec, spilled));
    let states = if layout.is_frozen(shard) { 1 } else { u64::from(STATE_SLOTS) };
    state as u64 * states + image as u64 * u64::from(IMAGE_SLOTS)
}

impl StorePlan {
    /// The plan of a store that is made with the shards of `opened`. With `spilled`, images are stored for every job.
    /// In `format` 1 only those shards have a place.
    pub(super) fn new(
        spec: &JobSpec,
        layout: &Layout,
        opened: &[ShardId],
        files: usize,
        spilled: bool,
        format: u32,
    ) -> StorePlan {
        let images = stores_images(spec, spilled);
        let image_block = (BLOCK_ELEMENTS * spec.image_dtype.bytes()) as usize;
        let without_place = |shard: ShardId| ShardExtent {
            shard,
            opened: false,
            position: None,
            file: 0,
            elements: 0,
            shape: Shape::of_shard(spec, layout, shard),
            frozen: layout.is_frozen(shard),
            state_bytes: 0,
            image_bytes: 0,
            state_at: 0,
            image_at: 0,
        };
        let shards: Vec<ShardExtent> = (0..layout.shards()).map(ShardId).map(without_place).collect();
        let files = vec![FilePlan::default(); files];
        let mut plan = StorePlan { shards, order: Vec::new(), files, images, spilled, image_block };
        opened.iter().for_each(|&shard| plan.add_place(spec, layout, shard, true));
        let others: Vec<ShardId> =
            plan.shards.iter().filter(|place| !place.opened).map(|place| place.shard).collect();
        others
            .into_iter()
            .filter(|_| format >= ALL_PLACES)
            .for_each(|shard| plan.add_place(spec, layout, shard, false));
        plan
    }

    fn add_place(&mut self, spec: &JobSpec, layout: &Layout, shard: ShardId, opened: bool) {
        let (owned, position) = (OwnedShard(shard.index()), self.order.len());
        let place = &mut self.shards[owned.index()];
        let elements = layout.shard_len(shard) as usize;
        // Files take turns, so that neighbours in forward order come from different devices.
        let number = position % self.files.len();
        let file = &mut self.files[number];
        (place.opened, place.position, place.file, place.elements) =
            (opened, Some(position), number, elements);
        (place.state_bytes, place.image_bytes) = slot_bytes(spec, layout, shard, self.images);
        let before = if place.frozen { &mut file.frozen_bytes } else { &mut file.state_bytes };
        (place.state_at, place.image_at) = (*before, file.image_bytes);
        *before += place.state_bytes as u64;
        file.image_bytes += place.image_bytes as u64;
        file.blocks += place.blocks();
        file.owned.push(owned);
        self.order.push(owned);
    }

    /// The shards that the store is made with.
    pub(super) fn opened(&self) -> impl Iterator<Item = &ShardExtent> {
        self.shards.iter().filter(|place| place.opened)
    }

    /// The parts of its file that a shard takes: offsets and lengths.
    pub(super) fn space(&self, owned: OwnedShard) -> Vec<Range<u64>> {
        let place = &self.shards[owned.index()];
        let slots = |count: u8| if place.frozen { 0..1 } else { 0..count };
        let states = slots(STATE_SLOTS).map(|slot| self.state_part(owned, slot));
        let images = slots(IMAGE_SLOTS).map(|slot| self.image_part(owned, slot));
        let parts = states.chain(images).filter(|part| !part.range.is_empty());
        parts.map(|part| part.offset..part.offset + part.range.len() as u64).collect()
    }

    /// The parts of a file that the store is made with, in order and joined: records, tables and shards.
    pub(super) fn space_at_first(&self, file: usize) -> Vec<Range<u64>> {
        let owned = self.files[file].owned.iter();
        let opened = owned.filter(|owned| self.shards[owned.index()].opened);
        let mut all: Vec<Range<u64>> = opened.flat_map(|&owned| self.space(owned)).collect();
        all.push(0..self.files[file].slots_at());
        all.sort_by_key(|part| part.start);
        let mut joined: Vec<Range<u64>> = Vec::new();
        for part in all {
            match joined.last_mut().filter(|last| last.end == part.start) {
                Some(last) => last.end = part.end,
                None => joined.push(part),
            }
        }
        joined
    }

    /// The bytes of the largest shard with its image, which is a buffer's size.
    pub(super) fn largest(&self) -> usize {
        self.shards.iter().map(ShardExtent::bytes).max().unwrap_or(0)
    }

    /// Returns the bytes of a shard that pulls may read: its image or frozen weights. 0 if pulls read no bytes.
    pub(super) fn pulled_bytes(&self, owned: OwnedShard) -> usize {
        let place = &self.shards[owned.index()];
        match place.frozen {
            true => place.shape.bytes(place.elements),
            false if self.spilled => place.image_bytes,
            false => 0,
        }
    }

    /// Returns the number of parts of `bytes` bytes that pulls may read.
    pub(super) fn pulled_parts(&self, bytes: usize) -> usize {
        self.order.iter().map(|&owned| self.pulled_bytes(owned).div_ceil(bytes)).sum()
    }

    /// The bytes that are reserved when the store is made.
    pub(super) fn disk_bytes(&self) -> u64 {
        let parts = (0..self.files.len()).flat_map(|file| self.space_at_first(file));
        parts.map(|part| part.end - part.start).sum()
    }

    /// Length of a buffer for records and tables, which is the largest of them.
    pub(super) fn meta_bytes(&self) -> usize {
        let table = self.files.iter().map(|file| file.table_bytes() as usize).max().unwrap_or(0);
        table.max(RECORD_BYTES)
    }

    /// Returns the place of a shard's state. A frozen shard has one place, whatever `slot` is.
    pub(super) fn state_part(&self, owned: OwnedShard, slot: u8) -> Part {
        let place = &self.shards[owned.index()];
        let file = &self.files[place.file];
        let start = match place.frozen {
            true => file.frozen_at(),
            false => file.slots_at() + u64::from(slot) * file.state_bytes,
        };
        let offset = start + place.state_at;
        Part { offset, range: 0..place.state_bytes }
    }

    /// Returns the place of a shard's image. In a buffer the image follows the state.
    pub(super) fn image_part(&self, owned: OwnedShard, slot: u8) -> Part {
        let place = &self.shards[owned.index()];
        let file = &self.files[place.file];
        let images = file.slots_at() + u64::from(STATE_SLOTS) * file.state_bytes;
        let offset = images + u64::from(slot) * file.image_bytes + place.image_at;
        Part { offset, range: place.state_bytes..place.bytes() }
    }

    pub(super) fn cut<'a>(&self, owned: OwnedShard, state: &'a mut [u8]) -> StateMut<'a> {
        let place = &self.shards[owned.index()];
        let mut rest = state;
        let arrays = place.shape.arrays(place.elements).map(|bytes| {
            let (array, after) = std::mem::take(&mut rest).split_at_mut(bytes);
            rest = after;
            array
        });
        StateMut::new(place.shape, arrays)
    }

    pub(super) fn cut_ref<'a>(&self, owned: OwnedShard, state: &'a [u8]) -> StateRef<'a> {
        let place = &self.shards[owned.index()];
        let mut rest = state;
        let arrays = place.shape.arrays(place.elements).map(|bytes| {
            let (array, after) = rest.split_at(bytes);
            rest = after;
            array
        });
        StateRef::new(place.shape, arrays)
    }

    pub(super) fn checksum(&self, owned: OwnedShard, state: &[u8], block: usize) -> u64 {
        crc64(self.cut_ref(owned, state).block(block).arrays)
    }
}

impl ShardExtent {
    pub(super) fn bytes(&self) -> usize {
        self.state_bytes + self.image_bytes
    }

    pub(super) fn blocks(&self) -> usize {
        self.elements / BLOCK_ELEMENTS as usize
    }
}

impl FilePlan {
    pub(super) fn record_at(parity: usize, copy: usize) -> u64 {
        ((parity * RECORD_COPIES + copy) * RECORD_BYTES) as u64
    }

    pub(super) fn table_bytes(&self) -> u64 {
        (self.blocks as u64 * 8).next_multiple_of(SECTOR as u64)
    }

    pub(super) fn state_table_at(&self, slot: u8) -> u64 {
        FilePlan::record_at(2, 0) + u64::from(slot) * self.table_bytes()
    }

    pub(super) fn image_table_at(&self, slot: u8) -> u64 {
        self.state_table_at(STATE_SLOTS + slot)
    }

    fn slots_at(&self) -> u64 {
        self.image_table_at(IMAGE_SLOTS)
    }

    fn frozen_at(&self) -> u64 {
        self.slots_at()
            + u64::from(STATE_SLOTS) * self.state_bytes
            + u64::from(IMAGE_SLOTS) * self.image_bytes
    }
}

/// The slots of the version that all shards have, or had before the current step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Slots {
    pub(super) state: u8,
    pub(super) image: u8,
    /// The slot of the image of the version before. None at the first version kept.
    pub(super) older_image: Option<u8>,
}

/// A shard that no table of a version covers, since this server fetched its state or an image. A job that moves without
/// ranks has thousands in one record, so a digest stands for a shard's checksums, which take 1 kB. A server that starts
/// again computes them from the drive.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Apart {
    /// Position in [`StorePlan::order`].
    pub(super) owned: usize,
    /// The slot of the state. None if another server has the shard.
    pub(super) slot: Option<u8>,
    /// Digest of the state's checksums.
    pub(super) checksums: Digest,
    /// Slots of the images of this version and the one before, as far as they are here, with digests of their
    /// checksums.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) images: Vec<(u8, Digest)>,
}

/// Checksums of a shard that lies apart, by block: of its state, and of its images.
pub(super) struct ApartChecksums {
    pub(super) state: Vec<u64>,
    /// Checksums of the images, by slot.
    pub(super) images: Vec<(u8, Vec<u64>)>,
}

/// The CRC-64 of the checksums of a shard's blocks, in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Digested")]
pub(super) struct Digest(u64);

impl std::fmt::Display for Digest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "CRC-64 {:016x} of its blocks' CRC-64", self.0)
    }
}

impl Digest {
    pub(super) fn of(checksums: &[u64]) -> Digest {
        let bytes: Vec<u8> = checksums.iter().flat_map(|checksum| checksum.to_le_bytes()).collect();
        Digest(crc64([&*bytes]))
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Digested {
    Digest(u64),
    /// The checksums themselves, as in records of format 2.
    Checksums(Vec<u64>),
}

impl From<Digested> for Digest {
    fn from(digested: Digested) -> Digest {
        match digested {
            Digested::Digest(digest) => Digest(digest),
            Digested::Checksums(checksums) => Digest::of(&checksums),
        }
    }
}

impl Slots {
    /// Returns the slots for the version that an update makes. Neither this version nor the image before needs them.
    pub(super) fn updated(&self) -> Slots {
        let taken = |slot: u8| slot == self.image || Some(slot) == self.older_image;
        let image = (0..).find(|&slot| !taken(slot)).unwrap_or_default();
        Slots { state: (self.state + 1) % STATE_SLOTS, image, older_image: Some(self.image) }
    }

    /// Slots of the images that are kept with a version: the version's, and the one before's.
    pub(super) fn images(&self, version: Version) -> impl Iterator<Item = (Version, u8)> {
        let older = version.0.checked_sub(1).map(Version).zip(self.older_image);
        [(version, self.image)].into_iter().chain(older)
    }

    /// The slots after a skipped step: the same state, and one image for both versions.
    pub(super) fn skipped(&self) -> Slots {
        Slots { older_image: Some(self.image), ..*self }
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::{
        Handover, JobName, Param, Placement, ServerId, Step,
        limits::{MAX_FETCHED_SHARDS, MAX_MOVING_SHARDS},
    };

    use super::{super::super::folder::FORMAT_VERSION, *};

    #[test]
    fn a_record_has_room_for_the_largest_move_without_ranks() {
        let digest = Digest(u64::MAX);
        let apart =
            |owned| Apart { owned, slot: Some(1), checksums: digest, images: vec![(1, digest), (2, digest)] };
        let all: Vec<Apart> = (0..MAX_FETCHED_SHARDS).map(apart).collect();
        let handover = |shard| Handover {
            shard: ShardId(shard),
            from_step: Step(99_999_999),
            before: ServerId(999),
            is_replica: false,
        };
        let handovers = (10_000..).take(MAX_MOVING_SHARDS).map(handover).collect();
        let placement = Placement {
            handovers,
            ..Placement::striped(vec!["host:7070".into(); 99], 2 * MAX_FETCHED_SHARDS as u32)
        };
        // The rest is for the largest trainer state and param groups.
        assert!(serde_json::to_vec(&(all, placement)).unwrap().len() < RECORD_BYTES - 2_400_000);
    }

    #[test]
    fn checksums_of_records_of_format_2_are_read() {
        let stored = r#"{"owned":3,"slot":1,"checksums":[5,7],"images":[[2,[8]]]}"#;
        let Apart { checksums, images, .. } = serde_json::from_str(stored).unwrap();
        assert_eq!((checksums, images), (Digest::of(&[5, 7]), vec![(2, Digest::of(&[8]))]));
    }

    #[test]
    fn every_shard_has_a_place_of_its_own_and_those_of_format_1_lie_as_before() {
        let params = vec![Param { name: "all".into(), shape: vec![9 * BLOCK_ELEMENTS], group: 0 }];
        let spec = JobSpec::new(JobName::parse("name", "places").unwrap(), params);
        let spec = JobSpec { shard_elements: BLOCK_ELEMENTS, max_delay: 1, ..spec };
        let layout = spec.validate().unwrap();
        let opened: Vec<ShardId> = (1..9).step_by(2).map(ShardId).collect();
        let [before, plan] = [FORMAT_VERSION, ALL_PLACES]
            .map(|format| StorePlan::new(&spec, &layout, &opened, 2, false, format));
        for (old, new) in before.shards.iter().zip(&plan.shards) {
            assert_eq!(old.position.is_some(), opened.contains(&old.shard));
            assert!(new.position.is_some() && old.opened == new.opened);
            assert!(
                !old.opened
                    || (old.file, old.state_at, old.image_at) == (new.file, new.state_at, new.image_at)
            );
            assert_eq!(before.space(OwnedShard(old.shard.index())).len(), if old.opened { 5 } else { 0 });
        }
        for file in 0..2 {
            let mut spaces: Vec<Range<u64>> =
                plan.files[file].owned.iter().flat_map(|&owned| plan.space(owned)).collect();
            spaces.sort_by_key(|space| space.start);
            assert!(
                spaces[0].start == plan.files[file].slots_at()
                    && spaces.is_sorted_by(|a, b| a.end <= b.start)
            );
            // Two slots of the state, three of the image.
            assert_eq!(plan.space_at_first(file).len(), 5);
            assert_eq!(before.space_at_first(file).len(), 1);
        }
    }
}
