//! Connections of a job's ranks. Admission has counted the memory of so many, and no more are a rank's.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use longshore_proto::limits::CONNECTIONS_PER_RANK;
use longshore_wire::direct::{Account, Connection};

/// Seats of a job's ranks, each taken by a connection until it ends or the job is closed.
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

    /// Makes the connection a rank's if a seat is free. A dead process's connections keep theirs until found dead, so
    /// callers ask again with later messages.
    pub(crate) fn take(&self, connection: &Connection) {
        if connection.account.is_vouched() {
            return;
        }
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.accounts.retain(|account| account.strong_count() > 0);
        if taken.accounts.len() < taken.most {
            taken.accounts.push(Arc::downgrade(&connection.account));
            connection.account.vouch();
        }
    }

    /// Returns true if no connection of a rank lives.
    pub(crate) fn are_empty(&self) -> bool {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.accounts.iter().all(|account| account.strong_count() == 0)
    }

    /// Takes all seats back, for good.
    pub(super) fn close(&self) {
        let mut taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        taken.most = 0;
        taken
            .accounts
            .drain(..)
            .filter_map(|account| account.upgrade())
            .for_each(|account| account.unvouch());
    }
}

#[cfg(test)]
mod tests {
    use longshore_wire::direct::{Bounds, Direct};
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
}
