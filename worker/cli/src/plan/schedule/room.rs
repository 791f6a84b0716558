//! Units that a device keeps at stage 3, as `longshore.shard` does. As far as there is room, the last units of
//! forward stay for backward. The last units of backward stay for the next micro-step.

use super::Run;

impl Run {
    /// Returns the number of units that stay from forward to backward.
    pub(crate) fn staying(&self) -> usize {
        self.fitting(self.units.iter().rev().map(|unit| unit.elements))
    }

    /// Returns how many of these units fit, one after the other.
    fn fitting(&self, elements: impl Iterator<Item = f64>) -> usize {
        let sums = elements.scan(0.0, |sum, elements| {
            *sum += elements;
            Some(*sum)
        });
        sums.take_while(|&sum| sum <= self.room).count()
    }

    /// Returns true if a unit is pulled before its forward pass. Each step reads another version, so nothing stays
    /// from one step to the next.
    pub(super) fn pulls_for_forward(&self, micro_step: u32, unit: usize) -> bool {
        micro_step == 0 || unit >= self.fitting(self.units.iter().map(|unit| unit.elements))
    }

    pub(super) fn pulls_for_backward(&self, unit: usize) -> bool {
        unit + self.staying() < self.units.len()
    }

    /// Returns the use that must end before a unit has room. None if no use is in the way.
    pub(super) fn makes_room(&self, used: &[usize], unit: usize) -> Option<usize> {
        let mut sum = self.units[unit].elements;
        used.iter().rposition(|&before| {
            sum += self.units[before].elements;
            sum > self.room
        })
    }
}
