//! Pieces of a job's description that fit any client's message limit, and their join.

use std::ops::Range;

use longshore_proto::limits::CHUNK_BYTES;

use super::v1::DescribeResponse;

/// Bytes of lists in one part.
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

/// Cuts a list whose items have so many `bytes`: yields pieces that fit a part, each with its bytes.
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
    use crate::v1::{BlockHash, JobProgress, JobSpec, Param, Placement};

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

    #[test]
    fn parts_make_the_whole_again() {
        let spec = |names: &[&str]| {
            let param = |name: &&str| Param { name: name.to_string(), ..Default::default() };
            Some(JobSpec { params: names.iter().map(param).collect(), ..Default::default() })
        };
        let owners = |owners: &[u32]| Some(Placement { owners: owners.to_vec(), ..Default::default() });
        let missing =
            |shards: &[u32]| Some(JobProgress { missing_shards: shards.to_vec(), ..Default::default() });
        let hashes = |blocks: &[u32]| {
            blocks.iter().map(|&block| BlockHash { block, ..Default::default() }).collect::<Vec<_>>()
        };
        let described = |names, servers, shards, blocks| DescribeResponse {
            spec: spec(names),
            placement: owners(servers),
            progress: missing(shards),
            hashes: hashes(blocks),
            ..Default::default()
        };
        let mut joined = described(&["a"], &[], &[7], &[1]);
        joined.join(DescribeResponse { spec: spec(&["b", "c"]), ..Default::default() });
        joined.join(DescribeResponse { placement: owners(&[4, 5]), ..Default::default() });
        joined.join(DescribeResponse { progress: missing(&[8]), hashes: hashes(&[2]), ..Default::default() });
        assert_eq!(joined, described(&["a", "b", "c"], &[4, 5], &[7, 8], &[1, 2]));
    }
}
