//! Placement: the owner of each shard.

use crate::{
    fault::{Fault, FaultKind},
    ids::{Epoch, ServerId, ShardId},
    limits::{BLOCK_ELEMENTS, MAX_SERVERS},
};

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Placement {
    pub epoch: Epoch,
    /// Addresses that workers dial.
    pub servers: Vec<String>,
    /// Owner of each shard, indexed by shard.
    pub owners: Vec<ServerId>,
}

impl Placement {
    /// Assigns shards round robin. All servers then work on the first layers at once, and none idles during a
    /// forward pass.
    pub fn striped(servers: Vec<String>, shards: u32) -> Placement {
        let count = servers.len() as u32;
        let owners = (0..shards).map(|shard| ServerId(shard % count)).collect();
        Placement { epoch: Epoch(1), servers, owners }
    }

    pub fn owner(&self, shard: ShardId) -> ServerId {
        self.owners[shard.index()]
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
        self.check_all_own()
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
}
