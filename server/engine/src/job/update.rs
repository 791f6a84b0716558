//! The update of one shard: unscale, clip, step, image, in one pass over each block.

use longshore_proto::{BlockId, Commit, Fault, Step, limits::BLOCK_ELEMENTS};

use super::{
    Job,
    buffers::{gradient, image_blocks},
    compute::BLOCK,
};
use crate::{
    kernels::{Gradient, ImageMut, Scalars, State, update},
    lock,
    memory::Region,
    step::Work,
    tier::{StateRef, Turn},
};

/// One block's part of everything an update touches.
struct Block<'a> {
    id: BlockId,
    /// Inside its shard.
    index: usize,
    gradient: Gradient<'a>,
    state: State<'a>,
    image: ImageMut<'a>,
}

impl Job {
    pub(super) fn update(&self, owned: usize, step: Step) -> Result<Option<Work>, Fault> {
        let decision = lock(&self.machine).decision(step).map(|(commit, applied)| (commit.clone(), applied));
        let (commit, applied) = decision.expect("a commit is kept until its updates are done");
        self.take_snapshots_before(owned, step)?;
        if commit.skip {
            self.tier.carry(owned, step.version(), &mut || self.carry_image(owned, step))?;
        } else {
            self.update_shard(owned, &commit, applied)?;
        }
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
        let buffers = &self.buffers.shards[owned];
        let slot = (commit.step.0 % self.spec.gradient_slots() as u64) as usize;
        let lone = lock(&buffers.contributions[slot][0]);
        let sum = buffers.accumulators[slot].as_ref().map(lock);
        let whole = match &sum {
            Some(region) => Gradient::F32(region.f32()),
            None => gradient(&lone, self.spec.gradient_dtype),
        };
        let version = commit.step.version();
        let image = &buffers.images[version.0 as usize % 2];
        let mut image = image.write().unwrap_or_else(|poison| poison.into_inner());
        let region = image.overwrite();
        self.tier.update(owned, version, &mut |state, guard| {
            let blocks = self.cut(owned, whole, state, region);
            self.compute.blocks(blocks, |mut block| {
                let index = block.index;
                if let Turn::Go(number) = guard.begin(index, StateRef::from(&block.state)) {
                    self.update_block(&mut block, &scalars, commit.compensation as f32);
                    guard.end(index, number, StateRef::from(&block.state), block.image.bytes());
                }
            });
        })?;
        image.set(Some(version));
        Ok(())
    }

    fn cut<'a>(
        &self,
        owned: usize,
        whole: Gradient<'a>,
        state: State<'a>,
        image: &'a mut Region,
    ) -> Vec<Block<'a>> {
        let first_block = self.layout.shard_range(self.owned[owned]).start / BLOCK_ELEMENTS;
        let mut master = state.master.chunks_mut(BLOCK);
        let mut first = state.first.chunks_mut(BLOCK);
        let mut second = state.second.chunks_mut(BLOCK);
        let images = image_blocks(image, self.spec.image_dtype, BLOCK);
        let blocks = images.into_iter().enumerate().map(|(index, image)| Block {
            id: BlockId(first_block as u32 + index as u32),
            index,
            gradient: whole.slice(index * BLOCK..(index + 1) * BLOCK),
            // A slot the rule does not use stays an empty slice.
            state: State {
                master: master.next().unwrap_or_default(),
                first: first.next().unwrap_or_default(),
                second: second.next().unwrap_or_default(),
            },
            image,
        });
        blocks.collect()
    }

    /// A block is cut once more where the param group changes.
    fn update_block(&self, block: &mut Block<'_>, scalars: &[Scalars], compensation: f32) {
        let Block { id, gradient, state, image, .. } = block;
        for (range, group) in self.layout.block_groups(*id) {
            let scalars = &scalars[group as usize];
            let (gradient, state) = (gradient.slice(range.clone()), state.slice(range.clone()));
            update(self.compute.isa(), scalars, gradient, state, image.slice(range), compensation);
        }
    }
}
