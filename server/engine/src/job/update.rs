//! The update of one shard: unscale, clip, step, image, in one pass over each block.

use longshore_proto::{BlockId, Commit, Fault, Step, limits::BLOCK_ELEMENTS};

use tracing::debug_span;

use super::{Job, buffers::image_blocks, compute::BLOCK, contribution::cast};
use crate::{
    kernels::{Gradient, ImageMut, Random, Scalars, update, update_low},
    lock,
    memory::Region,
    step::Work,
    tier::{StateMut, Turn},
};

/// One block's part of everything an update touches.
struct Block<'a> {
    id: BlockId,
    /// Inside its shard.
    index: usize,
    gradient: Gradient<'a>,
    state: StateMut<'a>,
    image: ImageMut<'a>,
}

impl Job {
    pub(super) fn update(&self, owned: usize, step: Step) -> Result<Option<Work>, Fault> {
        let _stage =
            debug_span!(target: "stage", "update", shard = self.owned[owned].0, step = step.0).entered();
        let decision = lock(&self.machine).decision(step).map(|(commit, applied)| (commit.clone(), applied));
        let (commit, applied) = decision.expect("a commit is kept until its updates are done");
        self.take_snapshots_before(owned, step)?;
        if commit.skip {
            self.tier.carry(owned, step.version(), &mut || self.carry_image(owned, step))?;
        } else {
            self.update_shard(owned, &commit, applied)?;
        }
        let slot = (step.0 % self.spec.gradient_slots() as u64) as usize;
        self.buffers.shards[owned].contributions[slot].iter().for_each(|rank| lock(rank).give_back());
        let mut machine = lock(&self.machine);
        let next = machine.updated(owned, step);
        if owned + 1 == self.owned.len() {
            self.record_of(&machine, step, |record| self.tier.finish(record))?;
        }
        drop(machine);
        tracing::trace!(job = %self.spec.name, %step, shard = %self.owned[owned], skip = commit.skip, "updated");
        Ok(next)
    }

    /// A skipped step changes nothing: its version's image is the one before.
    fn carry_image(&self, owned: usize, step: Step) {
        if self.spills_images() {
            // The tier knows that both versions have the one on its drives.
            return;
        }
        let images = &self.buffers.shards[owned].images;
        let before = images[(step.0 as usize + 1) % 2].read().unwrap_or_else(|poison| poison.into_inner());
        let mut after = images[step.0 as usize % 2].write().unwrap_or_else(|poison| poison.into_inner());
        after.overwrite().bytes_mut().copy_from_slice(before.bytes());
        after.set(Some(step.version()));
    }

    fn update_shard(&self, owned: usize, commit: &Commit, applied: u64) -> Result<(), Fault> {
        let multiplier = commit.gradient_multiplier();
        let scalars: Vec<Scalars> = commit
            .groups
            .iter()
            .map(|hyper| Scalars::new(self.spec.rule, hyper, applied, multiplier))
            .collect();
        let fetched = self.fetch_gradient(owned, commit.step)?;
        let buffers = &self.buffers.shards[owned];
        let slot = (commit.step.0 % self.spec.gradient_slots() as u64) as usize;
        let lone = lock(&buffers.contributions[slot][0]);
        let sum = buffers.accumulators[slot].as_ref().map(lock);
        let whole = match (&fetched, &sum) {
            (Some(region), Some(_)) => Gradient::F32(region.f32()),
            (Some(region), None) => cast(region.bytes(), self.spec.gradient_dtype),
            (None, Some(region)) => Gradient::F32(region.f32()),
            (None, None) => lone.gradient(self.spec.gradient_dtype),
        };
        let version = commit.step.version();
        let mut image = self.image_to_make(owned, version);
        let region = image.overwrite();
        self.tier.update(owned, version, &mut |state, guard| {
            let blocks = self.cut(owned, whole, state, region);
            let block = |mut block: Block<'_>| {
                let index = block.index;
                if let Turn::Go(number) = guard.begin(index, block.state.as_ref()) {
                    self.update_block(&mut block, &scalars, applied, commit.compensation as f32);
                    guard.end(index, number, block.state.as_ref(), block.image.bytes());
                }
            };
            self.compute.groups(vec![blocks], block, || self.notify_owed());
        })?;
        image.set(Some(version));
        drop((lone, sum));
        self.give_gradient_back(fetched);
        Ok(())
    }

    fn cut<'a>(
        &self,
        owned: usize,
        whole: Gradient<'a>,
        state: StateMut<'a>,
        image: &'a mut Region,
    ) -> Vec<Block<'a>> {
        let first_block = self.layout.shard_range(self.owned[owned]).start / BLOCK_ELEMENTS;
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

    /// A block is cut once more where the param group changes.
    fn update_block(&self, block: &mut Block<'_>, scalars: &[Scalars], applied: u64, compensation: f32) {
        let Block { id, gradient, state, image, .. } = block;
        let isa = self.compute.isa();
        let groups = self.layout.block_groups(*id);
        if !self.spec.formats.is_fp32() {
            let segments: Vec<_> =
                groups.into_iter().map(|(range, group)| (range, &scalars[group as usize])).collect();
            let first_element = u64::from(id.0) * BLOCK_ELEMENTS;
            let random = Random { seed: self.spec.formats.seed, step: applied, first_element };
            let image = image.slice(0..BLOCK);
            return update_low(isa, &segments, *gradient, state.low(), image, compensation, random);
        }
        let mut state = state.f32();
        for (range, group) in groups {
            let scalars = &scalars[group as usize];
            let (gradient, state) = (gradient.slice(range.clone()), state.slice(range.clone()));
            update(isa, scalars, gradient, state, image.slice(range), compensation);
        }
    }
}
