//! First weights that this server makes by itself, chunk by chunk beside those that rank 0 uploads.

use std::{
    ops::Range,
    sync::{Arc, MutexGuard},
};

use longshore_proto::{
    ChunkId, Dtype, Fault, FaultKind, Incarnation, Initialisation, ShardId, StateArray, checksum::crc32,
    limits::CHUNK_BYTES,
};

use super::{
    Job,
    compute::BLOCK,
    load::{Load, Source, Uploaded},
};
use crate::{
    ids::{OwnedShard, OwnedShards},
    initial::Made,
    lock,
    tier::StateMut,
};

/// How many chunks are made at a time. Who asks how far the load has come waits for them: some 50 ms.
const CHUNKS_AT_ONCE: usize = 16;
const CHUNK_BLOCKS: usize = CHUNK_BYTES / (BLOCK * size_of::<f32>());

impl Job {
    /// Makes all weights of this server that rank 0 does not upload, and starts the job if it waits for nothing else. The
    /// same call again makes what is missing. Several at once share the work.
    pub fn make_weights(
        &self,
        incarnation: Incarnation,
        initialisation: Initialisation,
    ) -> Result<(), Fault> {
        initialisation.validate(&self.spec.params)?;
        let Some(made) = self.begin_making(incarnation, initialisation)? else { return Ok(()) };
        for (owned, &shard) in OwnedShards::all(self.owned.len()).zip(&self.owned) {
            let chunks = self.layout.chunks(shard, Dtype::F32) as usize;
            for first in (0..chunks).step_by(CHUNKS_AT_ONCE) {
                let chunks = first..(first + CHUNKS_AT_ONCE).min(chunks);
                let Some(load) = self.go_on_making(incarnation, &made)? else { return Ok(()) };
                self.make_chunks(load, &made, owned, shard, chunks)?;
            }
        }
        self.start_if_whole(lock(&self.load))
    }

    /// Notes what is to be made. None if a job was begun with it and waits for nothing.
    fn begin_making(
        &self,
        incarnation: Incarnation,
        initialisation: Initialisation,
    ) -> Result<Option<Arc<Made>>, Fault> {
        let version = {
            let machine = self.protocol.machine();
            machine.check_rank_zero(incarnation)?;
            machine.version()
        };
        let mut load = lock(&self.load);
        let known = load.made.clone();
        match known {
            Some(made) if made.is(&initialisation) && load.source == Source::Complete => return Ok(None),
            _ => load.check_upload(version)?,
        }
        // An operator who gave up an earlier restore has set this. It ended that restore, and is not meant for this call.
        load.cancelled = false;
        match known {
            Some(made) if made.is(&initialisation) => Ok(Some(made)),
            Some(_) => Err(contradicts("another one", "that which this job's weights were begun with")),
            None if load.uploaded.is_some() => {
                Err(contradicts("given", "none, as rank 0 has begun to upload weights"))
            }
            None => {
                let made = Arc::new(Made::new(initialisation));
                (load.made, load.uploaded) = (Some(Arc::clone(&made)), Some(Uploaded::Weights));
                Ok(Some(made))
            }
        }
    }

    /// The load, if it is still to be gone on with. None if another call has made the rest.
    fn go_on_making(
        &self,
        incarnation: Incarnation,
        made: &Arc<Made>,
    ) -> Result<Option<MutexGuard<'_, Load>>, Fault> {
        let version = {
            let machine = self.protocol.machine();
            machine.check_rank_zero(incarnation)?;
            machine.version()
        };
        let load = lock(&self.load);
        let same = load.made.as_ref().is_some_and(|current| Arc::ptr_eq(current, made));
        if same && load.source == Source::Complete {
            return Ok(None);
        }
        load.check_upload(version)?;
        if same && !load.cancelled {
            return Ok(Some(load));
        }
        let remedy = "ask again where weights are still to be made on the servers";
        Err(Fault::new(
            FaultKind::Precondition,
            "initialisation",
            "given up by an operator",
            "wanted",
            remedy,
        ))
    }

    /// Makes those of a shard's chunks that are missing and that rank 0 does not upload.
    fn make_chunks(
        &self,
        mut load: MutexGuard<'_, Load>,
        made: &Made,
        owned: OwnedShard,
        shard: ShardId,
        chunks: Range<usize>,
    ) -> Result<(), Fault> {
        let start = self.layout.shard_range(shard).start;
        let flat = |chunk: usize| {
            let bytes = self.layout.chunk_bytes(shard, ChunkId(chunk as u32), Dtype::F32).unwrap_or(0..0);
            start + bytes.start / size_of::<f32>() as u64..start + bytes.end / size_of::<f32>() as u64
        };
        let checksums = &mut load.checksums[owned.index()][StateArray::Master.index()];
        let missing =
            |&chunk: &usize| checksums[chunk].is_none() && !made.is_uploaded(&self.layout, flat(chunk));
        let missing: Vec<usize> = chunks.filter(missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        self.tier.state.load(owned, &mut |state| {
            let blocks = state.blocks().enumerate();
            let blocks = blocks.filter(|(block, _)| missing.contains(&(block / CHUNK_BLOCKS))).collect();
            self.compute.blocks(blocks, |(block, state): (usize, StateMut<'_>)| {
                let mut values = vec![0.0; BLOCK];
                made.write(&self.layout, start + (block * BLOCK) as u64, &mut values);
                self.store_block(state, StateArray::Master, &values);
            });
        })?;
        for chunk in missing {
            let range = flat(chunk);
            let zeros = vec![0; (range.end - range.start) as usize * size_of::<f32>()];
            checksums[chunk] = Some(crc32(&zeros));
        }
        Ok(())
    }

    /// Checks that uploaded values, from element `first` of the flat space on, are 0 wherever weights are made here.
    pub(super) fn check_not_made(&self, made: &Made, first: u64, payload: &[u8]) -> Result<(), Fault> {
        let elements = payload.len() as u64 / size_of::<f32>() as u64;
        for (param, part) in made.made(&self.layout, first..first + elements) {
            let bytes = |element: u64| (element - first) as usize * size_of::<f32>();
            let values: &[[u8; size_of::<f32>()]] = payload[bytes(part.start)..bytes(part.end)].as_chunks().0;
            if let Some(wrong) = values.iter().position(|value| *value != [0; size_of::<f32>()]) {
                let at = part.start + wrong as u64 - self.layout.param_range(param).start;
                let name = &self.spec.params[param].name;
                let value =
                    format!("{} at element {at} of parameter {name}", f32::from_le_bytes(values[wrong]));
                let limit = "0 there, since the servers make this parameter's weights";
                let remedy = "upload the parameters that the initialisation leaves to rank 0, and no others";
                return Err(Fault::new(FaultKind::Conflict, "payload", value, limit, remedy));
            }
        }
        Ok(())
    }
}

fn contradicts(value: &str, limit: &str) -> Fault {
    let remedy = "go on with what the job's weights were begun with, or delete the job to start over";
    Fault::new(FaultKind::Conflict, "initialisation", value, limit, remedy)
}
