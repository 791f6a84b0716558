//! First weights that this server makes by itself, chunk by chunk beside those that rank 0 uploads.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, MutexGuard},
};

use longshore_proto::{
    ChunkId, Dtype, Fault, FaultKind, Incarnation, Initialisation, ShardId, StateArray, Version,
    checksum::crc32, limits::CHUNK_BYTES,
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

/// How many chunks are made at a time, 16 MiB. They are drawn while nobody is kept from asking how far the load has come.
const CHUNKS_AT_ONCE: usize = 16;
const CHUNK_BLOCKS: usize = CHUNK_BYTES / (BLOCK * size_of::<f32>());

impl Job {
    /// Makes all weights of this server that rank 0 does not upload, and starts the job if it waits for nothing else. The
    /// same call again makes what is missing. A job that has started at version 0 must have the weights that this would make.
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
                let missing = self.missing_chunks(&load, &made, (owned, shard), chunks);
                drop(load);
                let drawn = self.draw(&made, shard, &missing);
                let Some(load) = self.go_on_making(incarnation, &made)? else { return Ok(()) };
                self.store_drawn(load, (owned, shard), drawn)?;
            }
        }
        self.start_if_whole(lock(&self.load))
    }

    /// Notes what is to be made. None if the job has started with it.
    fn begin_making(
        &self,
        incarnation: Incarnation,
        initialisation: Initialisation,
    ) -> Result<Option<Arc<Made>>, Fault> {
        let version = self.check_maker(incarnation)?;
        let mut load = lock(&self.load);
        load.check_open()?;
        if load.source == Source::Complete {
            let known = load.made.clone();
            drop(load);
            return self.check_made_so(known, version, initialisation).map(|()| None);
        }
        load.check_upload(version)?;
        // An operator who gave up an earlier restore has set this. It ended that restore, and is not meant for this call.
        load.cancelled = false;
        match load.made.clone() {
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

    /// Checks that the caller is rank 0's current process, and returns the job's version.
    fn check_maker(&self, incarnation: Incarnation) -> Result<Version, Fault> {
        self.check_alive()?;
        let machine = self.protocol.machine();
        machine.check_rank_zero(incarnation)?;
        Ok(machine.version())
    }

    /// The load, if it is still to be gone on with. None if another call has made the rest.
    fn go_on_making(
        &self,
        incarnation: Incarnation,
        made: &Arc<Made>,
    ) -> Result<Option<MutexGuard<'_, Load>>, Fault> {
        let version = self.check_maker(incarnation)?;
        let load = lock(&self.load);
        load.check_open()?;
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

    /// Those of a shard's chunks that are missing and that rank 0 does not upload.
    fn missing_chunks(
        &self,
        load: &Load,
        made: &Made,
        (owned, shard): (OwnedShard, ShardId),
        chunks: Range<usize>,
    ) -> Vec<usize> {
        let stored = &load.checksums[owned.index()][StateArray::Master.index()];
        let missing = |&chunk: &usize| {
            stored[chunk].is_none() && !made.is_uploaded(&self.layout, self.flat(shard, chunk))
        };
        chunks.filter(missing).collect()
    }

    /// The elements of the flat space that a chunk of fp32 has.
    fn flat(&self, shard: ShardId, chunk: usize) -> Range<u64> {
        let start = self.layout.shard_range(shard).start;
        let bytes = self.layout.chunk_bytes(shard, ChunkId(chunk as u32), Dtype::F32).unwrap_or(0..0);
        start + bytes.start / size_of::<f32>() as u64..start + bytes.end / size_of::<f32>() as u64
    }

    /// The weights of these chunks, each with its number.
    fn draw(&self, made: &Made, shard: ShardId, chunks: &[usize]) -> Vec<(usize, Vec<Vec<f32>>)> {
        let start = self.layout.shard_range(shard).start;
        let blocks = |&chunk: &usize| {
            let elements = self.flat(shard, chunk);
            let blocks = (elements.end - elements.start) as usize / BLOCK;
            (0..blocks).map(move |block| (chunk, chunk * CHUNK_BLOCKS + block))
        };
        let blocks: Vec<(usize, usize)> = chunks.iter().flat_map(blocks).collect();
        let drawn = self.compute.blocks(blocks.clone(), |(_, block)| {
            let mut values = vec![0.0; BLOCK];
            made.write(&self.layout, start + (block * BLOCK) as u64, &mut values);
            values
        });
        let mut of_chunks: Vec<(usize, Vec<Vec<f32>>)> = Vec::with_capacity(chunks.len());
        for ((chunk, _), values) in blocks.into_iter().zip(drawn) {
            match of_chunks.last_mut() {
                Some((last, blocks)) if *last == chunk => blocks.push(values),
                _ => of_chunks.push((chunk, vec![values])),
            }
        }
        of_chunks
    }

    /// Stores the chunks that nobody has stored meanwhile.
    fn store_drawn(
        &self,
        mut load: MutexGuard<'_, Load>,
        (owned, shard): (OwnedShard, ShardId),
        mut drawn: Vec<(usize, Vec<Vec<f32>>)>,
    ) -> Result<(), Fault> {
        let checksums = &mut load.checksums[owned.index()][StateArray::Master.index()];
        drawn.retain(|&(chunk, _)| checksums[chunk].is_none());
        if drawn.is_empty() {
            return Ok(());
        }
        let values: BTreeMap<usize, &Vec<f32>> =
            drawn.iter().flat_map(|(chunk, blocks)| (chunk * CHUNK_BLOCKS..).zip(blocks)).collect();
        self.tier.state.load(owned, &mut |state| {
            let blocks = state.blocks().enumerate();
            let blocks = blocks.filter_map(|(block, state)| Some((state, *values.get(&block)?))).collect();
            self.compute.blocks(blocks, |(state, values): (StateMut<'_>, &Vec<f32>)| {
                self.store_block(state, StateArray::Master, values);
            });
        })?;
        for (chunk, _) in drawn {
            let range = self.flat(shard, chunk);
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

pub(super) fn contradicts(value: &str, limit: &str) -> Fault {
    let remedy = "go on with what the job's weights were begun with, or delete the job to start over";
    Fault::new(FaultKind::Conflict, "initialisation", value, limit, remedy)
}
