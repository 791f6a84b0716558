//! Room of a server for further shards of a job, in memory and in the file systems of its tier. Rank 0 and `longshore
//! scale` ask for it before they plan moves. The caller's thread may wait for a file system.

use std::cmp::Reverse;

use longshore_proto::{JobSpec, Layout, ShardId};

use super::Job;
use crate::{
    admission::Need,
    ids::OwnedShard,
    lock,
    tier::{self, Storage},
};

/// Returns the number of shards that fit a server without the job, the largest shards first. `memory` is free there.
pub fn room(spec: &JobSpec, layout: &Layout, storage: &Storage, memory: u64) -> usize {
    let need = |shards: &[ShardId]| Need::of(spec, layout, shards, storage);
    let mut shards: Vec<ShardId> = (0..layout.shards()).map(ShardId).collect();
    let spills = storage.spills(spec);
    shards.sort_by_cached_key(|&shard| by_bytes(&Need::of_shard(spec, layout, shard, spills)));
    let space = tier::free_space(spec, storage);
    let fits = |&count: &usize| {
        let need = need(&shards[..count]);
        need.total() <= memory && tier::space(spec, &need) <= space
    };
    (1..=shards.len()).collect::<Vec<_>>().partition_point(fits)
}

/// Order in which the largest shards come first.
fn by_bytes(need: &Need) -> Reverse<(u64, u64)> {
    Reverse((need.total(), need.disk))
}

impl Job {
    /// Returns the number of further shards that fit this server, the largest shards first. Memory and space of an
    /// abandoned plan count as free.
    pub fn room(&self, storage: &Storage) -> usize {
        let spec = &self.share.spec;
        let (mut memory, mut space) = (self.reservation.budget().free(), tier::free_space(spec, storage));
        let unneeded: Vec<OwnedShard> = {
            let (released, machine) = (lock(&self.released), self.protocol.machine());
            let is_unneeded = |owned: &OwnedShard| !released.contains(owned) && machine.is_unowned(*owned);
            self.share.all().filter(is_unneeded).collect()
        };
        for owned in unneeded {
            let need = self.bytes_of(owned);
            memory += need.total();
            space = space.saturating_add(tier::space(spec, &need));
        }
        let mut needs: Vec<Need> = self.share.all().map(|owned| self.bytes_of(owned)).collect();
        needs.sort_by_key(by_bytes);
        let fits = |need: &&Need| {
            let left = memory.checked_sub(need.total()).zip(space.checked_sub(tier::space(spec, need)));
            left.map(|left| (memory, space) = left).is_some()
        };
        needs.iter().take_while(fits).count()
    }
}
