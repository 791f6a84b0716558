//! Handovers: the steps at which this server owns a shard, as commits change them.
//!
//! The decision on step w names the owner of steps from w + 1 + `max_delay` on. The owner before keeps its last
//! version, and the new owner fetches it. Updates that need the state are held back until it is there.

use std::collections::BTreeSet;

use longshore_proto::{
    Handover, Incarnation, NO_SERVER, Placement, PlacementChange, STATE_AWAITED, ServerId, ShardId, Step,
    Version,
};

use super::{
    machine::{Machine, NOT_OWNED, Phase, Work},
    refusal::Refusal,
    shard::{ShardProgress, StepSlot},
};
use crate::{
    ids::OwnedShard,
    record::{Joined, Record, is_handed},
};

/// A shard whose state this server fetches from another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Awaited {
    pub shard: ShardId,
    /// Version of the fetched state.
    pub version: Version,
    /// The server with the state, and its address.
    pub source: ServerId,
    pub address: String,
    /// True if this server is the shard's replica: the owner's next update waits until the state is here.
    pub is_replica: bool,
}

impl Machine {
    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Takes the address at which a server of the job answers now. Returns the address before, if it differs.
    pub fn readdress(&mut self, server: ServerId, address: &str) -> Option<String> {
        let known = self.placement.servers.get_mut(server.0 as usize)?;
        let is_other = !known.is_empty() && !address.is_empty() && known != address;
        is_other.then(|| std::mem::replace(known, address.to_string()))
    }

    /// The placement, if it changed since this server was opened.
    pub fn changed_placement(&self) -> Option<Placement> {
        self.has_moved.then(|| self.placement.clone())
    }

    /// Returns true if this server is loading, or owns no shard at any step.
    pub fn is_without_shards(&self) -> bool {
        self.phase == Phase::Loading || self.shards.iter().all(|shard| shard.span.is_empty())
    }

    /// Returns true if an update waits for a shard that is being fetched.
    pub fn is_held(&self) -> bool {
        self.held.iter().any(|(owned, _)| self.shards[owned.index()].awaited)
    }

    /// Names the state that a held update waits for, and the other server: the source, or the new replica.
    pub(super) fn awaited_state(&self) -> Option<String> {
        let of = |(owned, _): &(OwnedShard, Step)| {
            let shard = &self.shards[owned.index()];
            let id = shard.shard;
            match shard.lent {
                Some(lent) => {
                    let replica = self.placement.replica(id)?;
                    Some(format!("{STATE_AWAITED}{id} at {lent} to reach server {}", self.address(replica)))
                }
                None if shard.awaited => {
                    let version = Version(shard.span.start - 1);
                    let source = self.placement.source(self.server, id, version);
                    Some(format!("{STATE_AWAITED}{id} at {version} from server {}", self.address(source)))
                }
                None => None,
            }
        };
        self.held.iter().find_map(of)
    }

    fn address(&self, server: ServerId) -> &str {
        self.placement.servers.get(server.0 as usize).map_or("", String::as_str)
    }

    /// Returns true if this server takes a shard's gradients of `step` and makes its version.
    pub fn owns(&self, owned: OwnedShard, step: Step) -> bool {
        self.shards[owned.index()].span.contains(&step.0)
    }

    /// Returns true if this server answers for a shard at a step: as its owner, or as the replica of an owner that is
    /// given up.
    pub fn answers_for(&self, owned: OwnedShard, step: Step) -> bool {
        let owner = self.placement.owner_at(self.shards[owned.index()].shard, step);
        self.owns(owned, step) && (owner == self.server || self.lost.contains(&owner))
    }

    /// Members of the job that are not given up.
    pub fn members(&self) -> impl Iterator<Item = ServerId> {
        self.placement.members().filter(|member| !self.lost.contains(member))
    }

    /// Returns true if this server owns a shard at no step.
    pub fn is_unowned(&self, owned: OwnedShard) -> bool {
        self.shards[owned.index()].span.is_empty()
    }

    /// The shards that this server owns at a step.
    pub(super) fn owned_at(&self, step: Step) -> impl Iterator<Item = &ShardProgress> {
        self.shards.iter().filter(move |shard| shard.span.contains(&step.0))
    }

    /// Returns true once this server has made a decided version on every shard that it owns at that step.
    pub fn is_made(&self, step: Step) -> bool {
        self.owned_at(step).all(|shard| shard.version >= step.version() && !shard.awaited)
    }

    /// Takes part in a running job from a version on, without any shard. `ranks` have joined the job.
    pub fn begin_without_shards(
        &mut self,
        incarnation: Incarnation,
        placement: Placement,
        record: Record,
        ranks: &[Option<Joined>],
    ) -> Result<(), Refusal> {
        self.check_rank_zero(incarnation)?;
        if !self.is_without_shards() {
            return Err(Refusal::NotLoading { version: self.version });
        }
        self.commits.clear();
        self.scales.clear();
        self.reads.clear();
        (self.placement, self.has_moved, self.is_placed) = (placement, true, false);
        self.ranks.iter_mut().for_each(|rank| rank.is_outdated = false);
        for shard in &mut self.shards {
            (shard.span, shard.version) = (NOT_OWNED, record.version);
        }
        self.begin(vec![record]);
        self.had_joined(ranks);
        Ok(())
    }

    /// Checks that this server has room for the shards that a change gives it.
    pub(super) fn check_change(&self, change: &PlacementChange) -> Result<(), Refusal> {
        let here =
            |&&(shard, to): &&(ShardId, ServerId)| to != self.server || self.owned[shard.index()].is_some();
        match change.moves.iter().chain(&change.replicas).find(|of| !here(of)) {
            Some(&(shard, _)) => Err(Refusal::NotOwned { shard, shards: self.layout.shards() }),
            None => Ok(()),
        }
    }

    /// Takes the change of the placement that came with the decision on `step`.
    pub(super) fn change(&mut self, change: &PlacementChange, step: Step) {
        let from = Placement::from_step(step, self.spec.max_delay);
        self.placement.apply(change, step, self.spec.max_delay);
        self.has_moved = true;
        let (placement, server) = (&self.placement, self.server);
        let named: BTreeSet<ShardId> =
            change.moves.iter().chain(&change.replicas).map(|(shard, _)| *shard).collect();
        // The loss of a server may change any shard, and a move only the named ones.
        let changes = |of: &&mut ShardProgress| !change.lost.is_empty() || named.contains(&of.shard);
        let hands = |shard: ShardId, before: ServerId| {
            let is_it = |of: &Handover| (of.shard, of.from_step, of.before) == (shard, from, before);
            placement.handovers.iter().any(is_it)
        };
        for shard in self.shards.iter_mut().filter(changes) {
            if shard.span.end > step.0
                && change.replicas.contains(&(shard.shard, NO_SERVER))
                && placement.holders_at(shard.shard, step).all(|holder| holder != server)
                && placement.owner(shard.shard) != server
            {
                shard.span.end = step.0;
                shard.awaited &= !shard.span.is_empty();
                continue;
            }
            let held = !shard.span.is_empty() && shard.span.end == u64::MAX;
            match (held, placement.holds(server, shard.shard)) {
                (false, true) => {
                    (shard.span, shard.awaited, shard.broken) = (from.0..u64::MAX, true, None);
                    shard.is_forsaken = false;
                    // The shard may have been dropped here, when its source was lost. Gradients from before are of no
                    // use.
                    if self.spec.replicas > 1 && !shard.is_in_use() {
                        shard.slots.iter_mut().for_each(StepSlot::start_over);
                    }
                }
                (true, false) if hands(shard.shard, server) => shard.span.end = from.0,
                // The source is lost: another server has the shard, and no rank pushes to this server.
                (true, false) => {
                    let has_made = !shard.awaited && shard.span.start <= step.0;
                    shard.span = if has_made { shard.span.start..step.0 + 1 } else { 0..1 };
                    shard.awaited = false;
                }
                _ => {}
            }
            if placement.replica(shard.shard).is_none() {
                shard.lent = None;
            } else if placement.owner(shard.shard) == server && hands(shard.shard, NO_SERVER) {
                shard.lent = Some(Version(from.0 - 1));
            }
        }
    }

    /// Takes another placement at the current version, from an operator's command in place of rank 0. The placement
    /// counts from the next step on, and contributions to that step are dropped. Returns false while a chunk or an
    /// update is in progress. Also false while this server awaits a shard's state that, by the placement, has arrived
    /// or leaves.
    pub fn place(
        &mut self,
        incarnation: Incarnation,
        version: Version,
        placement: Placement,
    ) -> Result<bool, Refusal> {
        self.check_not_loading()?;
        self.check_rank_zero(incarnation)?;
        let server = self.server;
        let first = |shard: &ShardProgress| {
            let is_replica = placement.owner(shard.shard) != server;
            let came = |of: &&Handover| (of.shard, of.is_replica) == (shard.shard, is_replica);
            placement.handovers.iter().rfind(came).map(|of| of.from_step.0)
        };
        let is_held = |shard: &ShardProgress| !shard.span.is_empty() && shard.span.end == u64::MAX;
        let mut held = placement.held(server).into_iter();
        let has_state = |shard: ShardId| {
            let owned = self.owned[shard.index()]?;
            let shard = &self.shards[owned.index()];
            (is_held(shard) || first(shard) == Some(version.0 + 1)).then_some(())
        };
        if let Some(shard) = held.find(|&shard| has_state(shard).is_none()) {
            return Err(Refusal::NotOwned { shard, shards: self.layout.shards() });
        }
        if version != self.version || placement.epoch <= self.placement.epoch {
            let (current, ours) = (self.version, self.placement.epoch);
            return Err(Refusal::OtherPlacement { version, epoch: placement.epoch, current, ours });
        }
        let is_early = |shard: &ShardProgress| {
            let is_fetched = !placement.holds(server, shard.shard) || first(shard).is_none();
            shard.is_in_use() || is_held(shard) && shard.awaited && is_fetched
        };
        if !self.is_settled() || self.shards.iter().any(is_early) {
            return Ok(false);
        }
        let next = version.0 + 1;
        for shard in &mut self.shards {
            match (is_held(shard), placement.holds(server, shard.shard), first(shard)) {
                // All servers have taken the placement before, and all states that it moved have arrived.
                (true, true, None) => shard.span = 0..u64::MAX,
                (true, true, Some(first)) if shard.awaited => shard.span.start = first,
                (true, true, Some(_)) => {}
                (false, true, first) => {
                    shard.span = first.unwrap_or(next)..u64::MAX;
                    (shard.awaited, shard.broken, shard.is_forsaken) = (true, None, false);
                }
                (_, false, _) if shard.span.is_empty() => {}
                (_, false, _) => shard.span.end = shard.span.end.min(next),
            }
            let is_first = |of: &Handover| (of.shard, of.before) == (shard.shard, NO_SERVER);
            let was_first = self.placement.handovers.iter().any(is_first);
            let is_first = placement.owner(shard.shard) == server && placement.handovers.iter().any(is_first);
            let lends = is_first && (shard.lent.is_some() || !was_first);
            shard.lent = lends.then_some(version);
        }
        // Other ranks wait here until rank 0 joins, but no rank joins a server that the job has left.
        self.is_placed = placement.members().any(|member| member == server);
        (self.placement, self.has_moved) = (placement, true);
        self.start_over();
        self.ranks[0].fence_only = true;
        self.ranks.iter_mut().skip(1).for_each(|rank| rank.is_outdated = true);
        Ok(true)
    }

    /// Notes that a new replica has fetched a shard's state from here. Returns the updates that waited for the replica.
    pub fn arrived(&mut self, owned: OwnedShard, version: Version) -> Vec<Work> {
        let lent = &mut self.shards[owned.index()].lent;
        if *lent != Some(version) {
            return Vec::new();
        }
        *lent = None;
        self.release_held().collect()
    }

    /// Ends the waits for these servers, which are lost. Returns the updates that waited for replicas on them.
    pub fn lose(&mut self, lost: Vec<ServerId>) -> Vec<Work> {
        self.lost = lost;
        self.forsake();
        self.release_held().collect()
    }

    /// Ends the waits for lost servers, once other servers have each shard. Gradients of decided steps that wait for a
    /// lost server's state are given up. Their slots then take the next step, whose decision can name the loss.
    pub(super) fn forsake(&mut self) {
        if self.lost.is_empty() || self.last_of(&self.lost).is_some() {
            return;
        }
        for index in 0..self.shards.len() {
            let shard = &self.shards[index];
            let is_lost = |server| self.lost.contains(&server);
            let is_forsaken = shard.awaited && is_lost(self.came(shard).source);
            let is_lent_there = self.placement.replica(shard.shard).is_some_and(is_lost);
            let (shard, version) = (&mut self.shards[index], self.version.0);
            if is_lent_there {
                shard.lent = None;
            }
            if is_forsaken {
                shard.is_forsaken = true;
                let decided = |slot: &&mut StepSlot| slot.step.is_some_and(|step| step.0 <= version);
                shard.slots.iter_mut().filter(decided).for_each(StepSlot::start_over);
            }
        }
    }

    /// Takes the placement of a recovered version. A shard that was being fetched then is fetched again.
    pub(super) fn recover_placement(&mut self, placement: Placement) {
        for shard in &mut self.shards {
            shard.span = placement.span(self.server, shard.shard);
            shard.awaited = !shard.span.is_empty() && shard.span.start > self.version.0;
            shard.version = self.version.min(Version(shard.span.end.saturating_sub(1)));
        }
        (self.placement, self.has_moved) = (placement, true);
    }

    /// Number of shards whose state is not here, even if the server that should send it is lost.
    pub fn lacking(&self) -> usize {
        self.shards.iter().filter(|shard| shard.awaited).count()
    }

    /// The shards whose state is being fetched, oldest version first, since later versions need the earlier ones.
    pub fn awaited(&self) -> Vec<Awaited> {
        let awaited = self.shards.iter().filter(|shard| shard.awaited && !shard.is_forsaken);
        let mut awaited: Vec<Awaited> = awaited.map(|shard| self.came(shard)).collect();
        awaited.sort_by_key(|of| of.version);
        awaited
    }

    /// The shards that this server alone could not serve: the state is being fetched, or ranks still read the version
    /// before the fetched one.
    pub(super) fn unfinished(&self) -> impl Iterator<Item = Awaited> {
        let oldest = self.version.0.saturating_sub(self.spec.max_delay.into());
        let is_early = move |shard: &&ShardProgress| {
            let came = !shard.span.is_empty() && shard.span.start > 0;
            shard.awaited || came && shard.span.start > oldest + 1
        };
        self.shards.iter().filter(is_early).map(|shard| self.came(shard))
    }

    fn came(&self, shard: &ShardProgress) -> Awaited {
        let version = Version(shard.span.start - 1);
        let source = self.placement.source(self.server, shard.shard, version);
        let address = self.address(source).to_string();
        let is_replica = self.placement.replica(shard.shard) == Some(self.server);
        Awaited { shard: shard.shard, version, source, address, is_replica }
    }

    /// Returns true if this version of a shard is being fetched. The shard may have moved away and back since, with a
    /// later version.
    pub fn awaits(&self, owned: OwnedShard, version: Version) -> bool {
        let shard = &self.shards[owned.index()];
        shard.awaited && !shard.is_forsaken && shard.span.start == version.0 + 1
    }

    /// Notes that the awaited state of a shard is here. Returns the updates that waited for the state.
    pub fn fetched(&mut self, owned: OwnedShard, version: Version) -> Vec<Work> {
        if !self.awaits(owned, version) {
            return Vec::new();
        }
        let shard = &mut self.shards[owned.index()];
        (shard.awaited, shard.version) = (false, version);
        self.release_held().collect()
    }

    /// Takes the held updates that can run now. Updates of shards that moved away or are given up go too, since updates
    /// of later shards follow them.
    pub(super) fn release_held(&mut self) -> impl Iterator<Item = Work> {
        let shards = &self.shards;
        let held = self.held.extract_if(.., |(owned, step)| {
            let shard = &shards[owned.index()];
            shard.can_update(*step) || !shard.span.contains(&step.0) || shard.is_given_up()
        });
        held.map(|(owned, step)| Work::Update { owned, step })
    }

    /// Returns a frozen shard whose state `step` has to wait for. The state has been fetched for as many steps as a
    /// trained shard has gradient slots. A frozen shard has no gradients that would hold steps up. Without this wait,
    /// its source could free the state before it has arrived.
    pub fn lagging(&self, step: Step) -> Option<ShardId> {
        let slots = self.spec.gradient_slots() as u64;
        let lags = |shard: &&ShardProgress| {
            let is_late = shard.is_frozen() && shard.span.start.saturating_add(slots) <= step.0;
            is_late && shard.awaited && !shard.is_given_up()
        };
        self.shards.iter().find(lags).map(|shard| shard.shard)
    }

    /// Returns true once a shard has the last version that this server makes of it, for the next owner.
    pub fn check_fetch(&self, owned: OwnedShard, version: Version) -> Result<bool, Refusal> {
        self.check_not_loading()?;
        let shard = &self.shards[owned.index()];
        if let Some(broken) = shard.broken {
            return Err(self.broken_at(shard.shard, broken.block));
        }
        if shard.span.end == version.0 + 1 || shard.lent == Some(version) {
            return Ok(shard.version == version && !shard.awaited);
        }
        // The decision that hands the shard over may not be here yet.
        match self.knows_owner(Step(version.0 + 1)) {
            false => Ok(false),
            true => Err(self.elsewhere(shard.shard, Step(version.0 + 1))),
        }
    }

    /// The shards that other servers own, and that no step in flight reads here.
    pub fn handed(&self) -> Vec<OwnedShard> {
        OwnedShard::all(self.shards.len()).filter(|&owned| self.is_handed(owned)).collect()
    }

    fn is_handed(&self, owned: OwnedShard) -> bool {
        is_handed(&self.shards[owned.index()].span, self.version, self.spec.max_delay)
    }

    /// Forgets a shard that was handed over. Changes nothing and returns false if the shard came back since, or a late
    /// chunk is being written.
    pub fn forget(&mut self, owned: OwnedShard) -> bool {
        let is_handed = self.is_handed(owned) && !self.shards[owned.index()].is_in_use();
        if is_handed {
            let shard = &mut self.shards[owned.index()];
            (shard.span, shard.broken) = (NOT_OWNED, None);
            // A shard with a lost source was never handed over, and has gradients that no update uses.
            shard.slots.iter_mut().for_each(StepSlot::start_over);
        }
        is_handed
    }

    /// Returns true if no later decision can change the owners of a step.
    pub(super) fn knows_owner(&self, step: Step) -> bool {
        Placement::from_step(Step(self.version.0), self.spec.max_delay) >= step
    }

    pub(super) fn elsewhere(&self, shard: ShardId, step: Step) -> Refusal {
        Refusal::Elsewhere { shard, step, owner: self.placement.owner_at(shard, step) }
    }

    /// Returns the first update of a step, from shard `owned` on, that can run. Updates before it are held back. The
    /// search goes on past a shard whose state is being fetched, from here or to here. The other server may be lost,
    /// and ranks need the later shards to decide on the loss. The search ends at a shard whose step before is not done.
    /// A server may own other shards at step t + 1 than at step t, and so be ahead of step t.
    pub(super) fn next_update(&mut self, owned: OwnedShard, step: Step) -> Option<Work> {
        for owned in OwnedShard::all(self.shards.len()).skip(owned.index()) {
            let shard = &self.shards[owned.index()];
            let is_made = shard.version >= step.version() && !shard.awaited;
            if !shard.span.contains(&step.0) || is_made || shard.is_given_up() {
                continue;
            }
            if shard.can_update(step) {
                return Some(Work::Update { owned, step });
            }
            let may_pass = shard.awaited || shard.lent.is_some();
            if !self.held.contains(&(owned, step)) {
                self.held.push((owned, step));
            }
            if !may_pass {
                return None;
            }
        }
        None
    }

    /// Returns the update in place of one that can no longer run. None if the version is made already.
    pub fn instead_of(&mut self, owned: OwnedShard, step: Step) -> Option<Work> {
        let is_made = self.shards[owned.index()].version >= step.version();
        if is_made { None } else { self.next_update(owned, step) }
    }
}
