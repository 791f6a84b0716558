//! Placement: the owner of each shard, and its changes, which come with commits.

use std::ops::Range;

use crate::{
    fault::{Fault, FaultKind},
    ids::{Epoch, ServerId, ShardId, Step},
    limits::{BLOCK_ELEMENTS, MAX_SERVERS},
};

#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Placement {
    pub epoch: Epoch,
    /// Addresses that workers dial, indexed by server. Empty for a server that has left the job: numbers are
    /// never given twice.
    pub servers: Vec<String>,
    /// Owner of each shard, indexed by shard.
    pub owners: Vec<ServerId>,
    /// Changes of owners that a step in flight may still ask about, oldest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub handovers: Vec<Handover>,
    /// The job's clock minus the clock of its first member, in ms. Processes of a rank are ordered by the job's clock,
    /// which is that of the very first server.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clock_ahead_ms: i64,
}

fn is_zero(value: &i64) -> bool {
    *value == 0
}

/// A shard's change of owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Handover {
    pub shard: ShardId,
    /// First step of the new owner.
    pub from_step: Step,
    /// The owner of the steps before.
    pub before: ServerId,
}

/// A change of a placement, decided with a step. Moves take effect once every rank knows of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct PlacementChange {
    /// Addresses of servers that join the job. Their numbers follow the placement's last one.
    pub added: Vec<String>,
    /// New owners of shards.
    pub moves: Vec<(ShardId, ServerId)>,
    /// Servers without shards that leave the job.
    pub removed: Vec<ServerId>,
    /// The placement's epoch after the change: one more than before.
    pub epoch: Epoch,
    /// Added to the placement's, where the first member leaves: its clock minus that of the next one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clock_ahead_ms: i64,
}

/// Number of steps behind the newest version for which the owner of a shard is still known. Pulls ask for the
/// version before the newest at the oldest.
const STEPS_KNOWN: u64 = 3;

impl Placement {
    /// Assigns shards round robin. All servers then work on the first layers at once, and none idles during a
    /// forward pass.
    pub fn striped(servers: Vec<String>, shards: u32) -> Placement {
        let count = servers.len() as u32;
        let owners = (0..shards).map(|shard| ServerId(shard % count)).collect();
        Placement { epoch: Epoch(1), servers, owners, ..Placement::default() }
    }

    /// The newest owner of a shard.
    pub fn owner(&self, shard: ShardId) -> ServerId {
        self.owners[shard.index()]
    }

    /// The owner that takes a shard's gradients of `step` and makes its version.
    pub fn owner_at(&self, shard: ShardId, step: Step) -> ServerId {
        let later =
            self.handovers.iter().find(|handover| handover.shard == shard && handover.from_step > step);
        later.map_or(self.owner(shard), |handover| handover.before)
    }

    /// The steps at which a server owns a shard, as far as handovers tell. Empty if it owns none that a step in flight
    /// may ask about.
    pub fn span(&self, server: ServerId, shard: ShardId) -> Range<u64> {
        let is_owner = self.owner(shard) == server;
        match self.handovers.iter().rfind(|handover| handover.shard == shard) {
            Some(handover) if is_owner => handover.from_step.0..u64::MAX,
            Some(handover) if handover.before == server => 0..handover.from_step.0,
            _ if is_owner => 0..u64::MAX,
            _ => u64::MAX..u64::MAX,
        }
    }

    /// The servers that take part in the job.
    pub fn members(&self) -> impl Iterator<Item = ServerId> {
        let numbered = (0..).map(ServerId).zip(&self.servers);
        numbered.filter(|(_, address)| !address.is_empty()).map(|(server, _)| server)
    }

    /// The addresses of the servers that take part in the job.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.servers.iter().map(String::as_str).filter(|address| !address.is_empty())
    }

    /// Returns the first step of the owners that the decision on `step` names. A delayed job's ranks may have pushed
    /// the step after it already.
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
        for &(shard, to) in &change.moves {
            let before = std::mem::replace(&mut self.owners[shard.index()], to);
            self.handovers.push(Handover { shard, from_step, before });
        }
        for server in &change.removed {
            self.servers[server.0 as usize].clear();
        }
    }

    /// Returns true if every handover is over: no step in flight at `version` has an owner that is not the newest.
    pub fn is_settled(&self, version: crate::ids::Version) -> bool {
        self.handovers.iter().all(|handover| handover.from_step.0 + STEPS_KNOWN <= version.0)
    }

    /// Checks a change before it is decided with `step`.
    ///
    /// # Errors
    /// `Invalid` for a server or shard that does not exist, for a shard that moved a moment ago, and for the removal
    /// of a server that owns shards.
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
        for (shard, to) in &change.moves {
            let Some(owner) = self.owners.get(shard.index()) else {
                return invalid("moves", shard.to_string(), format!("below {}", self.owners.len()));
            };
            let moving =
                |handover: &Handover| handover.shard == *shard && handover.from_step.0 + STEPS_KNOWN > step.0;
            if !is_member(to) || to == owner || self.handovers.iter().any(moving) {
                let limit = "another member of the job, for a shard that no change moves now";
                return invalid("moves", format!("{shard} to {to}"), limit.into());
            }
        }
        let owns = |server: &ServerId| {
            self.owners.contains(server)
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
        if self.owners == other.owners {
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
    fn a_move_counts_from_the_step_that_every_rank_knows() {
        let mut placement = Placement::striped(vec!["a".into(), "b".into()], 4);
        let change = PlacementChange {
            added: vec!["c".into()],
            moves: vec![(ShardId(1), ServerId(2))],
            epoch: Epoch(2),
            ..PlacementChange::default()
        };
        assert_eq!(placement.check(&change, Step(7)), Ok(()));
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
}
