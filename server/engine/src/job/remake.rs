//! Whether a job that has started has the weights that an initialisation makes. A new rank 0 may ask for others than the one
//! before it did, and a server's part would then not fit the others'.

use std::sync::Arc;

use longshore_proto::{Dtype, Fault, Initialisation, MasterFormat, ShardId, Version};

use super::{Job, compute::BLOCK, make::contradicts};
use crate::{
    ids::OwnedShards,
    initial::Made,
    kernels::{Gradient, ImageMut, cast, widen},
    step::Refusal,
};

impl Job {
    /// Refuses another initialisation than that of the job's weights. `known` is what they were made from. A process that has
    /// recovered the job does not know it, so it makes them again and compares.
    pub(super) fn check_made_so(
        &self,
        known: Option<Arc<Made>>,
        version: Version,
        initialisation: Initialisation,
    ) -> Result<(), Fault> {
        match known {
            Some(made) if made.is(&initialisation) => Ok(()),
            _ if version > Version(0) => Err(Refusal::NotLoading { version }.into()),
            Some(_) => Err(contradicts("another one", "that which this job's weights were made from")),
            None => self.compare_made(&Made::new(initialisation)),
        }
    }

    fn compare_made(&self, made: &Made) -> Result<(), Fault> {
        for (owned, &shard) in OwnedShards::all(self.owned.len()).zip(&self.owned) {
            let mut same = true;
            self.tier.state.read(owned, &mut |state| {
                let blocks = (0..state.blocks()).collect();
                let compared = self.compute.blocks(blocks, |block: usize| {
                    let start = self.layout.shard_range(shard).start + (block * BLOCK) as u64;
                    let expected = self.made_block(made, shard, start);
                    state.with_master(self.compute.isa(), block, |found| {
                        made.made(&self.layout, start..start + BLOCK as u64).all(|(_, part)| {
                            let part = (part.start - start) as usize..(part.end - start) as usize;
                            found[part.clone()] == expected[part]
                        })
                    })
                });
                same = compared.into_iter().all(|same| same);
            })?;
            if !same {
                let limit = format!("that which the weights of {shard} here were made from");
                return Err(contradicts("another one", &limit));
            }
        }
        Ok(())
    }

    /// A block of weights that are made here, from element `start` of the flat space on, rounded as its shard keeps them.
    fn made_block(&self, made: &Made, shard: ShardId, start: u64) -> Vec<f32> {
        let (isa, mut values) = (self.compute.isa(), vec![0.0; BLOCK]);
        made.write(&self.layout, start, &mut values);
        let kept = match (self.layout.is_frozen(shard), self.spec.formats.master) {
            (true, _) => self.spec.image_dtype,
            (false, MasterFormat::F32) => Dtype::F32,
            (false, MasterFormat::Bf16) => Dtype::Bf16,
        };
        let mut narrow = vec![0u16; BLOCK];
        match kept {
            Dtype::F32 => {}
            Dtype::F16 => {
                cast(isa, &values, ImageMut::F16(&mut narrow));
                widen(isa, Gradient::f16(&narrow), &mut values);
            }
            Dtype::Bf16 => {
                cast(isa, &values, ImageMut::Bf16(&mut narrow));
                widen(isa, Gradient::bf16(&narrow), &mut values);
            }
        }
        values
    }
}
