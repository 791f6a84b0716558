//! The update of shards: one pass over each block unscales, clips, applies the rule and writes the image.

use longshore_proto::{BlockId, Commit, Correction, Fault, Step, limits::BLOCK_ELEMENTS};
use tracing::debug_span;

use super::{
    Job,
    compute::BLOCK,
    gradients::cast,
    images::image_blocks,
    left_out::{Aside, Constants},
};
use crate::{
    ids::{Contributor, OwnedShard, OwnedShards},
    kernels::{self, Gradient, ImageMut, Random, Scalars, update, update_low},
    lock,
    memory::Region,
    step::Work,
    tier::{Guard, StateMut, Turn, Unguarded},
};

/// A block's part of all arrays that an update touches.
struct Block<'a> {
    id: BlockId,
    /// Its index inside its shard.
    index: usize,
    gradient: Gradient<'a>,
    state: StateMut<'a>,
    image: ImageMut<'a>,
}

/// Most shards that are updated together, if the tier allows it. After each group the threads wait for each
/// other, which takes 40 us where a shard's update takes 2 ms.
const MOST_AT_ONCE: usize = 8;
/// An update group that begins at shard `first` has `1 + first / AHEAD` shards. A group's images become
/// readable together, so most of them are late. No worker waits for a late image while the update leads the
/// worker's forward by a group: forward reads shards in the same order. The lead grows with every shard. If
/// forward takes a seventh longer than the update, the lead at shard `first` is `first / 8` shards, and a
/// group may have that many.
const AHEAD: usize = 8;

impl Job {
    pub(super) fn update(&self, first: OwnedShard, step: Step) -> Result<Option<Work>, Fault> {
        let most =
            if self.tier.together.is_some() { (1 + first.index() / AHEAD).min(MOST_AT_ONCE) } else { 1 };
        let run = self.protocol.machine().updatable(first, most, step);
        let shard = self.owned[first.index()].0;
        let _stage =
            debug_span!(target: "stage", "update", shard, shards = run.len(), step = step.0).entered();
        let decision =
            self.protocol.machine().decision(step).map(|(commit, applied)| (commit.clone(), applied));
        let (commit, applied) = decision.expect("a commit is kept until its updates are done");
        if self.is_frozen(first) {
            self.pass_frozen(run.clone(), step);
        } else if commit.skip {
            run.clone().for_each(|owned| self.snapshots.take_before(self, owned, step));
            for owned in run.clone() {
                match &self.tier.kept {
                    Some(kept) => kept.carry(owned, step.version(), &mut || self.images.carry(owned, step)),
                    None => self.images.carry(owned, step),
                }
            }
        } else {
            run.clone().for_each(|owned| self.snapshots.take_before(self, owned, step));
            self.update_shards(run.clone(), &commit, applied)?;
        }
        self.gradients.give_back(run.clone(), step);
        let mut machine = self.protocol.machine();
        let mut next = None;
        for owned in run.clone() {
            next = machine.updated(owned, step);
        }
        if run.indices().end == self.owned.len() {
            self.finish(&machine, step)?;
        }
        drop(machine);
        tracing::trace!(job = %self.spec.name, %step, run = ?run.indices(), skip = commit.skip, "updated");
        Ok(next)
    }

    /// Carries frozen shards to the step's version. No step changes them, so snapshots need not copy them first.
    fn pass_frozen(&self, run: OwnedShards, step: Step) {
        if let Some(kept) = &self.tier.kept {
            run.for_each(|owned| kept.carry(owned, step.version(), &mut || ()));
        }
    }

    fn update_shards(&self, run: OwnedShards, commit: &Commit, applied: u64) -> Result<(), Fault> {
        let share = self.spec.share(self.gradients.contributors(run.first()));
        let multiplier = commit.gradient_multiplier(share);
        let constants = Constants::new(commit, &self.layout, applied, |group, t| {
            let hyper = &commit.groups[group];
            let scalars = Scalars::new(self.spec.rule, hyper, t, multiplier);
            match &commit.correction {
                Correction::LookAhead(lr) => scalars.looking_ahead(hyper, t, lr[group]),
                Correction::None => scalars,
            }
        });
        let fetched = run.clone().map(|owned| self.gradients.fetch_gradient(owned, commit.step));
        let fetched = fetched.collect::<Result<Vec<_>, _>>()?;
        let (gradients, slot) = (&self.gradients, self.gradients.slot(commit.step));
        let lone: Vec<_> =
            run.clone().map(|owned| lock(gradients.contribution(owned, slot, Contributor::LONE))).collect();
        let sums: Vec<_> = run.clone().map(|owned| gradients.accumulator(owned, slot).map(lock)).collect();
        let whole = |index: usize| match (&fetched[index], &sums[index]) {
            (Some(region), Some(_)) => Gradient::f32(region.f32()),
            (Some(region), None) => cast(region.bytes().into(), self.spec.gradient_dtype),
            (None, Some(region)) => Gradient::f32(region.f32()),
            (None, None) => lone[index].gradient(self.spec.gradient_dtype),
        };
        let version = commit.step.version();
        let mut images: Vec<_> = run.clone().map(|owned| self.images.to_make(owned, version)).collect();
        let mut compute = |states: Vec<StateMut<'_>>, guard: &dyn Guard| {
            let shards = run.clone().zip(states).zip(&mut images).enumerate();
            let blocks = shards.map(|(index, ((owned, state), image))| {
                self.cut(owned, whole(index), state, image.overwrite())
            });
            let block = |mut block: Block<'_>| {
                let index = block.index;
                if let Turn::Go(number) = guard.begin(index, block.state.as_ref()) {
                    self.update_block(&mut block, &constants, applied);
                    guard.end(index, number, block.state.as_ref(), block.image.bytes());
                }
            };
            self.compute.groups(blocks.collect(), block, || self.notify_owed());
        };
        match &self.tier.together {
            Some(together) => together.update_run(run.clone(), &mut |states| compute(states, &Unguarded))?,
            None => {
                let update = &mut |state: StateMut<'_>, guard: &dyn Guard| compute(vec![state], guard);
                self.tier.state.update(run.first(), version, update)?;
            }
        }
        images.iter_mut().for_each(|image| image.set(Some(version)));
        drop((lone, sums));
        fetched.into_iter().for_each(|gradient| self.gradients.give_gradient_back(gradient));
        Ok(())
    }

    fn cut<'a>(
        &self,
        owned: OwnedShard,
        whole: Gradient<'a>,
        state: StateMut<'a>,
        image: &'a mut Region,
    ) -> Vec<Block<'a>> {
        let first_block = self.layout.shard_range(self.owned[owned.index()]).start / BLOCK_ELEMENTS;
        let images = image_blocks(image, self.spec.image_dtype, BLOCK);
        let blocks = state.blocks().zip(images).enumerate().map(|(index, (state, image))| Block {
            id: BlockId(first_block as u32 + index as u32),
            index,
            gradient: whole.slice(index * BLOCK..(index + 1) * BLOCK),
            state,
            image,
        });
        blocks.collect()
    }

    /// Updates one block, cut where the constants change. A left-out parameter keeps its state, and its image
    /// is its master weights rounded. No step of it is expected, so nothing corrects for a delay.
    fn update_block(&self, block: &mut Block<'_>, constants: &Constants, applied: u64) {
        if !self.spec.formats.is_fp32() {
            return self.update_low_block(block, constants, applied);
        }
        let Block { id, gradient, state, image, .. } = block;
        let isa = self.compute.isa();
        let mut state = state.f32();
        for (range, scalars) in constants.of_block(&self.layout, *id) {
            let (gradient, state) = (gradient.slice(range.clone()), state.slice(range.clone()));
            match scalars {
                Some(scalars) => update(isa, scalars, gradient, state, image.slice(range)),
                None => kernels::cast(isa, state.master, image.slice(range)),
            }
        }
    }

    /// Updates one block whose state has fewer bits. Its kernels take whole blocks, so the state of left-out
    /// parameters is saved meanwhile.
    fn update_low_block(&self, block: &mut Block<'_>, constants: &Constants, applied: u64) {
        let Block { id, gradient, state, image, .. } = block;
        let isa = self.compute.isa();
        let runs = constants.of_block(&self.layout, *id);
        let left_out = runs.iter().filter(|(_, scalars)| scalars.is_none()).map(|(range, _)| range.clone());
        let aside = Aside::take(state, left_out.collect());
        let segments: Vec<_> =
            runs.into_iter().map(|(range, scalars)| (range, scalars.unwrap_or(constants.any()))).collect();
        let first_element = u64::from(id.0) * BLOCK_ELEMENTS;
        let random = Random { seed: self.spec.formats.seed, step: applied, first_element };
        let whole = image.slice(0..BLOCK);
        update_low(isa, &segments, *gradient, state.low(), whole, random);
        aside.put_back(isa, state, image);
    }
}
