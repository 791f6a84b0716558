//! Adds up the gradients of several micro-steps on the worker, so that one gradient leaves for all of them.

use std::ops::Range;

use longshore_proto::{Dtype, Layout};

use crate::{
    convert,
    device::{Budget, Lease},
    error::Shortage,
};

const SUMS: &str = "fp32 sums of the gradients of a step's micro-steps";
/// How many elements are added at a time. Their wire bytes and their values stay in the L2 cache.
const TILE: usize = 16 * 1024;

/// The fp32 sum of each gradient element over the micro-steps so far. Each gradient is first rounded to the wire's
/// type, as it is if servers add it up. So it does not matter whether a framework hands out 16 or 32 bits.
pub(crate) struct Accumulator {
    dtype: Dtype,
    micro_steps: u32,
    sums: Vec<f32>,
    /// One tile as it came, and its values.
    wire: Vec<u8>,
    values: Vec<f32>,
    _lease: Lease,
}

impl Accumulator {
    /// # Errors
    /// `Shortage` when the host's budget has no room for 4 bytes an element.
    pub(crate) fn new(
        budget: &Budget,
        layout: &Layout,
        dtype: Dtype,
        micro_steps: u32,
    ) -> Result<Accumulator, Shortage> {
        let elements = layout.elements();
        let lease = budget.reserve(SUMS, elements * 4)?;
        Ok(Accumulator {
            dtype,
            micro_steps,
            sums: vec![0.0; elements as usize],
            wire: vec![0; TILE * dtype.bytes() as usize],
            values: vec![0.0; TILE],
            _lease: lease,
        })
    }

    pub(crate) fn is_last(&self, micro_step: u32) -> bool {
        micro_step + 1 == self.micro_steps
    }

    /// Adds a parameter that lies at `place` of the flat space. `write` gives a range of its elements in the wire's type.
    pub(crate) fn add(
        &mut self,
        micro_step: u32,
        place: Range<u64>,
        write: &mut dyn FnMut(Range<usize>, &mut [u8]),
    ) {
        let width = self.dtype.bytes() as usize;
        let sums = &mut self.sums[place.start as usize..place.end as usize];
        let mut start = 0;
        for sums in sums.chunks_mut(TILE) {
            let range = start..start + sums.len();
            start = range.end;
            let (wire, values) = (&mut self.wire[..sums.len() * width], &mut self.values[..sums.len()]);
            write(range, wire);
            convert::to_f32(self.dtype, wire, values);
            match micro_step {
                0 => sums.copy_from_slice(values),
                _ => add(sums, values),
            }
        }
    }

    /// Turns elements of the last micro-step, which begin at element `first` of the flat space, into the mean over all
    /// micro-steps.
    pub(crate) fn finish(&mut self, first: u64, wire: &mut [u8]) {
        let width = self.dtype.bytes() as usize;
        let share = 1.0 / self.micro_steps as f32;
        let sums = &self.sums[first as usize..first as usize + wire.len() / width];
        for (sums, wire) in sums.chunks(TILE).zip(wire.chunks_mut(TILE * width)) {
            let values = &mut self.values[..sums.len()];
            convert::to_f32(self.dtype, wire, values);
            mean(values, sums, share);
            convert::from_f32(self.dtype, values, wire);
        }
    }
}

fn add(sums: &mut [f32], values: &[f32]) {
    for (sum, value) in sums.iter_mut().zip(values) {
        *sum += value;
    }
}

/// Makes `values` the mean of themselves and of what `sums` holds.
fn mean(values: &mut [f32], sums: &[f32], share: f32) {
    for (value, sum) in values.iter_mut().zip(sums) {
        *value = (sum + *value) * share;
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::{JobName, JobSpec, Param, Rule, TierKind, limits::BLOCK_ELEMENTS};

    use super::*;

    #[test]
    fn three_micro_steps_leave_as_their_mean() {
        let spec = JobSpec {
            name: JobName::parse("name", "test").unwrap(),
            params: vec![Param { name: "p".into(), shape: vec![40_000], group: 0 }],
            groups: vec!["all".into()],
            rule: Rule::AdamW,
            gradient_dtype: Dtype::F16,
            image_dtype: Dtype::F16,
            world_size: 1,
            micro_steps: 1,
            max_delay: 0,
            shard_elements: BLOCK_ELEMENTS,
            tier: TierKind::Memory,
            formats: Default::default(),
            unchecked: false,
            partitions: Vec::new(),
            worker_local: false,
        };
        let layout = spec.validate().unwrap();
        let budget = Budget::unlimited("test");
        let mut accumulator = Accumulator::new(&budget, &layout, Dtype::F16, 3).unwrap();
        assert_eq!(budget.used(), layout.elements() * 4);
        let gradient = |micro_step: u32, element: usize| {
            half::f16::from_f32((element as f32 - 7_000.0) * 0.37 + micro_step as f32)
        };
        // Twice, so that nothing of the first step is left in the second.
        for _ in 0..2 {
            for micro_step in 0..2 {
                assert!(!accumulator.is_last(micro_step));
                accumulator.add(micro_step, 0..40_000, &mut |range, wire| {
                    for (element, bytes) in range.zip(wire.as_chunks_mut::<2>().0) {
                        *bytes = gradient(micro_step, element).to_le_bytes();
                    }
                });
            }
            assert!(accumulator.is_last(2));
            for (first, elements) in [(30_000, 10_000), (0, 30_000)] {
                let last = (first..first + elements).flat_map(|element| gradient(2, element).to_le_bytes());
                let mut wire: Vec<u8> = last.collect();
                accumulator.finish(first as u64, &mut wire);
                for (element, bytes) in (first..).zip(wire.as_chunks::<2>().0) {
                    let [a, b, c] = [0, 1, 2].map(|micro_step| gradient(micro_step, element).to_f32());
                    let expected = half::f16::from_f32((a + b + c) * (1.0f32 / 3.0));
                    assert_eq!(half::f16::from_le_bytes(*bytes), expected, "element {element}");
                }
            }
        }
    }
}
