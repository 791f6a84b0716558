//! Split of a job's description into parts that fit any client's message limit, and their join.

use longshore_proto::limits::{CHUNK_BYTES, STOCK_MESSAGE_BYTES};
use prost::Message;

use super::v1::{BlockHash, DescribeResponse, JobProgress, JobSpec, Param, Placement};

/// Bytes of lists in one part.
const PART_BYTES: usize = CHUNK_BYTES;
/// Most bytes of a list's item as a packed number, and the overhead of an item that is a message.
const NUMBER_BYTES: usize = 5;
const FRAME_BYTES: usize = 6;

impl DescribeResponse {
    /// Splits the message into parts whose lists concatenate to its own. The first part has all other fields.
    pub fn into_parts(mut self) -> Vec<DescribeResponse> {
        let Lists { params, owners, missing, hashes } = self.take_lists();
        let mut parts = vec![self];
        for params in pieces(params, |param: &Param| param.encoded_len() + FRAME_BYTES) {
            let spec = Some(JobSpec { params, ..JobSpec::default() });
            parts.push(DescribeResponse { spec, ..DescribeResponse::default() });
        }
        for owners in pieces(owners, |_| NUMBER_BYTES) {
            let placement = Some(Placement { owners, ..Placement::default() });
            parts.push(DescribeResponse { placement, ..DescribeResponse::default() });
        }
        for missing_shards in pieces(missing, |_| NUMBER_BYTES) {
            let progress = Some(JobProgress { missing_shards, ..JobProgress::default() });
            parts.push(DescribeResponse { progress, ..DescribeResponse::default() });
        }
        for hashes in pieces(hashes, |hash: &BlockHash| hash.encoded_len() + FRAME_BYTES) {
            parts.push(DescribeResponse { hashes, ..DescribeResponse::default() });
        }
        parts
    }

    /// Appends the lists of a later part.
    pub fn join(&mut self, part: DescribeResponse) {
        if let (Some(spec), Some(more)) = (&mut self.spec, part.spec) {
            spec.params.extend(more.params);
        }
        if let (Some(placement), Some(more)) = (&mut self.placement, part.placement) {
            placement.owners.extend(more.owners);
        }
        if let (Some(progress), Some(more)) = (&mut self.progress, part.progress) {
            progress.missing_shards.extend(more.missing_shards);
        }
        self.hashes.extend(part.hashes);
    }

    /// Clears lists until a stock client accepts the message, and sets `lists_left_out`.
    pub fn fit(mut self) -> DescribeResponse {
        let fits = |answer: &DescribeResponse| answer.encoded_len() <= STOCK_MESSAGE_BYTES;
        if fits(&self) {
            return self;
        }
        self.lists_left_out = true;
        if let Some(spec) = &mut self.spec {
            spec.params.clear();
        }
        if !fits(&self) {
            self.take_lists();
        }
        self
    }

    fn take_lists(&mut self) -> Lists {
        use std::mem::take;
        Lists {
            params: self.spec.as_mut().map(|spec| take(&mut spec.params)).unwrap_or_default(),
            owners: self.placement.as_mut().map(|placement| take(&mut placement.owners)).unwrap_or_default(),
            missing: self
                .progress
                .as_mut()
                .map(|progress| take(&mut progress.missing_shards))
                .unwrap_or_default(),
            hashes: take(&mut self.hashes),
        }
    }
}

/// The lists, which grow with the model.
struct Lists {
    params: Vec<Param>,
    owners: Vec<u32>,
    missing: Vec<u32>,
    hashes: Vec<BlockHash>,
}

/// Cuts a list so that the `bytes` of each piece's items fit a part.
fn pieces<T>(list: Vec<T>, bytes: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let (mut pieces, mut room) = (Vec::new(), 0);
    for item in list {
        let size = bytes(&item);
        if pieces.is_empty() || size > room {
            pieces.push(Vec::new());
            room = PART_BYTES;
        }
        room = room.saturating_sub(size);
        if let Some(piece) = pieces.last_mut() {
            piece.push(item);
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    fn large() -> DescribeResponse {
        let param = |index: u32| Param {
            name: format!("model.layers.{index}.mlp.experts.weight"),
            shape: vec![64, 64],
            group: 0,
        };
        DescribeResponse {
            spec: Some(JobSpec {
                params: (0..200_000).map(param).collect(),
                world_size: 3,
                ..JobSpec::default()
            }),
            placement: Some(Placement {
                owners: (0..300_000).map(|shard| shard % 3).collect(),
                ..Placement::default()
            }),
            progress: Some(JobProgress { missing_shards: (0..300_000).collect(), ..JobProgress::default() }),
            hashes: (0..100_000).map(|block| BlockHash { block, hash: vec![7; 32].into() }).collect(),
            isa: "avx2".into(),
            ..DescribeResponse::default()
        }
    }

    #[test]
    fn parts_fit_and_make_the_whole_again() {
        let whole = large();
        let parts = whole.clone().into_parts();
        assert!(parts.len() > 10);
        let mut bytes = Vec::new();
        for part in &parts {
            assert!(part.encoded_len() <= PART_BYTES + FRAME_BYTES, "{}", part.encoded_len());
            bytes.extend(part.encode_to_vec());
        }
        // Concatenated parts merge in any language's protobuf.
        assert_eq!(DescribeResponse::decode(&*bytes), Ok(whole.clone()));
        let mut parts = parts.into_iter();
        let mut joined = parts.next().unwrap_or_default();
        parts.for_each(|part| joined.join(part));
        assert_eq!(joined, whole);
    }

    #[test]
    fn one_message_is_what_a_stock_client_takes() {
        let fitted = large().fit();
        assert!(fitted.lists_left_out && fitted.encoded_len() <= STOCK_MESSAGE_BYTES);
        assert_eq!((fitted.isa.as_str(), fitted.spec.map(|spec| spec.world_size)), ("avx2", Some(3)));
        let small = DescribeResponse { isa: "avx2".into(), ..DescribeResponse::default() };
        assert_eq!(small.clone().fit(), small);
    }
}
