//! A simulated server's part in the loss of another server: the operator's command, and the states of its replicas.

use std::collections::BTreeMap;

use longshore_engine::{ids::OwnedShard, step::Wanted};
use longshore_proto::{Epoch, Fault, FaultKind, ServerId, ShardId, Version};
use longshore_wire::v1;

use super::{Instance, Server};
use crate::oracle::Plant;

impl Server {
    /// Takes an operator's wish, with the servers that are lost. Returns false if the job is not here.
    pub(crate) fn want(&self, wanted: &Wanted) -> bool {
        let kept = self.with(|instance| {
            let placement = instance.machine.placement().clone();
            instance.wanted.take(wanted.clone(), &placement);
            let works = instance.machine.lose(instance.wanted.lost.clone());
            instance.works.extend(works);
            Ok(())
        });
        self.moved();
        kept.is_ok()
    }

    /// Takes a rank's call that servers are lost.
    pub(super) fn scale(&self, request: v1::ScaleRequest) -> Result<v1::ScaleResponse, Fault> {
        let lost = request.lost.into_iter().map(ServerId).collect();
        let wanted = Wanted { lost, ..Wanted::default() };
        if let Some(shard) = self.last_after(wanted.clone()) {
            let value = format!("{:?}, with the last of {shard}", wanted.lost);
            return Err(Fault::new(FaultKind::Precondition, "lost", value, "held by others too", "restore"));
        }
        match request.check || self.want(&wanted) {
            true => Ok(v1::ScaleResponse {}),
            false => Err(self.absent()),
        }
    }

    /// Returns the newest wish of an operator that this server has.
    pub(crate) fn wanted(&self) -> Wanted {
        self.instance().as_ref().map(|instance| instance.wanted.clone()).unwrap_or_default()
    }

    /// Returns a shard whose last holder the operator's command would give up.
    pub(crate) fn last_after(&self, wanted: Wanted) -> Option<ShardId> {
        let instance = self.instance();
        let Instance { machine, wanted: known, .. } = instance.as_ref()?;
        let mut then = known.clone();
        then.take(wanted, machine.placement());
        let lost = &then.lost;
        if self.oracle.has(Plant::UnfetchedCounts) {
            return machine.placement().last_of(lost);
        }
        machine.last_of(lost)
    }

    /// Notes that a new replica has fetched the state of a shard.
    pub(super) fn arrived(&self, shard: ShardId, version: Version) -> Result<(), Fault> {
        self.with(|instance| {
            let owned = instance.machine.owned_index(shard)?;
            let works = instance.machine.arrived(owned, version);
            instance.works.extend(works);
            Ok(())
        })?;
        self.moved();
        Ok(())
    }

    /// Carries out the fault `LentUnawaited`: pretends that new replicas have arrived, so no update waits for them.
    pub(super) fn lend(&self, instance: &mut Instance) {
        if self.oracle.has(Plant::LentUnawaited) {
            let version = instance.machine.version().0;
            for owned in (0..instance.owned.len()).map(OwnedShard) {
                for version in version..=version + 1 {
                    let works = instance.machine.arrived(owned, Version(version));
                    instance.works.extend(works);
                }
            }
        }
    }

    /// Returns true if this server has the placement of `epoch` and awaits no state. With a `version`, each of its
    /// shards must have that version.
    pub(crate) fn has_all(&self, version: Option<Version>, epoch: Epoch) -> bool {
        let instance = self.instance();
        let Some(Instance { machine, owned, state, .. }) = instance.as_ref() else { return false };
        let placement = machine.placement();
        let number = super::lock(&self.disk).server;
        let has = |(shard, state): (&ShardId, &BTreeMap<Version, u64>)| {
            !placement.holds(number, *shard) || version.is_none_or(|version| state.contains_key(&version))
        };
        placement.epoch == epoch && machine.awaited().is_empty() && owned.iter().zip(state).all(has)
    }
}
