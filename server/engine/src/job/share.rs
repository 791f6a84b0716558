//! A server's share of a job: facts that do not change while the job is open. All parts of the job hold it.

use std::sync::Arc;

use longshore_proto::{
    BlockId, Dtype, Epoch, Fault, JobSpec, Layout, NO_SERVER, Placement, Rank, ServerId, ShardId, Step,
};

use super::compute::BLOCK;
use crate::{
    ids::{GradientSlot, OwnedShard, OwnedShards},
    memory::Source,
    tier,
};

pub(super) struct Share {
    pub(super) spec: Arc<JobSpec>,
    pub(super) layout: Arc<Layout>,
    pub(super) placement: Placement,
    pub(super) server: ServerId,
    /// The shards that this server has a place for, in forward order.
    pub(super) owned: Vec<ShardId>,
    /// Places of the shards that this server holds, as owner or replica, when the job is opened.
    pub(super) opened: Vec<OwnedShard>,
}

impl Share {
    /// `format` is the format of the tier's store, which decides the shards that have a place.
    ///
    /// # Errors
    /// For a spec, a placement or a server that no job can have.
    pub(super) fn new(
        spec: JobSpec,
        placement: Placement,
        server: ServerId,
        format: u32,
    ) -> Result<Share, Fault> {
        let layout = spec.validate()?;
        placement.validate(layout.shards())?;
        if server.0 as usize >= placement.servers.len() {
            let limit = format!("below {}, the number of servers", placement.servers.len());
            return Err(Fault::invalid("server", server.0, limit, "say which of placement.servers this is"));
        }
        if spec.replicas > 1 && placement.epoch == Epoch(1) && placement.replicas.contains(&NO_SERVER) {
            let limit = "at least 2 servers, with replicas 2";
            let remedy = "name another server, or leave replicas out";
            return Err(Fault::invalid("placement.servers", placement.servers.len(), limit, remedy));
        }
        if (spec.replicas > 1) == placement.replicas.is_empty() {
            let limit = "one for each shard with spec.replicas 2, and none without";
            let remedy = "give each shard of a job with replicas one";
            return Err(Fault::invalid("placement.replicas", placement.replicas.len(), limit, remedy));
        }
        let owned = tier::places(&layout, &placement, server, format);
        let opened = OwnedShard::all(owned.len()).zip(&owned);
        let opened = opened.filter(|(_, shard)| placement.holds(server, **shard)).map(|(index, _)| index);
        let opened = opened.collect();
        Ok(Share { spec: Arc::new(spec), layout: Arc::new(layout), placement, server, owned, opened })
    }

    pub(super) fn all(&self) -> OwnedShards {
        OwnedShard::all(self.owned.len())
    }

    /// The shards that this server holds, as owner or replica, when the job is opened.
    pub(super) fn opened(&self) -> impl Iterator<Item = OwnedShard> + use<'_> {
        self.opened.iter().copied()
    }

    pub(super) fn trained(&self) -> impl Iterator<Item = OwnedShard> + use<'_> {
        self.opened().filter(|&owned| !self.is_frozen(owned))
    }

    pub(super) fn is_opened(&self, owned: OwnedShard) -> bool {
        self.opened.binary_search(&owned).is_ok()
    }

    pub(super) fn shard(&self, owned: OwnedShard) -> ShardId {
        self.owned[owned.index()]
    }

    pub(super) fn is_frozen(&self, owned: OwnedShard) -> bool {
        self.layout.is_frozen(self.shard(owned))
    }

    pub(super) fn elements(&self, owned: OwnedShard) -> usize {
        self.layout.shard_len(self.shard(owned)) as usize
    }

    pub(super) fn blocks(&self, owned: OwnedShard) -> usize {
        self.elements(owned) / BLOCK
    }

    /// The number of a shard's block in the job.
    pub(super) fn block(&self, owned: OwnedShard, index: usize) -> BlockId {
        BlockId(self.layout.shard_blocks(self.shard(owned)).start + index as u32)
    }

    pub(super) fn contributors(&self, owned: OwnedShard) -> &[Rank] {
        self.layout.contributors(self.shard(owned))
    }

    /// Returns true if a shard's contributions are summed.
    pub(super) fn accumulates(&self, owned: OwnedShard) -> bool {
        self.spec.accumulates(self.contributors(owned))
    }

    /// The gradient slot that a step uses.
    pub(super) fn slot(&self, step: Step) -> GradientSlot {
        GradientSlot::of(step, self.spec.gradient_slots())
    }

    /// Checks that padding is 0 in `bytes`, elements of the flat space in wire format from element `first` on. Any
    /// other value would count in the norm and be trained.
    ///
    /// # Errors
    /// `Invalid`, naming the first element that is not 0.
    pub(super) fn check_padding<'a>(
        &self,
        first: u64,
        bytes: impl Into<Source<'a, u8>>,
        dtype: Dtype,
    ) -> Result<(), Fault> {
        let bytes: Source<'_, u8> = bytes.into();
        let size = dtype.bytes();
        for gap in self.layout.padding(first..first + bytes.len() as u64 / size) {
            let within = ((gap.start - first) * size) as usize..((gap.end - first) * size) as usize;
            let mut outcome = Ok(());
            bytes.slice(within).pieces(|start, piece| {
                if outcome.is_err() || is_zero(piece) {
                    return;
                }
                let mut elements = piece.chunks(size as usize).enumerate();
                if let Some((wrong, bytes)) = elements.find(|(_, bytes)| !is_zero(bytes)) {
                    outcome = Err(not_zero(gap.start + start as u64 / size + wrong as u64, bytes));
                }
            });
            outcome?;
        }
        Ok(())
    }
}

/// Returns true if all bytes are 0. Padding is most of a small job: this loop of vectors takes 4 us of its step, and a
/// search byte by byte took 60.
fn is_zero(bytes: &[u8]) -> bool {
    let (vectors, rest) = bytes.as_chunks::<64>();
    let or = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte);
    vectors.iter().all(|vector| or(vector) == 0) && or(rest) == 0
}

fn not_zero(element: u64, bytes: &[u8]) -> Fault {
    let little_endian: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let value = format!("{} at element {element} of the flat space", little_endian.join(" "));
    let limit = "0 there, since no parameter lies there";
    let remedy = "parameters start at multiples of 64 elements, and the last block is filled up: send zeros between them";
    Fault::invalid("payload", value, limit, remedy)
}
