//! Entry of a server in the manifest. The entry travels in gRPC messages, and is small for any model. Block hashes,
//! spec and trainer state grow with the model, so they lie in the part file.

use std::fmt;

use longshore_proto::{
    Dtype, Fault, JobName, JobSpec, MasterFormat, ShardId, StateFormat, Version, limits::BLOCK_ELEMENTS,
};
use safetensors::Dtype as TensorDtype;
use serde::{Deserialize, Serialize};

use crate::job::StoredImages;

/// Entry that [`Store::write`](super::Store::write) returns and `seal` takes, as JSON. Digests are BLAKE3 in
/// hex.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The file's name in the checkpoint's folder.
    pub file: String,
    pub bytes: u64,
    pub job: JobName,
    /// The server's index among the job's servers, and their number.
    pub server: u32,
    pub servers: u32,
    pub version: Version,
    pub applied: u64,
    /// Highest sequence of the sealed checkpoints that the writer saw, plus 1. Sequences order checkpoints without
    /// clocks, also after a job went back.
    pub sequence: u64,
    pub images: StoredImages,
    /// Digest of the job's spec as JSON. Its tier is always written as `memory`, so that every part has the same
    /// digest.
    pub spec: String,
    /// The digest of the last commit as JSON, the same in every part.
    pub commit: String,
    /// The digest of the file's length prefix and JSON header.
    pub header: String,
    /// The digest of the file from the first hash table to its end.
    pub tail: String,
    /// The shards in the order of their data, which is also the order of the rows in the hash tables.
    pub shards: Vec<PartShard>,
}

/// Place of a shard in the flat space. The safetensors header gives its place in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartShard {
    pub shard: ShardId,
    /// The first element in the flat space.
    pub start: u64,
    pub elements: u64,
}

impl Part {
    /// Returns the name of the part of server `server` of `servers`. Names count from 1, as Hugging Face's model files
    /// do.
    pub fn file_name(server: u32, servers: u32) -> String {
        format!("server-{:05}-of-{servers:05}.safetensors", server + 1)
    }

    /// Returns the entry as the JSON with which a server answers the call that wrote its part.
    pub fn to_json(&self) -> Result<String, Fault> {
        serde_json::to_string(self).map_err(|error| super::fault::defect(self.file.as_ref(), error))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Array {
    Master,
    First,
    Second,
    Image,
    OlderImage,
    /// The weights of a frozen shard, in the image dtype. Such a shard has no other array.
    Frozen,
}

impl Array {
    /// Returns the arrays of a shard's state, in the order in which a block's hash takes them. A trained shard has the
    /// arrays of its update rule.
    pub(super) fn state(spec: &JobSpec, frozen: bool) -> &'static [Array] {
        if frozen {
            return &[Array::Frozen];
        }
        &[Array::Master, Array::First, Array::Second][..1 + spec.rule.state_slots()]
    }

    fn block_bytes(self, spec: &JobSpec) -> u64 {
        let block = BLOCK_ELEMENTS as usize;
        match self {
            Array::Master => spec.formats.master.bytes(block) as u64,
            Array::First | Array::Second => spec.formats.state.bytes(block) as u64,
            Array::Image | Array::OlderImage | Array::Frozen => spec.image_dtype.bytes() * BLOCK_ELEMENTS,
        }
    }

    pub(super) fn bytes(self, spec: &JobSpec, elements: u64) -> u64 {
        elements / BLOCK_ELEMENTS * self.block_bytes(spec)
    }

    /// Returns the type and shape of the tensor for `elements` elements. 8-bit moments have a row of bytes for each
    /// block: codes, then scales.
    pub(super) fn tensor(self, spec: &JobSpec, elements: u64) -> (TensorDtype, Vec<u64>) {
        let dtype = match self {
            Array::Master if spec.formats.master == MasterFormat::Bf16 => Dtype::Bf16,
            Array::Master => Dtype::F32,
            Array::First | Array::Second => match spec.formats.state {
                StateFormat::F32 => Dtype::F32,
                StateFormat::Bf16 => Dtype::Bf16,
                StateFormat::Block8 => {
                    return (TensorDtype::U8, vec![elements / BLOCK_ELEMENTS, self.block_bytes(spec)]);
                }
            },
            Array::Image | Array::OlderImage | Array::Frozen => spec.image_dtype,
        };
        let dtype = match dtype {
            Dtype::F32 => TensorDtype::F32,
            Dtype::F16 => TensorDtype::F16,
            Dtype::Bf16 => TensorDtype::BF16,
        };
        (dtype, vec![elements])
    }

    pub(super) fn of(self, shard: ShardId) -> String {
        format!("shard.{:06}.{self}", shard.0)
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Array::Master => "master",
            Array::First => "first",
            Array::Second => "second",
            Array::Image => "image",
            Array::OlderImage => "older_image",
            Array::Frozen => "frozen",
        })
    }
}

/// A table of block hashes in a part's tail: 32 bytes a block, shard after shard. A block has the same row number in
/// each table. For a frozen shard, which has no images, the image tables hold the hash of an empty input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Table {
    /// The hashes of master, first and second together, as in the state hash. So one pass over the state makes this
    /// table and the state hash.
    State,
    Image,
    OlderImage,
}

impl Table {
    pub(super) fn stored(images: StoredImages) -> &'static [Table] {
        let count = match images {
            StoredImages::None => 1,
            StoredImages::Current => 2,
            StoredImages::Both => 3,
        };
        &[Table::State, Table::Image, Table::OlderImage][..count]
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Table::State => "hashes.state",
            Table::Image => "hashes.image",
            Table::OlderImage => "hashes.older_image",
        }
    }
}

/// Names of the tensors in a part's tail that hold JSON as bytes.
pub(super) const SPEC: &str = "job.spec";
pub(super) const COMMIT: &str = "job.commit";
pub(super) const HASH_BYTES: u64 = 32;
