//! The `shm` tier: the memory tier's arrays in files of a tmpfs, so that they outlive the process.
//!
//! A killed process leaves in the files all that it has stored. So recovery needs only a fixed order of stores, and a
//! copy of each block during its change. A tmpfs ends with its host; checkpoints protect against that.

mod inspect;
mod open;
mod records;
mod undo;

use std::{
    ops::Range,
    sync::{
        Condvar, Mutex,
        atomic::{AtomicU64, Ordering, fence},
    },
};

use longshore_proto::{Fault, Incarnation, Rank, Step, Version, limits::BLOCK_ELEMENTS};

pub(super) use self::{
    inspect::inspect,
    open::{format, open, overhead},
};
use self::{records::damaged, undo::Undo};
use super::{
    contract::{ComputedWith, Durable, KeptMemory, Tier},
    folder::{Folder, Watch},
    memory::MemoryTier,
    record::nonzero_crc64,
    state::{Guarded, StateMut, StateRef},
    stored::remove_all,
};
use crate::{
    ids::{OwnedShard, OwnedShards},
    memory::{AtomicWords, Region},
    record::{Joined, Record},
};

const BLOCK: usize = BLOCK_ELEMENTS as usize;
/// Largest number of blocks that are updated at once, one for each thread. Further threads wait.
const UNDO_SLOTS: usize = 32;
/// Number of words of a shard: the version begun, the version done, and the oldest version with an image here. Two more
/// words have, by parity, the step whose contributions are all summed.
const SHARD_WORDS: usize = 5;
/// Index of the first word of the summed steps.
const SUMMED: usize = 3;
/// Number of checksums of a block: of its state and of its image, by version parity.
const SUM_WORDS: usize = 4;
/// Index of the first checksum of an image.
const IMAGE_SUM: usize = 2;
/// Number of words of a settled step: the step, its loss scale's bits, and 1 + the version of its first micro-step.
const SETTLED_WORDS: usize = 3;
/// Number of words of an undo slot: 1 + the block (0 when unused), and the version that its update makes.
const UNDO_WORDS: usize = 2;
/// Lowest bit of the world size in the word with the version at which a rank joined.
const WORLD_SIZE_SHIFT: u32 = 48;

/// The job's arrays, and the order in which they are changed.
///
/// Files in the job's folder, mode 0600, native byte order (a tmpfs never changes hosts). Every shard of the job has a
/// place in them, which is a hole unless the shard is here. In format 1 only the shards at creation have a place.
///
/// ```text
/// header.json  whose folder it is (tier/folder.rs)
/// state        each shard's master weights, first and second moments
/// buffers      images, contributions and sums: a decided step is updated from them after a restart; then the images'
///              words, of no use to another process
/// progress     record of version parity 0, of parity 1 (tier/record.rs), 4 MiB each, with two notes of 32 KiB on pauses at
///              their ends;
///              words of 8 bytes: 5 for each shard, 1 for each block (its version), 2 for each undo slot,
///              1 for each rank (its incarnation);
///              undo slots: one block's state each;
///              1 word for each rank (twice the version at which that incarnation joined; 1 more while it has only fenced);
///              3 words for each of two steps, by parity: the step, and what its sums were computed with;
///              4 words for each block: CRC-64 of its state and of its image, each by version parity; 0 where unknown
/// ```
///
/// **Deciding** a step writes its record over the record of two versions before. Callers hear of the decision only
/// then.
///
/// **Updating** a shard stores the version begun first and the version done last. In between, each block is copied into
/// an undo slot, then the slot's words are stored. Then the block is changed in place. Its checksums, its version, and
/// 0 in the slot's words follow.
///
/// **Recovery** puts back each block of an undo slot whose version was not reached. The newest record is taken, and the
/// remaining blocks are updated. Blocks that reached their version stay. A shard whose version begun is not done has
/// lost its older image, which the new one was overwriting. A step that is summed and undecided stays summed. Another
/// server may have the decision, and the step's gradients may be gone elsewhere.
///
/// **Moving** a shard stores only its words. The newest record's placement names this server's shards. A shard whose
/// version done is below the fetched version was being fetched, and is fetched again. Words of a shard that has left
/// are ignored.
pub(super) struct ShmTier {
    memory: MemoryTier,
    words: AtomicWords,
    joined_at: AtomicWords,
    settled: AtomicWords,
    sums: AtomicWords,
    records: Mutex<Region>,
    /// Free undo regions, with their slot.
    undo: Mutex<Vec<(usize, Region)>>,
    undo_freed: Condvar,
    /// The region of each slot that is in use, by slot.
    undo_held: Vec<Mutex<Option<Region>>>,
    /// Index of each shard's first block; one more at the end.
    blocks: Vec<usize>,
    watch: Watch,
    folder: Folder,
}

impl ShmTier {
    fn shards(&self) -> OwnedShards {
        OwnedShard::all(self.blocks.len() - 1)
    }

    fn block_sums(&self, block: usize) -> &[AtomicU64] {
        &self.sums.get()[block * SUM_WORDS..][..SUM_WORDS]
    }

    fn blocks_of(&self, owned: OwnedShard) -> Range<usize> {
        self.blocks[owned.index()]..self.blocks[owned.next().index()]
    }

    /// Runs `change` between the stores of the shard's version begun and version done.
    fn between(&self, owned: OwnedShard, version: Version, change: &mut dyn FnMut()) {
        let words = self.shard(owned);
        words[0].store(version.0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        change();
        fence(Ordering::SeqCst);
        words[1].store(version.0, Ordering::SeqCst);
    }

    /// A shard's words: version begun, version done, oldest image, steps summed.
    fn shard(&self, owned: OwnedShard) -> &[AtomicU64] {
        &self.words.get()[owned.index() * SHARD_WORDS..][..SHARD_WORDS]
    }

    fn block(&self, block: usize) -> &AtomicU64 {
        &self.words.get()[self.shards().len() * SHARD_WORDS + block]
    }

    fn undo_words(&self, slot: usize) -> &[AtomicU64] {
        let start = self.shards().len() * SHARD_WORDS + self.blocks[self.shards().len()];
        &self.words.get()[start + slot * UNDO_WORDS..][..UNDO_WORDS]
    }

    /// The incarnation of each rank; 0 before it has joined.
    fn ranks(&self) -> &[AtomicU64] {
        &self.words.get()
            [self.shards().len() * SHARD_WORDS + self.blocks[self.shards().len()] + UNDO_SLOTS * UNDO_WORDS..]
    }
}

impl Tier for ShmTier {
    fn load(&self, owned: OwnedShard, load: &mut dyn FnMut(StateMut<'_>)) -> Result<(), Fault> {
        self.memory.load(owned, load)
    }

    fn read(&self, owned: OwnedShard, read: &mut dyn FnMut(StateRef<'_>)) -> Result<(), Fault> {
        self.memory.read(owned, read)
    }

    fn make_room(&self, owned: OwnedShard) -> Result<(), Fault> {
        self.memory.make_room(owned)
    }

    fn release(&self, owned: OwnedShard) {
        self.memory.release(owned);
    }

    /// The version done is stored last, since until then a next process would fetch a moved shard again.
    fn seal(&self, owned: OwnedShard, version: Version, oldest: Version) -> Result<(), Fault> {
        let mut result = Ok(());
        self.between(owned, version, &mut || {
            result = self.memory.read(owned, &mut |state| {
                for (index, block) in self.blocks_of(owned).enumerate() {
                    let sums = self.block_sums(block);
                    sums[(version.0 % 2) as usize]
                        .store(nonzero_crc64(state.block(index).arrays), Ordering::Relaxed);
                    sums[IMAGE_SUM..].iter().for_each(|image| image.store(0, Ordering::Relaxed));
                    self.block(block).store(version.0, Ordering::SeqCst);
                }
            });
            self.shard(owned)[2].store(oldest.0, Ordering::SeqCst);
        });
        result
    }

    fn update(
        &self,
        run: &[OwnedShard],
        version: Version,
        update: &mut dyn FnMut(Vec<Guarded<'_>>),
    ) -> Result<(), Fault> {
        run.iter().try_for_each(|&owned| {
            let guard = Undo { tier: self, first_block: self.blocks[owned.index()], version };
            let mut result = Ok(());
            self.between(owned, version, &mut || {
                result = self.memory.load(owned, &mut |state| update(vec![(state, &guard)]));
            });
            result
        })
    }
}

impl KeptMemory for ShmTier {
    fn settle(&self, step: Step, (scale, reads): ComputedWith) {
        let words = &self.settled.get()[(step.0 % 2) as usize * SETTLED_WORDS..][..SETTLED_WORDS];
        if words[0].load(Ordering::Acquire) == step.0 {
            return;
        }
        let scale = scale.map_or(0, f64::to_bits);
        // The step's number is cleared first and stored last: a kill in the meantime leaves no settled step.
        words[0].store(0, Ordering::SeqCst);
        words[1].store(scale, Ordering::SeqCst);
        words[2].store(reads.map_or(0, |version| 1 + version.0), Ordering::SeqCst);
        words[0].store(step.0, Ordering::SeqCst);
    }

    fn settled(&self) -> Vec<(Step, ComputedWith)> {
        let settled = self.settled.get().chunks_exact(SETTLED_WORDS).map(|words| {
            let [step, scale, reads] = [0, 1, 2].map(|word| words[word].load(Ordering::Acquire));
            let scale = Some(f64::from_bits(scale)).filter(|scale| *scale > 0.0);
            (Step(step), (scale, reads.checked_sub(1).map(Version)))
        });
        settled.filter(|(step, _)| step.0 > 0).collect()
    }

    fn complete(&self, owned: OwnedShard, step: Step) {
        // The sum is whole before its word is stored.
        fence(Ordering::SeqCst);
        self.shard(owned)[SUMMED + (step.0 % 2) as usize].store(step.0, Ordering::SeqCst);
    }

    fn carry(&self, owned: OwnedShard, version: Version, carry: &mut dyn FnMut()) {
        let parity = (version.0 % 2) as usize;
        self.between(owned, version, &mut || {
            carry();
            for block in self.blocks_of(owned) {
                let (sums, held) = (self.block_sums(block), self.block(block));
                let state = (held.load(Ordering::Acquire) % 2) as usize;
                let image = 1 - parity;
                sums[parity].store(sums[state].load(Ordering::Relaxed), Ordering::Relaxed);
                sums[IMAGE_SUM + parity]
                    .store(sums[IMAGE_SUM + image].load(Ordering::Relaxed), Ordering::Relaxed);
                // A block's checksum lies at the parity of the block's version. If the block kept its old version here,
                // the next update would have the same parity. The update's checksum would overwrite the block's before
                // the block has the new version.
                fence(Ordering::SeqCst);
                held.store(version.0, Ordering::SeqCst);
            }
        });
    }

    fn check_image(&self, owned: OwnedShard, version: Version, image: &[u8]) -> Result<(), Fault> {
        let range = self.blocks_of(owned);
        let bytes = image.len() / range.len().max(1);
        for (block, image) in range.zip(image.chunks(bytes.max(1))) {
            let kept = self.block_sums(block)[IMAGE_SUM + (version.0 % 2) as usize].load(Ordering::Relaxed);
            if kept != 0 && kept != nonzero_crc64([image]) {
                return Err(damaged(
                    &self.folder.path.join("buffers"),
                    &format!("an image of block {block} of it"),
                ));
            }
        }
        Ok(())
    }
}

impl Durable for ShmTier {
    fn start(&self, record: &Record) -> Result<(), Fault> {
        self.write_record(record)
    }

    fn decide(&self, record: &Record) -> Result<(), Fault> {
        self.watch.check()?;
        self.write_record(record)
    }

    fn stand(&self, record: &Record) -> Result<(), Fault> {
        self.write_note(record)
    }

    /// Writes the record to both places, one after the other, so that at any instant one is whole. The record of the
    /// version before is overwritten, since no shard needs it.
    fn place(&self, record: &Record) -> Result<(), Fault> {
        self.write_record_at(record, record.version.next_step().version())?;
        self.write_record(record)
    }

    fn joined(&self, rank: Rank, joined: Joined, over: bool) {
        let summed = self.shards().flat_map(|owned| &self.shard(owned)[SUMMED..]);
        let words = summed.chain(self.settled.get());
        words.filter(|_| over).for_each(|word| word.store(0, Ordering::SeqCst));
        // A kill between the two stores pairs the old incarnation with the new version. The pair does no harm, since
        // that incarnation is being replaced.
        let world_size = u64::from(joined.world_size) << WORLD_SIZE_SHIFT;
        let at = world_size + 2 * joined.at.0 + u64::from(joined.fence_only);
        self.joined_at.get()[rank.index()].store(at, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.ranks()[rank.index()].store(joined.incarnation.0, Ordering::SeqCst);
    }

    fn keep_joined(&self) -> Result<(), Fault> {
        // A word of a tmpfs is kept as soon as it is stored.
        Ok(())
    }

    fn who_joined(&self) -> Vec<Option<Joined>> {
        let ranks = self.ranks().iter().zip(self.joined_at.get());
        let joined = |(incarnation, at): (&AtomicU64, &AtomicU64)| {
            let [incarnation, at] = [incarnation, at].map(|word| word.load(Ordering::Acquire));
            let (world_size, fence_only) = ((at >> WORLD_SIZE_SHIFT) as u32, at % 2 == 1);
            let (incarnation, at) = (Incarnation(incarnation), Version(at % (1 << WORLD_SIZE_SHIFT) / 2));
            (incarnation.0 > 0).then_some(Joined { incarnation, at, fence_only, world_size })
        };
        ranks.map(joined).collect()
    }

    fn discard(&self) -> Result<(), Fault> {
        remove_all(std::slice::from_ref(&self.folder.path))
    }
}
