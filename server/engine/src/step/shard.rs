//! Contributions of a shard: stored chunks, the micro-step being filled, and the completion of the sum.

use std::ops::Range;

use longshore_proto::{
    BlockId, ChunkId, ContributionChunk, Incarnation, MicroStep, Origin, Rank, ShardId, Step, Version,
};

use super::{machine::Admission, refusal::Refusal};
use crate::ids::{Contributor, GradientSlot};

/// A stored chunk's checksum, and the process that sent it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Receipt {
    /// Checksum of the chunk. None for a lent chunk.
    crc32: Option<u32>,
    incarnation: Incarnation,
}

/// Buffer of one rank, which holds one micro-step at a time.
#[derive(Clone, Debug)]
struct RankSlot {
    /// A flag for each chunk, as in `writing` and `sent`. Counters would count a repeated chunk twice.
    stored: Vec<bool>,
    writing: Vec<bool>,
    /// The newest process that sent chunks of the last micro-step. `sent` marks those chunks, also ones that were not
    /// stored.
    sent_by: Incarnation,
    sent: Vec<bool>,
    /// Receipts by micro-step and chunk, until the step is decided. A receipt tells a repeated chunk of a summed
    /// micro-step from a conflicting one. The receipts take 24 bytes a MiB received.
    receipts: Vec<Vec<Option<Receipt>>>,
}

/// The gradient of one step of one shard, until it is complete and used.
#[derive(Clone, Debug)]
pub(super) struct StepSlot {
    pub(super) step: Option<Step>,
    /// Number of micro-steps summed, which is also the number of the micro-step being received.
    pub(super) summed: u32,
    /// True while all contributions of the current micro-step are stored and are being summed.
    pub(super) summing: bool,
    pub(super) complete: bool,
    /// The origin of the sum so far. Sums of an earlier process of this server have an unknown origin.
    origin: Origin,
    /// The first element of the complete gradient that is inf or NaN, if the job looks for one.
    pub(super) nonfinite: Option<u64>,
    /// Buffers of the ranks, by contributor.
    ranks: Vec<RankSlot>,
}

/// A shard whose state has a flipped bit in this server's memory. From then on, updates do not change the state.
#[derive(Clone, Copy, Debug)]
pub(super) struct Broken {
    /// The first block that differs from its checksum, by its number in the job.
    pub(super) block: BlockId,
    /// The last version whose image is whole.
    pub(super) image: Version,
}

/// Progress of a shard in the protocol.
#[derive(Clone, Debug)]
pub(super) struct ShardProgress {
    pub(super) shard: ShardId,
    pub(super) chunks: u32,
    /// The ranks that contribute to the shard, in ascending order. A frozen shard has none.
    pub(super) contributors: Vec<Rank>,
    /// Version of the shard's state.
    pub(super) version: Version,
    /// Steps at which this server makes the shard's versions, as owner or replica.
    pub(super) span: Range<u64>,
    /// True while the state is being fetched from the owner before.
    pub(super) awaited: bool,
    /// True if the source of the awaited state is lost: a decision will take the shard away.
    pub(super) is_forsaken: bool,
    /// The version that a new replica has yet to fetch from here. Later updates wait until it has done so.
    pub(super) lent: Option<Version>,
    /// Present if the state differs from its checksums. The other holder goes on with the shard then.
    pub(super) broken: Option<Broken>,
    /// Gradient slots. A step has the slot of its number modulo the number of slots.
    pub(super) slots: Vec<StepSlot>,
}

impl RankSlot {
    fn new(chunks: u32) -> RankSlot {
        let [stored, writing, sent] = [(); 3].map(|()| vec![false; chunks as usize]);
        RankSlot { stored, writing, sent_by: Incarnation::default(), sent, receipts: Vec::new() }
    }

    fn receipt(&self, micro_step: MicroStep, chunk: u32) -> Option<Receipt> {
        *self.receipts.get(micro_step.0 as usize)?.get(chunk as usize)?
    }

    /// Returns the process that sent a micro-step. All chunks of a micro-step come from one process.
    fn sender(&self, micro_step: u32) -> Incarnation {
        let receipts = self.receipts.get(micro_step as usize).into_iter().flatten().flatten();
        receipts.map(|receipt| receipt.incarnation).max().unwrap_or_default()
    }

    fn set_writing(&mut self, chunk: &ContributionChunk, value: bool) {
        for index in self.covered(chunk) {
            self.writing[index as usize] = value;
        }
    }

    fn is_writing(&self, chunk: &ContributionChunk) -> bool {
        self.covered(chunk).any(|index| self.writing[index as usize])
    }

    /// Returns the verdict on a chunk that is held already. A rank's restarted process may compute other bits for a
    /// batch that is in the sum. The first bits stay, as a gradient of the same batch: to replace them, all other ranks
    /// would have to send again.
    fn repeated(&self, chunk: &ContributionChunk) -> Result<Admission<()>, Refusal> {
        let contribution = chunk.contribution;
        let receipt = self.receipt(contribution.micro_step, chunk.chunk.0);
        let earlier = receipt.filter(|receipt| receipt.incarnation == chunk.incarnation && !chunk.lent);
        match earlier.and_then(|receipt| receipt.crc32) {
            Some(earlier) if earlier != chunk.crc32 => {
                let (chunk, crc32) = (chunk.chunk, chunk.crc32);
                Err(Refusal::OtherChecksum { contribution, chunk, crc32, earlier })
            }
            Some(_) => Ok(Admission::Duplicate),
            None => Ok(Admission::Superseded),
        }
    }

    /// Returns the first chunk of this message whose predecessor, the same chunk of the micro-step before, is neither
    /// stored nor being received. Such a message is refused while micro-step `current` is received. If it waited, a
    /// predecessor behind it on the same stream could never arrive.
    fn overtaken(&self, chunk: &ContributionChunk, current: u32) -> Option<ChunkId> {
        let before = chunk.contribution.micro_step.0.checked_sub(1).filter(|&before| before >= current)?;
        let here = |index: u32| {
            self.receipt(MicroStep(before), index).is_some()
                || (before == current && self.writing[index as usize])
        };
        self.covered(chunk).find(|&index| !here(index)).map(ChunkId)
    }

    /// The chunks that the message brings.
    fn covered(&self, chunk: &ContributionChunk) -> Range<u32> {
        if chunk.lent { 0..self.stored.len() as u32 } else { chunk.chunk.0..chunk.chunk.0 + 1 }
    }
}

impl StepSlot {
    fn new(chunks: u32, contributors: usize) -> StepSlot {
        StepSlot {
            step: None,
            summed: 0,
            summing: false,
            complete: false,
            origin: Origin::UNKNOWN,
            nonfinite: None,
            ranks: (0..contributors).map(|_| RankSlot::new(chunks)).collect(),
        }
    }

    /// Returns the verdict on a chunk whose fields are in range and whose step this slot may hold.
    pub(super) fn judge(
        &mut self,
        chunk: &ContributionChunk,
        contributor: Contributor,
        chunks: u32,
    ) -> Result<Admission<()>, Refusal> {
        let contribution = chunk.contribution;
        match self.step {
            Some(step) if step != contribution.step => return Ok(Admission::Busy),
            _ => {}
        }
        let rank = &mut self.ranks[contributor.index()];
        // A message of several chunks is a repetition only if all its chunks are held. Otherwise all are written.
        let unheld =
            rank.covered(chunk).find(|&index| rank.receipt(contribution.micro_step, index).is_none());
        if unheld.is_none() {
            return rank.repeated(chunk);
        }
        if self.complete {
            // An earlier process of this server summed the whole step, and its receipts are gone.
            return Ok(Admission::Superseded);
        }
        if let Some(missing) = rank.overtaken(chunk, self.summed) {
            return Err(Refusal::MicroStepTooEarly { contribution, missing });
        }
        if self.summing || contribution.micro_step.0 != self.summed || rank.is_writing(chunk) {
            return Ok(Admission::Busy);
        }
        self.step = Some(contribution.step);
        rank.set_writing(chunk, true);
        let micro_step = contribution.micro_step.0 as usize;
        if rank.receipts.len() <= micro_step {
            rank.receipts.resize(micro_step + 1, vec![None; chunks as usize]);
        }
        Ok(Admission::New(()))
    }

    /// Notes that the chunk's bytes are in its buffer. Returns true if the chunk was the micro-step's last.
    pub(super) fn stored(&mut self, chunk: &ContributionChunk, contributor: Contributor) -> bool {
        let rank = &mut self.ranks[contributor.index()];
        rank.set_writing(chunk, false);
        let crc32 = (!chunk.lent).then_some(chunk.crc32);
        let receipt = Receipt { crc32, incarnation: chunk.incarnation };
        for index in rank.covered(chunk) {
            rank.stored[index as usize] = true;
            rank.receipts[chunk.contribution.micro_step.0 as usize][index as usize] = Some(receipt);
        }
        self.summing = self.ranks.iter().all(|rank| !rank.stored.contains(&false));
        self.summing
    }

    /// Marks a chunk of the last micro-step as sent by its process.
    pub(super) fn sent(&mut self, chunk: &ContributionChunk, contributor: Contributor) {
        let rank = &mut self.ranks[contributor.index()];
        if rank.sent_by != chunk.incarnation {
            rank.sent_by = chunk.incarnation;
            rank.sent.fill(false);
        }
        for index in rank.covered(chunk) {
            rank.sent[index as usize] = true;
        }
    }

    /// Returns true if the process has sent its whole gradient of the step, summed or not.
    pub(super) fn has_sent(&self, contributor: Contributor, process: Incarnation) -> bool {
        let rank = &self.ranks[contributor.index()];
        rank.sent_by == process && !rank.sent.contains(&false)
    }

    /// Returns true if the micro-step is summed, or being summed.
    pub(super) fn has_summed(&self, step: Step, micro_step: MicroStep) -> bool {
        let summed = self.summed + u32::from(self.summing);
        self.step == Some(step) && micro_step.0 < summed
    }

    /// Notes that the chunk's bytes did not arrive.
    pub(super) fn abandoned(&mut self, chunk: &ContributionChunk, contributor: Contributor) {
        self.ranks[contributor.index()].set_writing(chunk, false);
        self.free_if_untouched();
    }

    /// Forgets a step without any chunk in the slot. So a chunk that did not arrive does not settle the step's loss
    /// scale.
    fn free_if_untouched(&mut self) {
        let untouched = |rank: &RankSlot| !rank.stored.contains(&true) && !rank.writing.contains(&true);
        if self.summed == 0 && self.ranks.iter().all(untouched) {
            self.free();
        }
    }

    /// Notes that the current micro-step is summed. Returns true if it was the step's last. `nonfinite` then is the
    /// gradient's first element that is inf or NaN.
    pub(super) fn summed(&mut self, micro_steps: u32, nonfinite: Option<u64>) -> bool {
        self.summing = false;
        for (rank, slot) in self.ranks.iter().enumerate() {
            let sender = slot.sender(self.summed).0;
            self.origin.0 = mix(self.origin.0 ^ mix(u64::from(self.summed) << 32 | rank as u64) ^ sender);
        }
        self.summed += 1;
        self.complete = self.summed == micro_steps;
        self.nonfinite = nonfinite.filter(|_| self.complete);
        for rank in &mut self.ranks {
            rank.stored.fill(false);
        }
        self.complete
    }

    /// Notes that an earlier process of this server had summed the whole step.
    pub(super) fn take_over(&mut self, step: Step, micro_steps: u32) {
        (self.step, self.summed, self.complete) = (Some(step), micro_steps, true);
        self.origin = Origin::UNKNOWN;
    }

    /// Frees the slot of a decided step whose gradient is used up.
    pub(super) fn free(&mut self) {
        self.step = None;
        self.summed = 0;
        self.complete = false;
        self.origin = Origin::UNKNOWN;
        self.nonfinite = None;
        for rank in &mut self.ranks {
            rank.receipts.clear();
            rank.sent_by = Incarnation::default();
            rank.sent.fill(false);
        }
    }

    /// Returns true if a sum or an update still needs a contributor's buffer.
    pub(super) fn holds(&self, contributor: Contributor) -> bool {
        let has_stored = |rank: &RankSlot| rank.stored.contains(&true) || rank.writing.contains(&true);
        self.complete || self.summing || self.ranks.get(contributor.index()).is_some_and(has_stored)
    }

    /// Returns true while a chunk of this contributor is being written or its buffer is being read.
    pub(super) fn in_use(&self, contributor: Contributor) -> bool {
        self.summing || self.ranks[contributor.index()].writing.contains(&true)
    }

    /// Forgets the contributions of the job's lone rank: its new process starts the step over.
    pub(super) fn start_over(&mut self) {
        self.free();
        self.ranks.iter_mut().for_each(|rank| rank.stored.fill(false));
    }

    /// Forgets the contributions of a rank's earlier process that no sum contains yet: the rank's new process may
    /// compute other bits. Finished sums stay, since the step may be decided on another server.
    pub(super) fn rejoined(&mut self, contributor: Contributor) {
        let current = self.summed as usize;
        let slot = &mut self.ranks[contributor.index()];
        if !self.complete {
            slot.stored.fill(false);
            slot.receipts.truncate(current);
        }
        self.free_if_untouched();
    }

    /// Returns the contributors whose contribution to the current micro-step is not whole.
    pub(super) fn missing(&self) -> Vec<Contributor> {
        if self.complete || self.summing {
            return Vec::new();
        }
        let ranks = Contributor::all(self.ranks.len()).zip(&self.ranks);
        ranks.filter(|(_, rank)| rank.stored.contains(&false)).map(|(contributor, _)| contributor).collect()
    }
}

impl ShardProgress {
    pub(super) fn new(shard: ShardId, chunks: u32, slots: usize, contributors: &[Rank]) -> ShardProgress {
        let slots = (0..slots).map(|_| StepSlot::new(chunks, contributors.len())).collect();
        let (contributors, version) = (contributors.to_vec(), Version(0));
        ShardProgress {
            shard,
            chunks,
            contributors,
            version,
            span: 0..u64::MAX,
            awaited: false,
            is_forsaken: false,
            lent: None,
            broken: None,
            slots,
        }
    }

    /// Takes other contributors. No slot of an undecided step has contributions.
    pub(super) fn set_contributors(&mut self, contributors: Vec<Rank>) {
        for slot in &mut self.slots {
            slot.ranks.resize_with(contributors.len(), || RankSlot::new(self.chunks));
        }
        self.contributors = contributors;
    }

    /// Returns true if the step's update is next, and its state is here.
    pub(super) fn can_update(&self, step: Step) -> bool {
        self.version.next_step() == step
            && !self.awaited
            && self.lent.is_none_or(|lent| step.version() <= lent)
    }

    /// Returns true if the awaited state never comes: its source is lost.
    pub(super) fn is_given_up(&self) -> bool {
        self.awaited && self.is_forsaken
    }

    /// Returns true while a chunk is being written, or a sum formed.
    pub(super) fn is_in_use(&self) -> bool {
        let contributors = || Contributor::all(self.contributors.len());
        self.slots.iter().any(|slot| contributors().any(|contributor| slot.in_use(contributor)))
    }

    /// Returns a rank's index among the shard's contributors, if it is one of them.
    pub(super) fn contributor(&self, rank: Rank) -> Option<Contributor> {
        Contributor::of(rank, &self.contributors)
    }

    pub(super) fn slot_of(&self, step: Step) -> GradientSlot {
        GradientSlot::of(step, self.slots.len())
    }

    pub(super) fn slot(&self, step: Step) -> &StepSlot {
        &self.slots[self.slot_of(step).index()]
    }

    pub(super) fn slot_mut(&mut self, step: Step) -> &mut StepSlot {
        let slot = self.slot_of(step);
        &mut self.slots[slot.index()]
    }

    /// Returns the origin of the step's gradient on this shard, mixed with the shard's number.
    pub(super) fn origin(&self, step: Step) -> Origin {
        match self.slot(step).origin {
            Origin(mixed) if mixed != 0 && self.is_complete(step) => {
                Origin(mix(mixed ^ u64::from(self.shard.0)).max(1))
            }
            _ => Origin::UNKNOWN,
        }
    }

    /// Returns true if the shard has no contributors, so that no step changes it.
    pub(super) fn is_frozen(&self) -> bool {
        self.contributors.is_empty()
    }

    /// Returns true if every contribution of the step is stored and summed. A frozen shard needs none.
    pub(super) fn is_complete(&self, step: Step) -> bool {
        if self.is_frozen() {
            return true;
        }
        let slot = self.slot(step);
        slot.step == Some(step) && slot.complete
    }
}

/// Spreads a number's bits over all 64, as splitmix64 does, so that sums of mixed numbers differ if any number does.
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
