//! Live processes of ranks: those with an open Watch, or with a connection on which they joined or pushed. Waits for a
//! rank ask for its Watch, since an evaluating process sends nothing for minutes. A dead process never sends anything
//! again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use longshore_proto::{Incarnation, Rank};
use longshore_wire::direct::Account;

#[derive(Default)]
pub(crate) struct Processes(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// Open watches of each rank's process.
    watches: BTreeMap<(Rank, Incarnation), u32>,
    calling: BTreeMap<Rank, Calling>,
}

/// Newest process of a rank that joined or pushed here.
struct Calling {
    incarnation: Incarnation,
    transport: &'static str,
    connections: Vec<Weak<Account>>,
}

/// Guard of one open Watch of a rank's process.
pub(crate) struct Watching {
    among: Arc<Processes>,
    who: (Rank, Incarnation),
}

impl Processes {
    pub(crate) fn enter(self: &Arc<Self>, rank: Rank, incarnation: Incarnation) -> Watching {
        let who = (rank, incarnation);
        *self.lock().watches.entry(who).or_default() += 1;
        Watching { among: Arc::clone(self), who }
    }

    pub(crate) fn is_watching(&self, rank: Rank, incarnation: Incarnation) -> bool {
        self.lock().watches.contains_key(&(rank, incarnation))
    }

    /// Records a connection on which the rank's current process has joined or pushed.
    pub(crate) fn called(
        &self,
        rank: Rank,
        incarnation: Incarnation,
        transport: &'static str,
        account: &Arc<Account>,
    ) {
        let mut known = self.lock();
        let new = || Calling { incarnation, transport, connections: Vec::new() };
        let calling = known.calling.entry(rank).or_insert_with(new);
        if calling.incarnation < incarnation {
            *calling = new();
        }
        calling.transport = transport;
        calling.connections.retain(|known| known.strong_count() > 0);
        if calling.connections.iter().all(|known| known.as_ptr() != Arc::as_ptr(account)) {
            calling.connections.push(Arc::downgrade(account));
        }
    }

    /// Returns the transport of the rank's last call. Empty for a rank that has not called this server's process.
    pub(crate) fn transport(&self, rank: Rank) -> &'static str {
        self.lock().calling.get(&rank).map_or("", |calling| calling.transport)
    }

    /// Returns whether the process has a connection.
    pub(crate) fn is_connected(&self, rank: Rank, incarnation: Incarnation) -> bool {
        let known = self.lock();
        let calling = known.calling.get(&rank).filter(|calling| calling.incarnation == incarnation);
        calling.is_some_and(|calling| calling.connections.iter().any(|known| known.strong_count() > 0))
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut known = self.among.lock();
        let count = known.watches.remove(&self.who).unwrap_or_default();
        if count > 1 {
            known.watches.insert(self.who, count - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use longshore_wire::direct::{Bounds, Owner};

    use super::*;

    #[test]
    fn a_process_is_there_until_its_last_watch_and_connection_end() {
        let processes = Arc::<Processes>::default();
        let (rank, old, new) = (Rank(1), Incarnation(7), Incarnation(8));
        let first = processes.enter(rank, old);
        let second = processes.enter(rank, old);
        drop(first);
        assert!(processes.is_watching(rank, old) && !processes.is_watching(rank, new));
        assert!(!processes.is_watching(Rank(0), old));
        drop(second);
        assert!(!processes.is_watching(rank, old));

        let [first, second, third] = [(); 3].map(|()| Bounds::default().account(Owner::Local));
        processes.called(rank, old, "tcp", &first);
        processes.called(rank, old, "tcp", &second);
        drop(first);
        assert!(processes.is_connected(rank, old) && !processes.is_connected(Rank(0), old));
        processes.called(rank, new, "unix", &third);
        assert!(processes.is_connected(rank, new) && !processes.is_connected(rank, old));
        drop(third);
        assert!(!processes.is_connected(rank, new));
        assert_eq!(processes.transport(rank), "unix");
    }
}
