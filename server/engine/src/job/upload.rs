//! A job's first state as rank 0 uploads it: weights alone, or weights with optimizer state. Rank 0's calls run this.

use longshore_proto::{
    ChunkId, Dtype, Fault, FaultKind, Incarnation, LeftOut, ShardId, StateArray, Version,
    left_out::check_uploaded,
};

use super::{
    Job,
    compute::BLOCK,
    load::{Load, Uploaded},
};
use crate::{
    kernels::{Code, ImageMut, MasterMut, cast, encode},
    lock,
    step::Refusal,
    tier::StateMut,
};

/// Chunk of the state that rank 0 uploads.
#[derive(Clone, Debug)]
pub struct UploadChunk {
    pub shard: ShardId,
    pub array: StateArray,
    pub chunk: ChunkId,
    /// Number of updates that made the state. None if the job is filled with weights alone.
    pub applied: Option<u64>,
    /// Parameters whose state comes from fewer updates than `applied`.
    pub left_out: Vec<LeftOut>,
    pub crc32: u32,
}

impl Job {
    /// Stores a chunk of fp32 initial state. The last chunk starts the job at version 0.
    pub fn upload_chunk(
        &self,
        incarnation: Incarnation,
        part: UploadChunk,
        payload: &[u8],
    ) -> Result<(), Fault> {
        let UploadChunk { shard, array, chunk, applied, left_out, crc32 } = part;
        let owned = {
            let machine = self.protocol.machine();
            machine.check_loading()?;
            machine.check_rank_zero(incarnation)?;
            let owned = machine.owned_index(shard)?;
            if !self.share.is_opened(owned) {
                let shards = self.share.layout.shards();
                return Err(Refusal::NotOwned { shard, shards }.into());
            }
            owned
        };
        self.check_array(shard, array, applied)?;
        check_uploaded(&left_out, &self.share.spec, applied)?;
        let chunks = self.share.layout.chunks(shard, Dtype::F32);
        let Some(range) = self.share.layout.chunk_bytes(shard, chunk, Dtype::F32) else {
            return Err(Refusal::UnknownChunk { shard, chunk, chunks }.into());
        };
        if payload.len() as u64 != range.end - range.start {
            let limit = format!("{} bytes", range.end - range.start);
            let remedy = "chunks are 1 MiB, the last one of a shard what is left";
            return Err(Fault::invalid("payload", format!("{} bytes", payload.len()), limit, remedy));
        }
        let uploaded = Uploaded::of(applied, left_out);
        let mut load = lock(&self.load);
        load.check_upload(Version(0))?;
        check_same_upload(&load, &uploaded)?;
        match load.checksums[owned.index()][array.index()].get(chunk.0 as usize).copied().flatten() {
            Some(earlier) if earlier == crc32 => return Ok(()),
            Some(earlier) => return Err(Refusal::OtherUpload { shard, chunk, crc32, earlier }.into()),
            None => {}
        }
        self.check_values(shard, array, range.start, payload)?;
        // The payload is copied, since it may lie at any alignment in its message.
        let mut values = vec![0.0; payload.len() / size_of::<f32>()];
        bytemuck::cast_slice_mut::<f32, u8>(&mut values).copy_from_slice(payload);
        self.tier.state.load(owned, &mut |state| {
            self.store_values(state, array, range.start as usize / (BLOCK * size_of::<f32>()), &values);
        })?;
        load.checksums[owned.index()][array.index()][chunk.0 as usize] = Some(crc32);
        load.uploaded = Some(uploaded);
        self.start_if_whole(load)
    }

    /// Checks that the job has the array. An array of moments must belong to an upload with state.
    fn check_array(&self, shard: ShardId, array: StateArray, applied: Option<u64>) -> Result<(), Fault> {
        let rule = self.share.spec.rule;
        if array != StateArray::Master && self.share.layout.is_frozen(shard) {
            let value = format!("{array} of {shard}");
            let limit = "master weights: the shard is frozen (spec.partitions)";
            return Err(Fault::invalid(
                "array",
                value,
                limit,
                "leave it out: frozen parameters have no moments",
            ));
        }
        if !StateArray::of(rule).contains(&array) {
            let remedy = "leave it out, or open the job with the rule that the state is of";
            return Err(Fault::invalid("array", array, format!("an array of {}", rule.name()), remedy));
        }
        if applied == Some(0) {
            let remedy =
                "count the updates that made the state; leave it absent to fill the job with weights alone";
            return Err(Fault::invalid("applied", 0, "at least 1", remedy));
        }
        if applied.is_none() && array != StateArray::Master {
            let limit = "master weights where `applied` is absent";
            return Err(Fault::invalid(
                "array",
                array,
                limit,
                "say in every chunk how many updates made the state",
            ));
        }
        Ok(())
    }

    /// Checks that values are valid numbers for their array, and that padding is 0. The values begin at byte
    /// `at` of their shard's array.
    fn check_values(&self, shard: ShardId, array: StateArray, at: u64, payload: &[u8]) -> Result<(), Fault> {
        let first = self.share.layout.shard_range(shard).start + at / size_of::<f32>() as u64;
        self.share.check_padding(first, payload, Dtype::F32)?;
        let squares = array.is_squares(self.share.spec.rule);
        let wrong = |value: f32| !value.is_finite() || squares && value < 0.0;
        let values = payload.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        let Some((index, value)) = values.enumerate().find(|(_, value)| wrong(*value)) else { return Ok(()) };
        let at = self.share.spec.name_element(&self.share.layout, first + index as u64);
        let (value, limit, remedy) = match array {
            StateArray::Master => (
                format!("{value} in {at}"),
                "finite",
                "initial weights that are not numbers spoil the model: look at how they were made",
            ),
            _ => (
                format!("{value} in {at} ({array})"),
                if squares { "finite, and not below 0" } else { "finite" },
                "a state with such a value spoils the model: take an earlier checkpoint, or start from its weights alone",
            ),
        };
        Err(Fault::invalid("payload", value, limit, remedy))
    }

    /// Puts fp32 values at block `first` of a shard's array.
    fn store_values(&self, state: StateMut<'_>, array: StateArray, first: usize, values: &[f32]) {
        for (block, values) in state.blocks().skip(first).zip(values.chunks_exact(BLOCK)) {
            self.store_block(block, array, values);
        }
    }

    /// Puts fp32 values in one block's array. The values are rounded to nearest if the job keeps fewer bits.
    /// In a frozen shard they are rounded to the image's format.
    pub(super) fn store_block(&self, mut block: StateMut<'_>, array: StateArray, values: &[f32]) {
        let (isa, rule) = (self.compute.isa(), self.share.spec.rule);
        if let Some(weights) = block.frozen() {
            cast(isa, values, weights);
            return;
        }
        let low = block.low();
        match (array, low.master) {
            (StateArray::Master, MasterMut::F32(master)) => master.copy_from_slice(values),
            (StateArray::Master, MasterMut::Bf16(master)) => cast(isa, values, ImageMut::Bf16(master)),
            (StateArray::First, _) => encode(isa, Code::of(rule, 0), values, low.first),
            (StateArray::Second, _) => encode(isa, Code::of(rule, 1), values, low.second),
        }
    }
}

/// Checks that a chunk belongs to the same state as the chunks before it.
fn check_same_upload(load: &Load, uploaded: &Uploaded) -> Result<(), Fault> {
    let Some(earlier) = load.uploaded.as_ref().filter(|earlier| *earlier != uploaded) else { return Ok(()) };
    let applied = |uploaded: &Uploaded| match uploaded {
        Uploaded::Weights => "absent (weights alone)".to_string(),
        Uploaded::State { applied, .. } => applied.to_string(),
    };
    let left_out = |uploaded: &Uploaded| match uploaded {
        Uploaded::State { left_out, .. } => format!("of {} parameters", left_out.len()),
        Uploaded::Weights => "empty".to_string(),
    };
    let (field, given, said) = match applied(uploaded) == applied(earlier) {
        true => ("left_out", left_out(uploaded), left_out(earlier)),
        false => ("applied", applied(uploaded), applied(earlier)),
    };
    let remedy =
        "go on with the state that the upload began with, or delete the job to start over with another";
    Err(Fault::new(FaultKind::Conflict, field, given, format!("{said}, as in the chunks before"), remedy))
}
