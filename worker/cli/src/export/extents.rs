//! Maps flat elements to parameters, and to the places of their values.

use std::ops::Range;

use longshore_proto::Fault;

/// Parameters by their range in the flat space, each with the place of its values.
pub(super) struct Extents<T>(Vec<(Range<u64>, T)>);

impl<T> Extents<T> {
    pub(super) fn new(mut extents: Vec<(Range<u64>, T)>) -> Extents<T> {
        extents.sort_unstable_by_key(|(flat, _)| flat.start);
        Extents(extents)
    }

    /// Deals out values of flat elements from `at` on, each of `size` bytes. `write` gets a parameter's place, the
    /// byte offset of the values within the parameter, and the values. Values between parameters are dropped.
    pub(super) fn deal(
        &self,
        at: u64,
        values: &[u8],
        size: u64,
        mut write: impl FnMut(&T, u64, &[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let end = at + values.len() as u64 / size;
        let first = self.0.partition_point(|(flat, _)| flat.end <= at);
        for (flat, place) in self.0[first..].iter().take_while(|(flat, _)| flat.start < end) {
            let (from, to) = (flat.start.max(at), flat.end.min(end));
            let part = &values[((from - at) * size) as usize..((to - at) * size) as usize];
            write(place, (from - flat.start) * size, part)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_to_the_parameters_that_they_overlap() {
        let extents = Extents::new(vec![(10..14, 'b'), (0..4, 'a'), (14..16, 'c')]);
        let dealt = |at: u64, count: usize| {
            let values: Vec<u8> = (0..count).flat_map(|value| [value as u8; 2]).collect();
            let mut dealt = Vec::new();
            let note = |place: &char, byte, values: &[u8]| {
                dealt.push((*place, byte, values[0], values.len()));
                Ok(())
            };
            extents.deal(at, &values, 2, note).unwrap();
            dealt
        };
        assert_eq!(dealt(4, 6), []);
        assert_eq!(dealt(3, 12), [('a', 6, 0, 2), ('b', 0, 7, 8), ('c', 0, 11, 2)]);
        assert_eq!(dealt(11, 2), [('b', 2, 0, 4)]);
    }
}
