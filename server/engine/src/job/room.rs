//! Room of a server for further shards of a job: in its memory and, in a tmpfs or on drives, in their space. Rank 0 and
//! `longshore scale` ask for it before they plan moves. Callers' threads may wait for a file system.

use std::cmp::Reverse;

use longshore_proto::{JobSpec, Layout, ShardId};

use super::Job;
use crate::{
    admission::Need,
    lock,
    tier::{self, Storage},
};

/// Returns the number of shards for which a server without the job has room, whichever they are. `memory` is free there.
pub fn room(spec: &JobSpec, layout: &Layout, storage: &Storage, memory: u64) -> usize {
    let need = |shards: &[ShardId]| Need::of(spec, layout, shards, storage);
    let mut shards: Vec<ShardId> = (0..layout.shards()).map(ShardId).collect();
    shards.sort_by_cached_key(|&shard| Reverse(need(&[shard]).total()));
    let space = tier::free_space(spec, storage);
    let fits = |&count: &usize| {
        let need = need(&shards[..count]);
        need.total() <= memory && tier::space(spec, &need) <= space
    };
    (1..=shards.len()).collect::<Vec<_>>().partition_point(fits)
}

impl Job {
    /// Returns the number of shards for which this server has room beside those that it holds, whichever they are.
    /// Memory and space of an earlier plan that came to nothing count as free.
    pub fn room(&self, storage: &Storage) -> usize {
        let spec = &self.share.spec;
        let (mut memory, mut space) = (self.reservation.budget().free(), tier::free_space(spec, storage));
        let (released, machine) = (lock(&self.released), self.protocol.machine());
        for owned in self.share.all().filter(|owned| !released.contains(owned) && machine.is_unowned(*owned))
        {
            let need = self.bytes_of(owned);
            memory += need.total();
            space = space.saturating_add(tier::space(spec, &need));
        }
        drop((released, machine));
        let mut needs: Vec<Need> = self.share.all().map(|owned| self.bytes_of(owned)).collect();
        needs.sort_by_key(|need| Reverse((need.total(), need.disk)));
        let fits = |need: &&Need| {
            let left = memory.checked_sub(need.total()).zip(space.checked_sub(tier::space(spec, need)));
            left.map(|left| (memory, space) = left).is_some()
        };
        needs.iter().take_while(fits).count()
    }
}
