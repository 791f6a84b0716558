//! Adds up the gradients of several micro-steps on the worker, which then sends one gradient for all of them. The
//! pipeline owns the sums, and assemblers fill them.

use std::ops::Range;

use longshore_memory::float::Standard;
use longshore_proto::{Dtype, Layout, Rank};

use super::Write;
use crate::{
    convert,
    device::{Budget, Lease},
    error::{Result, Shortage},
};

const SUMS: &str = "fp32 sums of the gradients of a step's micro-steps";
/// Elements added at a time. Their wire bytes and their values stay in the L2 cache.
const TILE: usize = 16 * 1024;

/// The fp32 sum of each gradient element over the micro-steps so far. Each gradient is first rounded to the wire's
/// type, as in a sum on the servers. So 16-bit and 32-bit gradients of a framework give the same result.
pub(crate) struct Accumulator {
    dtype: Dtype,
    micro_steps: u32,
    /// Flat ranges that the rank contributes to, in order. Their sums lie end to end.
    ranges: Vec<Range<u64>>,
    sums: Vec<f32>,
    /// A tile: its wire bytes, and its values.
    wire: Vec<u8>,
    values: Vec<f32>,
    _lease: Lease,
}

impl Accumulator {
    /// # Errors
    /// `Shortage` when the host's budget has no room for 4 bytes an element of the partitions that `rank` contributes to.
    pub(crate) fn new(
        budget: &Budget,
        (layout, rank): (&Layout, Rank),
        dtype: Dtype,
        micro_steps: u32,
    ) -> Result<Accumulator, Shortage> {
        let ranges: Vec<Range<u64>> = layout.contributed_by(rank).collect();
        let elements: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let lease = budget.reserve(SUMS, elements * 4)?;
        Ok(Accumulator {
            dtype,
            micro_steps,
            ranges,
            sums: vec![0.0; elements as usize],
            wire: vec![0; TILE * dtype.bytes() as usize],
            values: vec![0.0; TILE],
            _lease: lease,
        })
    }

    pub(crate) fn is_last(&self, micro_step: u32) -> bool {
        micro_step + 1 == self.micro_steps
    }

    /// Returns the range inside the sums for a flat range. The caller has checked that the rank contributes to that
    /// range.
    fn place(&self, flat: Range<u64>) -> Range<usize> {
        let mut before = 0;
        for range in &self.ranges {
            if range.contains(&flat.start) {
                let start = before + (flat.start - range.start);
                return start as usize..(start + (flat.end - flat.start)) as usize;
            }
            before += range.end - range.start;
        }
        unreachable!("element {} is of no partition of this rank", flat.start)
    }

    /// Adds a parameter's gradient to the sums at `flat`. `write` provides a range of its elements in the wire's
    /// type.
    ///
    /// # Errors
    /// Errors of `write`; the sums are then useless.
    pub(crate) fn add(&mut self, micro_step: u32, flat: Range<u64>, write: &mut Write<'_>) -> Result<()> {
        let _standard = Standard::enter();
        let width = self.dtype.bytes() as usize;
        let place = self.place(flat);
        let sums = &mut self.sums[place];
        let mut start = 0;
        for sums in sums.chunks_mut(TILE) {
            let range = start..start + sums.len();
            start = range.end;
            let (wire, values) = (&mut self.wire[..sums.len() * width], &mut self.values[..sums.len()]);
            write(range, wire)?;
            convert::to_f32(self.dtype, wire, values);
            match micro_step {
                0 => sums.copy_from_slice(values),
                _ => add(sums, values),
            }
        }
        Ok(())
    }

    /// Returns true if no gradient was added so far to an element: its sum is still -0.
    pub(crate) fn is_nothing_at(&self, element: u64) -> bool {
        self.sums[self.place(element..element + 1).start].to_bits() == (-0.0f32).to_bits()
    }

    /// Turns elements of the last micro-step into the mean over all micro-steps. `first` is their first element in
    /// the flat space.
    pub(crate) fn finish(&mut self, first: u64, wire: &mut [u8]) {
        let _standard = Standard::enter();
        let width = self.dtype.bytes() as usize;
        let share = 1.0 / self.micro_steps as f32;
        let sums = &self.sums[self.place(first..first + (wire.len() / width) as u64)];
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

/// Replaces `values` by the mean of themselves and the sums.
fn mean(values: &mut [f32], sums: &[f32], share: f32) {
    for (value, sum) in values.iter_mut().zip(sums) {
        *value = (sum + *value) * share;
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::{JobName, JobSpec, Param, Partition, limits::BLOCK_ELEMENTS};

    use super::*;
    use crate::push::nothing;

    /// Rank 0 contributes to the second and the fourth parameter.
    fn spec() -> JobSpec {
        let params = [("a", 100), ("b", 40_000), ("c", 100), ("d", 500)];
        let param =
            |(name, elements): (&str, u64)| Param { name: name.into(), shape: vec![elements], group: 0 };
        JobSpec {
            gradient_dtype: Dtype::F16,
            image_dtype: Dtype::F16,
            world_size: 2,
            shard_elements: BLOCK_ELEMENTS,
            partitions: (0..4).map(|first| Partition { first, ranks: vec![Rank((first + 1) % 2)] }).collect(),
            ..JobSpec::new(JobName::parse("name", "test").unwrap(), params.map(param).into())
        }
    }

    fn gradient(micro_step: u32, at: u64) -> half::f16 {
        half::f16::from_f32((at as f32 - 70_000.0) * 0.17 + micro_step as f32)
    }

    fn of_range(micro_step: u32, range: Range<u64>) -> Vec<u8> {
        range.flat_map(|at| gradient(micro_step, at).to_le_bytes()).collect()
    }

    #[test]
    fn three_micro_steps_leave_as_their_mean() {
        let layout = spec().validate().unwrap();
        let budget = Budget::unlimited("test");
        let mut accumulator = Accumulator::new(&budget, (&layout, Rank(0)), Dtype::F16, 3).unwrap();
        let own: u64 = layout.contributed_by(Rank(0)).map(|range| range.end - range.start).sum();
        assert_eq!(budget.used(), own * 4);
        assert!(own < layout.elements(), "the other rank's partitions take no room");
        let places = [1, 3].map(|param| layout.param_range(param));
        // Two steps: the second must not contain sums of the first, nor depend on the caller's floating-point mode.
        for step in 0..2 {
            let _foreign = (step == 1).then(longshore_memory::float::foreign_for_tests);
            for micro_step in 0..2 {
                assert!(!accumulator.is_last(micro_step));
                for place in places.clone() {
                    let mut write = |range: Range<usize>, wire: &mut [u8]| {
                        let flat = place.start + range.start as u64..place.start + range.end as u64;
                        wire.copy_from_slice(&of_range(micro_step, flat));
                        Ok(())
                    };
                    accumulator.add(micro_step, place.clone(), &mut write).unwrap();
                }
            }
            assert!(accumulator.is_last(2));
            let [first, second] = places.clone();
            let cut = first.start + 30_000;
            for flat in [cut..first.end, second, first.start..cut] {
                let mut wire = of_range(2, flat.clone());
                accumulator.finish(flat.start, &mut wire);
                let _standard = Standard::enter();
                for (at, bytes) in flat.zip(wire.as_chunks::<2>().0) {
                    let [a, b, c] = [0, 1, 2].map(|micro_step| gradient(micro_step, at).to_f32());
                    let expected = half::f16::from_f32((a + b + c) * (1.0f32 / 3.0));
                    assert_eq!(half::f16::from_le_bytes(*bytes), expected, "element {at}");
                }
            }
        }
    }

    #[test]
    fn nothing_stays_nothing_until_something_is_added() {
        let layout = spec().validate().unwrap();
        let mut accumulator =
            Accumulator::new(&Budget::unlimited("test"), (&layout, Rank(0)), Dtype::F16, 3).unwrap();
        let [without, with] = [1, 3].map(|param| layout.param_range(param));
        for micro_step in 0..2 {
            let mut put = |place: &Range<u64>, act: fn(&mut [u8])| {
                let mut write = |_: Range<usize>, wire: &mut [u8]| {
                    act(wire);
                    Ok(())
                };
                accumulator.add(micro_step, place.clone(), &mut write).unwrap();
            };
            let nothing = |wire: &mut [u8]| nothing::fill(Dtype::F16, wire);
            put(&without, nothing);
            put(&with, if micro_step == 0 { nothing } else { |wire| wire.fill(0) });
            assert!(accumulator.is_nothing_at(without.start));
            assert_eq!(accumulator.is_nothing_at(with.start), micro_step == 0, "zeros are a gradient");
        }
        let mut wire = vec![0; 2 * (without.end - without.start) as usize];
        nothing::fill(Dtype::F16, &mut wire);
        let sent = wire.clone();
        accumulator.finish(without.start, &mut wire);
        assert_eq!(wire, sent, "and so is the mean");
    }
}
