//! Connections of each identity, for its quota.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use longshore_proto::Fault;
use longshore_wire::direct::{Connection, Owner};

use crate::quota::Quota;

/// Number of connections of each identity. A connection that has shown several identities, by tokens, counts for
/// each.
#[derive(Default)]
pub(super) struct Presences(Mutex<BTreeMap<String, u64>>);

/// Guard of an identity on one connection, stored with the connection.
struct Presence {
    among: Arc<Presences>,
    name: String,
}

impl Presences {
    pub(super) fn of(&self, name: &str) -> u64 {
        self.lock().get(name).copied().unwrap_or_default()
    }

    /// Counts the connection once for this identity.
    pub(super) fn admit(
        self: &Arc<Self>,
        connection: &Connection,
        name: &str,
        quota: &Quota,
    ) -> Result<(), Fault> {
        // The lock is held meanwhile, so that two calls on one connection count it once.
        let mut kept = connection.kept();
        let here = |presence: &Presence| presence.name == name;
        if kept.iter().filter_map(|kept| kept.downcast_ref()).any(here) {
            return Ok(());
        }
        let mut counts = self.lock();
        let count = counts.get(name).copied().unwrap_or_default();
        let most = connection.account.most_connections().map(|most| most as u64);
        Quota { connections: quota.connections.or(most), ..*quota }.admit_connection(name, count)?;
        counts.insert(name.to_string(), count + 1);
        connection.account.belongs_to(Owner::Identity(name.to_string()));
        kept.push(Box::new(Presence { among: Arc::clone(self), name: name.to_string() }));
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        let mut counts = self.among.lock();
        if let Some(count) = counts.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.name);
            }
        }
    }
}
