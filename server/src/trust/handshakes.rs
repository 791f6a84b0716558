//! Connections with TLS: handshakes go on beside each other, so that one silent stranger keeps nobody waiting.

use std::{collections::HashMap, io, sync::Arc};

use longshore_proto::limits::{HANDSHAKE_DEADLINE, MAX_HANDSHAKES};
use longshore_wire::tls::Secured;
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, Id, JoinSet, yield_now},
    time::timeout,
};

use super::register::Register;
use crate::{accept::Accept, connections::Origin, log::Seldom};

/// A listener whose connections have shaken hands.
pub(crate) struct Handshakes {
    listener: TcpListener,
    register: Arc<Register>,
    under_way: JoinSet<(io::Result<Secured>, Origin)>,
    /// Those, oldest first.
    entries: Vec<Entry>,
    most: usize,
    full: Seldom,
    failed: Seldom,
}

struct Entry {
    origin: Origin,
    task: AbortHandle,
}

impl Handshakes {
    /// `possible` is how many connections the descriptors allow.
    pub(crate) fn new(listener: TcpListener, register: Arc<Register>, possible: usize) -> Handshakes {
        // Connections that have shaken hands keep the better part.
        let most = MAX_HANDSHAKES.min(possible / 4).max(1);
        let (full, failed) = (Seldom::default(), Seldom::default());
        Handshakes { listener, register, under_way: JoinSet::new(), entries: Vec::new(), most, full, failed }
    }

    /// Returns whether an earlier handshake was ended for it.
    fn begin(&mut self, socket: TcpStream, origin: Origin) -> bool {
        let full = self.entries.len() >= self.most;
        if full {
            self.make_room();
        }
        let tls = self.register.now().tls.clone();
        let task = self.under_way.spawn(async move {
            let late = || io::Error::new(io::ErrorKind::TimedOut, "the handshake was not finished in time");
            let shaken = timeout(HANDSHAKE_DEADLINE, tls.accept(socket)).await;
            (shaken.unwrap_or_else(|_| Err(late())), origin)
        });
        self.entries.push(Entry { origin, task });
        full
    }

    /// Ends the oldest handshake of the origin that has the most.
    fn make_room(&mut self) {
        let most = self.most;
        self.full
            .say(|| tracing::info!(most, "many handshakes at once: the oldest of the same origin are ended"));
        let mut of_origin = HashMap::new();
        for entry in &self.entries {
            *of_origin.entry(entry.origin).or_insert(0_usize) += 1;
        }
        let from = of_origin.into_iter().max_by_key(|(_, count)| *count).map(|(origin, _)| origin);
        if let Some(oldest) = self.entries.iter().position(|entry| Some(entry.origin) == from) {
            self.entries.remove(oldest).task.abort();
        }
    }

    fn forget(&mut self, id: Id) {
        self.entries.retain(|entry| entry.task.id() != id);
    }
}

impl Accept for Handshakes {
    type Socket = Secured;

    async fn accept(&mut self) -> io::Result<(Secured, Origin)> {
        loop {
            tokio::select! {
                Some(done) = self.under_way.join_next_with_id() => match done {
                    Ok((id, (shaken, origin))) => {
                        self.forget(id);
                        match shaken {
                            Ok(socket) => return Ok((socket, origin)),
                            // It is no failure of accepting, after which there would be a pause.
                            Err(error) => {
                                tracing::debug!(?origin, %error, "a handshake failed");
                                self.failed.say(|| tracing::info!(?origin, %error, "a handshake failed"));
                            }
                        }
                    }
                    Err(ended) => self.forget(ended.id()),
                },
                accepted = Accept::accept(&mut self.listener) => {
                    let (socket, origin) = accepted?;
                    if self.begin(socket, origin) {
                        // What was ended lets go of its socket when it is its turn. Without this yield a flood is accepted 128 at a
                        // time in between, and as many sockets more are open.
                        yield_now().await;
                    }
                }
            }
        }
    }
}
