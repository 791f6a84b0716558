//! The two directions of a rank without steps, for benchmarks: pushes of a whole gradient, and pulls of a version.

use std::{sync::Arc, thread, time::Duration};

use longshore_proto::{
    ChunkId, Dtype, Incarnation, MicroStep, ServerId, ShardId, Step, Version, checksum::crc32,
};
use longshore_wire::{fault_from_status, v1::JoinRequest};

use super::Session;
use crate::{
    error::Result,
    pull::{Feed, Reading},
    push::{ChunkKey, Outbox, Payload},
    rank::take,
};

/// The only server of the job.
const SERVER: ServerId = ServerId(0);

/// A joined session, and a bf16 gradient of its job. Servers never sum the gradient while another rank of the job
/// is missing.
pub struct Probe {
    session: Session,
    incarnation: Incarnation,
    chunks: Vec<(ChunkKey, Payload, u32)>,
}

impl Probe {
    pub fn new(session: Session) -> Result<Probe> {
        let layout = session.layout();
        let mut chunks = Vec::new();
        for shard in (0..layout.shards()).map(ShardId) {
            for chunk in (0..layout.chunks(shard, Dtype::Bf16)).map(ChunkId) {
                let range = layout.chunk_bytes(shard, chunk, Dtype::Bf16).unwrap_or(0..0);
                let mut buffer = session.gradients.buffer((range.end - range.start) as usize)?;
                buffer.as_mut().fill(chunk.0 as u8);
                let payload = Payload::from(buffer);
                let key = ChunkKey { step: Step(1), micro_step: MicroStep(0), shard, chunk };
                chunks.push((key, payload.clone(), crc32(&payload.bytes)));
            }
        }
        let incarnation = session.rank.incarnation();
        Ok(Probe { session, incarnation, chunks })
    }

    /// Size of the gradient in bytes.
    pub fn bytes(&self) -> usize {
        self.chunks.iter().map(|(_, payload, _)| payload.bytes.len()).sum()
    }

    /// Joins as a new process. The server then forgets the rank's chunks, and stores the next chunks instead of
    /// comparing them.
    pub fn rejoin(&mut self) -> Result<()> {
        let Session { cluster, rank, .. } = &self.session;
        self.incarnation = cluster.runtime.block_on(take(cluster))?;
        let (job, incarnation) = (cluster.job().to_string(), self.incarnation.0);
        let request =
            JoinRequest { job, rank: cluster.options.rank.0, incarnation, ..JoinRequest::default() };
        let peer = cluster.peer(SERVER);
        let joined = cluster.runtime.block_on(async { Ok(peer.training().join(request).await) })?;
        joined.map_err(|status| {
            cluster.explain(SERVER, "Join", None, fault_from_status(&status, &peer.address))
        })?;
        rank.set_incarnation(self.incarnation);
        cluster.runtime.block_on(async { Ok(rank.relink(cluster, SERVER).await?) })
    }

    /// Pushes the whole gradient, and waits until every chunk is acknowledged.
    pub fn push(&self) -> Result<()> {
        let Session { cluster, gradients, .. } = &self.session;
        let outbox = Outbox::new(Arc::clone(gradients), 1.0, Reading::new(Version(0)), Arc::default());
        for (key, payload, crc32) in &self.chunks {
            outbox.send(*key, payload.clone(), *crc32)?;
        }
        while self.session.unacknowledged_chunks() > 0 {
            cluster.waits.check()?;
            // A period of 0.1 ms took 0.03 s of CPU time a GB, which no worker spends.
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Frees the pushed gradient.
    pub fn release(&self) {
        self.session.gradients.committed(Step(1));
    }

    /// Starts to pull all of version 0.
    pub fn pull(&self) -> Result<Feed> {
        let all = 0..self.session.layout().elements();
        self.session.pull(Version(0), std::slice::from_ref(&all))
    }

    /// Returns true if weights are read in the server's memory.
    pub fn reads_in_place(&self) -> bool {
        self.session.rank.link(SERVER).is_some()
    }

    pub fn session(&self) -> &Session {
        &self.session
    }
}
