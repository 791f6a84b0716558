//! Placement: the owner of each shard. Changes of a placement come with commits.

use std::{collections::BTreeSet, ops::Range};

use crate::{
    fault::{Fault, FaultKind},
    ids::{Epoch, ServerId, ShardId, Step, Version},
    limits::{BLOCK_ELEMENTS, MAX_SERVERS},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Placement {
    pub epoch: Epoch,
    /// Addresses that workers dial, indexed by server. Empty for a server that has left the job, since its number is
    /// never given to another.
    pub servers: Vec<String>,
    /// Owner of each shard, indexed by shard.
    pub owners: Vec<ServerId>,
    /// Replica of each shard, indexed by shard: a second server that makes the same updates from the same gradients.
    /// [`NO_SERVER`] where a shard has none. Empty in a job without replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<ServerId>,
    /// Changes of owners and replicas that a step in flight may still ask about. Sorted by shard; a shard's oldest is
    /// first.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "by_shard")]
    pub handovers: Vec<Handover>,
    /// The job's clock minus the clock of the placement's first member, in ms. The job's clock is that of its very
    /// first server, also once that server has left. A rank's processes are ordered by the job's clock.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clock_ahead_ms: i64,
}

/// Sorts handovers by shard, since records of earlier releases list the oldest first.
fn by_shard<'de, D: serde::Deserializer<'de>>(stored: D) -> Result<Vec<Handover>, D::Error> {
    let mut handovers: Vec<Handover> = serde::Deserialize::deserialize(stored)?;
    handovers.sort_by_key(|of| of.shard);
    Ok(handovers)
}

fn is_zero(value: &i64) -> bool {
    *value == 0
}

/// Stands for the replica of a shard that has none.
pub const NO_SERVER: ServerId = ServerId(u32::MAX);

/// A shard's change of owner or replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Handover {
    pub shard: ShardId,
    /// First step of the new server.
    pub from_step: Step,
    /// The server of the steps before; [`NO_SERVER`] for a replica where there was none.
    pub before: ServerId,
    /// The shard's replica changes, and not its owner.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_replica: bool,
}

/// A change of a placement, decided with a step. Moves take effect once every rank knows of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlacementChange {
    /// Addresses of servers that join the job. Their numbers follow the last number of the placement.
    pub added: Vec<String>,
    /// New owners of shards.
    pub moves: Vec<(ShardId, ServerId)>,
    /// New replicas of shards. [`NO_SERVER`] drops a shard's replica, from this very step on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replicas: Vec<(ShardId, ServerId)>,
    /// Servers without shards that leave the job.
    pub removed: Vec<ServerId>,
    /// Servers that are gone for good. The other holder of each of their shards becomes its owner at once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<ServerId>,
    /// The placement's epoch after the change: one more than before.
    pub epoch: Epoch,
    /// Added to the placement's `clock_ahead_ms` if the first member leaves: the leaving member's clock minus the next
    /// member's clock.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clock_ahead_ms: i64,
}

/// Checks `max_exposed`: the part of a step's time that updates may wait for moving shards.
pub fn check_max_exposed(part: f64) -> Result<(), Fault> {
    if part > 0.0 && part <= 1.0 {
        return Ok(());
    }
    let value = part.to_string();
    Err(Fault::invalid("max_exposed", value, "above 0 and at most 1", "name a part of a step, as in 0.05"))
}

/// Number of steps behind the newest version for which the owner of a shard is still known. A pull asks for the version
/// before the newest at the oldest.
const STEPS_KNOWN: u64 = 3;

impl Placement {
    /// Assigns shards round robin. All servers then work on the first layers at once, and none idles during a
    /// forward pass.
    pub fn striped(servers: Vec<String>, shards: u32) -> Placement {
        let count = servers.len() as u32;
        let owners = (0..shards).map(|shard| ServerId(shard % count)).collect();
        Placement { epoch: Epoch(1), servers, owners, ..Placement::default() }
    }

    /// Gives each shard a replica on another server than its owner's. Replicas of an owner's shards are dealt over all
    /// others: each takes an equal part of a lost server's shards.
    pub fn with_replicas(mut self) -> Placement {
        let count = self.servers.len() as u32;
        let replica = |(shard, owner): (u32, &ServerId)| match count {
            1 => NO_SERVER,
            _ => ServerId((owner.0 + 1 + shard / count % (count - 1)) % count),
        };
        self.replicas = (0..).zip(&self.owners).map(replica).collect();
        self
    }

    /// Returns the newest owner of a shard.
    pub fn owner(&self, shard: ShardId) -> ServerId {
        self.owners[shard.index()]
    }

    /// Returns the newest replica of a shard.
    pub fn replica(&self, shard: ShardId) -> Option<ServerId> {
        self.replicas.get(shard.index()).copied().filter(|&server| server != NO_SERVER)
    }

    /// Returns the number of shards that lack a replica, in a job with replicas.
    pub fn unreplicated(&self) -> usize {
        self.replicas.iter().filter(|&&server| server == NO_SERVER).count()
    }

    /// Returns true if a server is the newest owner or replica of a shard.
    pub fn holds(&self, server: ServerId, shard: ShardId) -> bool {
        self.owner(shard) == server || self.replica(shard) == Some(server)
    }

    /// Returns a shard's owner at `step`: ranks pull the version that this server makes.
    pub fn owner_at(&self, shard: ShardId, step: Step) -> ServerId {
        self.before(shard, step, false).unwrap_or(self.owner(shard))
    }

    /// Returns the servers that take a shard's gradients of `step` and make its version, the owner first.
    pub fn holders_at(&self, shard: ShardId, step: Step) -> impl Iterator<Item = ServerId> + use<> {
        let owner = self.owner_at(shard, step);
        let replica = self.before(shard, step, true).or(self.replica(shard));
        std::iter::once(owner).chain(replica.filter(|&replica| replica != NO_SERVER && replica != owner))
    }

    /// Returns the servers that may have a shard's version of `step`, the owner first. A server that holds the shard
    /// from a later step on may have fetched that version.
    pub fn sources_at(&self, shard: ShardId, step: Step) -> Vec<ServerId> {
        let mut sources: Vec<ServerId> = self.holders_at(shard, step).collect();
        if !self.replicas.is_empty() {
            let later = self.holders_at(shard, Step(u64::MAX)).filter(|later| !sources.contains(later));
            sources.extend(later.collect::<Vec<_>>());
        }
        sources
    }

    /// Returns the server before a change, if the change takes effect after `step`.
    fn before(&self, shard: ShardId, step: Step, is_replica: bool) -> Option<ServerId> {
        let is_later = |of: &&Handover| of.is_replica == is_replica && of.from_step > step;
        self.handovers_of(shard).iter().find(is_later).map(|handover| handover.before)
    }

    /// Returns a shard's handovers. Binary search finds them, since each chunk and pull asks, and a large move has tens
    /// of thousands.
    fn handovers_of(&self, shard: ShardId) -> &[Handover] {
        let from = self.handovers.partition_point(|of| of.shard < shard);
        let to = from + self.handovers[from..].partition_point(|of| of.shard == shard);
        &self.handovers[from..to]
    }

    /// Returns the server from which `server` gets a shard's state of `version`.
    pub fn source(&self, server: ServerId, shard: ShardId, version: Version) -> ServerId {
        let step = Step(version.0);
        let before = self.before(shard, step, self.owner(shard) != server);
        before.filter(|&before| before != NO_SERVER).unwrap_or(self.owner_at(shard, step))
    }

    /// Returns the steps at which a server owns a shard, as far as handovers tell. Empty if no step in flight may ask
    /// this server about the shard. Replicas do not count, since jobs in tiers that keep records have none.
    pub fn span(&self, server: ServerId, shard: ShardId) -> Range<u64> {
        let is_owner = self.owner(shard) == server;
        match self.handovers_of(shard).last() {
            Some(handover) if is_owner => handover.from_step.0..u64::MAX,
            Some(handover) if handover.before == server => 0..handover.from_step.0,
            _ if is_owner => 0..u64::MAX,
            _ => u64::MAX..u64::MAX,
        }
    }

    /// Returns the servers that take part in the job.
    pub fn members(&self) -> impl Iterator<Item = ServerId> {
        let numbered = (0..).map(ServerId).zip(&self.servers);
        numbered.filter(|(_, address)| !address.is_empty()).map(|(server, _)| server)
    }

    /// The addresses of the servers that take part in the job.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.servers.iter().map(String::as_str).filter(|address| !address.is_empty())
    }

    /// Returns the first step of the owners that the decision on `step` names. A delayed job's ranks may already have
    /// pushed the step after `step`, so its owners must stay.
    pub fn from_step(step: Step, max_delay: u32) -> Step {
        Step(step.0 + 1 + u64::from(max_delay))
    }

    /// Takes a change that was decided with `step`. A change that was taken before changes nothing.
    pub fn apply(&mut self, change: &PlacementChange, step: Step, max_delay: u32) {
        if change.epoch <= self.epoch {
            return;
        }
        let from_step = Placement::from_step(step, max_delay);
        self.epoch = change.epoch;
        self.clock_ahead_ms = self.clock_ahead_ms.saturating_add(change.clock_ahead_ms);
        self.servers.extend(change.added.iter().cloned());
        self.handovers.retain(|handover| handover.from_step.0 + STEPS_KNOWN > step.0);
        self.lose(&change.lost);
        for &(shard, to) in &change.moves {
            let before = std::mem::replace(&mut self.owners[shard.index()], to);
            self.handovers.push(Handover { shard, from_step, before, is_replica: false });
            if self.replica(shard) == Some(to) {
                self.replicas[shard.index()] = NO_SERVER;
                self.handovers.push(Handover { shard, from_step, before: to, is_replica: true });
            }
        }
        for &(shard, to) in &change.replicas {
            let mut before = std::mem::replace(&mut self.replicas[shard.index()], to);
            let mut from_step = from_step;
            // The gradient of a dropped replica may differ at this step, so the replica makes no version of the step.
            if to == NO_SERVER {
                from_step = step;
                let is_later = |of: &mut Handover| of.shard == shard && of.is_replica && of.from_step > step;
                before = self.handovers.extract_if(.., is_later).next().map_or(before, |of| of.before);
            }
            // A replica that owns the shard from a later step on stays, and the present owner is dropped instead.
            if to == NO_SERVER && before == self.owner(shard) {
                let later = self.handovers.iter_mut().filter(|of| of.shard == shard && of.from_step > step);
                later.for_each(|of| of.from_step = step);
            }
            self.handovers.push(Handover { shard, from_step, before, is_replica: true });
        }
        self.handovers.sort_by_key(|of| of.shard);
        for server in &change.removed {
            self.servers[server.0 as usize].clear();
        }
    }

    /// Takes servers for lost: the other holder of each of their shards becomes its owner. A server that awaits a
    /// shard's state from a lost server gives the shard up if another server holds it.
    fn lose(&mut self, lost: &[ServerId]) {
        for (shard, owner) in (0..).map(ShardId).zip(&mut self.owners) {
            let Some(replica) = self.replicas.get_mut(shard.index()) else { continue };
            let mut came = self.handovers.iter().filter(|of| of.shard == shard && lost.contains(&of.before));
            let moving = came.next_back().map(|of| of.is_replica);
            let is_owner_lost = lost.contains(owner);
            if lost.contains(replica) || moving == Some(true) && !is_owner_lost {
                *replica = NO_SERVER;
                self.handovers.retain(|of| of.shard != shard || !of.is_replica);
            } else if *replica != NO_SERVER && (is_owner_lost || moving == Some(false)) {
                *owner = std::mem::replace(replica, NO_SERVER);
                // The new owner may still have to fetch its state from the replica before it.
                self.handovers.retain(|of| of.shard != shard || of.is_replica && of.before != NO_SERVER);
                self.handovers.iter_mut().filter(|of| of.shard == shard).for_each(|of| of.is_replica = false);
            }
        }
        self.handovers.retain(|of| !lost.contains(&of.before));
        lost.iter().for_each(|server| self.servers[server.0 as usize].clear());
    }

    /// Returns the first shard of which nothing is left once these servers are lost.
    pub fn last_of(&self, lost: &[ServerId]) -> Option<ShardId> {
        let is_last = |shard: &ShardId| {
            lost.contains(&self.owner(*shard)) && self.replica(*shard).is_none_or(|of| lost.contains(&of))
        };
        let shards = if lost.is_empty() { 0 } else { self.owners.len() as u32 };
        (0..shards).map(ShardId).find(is_last)
    }

    /// Returns true if every handover is over: all steps in flight at `version` have the newest owners.
    pub fn is_settled(&self, version: Version) -> bool {
        self.handovers.iter().all(|handover| handover.from_step.0 + STEPS_KNOWN <= version.0)
    }

    /// Checks a change before it is decided with `step`.
    ///
    /// # Errors
    /// `Invalid` for a server or shard that does not exist, for a shard that is named twice, and for a shard whose last
    /// move is not over. The removal of a server that owns shards is `Invalid` too.
    pub fn check(&self, change: &PlacementChange, step: Step) -> Result<(), Fault> {
        let count = self.servers.len() + change.added.len();
        let invalid = |field: &str, value: String, limit: String| {
            Err(Fault::invalid(
                format!("commit.placement.{field}"),
                value,
                limit,
                "name what Admin.Describe shows",
            ))
        };
        if change.epoch.0 != self.epoch.0 + 1 {
            return invalid("epoch", change.epoch.to_string(), format!("{}, the next one", self.epoch.0 + 1));
        }
        if count > MAX_SERVERS || change.added.iter().any(String::is_empty) {
            return invalid(
                "added",
                format!("{count} servers"),
                format!("at most {MAX_SERVERS}, with addresses"),
            );
        }
        let is_member = |server: &ServerId| match self.servers.get(server.0 as usize) {
            Some(address) => !address.is_empty(),
            None => (server.0 as usize) < count,
        };
        let moving = |shard: &ShardId| {
            self.handovers_of(*shard).iter().any(|of| of.from_step.0 + STEPS_KNOWN > step.0)
        };
        let mut named = BTreeSet::new();
        for (shard, to) in &change.moves {
            let Some(owner) = self.owners.get(shard.index()) else {
                return invalid("moves", shard.to_string(), format!("below {}", self.owners.len()));
            };
            if !is_member(to) || to == owner || moving(shard) || !named.insert(shard) {
                let limit =
                    "another member of the job, for a shard that is named once and that no change moves now";
                return invalid("moves", format!("{shard} to {to}"), limit.into());
            }
        }
        for (shard, to) in &change.replicas {
            let is_other = self.replicas.get(shard.index()).is_some_and(|replica| replica != to)
                || *to == NO_SERVER && self.before(*shard, step, true).is_some();
            // A replica whose gradient differs must go at once, so a drop does not wait for the shard's handover.
            let is_free = is_other && (*to == NO_SERVER || !moving(shard)) && named.insert(shard);
            if !is_free || *to != NO_SERVER && (!is_member(to) || self.owner(*shard) == *to) {
                let limit = "a member that does not own the shard, in a job with replicas, for a shard that is named once and that no change moves now";
                return invalid("replicas", format!("{shard} to {to}"), limit.into());
            }
        }
        if let Some(unknown) = change.lost.iter().find(|server| !is_member(server)) {
            return invalid("lost", unknown.to_string(), "a member of the job".into());
        }
        if let Some(shard) = self.last_of(&change.lost) {
            let limit = "servers whose shards others hold too";
            return invalid("lost", format!("{:?}, with the last of {shard}", change.lost), limit.into());
        }
        let owns = |server: &ServerId| {
            self.owners.contains(server)
                || self.replicas.contains(server)
                || self
                    .handovers
                    .iter()
                    .any(|of| of.before == *server && of.from_step.0 + STEPS_KNOWN > step.0)
        };
        match change.removed.iter().find(|server| !is_member(server) || owns(server)) {
            Some(server) => invalid("removed", server.to_string(), "a member that owns nothing".into()),
            None => Ok(()),
        }
    }

    pub fn owned(&self, server: ServerId) -> Vec<ShardId> {
        let shards = (0..self.owners.len() as u32).map(ShardId);
        shards.filter(|&shard| self.owner(shard) == server).collect()
    }

    /// Returns the shards of which a server is the newest owner or replica.
    pub fn held(&self, server: ServerId) -> Vec<ShardId> {
        let shards = (0..self.owners.len() as u32).map(ShardId);
        shards.filter(|&shard| self.holds(server, shard)).collect()
    }

    pub fn validate(&self, shards: u32) -> Result<(), Fault> {
        if self.servers.is_empty() || self.servers.len() > MAX_SERVERS {
            let limit = format!("in 1..={MAX_SERVERS}");
            return Err(Fault::invalid("placement.servers", self.servers.len(), limit, "name the servers"));
        }
        if self.owners.len() != shards as usize {
            let limit = format!("{shards}, the layout's number of shards");
            return Err(Fault::invalid(
                "placement.owners",
                self.owners.len(),
                limit,
                "give each shard an owner",
            ));
        }
        for (shard, owner) in self.owners.iter().enumerate() {
            if owner.0 as usize >= self.servers.len() {
                let limit = format!("below {}, the number of servers", self.servers.len());
                let field = format!("placement.owners[{shard}]");
                return Err(Fault::invalid(field, owner.0, limit, "name an existing server"));
            }
        }
        if !self.replicas.is_empty() && self.replicas.len() != self.owners.len() {
            let limit = format!("{shards}, the layout's number of shards, or none");
            let remedy = "give each shard a replica";
            return Err(Fault::invalid("placement.replicas", self.replicas.len(), limit, remedy));
        }
        for (shard, (owner, replica)) in self.owners.iter().zip(&self.replicas).enumerate() {
            let is_server = (replica.0 as usize) < self.servers.len() && replica != owner;
            if !is_server && *replica != NO_SERVER {
                let limit = format!("below {}, the number of servers, and not the owner", self.servers.len());
                let field = format!("placement.replicas[{shard}]");
                return Err(Fault::invalid(field, replica.0, limit, "name another server"));
            }
        }
        for (index, of) in self.handovers.iter().enumerate() {
            let is_no_server = of.is_replica && of.before == NO_SERVER;
            let is_known = is_no_server || (of.before.0 as usize) < self.servers.len();
            if of.shard.0 >= shards || !is_known {
                let value = format!("{} from {}", of.shard, of.before);
                let limit = format!("of the {shards} shards and the {} servers", self.servers.len());
                let field = format!("placement.handovers[{index}]");
                return Err(Fault::invalid(field, value, limit, "name what Admin.Describe shows"));
            }
        }
        // Later placements may have servers that own nothing yet, or nothing any more.
        if self.epoch > Epoch(1) { Ok(()) } else { self.check_all_own() }
    }

    /// Refuses a server without a shard, which would wait for weights that no worker sends.
    fn check_all_own(&self) -> Result<(), Fault> {
        let mut owns = vec![false; self.servers.len()];
        self.owners.iter().for_each(|owner| owns[owner.0 as usize] = true);
        let Some(idle) = owns.iter().position(|owns| !owns) else { return Ok(()) };
        let value =
            format!("{} servers, of which server {idle} ({}) owns no shard", owns.len(), self.servers[idle]);
        let limit = format!("servers that each own at least one of the {} shards", self.owners.len());
        let remedy = format!(
            "name fewer servers, or open the job with smaller shards (shard_elements, {BLOCK_ELEMENTS} at the least)"
        );
        Err(Fault::invalid("placement.servers", value, limit, remedy))
    }

    /// Refuses a second open of a job whose shards have other owners. Addresses may change, since a server may
    /// restart elsewhere.
    pub fn same_owners(&self, other: &Placement) -> Result<(), Fault> {
        if self.owners == other.owners && self.replicas == other.replicas {
            return Ok(());
        }
        let remedy = "name the same servers in the same order; or take the job to these: `longshore checkpoint` on the servers that hold \
                      it, then `longshore restore`, or the trainer's --resume, on these";
        let conflict =
            |value, limit| Fault::new(FaultKind::Conflict, "placement.owners", value, limit, remedy);
        let (ours, theirs) = (self.servers.len(), other.servers.len());
        let first = self.owners.iter().zip(&other.owners).position(|(ours, theirs)| ours != theirs);
        Err(match first {
            Some(shard) if ours == theirs => conflict(
                format!("shard {shard} on server {}", other.owners[shard].0),
                format!(
                    "as the job was opened, over {ours} servers, that shard on server {}",
                    self.owners[shard].0
                ),
            ),
            None if ours == theirs => conflict(
                format!("{} shards", other.owners.len()),
                format!("as the job was opened, over {ours} servers, {} shards", self.owners.len()),
            ),
            _ => conflict(
                format!("over {theirs} servers"),
                format!("as the job was opened, over {ours} servers"),
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_a_shard_is_refused_by_name() {
        let servers = |count: u32| (0..count).map(|server| format!("host{server}:7070")).collect();
        assert_eq!(Placement::striped(servers(3), 3).validate(3), Ok(()));
        let fault = Placement::striped(servers(3), 2).validate(2).unwrap_err();
        assert_eq!((fault.kind, fault.field.as_str()), (FaultKind::Invalid, "placement.servers"));
        assert!(
            fault.to_string().contains("3 servers, of which server 2 (host2:7070) owns no shard"),
            "{fault}"
        );
        // An idle server may also come before a server that has shards.
        let owners = vec![ServerId(0), ServerId(2)];
        let fault = Placement { owners, ..Placement::striped(servers(3), 2) }.validate(2).unwrap_err();
        assert!(fault.value.contains("server 1 (host1:7070)"), "{fault}");
    }

    #[test]
    fn a_handover_of_no_shard_or_from_no_server_is_refused() {
        let [placed, unplaced] = [ShardId(1), ShardId(2)];
        for (shard, before, is_replica, is_right) in [
            (placed, ServerId(0), false, true),
            (placed, NO_SERVER, true, true),
            (placed, NO_SERVER, false, false),
            (placed, ServerId(2), true, false),
            (unplaced, ServerId(0), false, false),
        ] {
            let handovers = vec![Handover { shard, from_step: Step(3), before, is_replica }];
            let placement = Placement { handovers, ..Placement::striped(vec!["a".into(), "b".into()], 2) };
            let found = placement.validate(2);
            assert_eq!(found.is_ok(), is_right, "{found:?}");
        }
    }

    #[test]
    fn a_move_counts_from_the_step_that_every_rank_knows() {
        let mut placement = Placement::striped(vec!["a".into(), "b".into()], 4);
        let change = PlacementChange {
            added: vec!["c".into()],
            moves: vec![(ShardId(1), ServerId(2))],
            epoch: Epoch(2),
            ..PlacementChange::default()
        };
        assert_eq!(placement.check(&change, Step(7)), Ok(()));
        let twice = PlacementChange { moves: change.moves.repeat(2), ..change.clone() };
        assert!(placement.check(&twice, Step(7)).is_err());
        placement.apply(&change, Step(7), 1);
        let owner = |placement: &Placement, step| placement.owner_at(ShardId(1), Step(step));
        assert_eq!((owner(&placement, 8), owner(&placement, 9)), (ServerId(1), ServerId(2)));
        assert_eq!(placement.owned(ServerId(1)), [ShardId(3)]);
        let (moves, epoch) = (vec![(ShardId(1), ServerId(0))], Epoch(3));
        let again = PlacementChange { moves, epoch, ..PlacementChange::default() };
        assert!(placement.check(&again, Step(11)).is_err(), "version 8 may still be read");
        assert_eq!(placement.check(&again, Step(12)), Ok(()));
        placement.apply(&again, Step(12), 1);
        assert_eq!((owner(&placement, 13), owner(&placement, 14)), (ServerId(2), ServerId(0)));
        let (removed, epoch, clock_ahead_ms) = (vec![ServerId(2)], Epoch(4), -5);
        let leave = PlacementChange { removed, epoch, clock_ahead_ms, ..PlacementChange::default() };
        assert!(placement.check(&leave, Step(16)).is_err());
        assert_eq!(placement.check(&leave, Step(17)), Ok(()));
        placement.apply(&leave, Step(17), 1);
        placement.apply(&leave, Step(17), 1);
        assert_eq!(placement.members().collect::<Vec<_>>(), [ServerId(0), ServerId(1)]);
        assert_eq!(placement.clock_ahead_ms, -5);
    }

    /// Servers a, b and c, and one shard of a with a replica on b.
    fn replicated() -> Placement {
        let servers = vec!["a".into(), "b".into(), "c".into()];
        Placement { replicas: vec![ServerId(1)], ..Placement::striped(servers, 1) }
    }

    fn take(placement: &mut Placement, step: u64, change: PlacementChange) {
        let change = PlacementChange { epoch: Epoch(placement.epoch.0 + 1), ..change };
        assert_eq!(placement.check(&change, Step(step)), Ok(()));
        placement.apply(&change, Step(step), 1);
    }

    #[test]
    fn the_next_owner_of_a_shard_stays_where_both_holders_before_are_lost() {
        let moves = vec![(ShardId(0), ServerId(2))];
        for lost in [vec![ServerId(0)], vec![ServerId(0), ServerId(1)], vec![ServerId(1), ServerId(0)]] {
            let mut placement = replicated();
            take(&mut placement, 4, PlacementChange { moves: moves.clone(), ..PlacementChange::default() });
            let owner = if lost.len() == 1 { ServerId(1) } else { ServerId(2) };
            take(&mut placement, 5, PlacementChange { lost, ..PlacementChange::default() });
            assert_eq!((placement.owner(ShardId(0)), placement.replica(ShardId(0))), (owner, None));
        }
    }

    #[test]
    fn a_replica_with_another_gradient_stays_where_it_is_the_next_owner() {
        let mut placement = replicated();
        let moves = vec![(ShardId(0), ServerId(1))];
        take(&mut placement, 4, PlacementChange { moves, ..PlacementChange::default() });
        let holders = |placement: &Placement, step| {
            placement.holders_at(ShardId(0), Step(step)).map(|server| server.0).collect::<Vec<_>>()
        };
        assert_eq!((holders(&placement, 5), holders(&placement, 6)), (vec![0, 1], vec![1]));
        let replicas = vec![(ShardId(0), NO_SERVER)];
        take(&mut placement, 5, PlacementChange { replicas, ..PlacementChange::default() });
        assert_eq!((holders(&placement, 4), holders(&placement, 5)), (vec![0, 1], vec![1]));
    }
}
