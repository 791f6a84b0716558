//! Pieces of a job's description that fit any client's message limit, and their join.

use std::ops::Range;

use longshore_proto::limits::CHUNK_BYTES;

use super::v1::DescribeResponse;

/// Largest size of the lists in one part.
const PART_BYTES: usize = CHUNK_BYTES;

impl DescribeResponse {
    pub fn join(&mut self, part: DescribeResponse) {
        if let (Some(spec), Some(more)) = (&mut self.spec, part.spec) {
            spec.params.extend(more.params);
        }
        if let (Some(placement), Some(more)) = (&mut self.placement, part.placement) {
            placement.owners.extend(more.owners);
            placement.replicas.extend(more.replicas);
        }
        if let (Some(progress), Some(more)) = (&mut self.progress, part.progress) {
            progress.missing_shards.extend(more.missing_shards);
        }
        self.hashes.extend(part.hashes);
    }
}

/// Cuts a list whose items have the sizes `bytes`. Yields runs of items that fit a part, each with its size.
pub fn pieces(bytes: impl Iterator<Item = usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
    let mut pieces: Vec<(Range<usize>, usize)> = Vec::new();
    for (index, bytes) in bytes.enumerate() {
        match pieces.last_mut() {
            Some((piece, sum)) if *sum + bytes <= PART_BYTES => (piece.end, *sum) = (index + 1, *sum + bytes),
            _ => pieces.push((index..index + 1, bytes)),
        }
    }
    pieces.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_fit_and_follow_each_other() {
        let sizes: Vec<usize> = (0..5000).map(|item| item * 37 % 4001).chain([2 * PART_BYTES, 1]).collect();
        let cut: Vec<_> = pieces(sizes.iter().copied()).collect();
        let mut at = 0;
        for (piece, bytes) in &cut {
            assert_eq!((piece.start, sizes[piece.clone()].iter().sum()), (at, *bytes));
            assert!(*bytes <= PART_BYTES || piece.len() == 1);
            at = piece.end;
        }
        assert!(at == sizes.len() && cut.len() < 15, "{} pieces", cut.len());
        assert_eq!(pieces(std::iter::empty()).count(), 0);
    }
}
