//! Which server owns which shard.

use crate::{
    fault::{Fault, FaultKind},
    ids::{Epoch, ServerId, ShardId},
    limits::MAX_SERVERS,
};

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Placement {
    pub epoch: Epoch,
    /// Addresses, as the workers dial them.
    pub servers: Vec<String>,
    /// For each shard its owner.
    pub owners: Vec<ServerId>,
}

impl Placement {
    /// Shards dealt in turn, so that all servers work on the first layers at once and none idles during the others'
    /// part of a forward pass.
    pub fn striped(servers: Vec<String>, shards: u32) -> Placement {
        let count = servers.len() as u32;
        let owners = (0..shards).map(|shard| ServerId(shard % count)).collect();
        Placement { epoch: Epoch(1), servers, owners }
    }

    pub fn owner(&self, shard: ShardId) -> ServerId {
        self.owners[shard.index()]
    }

    /// A server's shards, in forward order.
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
        Ok(())
    }

    /// Checks a second open of a job. Addresses may change (a restarted server elsewhere), ownership may not.
    pub fn same_owners(&self, other: &Placement) -> Result<(), Fault> {
        if self.owners == other.owners {
            return Ok(());
        }
        let remedy = "name the same servers in the same order, or restore a checkpoint onto the new ones";
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
