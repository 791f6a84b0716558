//! Membership: processes of ranks join, fence and leave, and each event's process is checked.

use longshore_proto::{Incarnation, Rank};

use super::{
    machine::{Machine, RankState},
    refusal::Refusal,
    shard::ShardProgress,
};
use crate::{
    ids::{Contributor, GradientSlot, OwnedShard},
    record::Joined,
};

impl Machine {
    /// Revokes the right of a rank's earlier processes to push. Contributions stay, since a decision that another
    /// server has made may need them here. Returns false if this process has fenced or joined before.
    pub fn fence(&mut self, rank: Rank, incarnation: Incarnation) -> Result<bool, Refusal> {
        if self.check_taking(rank, incarnation)? {
            return Ok(false);
        }
        let state = &mut self.ranks[rank.index()];
        *state = RankState {
            incarnation: Some(incarnation),
            fence_only: true,
            joined_at: self.version,
            last_step: state.last_step,
            ..RankState::default()
        };
        Ok(true)
    }

    /// Binds a rank to a higher incarnation, or to the incarnation that fenced it. The earlier process's unsummed
    /// contributions are dropped, and finished sums too if the job has one rank.
    ///
    /// Returns false while the earlier process's last chunk is being written, and for another world size than rank 0's.
    /// After a change of the placement between two steps, other ranks wait for rank 0.
    ///
    /// `world_size` is the number of ranks that take part, as the process was started; None leaves it as it is.
    pub fn join(
        &mut self,
        rank: Rank,
        incarnation: Incarnation,
        world_size: Option<u32>,
    ) -> Result<bool, Refusal> {
        let world_size = world_size.unwrap_or(self.world_size);
        self.check_world_size(rank, world_size)?;
        let has_taken = self.check_taking(rank, incarnation)?;
        if has_taken && self.ranks[rank.index()].is_outdated {
            return Err(Refusal::PlacementChanged { rank, incarnation, epoch: self.placement.epoch });
        }
        let is_bound = has_taken && !self.ranks[rank.index()].fence_only;
        if rank != Rank(0) && (world_size != self.world_size || self.is_placed) {
            return Ok(false);
        }
        if !is_bound && !self.bind(rank, incarnation) {
            return Ok(false);
        }
        Ok(world_size == self.world_size || self.resize(world_size))
    }

    /// Begins the undecided steps anew, with another number of ranks. Rank 0 has brought all servers to one version.
    /// Returns false while a chunk is being written.
    fn resize(&mut self, world_size: u32) -> bool {
        if self.shards.iter().any(ShardProgress::is_in_use) {
            return false;
        }
        self.start_over();
        self.set_contributors(world_size);
        true
    }

    /// Begins the undecided steps anew. Ranks other than 0 join again before they push.
    pub(super) fn start_over(&mut self) {
        let version = self.version.0;
        for slot in self.shards.iter_mut().flat_map(|shard| &mut shard.slots) {
            if slot.step.is_none_or(|step| step.0 > version) {
                slot.start_over();
            }
        }
        self.unsettle();
        self.reads.clear();
        for rank in self.ranks.iter_mut().skip(1) {
            rank.fence_only = true;
        }
    }

    pub(super) fn set_contributors(&mut self, world_size: u32) {
        if !self.spec.takes_fewer_ranks() {
            return;
        }
        self.world_size = world_size;
        for shard in self.shards.iter_mut().filter(|shard| !shard.is_frozen()) {
            shard.set_contributors((0..world_size).map(Rank).collect());
        }
    }

    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// The newest process of a rank, as a tier keeps it.
    pub fn joined(&self, rank: Rank) -> Option<Joined> {
        let RankState { incarnation, fence_only, joined_at, .. } = *self.ranks.get(rank.index())?;
        let is_all = rank != Rank(0) || self.world_size == self.spec.world_size;
        let world_size = if is_all { 0 } else { self.world_size };
        Some(Joined { incarnation: incarnation?, at: joined_at, fence_only, world_size })
    }

    fn check_world_size(&self, rank: Rank, world_size: u32) -> Result<(), Refusal> {
        let most = self.spec.world_size;
        let fits = (1..=most).contains(&world_size) && rank.0 < world_size;
        match fits && (world_size == most || self.spec.takes_fewer_ranks()) {
            true => Ok(()),
            false => Err(Refusal::WorldSize { rank, world_size, most }),
        }
    }

    /// Gives a rank to a process. Returns false while the earlier process's last chunk is being written.
    fn bind(&mut self, rank: Rank, incarnation: Incarnation) -> bool {
        let undecided = self.version.0 + 1..=self.version.0 + self.spec.gradient_slots() as u64;
        let in_use = |shard: &ShardProgress| {
            let contributor = shard.contributor(rank);
            contributor.is_some_and(|contributor| shard.slots.iter().any(|slot| slot.in_use(contributor)))
        };
        if self.shards.iter().any(in_use) {
            return false;
        }
        let is_lone = self.world_size == 1;
        for shard in &mut self.shards {
            let Some(contributor) = shard.contributor(rank) else { continue };
            // The slot of a decided step belongs to that step's update.
            let undecided = shard
                .slots
                .iter_mut()
                .filter(|slot| slot.step.is_some_and(|step| undecided.contains(&step.0)));
            undecided.for_each(|slot| if is_lone { slot.start_over() } else { slot.rejoined(contributor) });
        }
        let joined_at = self.version;
        self.is_placed &= rank != Rank(0);
        self.unsettle();
        self.forget_reads_of(rank);
        self.ranks[rank.index()] =
            RankState { incarnation: Some(incarnation), joined_at, ..RankState::default() };
        true
    }

    /// Checks that a process may take a rank. Returns true if it has taken it already.
    fn check_taking(&self, rank: Rank, incarnation: Incarnation) -> Result<bool, Refusal> {
        let world_size = self.spec.world_size;
        let state = self.ranks.get(rank.index()).ok_or(Refusal::UnknownRank { rank, world_size })?;
        match state.incarnation {
            Some(current) if current == incarnation && !state.left => Ok(true),
            Some(current) if current >= incarnation => Err(Refusal::Fenced { rank, incarnation, current }),
            _ => Ok(false),
        }
    }

    /// Returns true if a rank's process may push.
    pub fn has_joined(&self, rank: Rank, incarnation: Incarnation) -> bool {
        let state = self.ranks.get(rank.index());
        state.is_some_and(|state| state.incarnation == Some(incarnation) && !state.fence_only && !state.left)
    }

    /// Returns true if a rank's newest process must join again before it pushes: its gradients so far may be gone.
    pub fn must_rejoin(&self, rank: Rank, incarnation: Incarnation) -> bool {
        let state = self.ranks.get(rank.index());
        state.is_some_and(|state| state.incarnation == Some(incarnation) && state.fence_only && !state.left)
    }

    /// Returns true if a sum or an update still needs a contributor's buffer of a slot.
    pub fn holds(&self, owned: OwnedShard, slot: GradientSlot, contributor: Contributor) -> bool {
        self.shards[owned.index()].slots[slot.index()].holds(contributor)
    }

    pub fn incarnation(&self, rank: Rank) -> Option<Incarnation> {
        self.ranks.get(rank.index()).and_then(|state| state.incarnation)
    }

    /// Checks that no newer process has taken the rank.
    pub fn check_newest(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Refusal> {
        match self.incarnation(rank) {
            Some(current) if current > incarnation => Err(Refusal::Fenced { rank, incarnation, current }),
            _ => Ok(()),
        }
    }

    /// The rank's process leaves. A repeat is accepted, since the first answer may have been lost.
    pub fn leave(&mut self, rank: Rank, incarnation: Incarnation) -> Result<(), Refusal> {
        match self.check_rank(rank, incarnation) {
            Ok(()) => self.ranks[rank.index()].left = true,
            Err(Refusal::Left { .. }) => {}
            Err(refusal) => return Err(refusal),
        }
        Ok(())
    }

    /// Returns true once every rank's process has left, after which no step follows.
    pub fn has_been_left(&self) -> bool {
        self.ranks.iter().take(self.world_size as usize).all(|state| state.left)
    }

    /// Checks that the caller is the rank's current process.
    pub fn check_rank(&self, rank: Rank, incarnation: Incarnation) -> Result<(), Refusal> {
        let world_size = self.spec.world_size;
        let state = self.ranks.get(rank.index()).ok_or(Refusal::UnknownRank { rank, world_size })?;
        match state.incarnation {
            None => Err(Refusal::NotJoined { rank }),
            Some(current) if incarnation > current => Err(Refusal::NotJoined { rank }),
            Some(current) if incarnation < current => Err(Refusal::Fenced { rank, incarnation, current }),
            Some(_) if state.left => Err(Refusal::Left { rank, incarnation }),
            Some(_) => Ok(()),
        }
    }

    /// Checks that the caller is rank 0's current process.
    pub fn check_rank_zero(&self, incarnation: Incarnation) -> Result<(), Refusal> {
        match self.check_rank(Rank(0), incarnation) {
            Err(Refusal::Fenced { current, .. }) => Err(Refusal::NotRankZero { incarnation, current }),
            other => other,
        }
    }
}
