//! The work of the compute thread: sums of contributions, and updates of shards. An update passes over each block once:
//! unscale, clip, apply the rule, write the image.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::atomic::Ordering,
};

use longshore_proto::{BlockId, Commit, Correction, Fault, Layout, Step, limits::BLOCK_ELEMENTS};
use tracing::debug_span;

use super::{
    Job,
    compute::BLOCK,
    gradients::{cast, first_nonfinite, take_sums},
    images::image_blocks,
};
use crate::{
    ids::{Contributor, OwnedShard},
    kernels::{self, Gradient, ImageMut, Isa, Random, Scalars, update, update_low},
    lock,
    memory::{Region, float::Standard},
    step::{Sum, Work},
    tier::{Guard, Guarded, StateMut, Turn},
};

/// An update group that begins at shard `first` has `1 + first / AHEAD` shards. The images of a group become readable
/// together, so all but the last are readable later than they are made. Forward reads shards in the same order. So no
/// worker waits while the update is a group ahead of forward. If forward takes a seventh longer than the update, the
/// update is `first / 8` shards ahead at shard `first`.
///
/// A GPU's forward is often faster than the update, and waits for each group. Forward's work after the last group is
/// exposed time, so groups shrink again. A group with `rest` shards behind it has at most `1 + rest / AHEAD`.
const AHEAD: usize = 8;

/// A block's part of all arrays that an update touches.
struct Block<'a> {
    id: BlockId,
    /// The block's index in its shard.
    index: usize,
    gradient: Gradient<'a>,
    state: StateMut<'a>,
    image: ImageMut<'a>,
    guard: &'a dyn Guard,
}

impl Job {
    /// Performs the oldest work, together with the sums that follow it if it is a sum. Work that arises from it goes to
    /// the end of the queue.
    pub fn perform(&self, works: &mut VecDeque<Work>) -> Result<(), Fault> {
        self.protocol.check_alive()?;
        let _standard = Standard::enter();
        let sums = take_sums(works);
        let next = match sums.is_empty().then(|| works.pop_front()).flatten() {
            Some(Work::Update { owned, step }) => self.update(owned, step),
            _ => self.sum(&sums).map(|()| Vec::new()),
        };
        works.extend(next.map_err(|fault| self.protocol.fail(fault))?);
        // Waiting threads are woken once the next work has begun. If the next work may wait for drives or a snapshot,
        // the threads are woken now.
        let soon = !works.is_empty() && self.tier.behind.is_none() && self.snapshots.len() == 0;
        if self.protocol.owe(soon) || !soon {
            self.protocol.notify();
        }
        Ok(())
    }

    /// Adds the ranks' contributions of a micro-step in rank order, and takes the statistics with the last addition.
    /// The machine asks for one sum of a shard's slot at a time.
    fn sum(&self, sums: &[Sum]) -> Result<(), Fault> {
        let Some(first) = sums.first() else { return Ok(()) };
        let shard = self.share.shard(first.owned).0;
        let _stage =
            debug_span!(target: "stage", "sum", shard, shards = sums.len(), step = first.step.0).entered();
        let statistics = self.gradients.form(sums, || self.protocol.notify_owed())?;
        for (&Sum { owned, slot, step, micro_step, .. }, statistics) in sums.iter().zip(statistics) {
            let mut nonfinite = None;
            if self.gradients.is_last(micro_step) {
                nonfinite = first_nonfinite(&statistics);
                self.gradients.set_statistics(owned, slot, statistics);
                self.gradients.find_left_out(owned, slot);
                if let Some(kept) = &self.tier.kept {
                    // The next process goes on with this sum, so the step's version and loss scale are kept too.
                    kept.settle(step, self.protocol.machine().computed_with(step));
                    kept.complete(owned, step);
                }
            }
            let complete = self.protocol.machine().summed(owned, slot, nonfinite);
            let shard = self.share.shard(owned);
            tracing::trace!(job = %self.share.spec.name, %step, %micro_step, %shard, complete, "summed");
        }
        Ok(())
    }

    fn update(&self, first: OwnedShard, step: Step) -> Result<Vec<Work>, Fault> {
        let at_once = self.tier.state.most_at_once();
        let most = |before: usize, rest: usize| (1 + before.min(rest) / AHEAD).min(at_once);
        let run = {
            let mut machine = self.protocol.machine();
            let run = machine.updatable(first, most, step);
            if run.is_empty() {
                return Ok(machine.instead_of(first, step).into_iter().collect());
            }
            run
        };
        let shard = self.share.shard(first).0;
        let _stage =
            debug_span!(target: "stage", "update", shard, shards = run.len(), step = step.0).entered();
        let decision =
            self.protocol.machine().decision(step).map(|(commit, applied)| (commit.clone(), applied));
        let (commit, applied) = decision.expect("a commit is kept until its updates are done");
        // No step changes a frozen shard, so snapshots need not copy it first.
        let frozen = self.share.is_frozen(first);
        if !frozen {
            run.iter().for_each(|&owned| self.snapshots.take_before(self, owned, step));
        }
        let whole = self.protocol.machine().whole(&run);
        if frozen || commit.skip {
            for &owned in &whole {
                let carry = &mut || {
                    if !frozen {
                        self.images.carry(owned, step);
                    }
                };
                match &self.tier.kept {
                    Some(kept) => kept.carry(owned, step.version(), carry),
                    None => carry(),
                }
            }
        } else {
            self.update_shards(&whole, &commit, applied)?;
            let bytes = whole.iter().map(|&owned| self.shard_update_bytes(owned)).sum();
            self.updated_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        self.gradients.give_back(&run, step);
        let mut machine = self.protocol.machine();
        let next = machine.updated(&run, step);
        if machine.is_made(step) {
            self.protocol.finish(&machine, step)?;
        }
        drop(machine);
        tracing::trace!(job = %self.share.spec.name, %step, ?run, skip = commit.skip, "updated");
        Ok(next)
    }

    fn update_shards(&self, run: &[OwnedShard], commit: &Commit, applied: u64) -> Result<(), Fault> {
        let share = &self.share;
        let Some(&first) = run.first() else { return Ok(()) };
        let multiplier = commit.gradient_multiplier(share.spec.share(share.contributors(first)));
        let constants = Constants::new(commit, &share.layout, applied, |group, t| {
            let hyper = &commit.groups[group];
            let scalars = Scalars::new(share.spec.rule, hyper, t, multiplier);
            match &commit.correction {
                Correction::LookAhead(lr) => scalars.looking_ahead(hyper, t, lr[group]),
                Correction::None => scalars,
            }
        });
        let next = self.gradients.are_spilled().then(|| {
            let machine = self.protocol.machine();
            let is_next = |&owned: &OwnedShard| owned > first && machine.owns(owned, commit.step);
            share.all().filter(|&owned| !share.is_frozen(owned)).find(is_next)
        });
        let next = next.flatten();
        let fetched = run.iter().map(|&owned| self.gradients.fetch_gradient(owned, next, commit.step));
        let fetched = fetched.collect::<Result<Vec<_>, _>>()?;
        let (gradients, slot, dtype) = (&self.gradients, share.slot(commit.step), share.spec.gradient_dtype);
        let lone: Vec<_> =
            run.iter().map(|&owned| lock(gradients.contribution(owned, slot, Contributor::LONE))).collect();
        let sums: Vec<_> = run.iter().map(|&owned| gradients.accumulator(owned, slot).map(lock)).collect();
        let whole = |index: usize| match (&fetched[index], &sums[index]) {
            (Some(region), Some(_)) => Gradient::f32(region.f32()),
            (Some(region), None) => cast(region.bytes().into(), dtype),
            (None, Some(region)) => Gradient::f32(region.f32()),
            (None, None) => lone[index].gradient(dtype),
        };
        let version = commit.step.version();
        let mut images: Vec<_> = run.iter().map(|&owned| self.images.to_make(owned, version)).collect();
        let mut damaged = Vec::new();
        let mut compute = |states: Vec<Guarded<'_>>| {
            let shards = run.iter().zip(states).zip(&mut images).enumerate();
            let blocks = shards.map(|(index, ((&owned, state), image))| {
                self.cut(owned, whole(index), state, image.overwrite())
            });
            let block = |mut block: Block<'_>| {
                let (index, guard) = (block.index, block.guard);
                let turn = guard.begin(index, block.state.as_ref());
                if let Turn::Go(number) = turn {
                    self.update_block(&mut block, &constants, applied);
                    guard.end(index, number, block.state.as_ref(), block.image.bytes());
                }
                turn == Turn::Damaged
            };
            damaged = self.compute.groups(blocks.collect(), block, || self.protocol.notify_owed());
        };
        self.tier.state.update(run, version, &mut compute)?;
        let broken = damaged.iter().map(|blocks| blocks.iter().position(|&damaged| damaged));
        let broken: Vec<Option<usize>> = broken.collect();
        let made = images.iter_mut().zip(&broken).filter(|(_, broken)| broken.is_none());
        made.for_each(|(image, _)| image.set(Some(version)));
        drop((lone, sums, images));
        for (&owned, block) in run.iter().zip(broken) {
            block.map_or(Ok(()), |block| self.found_broken(owned, block).map(drop))?;
        }
        fetched.into_iter().for_each(|gradient| self.gradients.give_gradient_back(gradient));
        Ok(())
    }

    fn cut<'a>(
        &self,
        owned: OwnedShard,
        whole: Gradient<'a>,
        (state, guard): Guarded<'a>,
        image: &'a mut Region,
    ) -> Vec<Block<'a>> {
        let first_block = self.share.layout.shard_range(self.share.shard(owned)).start / BLOCK_ELEMENTS;
        let images = image_blocks(image, self.share.spec.image_dtype, BLOCK);
        let blocks = state.blocks().zip(images).enumerate().map(|(index, (state, image))| Block {
            id: BlockId(first_block as u32 + index as u32),
            index,
            gradient: whole.slice(index * BLOCK..(index + 1) * BLOCK),
            state,
            image,
            guard,
        });
        blocks.collect()
    }

    /// Updates one block, cut where the constants change. A left-out parameter keeps its state, and its image is its
    /// rounded master weights. The image does not look ahead, since no next update of the parameter is expected.
    fn update_block(&self, block: &mut Block<'_>, constants: &Constants, applied: u64) {
        if !self.share.spec.formats.is_fp32() {
            return self.update_low_block(block, constants, applied);
        }
        let Block { id, gradient, state, image, .. } = block;
        let isa = self.compute.isa();
        let mut state = state.f32();
        for (range, scalars) in constants.of_block(&self.share.layout, *id) {
            let (gradient, state) = (gradient.slice(range.clone()), state.slice(range.clone()));
            match scalars {
                Some(scalars) => update(isa, scalars, gradient, state, image.slice(range)),
                None => kernels::cast(isa, state.master, image.slice(range)),
            }
        }
    }

    /// Updates one block whose state has fewer bits. The kernels update whole blocks, so the state of left-out
    /// parameters is saved before and restored afterwards.
    fn update_low_block(&self, block: &mut Block<'_>, constants: &Constants, applied: u64) {
        let Block { id, gradient, state, image, .. } = block;
        let isa = self.compute.isa();
        let runs = constants.of_block(&self.share.layout, *id);
        let left_out = runs.iter().filter(|(_, scalars)| scalars.is_none()).map(|(range, _)| range.clone());
        let aside = Aside::take(state, left_out.collect());
        let segments: Vec<_> =
            runs.into_iter().map(|(range, scalars)| (range, scalars.unwrap_or(constants.any()))).collect();
        let first_element = u64::from(id.0) * BLOCK_ELEMENTS;
        let random = Random { seed: self.share.spec.formats.seed, step: applied, first_element };
        let whole = image.slice(0..BLOCK);
        update_low(isa, &segments, *gradient, state.low(), whole, random);
        aside.put_back(isa, state, image);
    }
}

/// The constants of a step, for each parameter.
pub(super) struct Constants {
    /// Constants of each param group.
    groups: Vec<Scalars>,
    /// The t of each parameter's update, or None if this step leaves it out. Parameters that were never left out are
    /// absent.
    own: BTreeMap<usize, Option<u64>>,
    /// Constants by param group and t, for the parameters in `own`.
    by_t: BTreeMap<(usize, u64), Scalars>,
}

impl Constants {
    /// `scalars` makes the constants of a param group for a t. `applied` is the job's t.
    pub(super) fn new(
        commit: &Commit,
        layout: &Layout,
        applied: u64,
        scalars: impl Fn(usize, u64) -> Scalars,
    ) -> Constants {
        let groups = (0..commit.groups.len()).map(|group| scalars(group, applied)).collect();
        let (mut own, mut by_t) = (BTreeMap::new(), BTreeMap::new());
        for left_out in &commit.left_out {
            let (param, t) = (left_out.param as usize, applied.saturating_sub(left_out.steps));
            own.insert(param, (!left_out.now).then_some(t));
            if !left_out.now {
                let group = layout.param_group(param) as usize;
                by_t.entry((group, t)).or_insert_with(|| scalars(group, t));
            }
        }
        Constants { groups, own, by_t }
    }

    /// Returns a block's ranges, cut where the constants change. The constants are None for parameters that
    /// the step leaves out.
    pub(super) fn of_block(&self, layout: &Layout, block: BlockId) -> Vec<(Range<usize>, Option<&Scalars>)> {
        if self.own.is_empty() {
            let groups = layout.block_groups(block).into_iter();
            return groups.map(|(range, group)| (range, Some(&self.groups[group as usize]))).collect();
        }
        let mut runs: Vec<(Range<usize>, Option<&Scalars>)> = Vec::new();
        for (range, param) in layout.block_params(block) {
            let group = layout.param_group(param) as usize;
            let scalars = match self.own.get(&param) {
                None => Some(&self.groups[group]),
                Some(t) => t.map(|t| &self.by_t[&(group, t)]),
            };
            let address = |scalars: Option<&Scalars>| scalars.map_or(std::ptr::null(), std::ptr::from_ref);
            match runs.last_mut() {
                Some((run, before)) if address(*before) == address(scalars) => run.end = range.end,
                _ => runs.push((range, scalars)),
            }
        }
        runs
    }

    /// Constants of this step's rule, for elements whose results are not kept.
    pub(super) fn any(&self) -> &Scalars {
        &self.groups[0]
    }
}

/// The state of one block's left-out parameters, saved while all of the block is updated.
pub(super) struct Aside {
    ranges: Vec<Range<usize>>,
    /// Saved bytes by range, then by array.
    bytes: Vec<Vec<Vec<u8>>>,
}

impl Aside {
    /// Copies the state of these ranges of elements. An element has whole bytes in each array.
    pub(super) fn take(state: &StateMut<'_>, ranges: Vec<Range<usize>>) -> Aside {
        let part = |array: &[u8], range: &Range<usize>| array[bytes_of(array.len(), range)].to_vec();
        let of_range = |range| state.as_ref().arrays.iter().map(|array| part(array, range)).collect();
        let bytes = ranges.iter().map(of_range).collect();
        Aside { ranges, bytes }
    }

    /// Restores the saved state, and makes its image from the restored master weights.
    pub(super) fn put_back(self, isa: Isa, state: &mut StateMut<'_>, image: &mut ImageMut<'_>) {
        for (range, saved) in self.ranges.iter().zip(self.bytes) {
            for (array, saved) in state.arrays.iter_mut().zip(saved) {
                let place = bytes_of(array.len(), range);
                array[place].copy_from_slice(&saved);
            }
            let image = image.slice(range.clone());
            state.as_ref().with_master(isa, 0, |master| kernels::cast(isa, &master[range.clone()], image));
        }
    }
}

/// Byte range of a block's elements in one of its arrays, which is `array` bytes long.
fn bytes_of(array: usize, range: &Range<usize>) -> Range<usize> {
    let width = array / BLOCK;
    range.start * width..range.end * width
}
