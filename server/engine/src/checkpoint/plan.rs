//! Layout of a part, decided before the version is known. So space can be reserved, and shards written in any order.
//!
//! ```text
//! 8 bytes   length of the header
//! header    JSON, padded with spaces to its largest possible size and to whole pages
//! data      shard.000000.master, .first, .second, .image, or of a frozen one shard.000000.frozen; then the next shard's
//!           shard.000000.older_image; then the next shard's
//! tail      hashes.state, hashes.image, hashes.older_image, job.spec, job.commit
//! ```
//!
//! Optional data (the older image) and data of varying size (the commit) come last. If they are smaller than planned,
//! the file is shortened there. So every earlier offset stays, and no hole remains, which the format forbids. The
//! header is written last: without it no reader takes an unfinished file for a part.

use std::collections::HashMap;

use longshore_proto::{
    JobSpec, Layout, ShardId, Version,
    limits::{BLOCK_ELEMENTS, MAX_TRAINER_STATE_BYTES},
};
use safetensors::{Dtype, SafeTensorError, tensor::Metadata, tensor::TensorInfo};

use super::part::{Array, COMMIT, HASH_BYTES, SPEC, Table};
use crate::job::StoredImages;

/// Longest header that the safetensors crate and Python package accept.
pub(super) const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Data start on a page, so that a reader may map the file.
const PAGE: u64 = 4096;
/// Bytes for the JSON of a commit without groups and trainer state, about twice its largest size. `GROUP_BYTES` is the
/// same for one group.
const COMMIT_BYTES: u64 = 1024;
const GROUP_BYTES: u64 = 1024;

pub(super) struct PartPlan<'a> {
    pub(super) spec: &'a JobSpec,
    pub(super) layout: &'a Layout,
    pub(super) shards: &'a [ShardId],
    pub(super) server: u32,
    pub(super) servers: u32,
    pub(super) spec_bytes: u64,
}

/// Properties of the part that are known only once the shards are captured.
#[derive(Clone, Copy)]
pub(super) struct Found {
    pub(super) version: Version,
    pub(super) images: StoredImages,
    pub(super) commit_bytes: u64,
}

/// A header, and the sizes of the file that it describes.
pub(super) struct Header {
    /// The header's bytes, its length prefix included.
    pub(super) bytes: Vec<u8>,
    /// The bytes of data before the first hash table.
    pub(super) tail: u64,
    pub(super) data: u64,
}

impl PartPlan<'_> {
    /// The largest header fields that a job's part can have.
    pub(super) fn largest(&self) -> Found {
        let delayed = self.spec.max_delay >= 1;
        let groups = self.spec.groups.len() as u64 * GROUP_BYTES;
        Found {
            version: Version(u64::MAX),
            images: if delayed { StoredImages::Both } else { StoredImages::None },
            commit_bytes: COMMIT_BYTES + groups + 2 * MAX_TRAINER_STATE_BYTES as u64,
        }
    }

    /// Returns the arrays that lie together in a shard's data. Older images follow after all shards.
    fn near(&self, shard: ShardId) -> impl Iterator<Item = Array> {
        let frozen = self.layout.is_frozen(shard);
        let image = (self.spec.max_delay >= 1 && !frozen).then_some(Array::Image);
        Array::state(self.spec, frozen).iter().copied().chain(image)
    }

    /// The data offset of each array of each shard, in file order.
    pub(super) fn arrays(&self, images: StoredImages) -> Vec<(ShardId, Array, u64)> {
        let mut arrays = Vec::new();
        let mut offset = 0;
        let mut place = |shard: ShardId, array: Array| {
            arrays.push((shard, array, offset));
            offset += array.bytes(self.spec, self.layout.shard_len(shard));
        };
        for &shard in self.shards {
            self.near(shard).for_each(|array| place(shard, array));
        }
        if images == StoredImages::Both {
            let trained = self.shards.iter().filter(|&&shard| !self.layout.is_frozen(shard));
            trained.for_each(|&shard| place(shard, Array::OlderImage));
        }
        arrays
    }

    /// Returns the header for the captured version, without padding.
    pub(super) fn header(&self, found: Found) -> Result<Header, SafeTensorError> {
        let mut tensors = Vec::new();
        let mut end = 0;
        for (shard, array, offset) in self.arrays(found.images) {
            let elements = self.layout.shard_len(shard);
            let (dtype, dimensions) = array.tensor(self.spec, elements);
            end = offset + array.bytes(self.spec, elements);
            tensors.push((array.of(shard), info(dtype, &dimensions, offset, end)));
        }
        let tail = end;
        let blocks: u64 =
            self.shards.iter().map(|&shard| self.layout.shard_len(shard) / BLOCK_ELEMENTS).sum();
        let mut add = |name: &str, shape: &[u64]| {
            let start = end;
            end += shape.iter().product::<u64>();
            tensors.push((name.to_string(), info(Dtype::U8, shape, start, end)));
        };
        for table in Table::stored(found.images) {
            add(table.name(), &[blocks, HASH_BYTES]);
        }
        add(SPEC, &[self.spec_bytes]);
        add(COMMIT, &[found.commit_bytes]);
        let json = serde_json::to_vec(&Metadata::new(Some(self.metadata(found)), tensors)?)?;
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        Ok(Header { bytes, tail, data: end })
    }

    fn metadata(&self, found: Found) -> HashMap<String, String> {
        let entries = [
            ("format", "longshore-checkpoint".to_string()),
            ("job", self.spec.name.to_string()),
            ("version", found.version.0.to_string()),
            ("server", (self.server + 1).to_string()),
            ("servers", self.servers.to_string()),
        ];
        entries.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }
}

impl Header {
    /// Returns the offset of the data, if no header of the part is larger than this one.
    pub(super) fn data_start(&self) -> u64 {
        (self.bytes.len() as u64).next_multiple_of(PAGE)
    }

    /// Pads the header with the spaces that the format allows. Returns false when it is longer than planned.
    pub(super) fn pad(&mut self, data_start: u64) -> bool {
        if self.bytes.len() as u64 > data_start {
            return false;
        }
        self.bytes.resize(data_start as usize, b' ');
        self.bytes[..8].copy_from_slice(&(data_start - 8).to_le_bytes());
        true
    }
}

fn info(dtype: Dtype, shape: &[u64], start: u64, end: u64) -> TensorInfo {
    let shape = shape.iter().map(|&side| side as usize).collect();
    TensorInfo { dtype, shape, data_offsets: (start as usize, end as usize) }
}
