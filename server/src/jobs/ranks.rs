//! Ranks of a job as connections: those that admission has counted, and the processes behind them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, Weak},
};

use longshore_proto::{Incarnation, Rank, limits::CONNECTIONS_PER_RANK};
use longshore_wire::direct::{Account, Connection};

use crate::lock::lock;

/// Seats of a job's ranks, each taken by a connection until it ends or the job is closed. Admission has counted the
/// memory of one connection for each seat.
pub(crate) struct Seats(Mutex<Taken>);

struct Taken {
    most: usize,
    accounts: Vec<Weak<Account>>,
}

impl Seats {
    pub(super) fn new(world_size: u32) -> Seats {
        let most = CONNECTIONS_PER_RANK * world_size as usize;
        Seats(Mutex::new(Taken { most, accounts: Vec::new() }))
    }

    /// Makes the connection a rank's if a seat is free. A dead process's connections keep their seats until found dead,
    /// so callers ask again with later messages.
    pub(crate) fn take(&self, connection: &Connection) {
        if connection.account.is_vouched() {
            return;
        }
        let mut taken = lock(&self.0);
        taken.accounts.retain(|account| account.strong_count() > 0);
        if taken.accounts.len() < taken.most {
            taken.accounts.push(Arc::downgrade(&connection.account));
            connection.account.vouch();
        }
    }

    /// Returns true if no connection of a rank lives.
    pub(crate) fn are_empty(&self) -> bool {
        let taken = lock(&self.0);
        taken.accounts.iter().all(|account| account.strong_count() == 0)
    }

    /// Takes all seats back, and gives out none afterwards.
    pub(super) fn close(&self) {
        let mut taken = lock(&self.0);
        taken.most = 0;
        taken
            .accounts
            .drain(..)
            .filter_map(|account| account.upgrade())
            .for_each(|account| account.unvouch());
    }
}

/// Live processes of ranks: those with an open Watch, or with a connection on which they joined or pushed. Waits for
/// a rank look at its Watch, since a process that evaluates sends nothing for minutes. A dead process never sends
/// anything again.
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
        *lock(&self.0).watches.entry(who).or_default() += 1;
        Watching { among: Arc::clone(self), who }
    }

    pub(crate) fn is_watching(&self, rank: Rank, incarnation: Incarnation) -> bool {
        lock(&self.0).watches.contains_key(&(rank, incarnation))
    }

    /// Records a connection on which the rank's current process has joined or pushed.
    pub(crate) fn called(
        &self,
        rank: Rank,
        incarnation: Incarnation,
        transport: &'static str,
        account: &Arc<Account>,
    ) {
        let mut known = lock(&self.0);
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
        lock(&self.0).calling.get(&rank).map_or("", |calling| calling.transport)
    }

    pub(crate) fn is_connected(&self, rank: Rank, incarnation: Incarnation) -> bool {
        let known = lock(&self.0);
        let calling = known.calling.get(&rank).filter(|calling| calling.incarnation == incarnation);
        calling.is_some_and(|calling| calling.connections.iter().any(|known| known.strong_count() > 0))
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let mut known = lock(&self.among.0);
        let count = known.watches.remove(&self.who).unwrap_or_default();
        if count > 1 {
            known.watches.insert(self.who, count - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use longshore_wire::direct::{Bounds, Direct, Owner};
    use tokio::net::UnixStream;
    use tonic::transport::server::Connected;

    use super::*;

    #[tokio::test]
    async fn a_rank_has_four_connections_while_its_job_is_open() {
        let bounds = Arc::new(Bounds::default());
        let connect = || {
            let (socket, other) = UnixStream::pair().unwrap();
            let (direct, standing) = Direct::serve(socket, &bounds, None);
            (direct.connect_info(), direct, standing, other)
        };
        let seats = Seats::new(1);
        let mut connections: Vec<_> = (0..=CONNECTIONS_PER_RANK).map(|_| connect()).collect();
        connections.iter().for_each(|(connection, ..)| seats.take(connection));
        let vouched = |connections: &[(Connection, Direct<_>, _, _)]| {
            connections.iter().filter(|(connection, ..)| connection.account.is_vouched()).count()
        };
        assert_eq!(vouched(&connections), CONNECTIONS_PER_RANK);
        connections.remove(0);
        seats.take(&connections[CONNECTIONS_PER_RANK - 1].0);
        assert_eq!(vouched(&connections), CONNECTIONS_PER_RANK, "the seat of one that has ended");
        seats.close();
        seats.take(&connections[0].0);
        assert_eq!(vouched(&connections), 0);
    }

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
