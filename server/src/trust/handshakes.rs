//! TLS connections. Handshakes run concurrently, so that a silent stranger delays no one else.

use std::{io, sync::Arc};

use longshore_proto::limits::{HANDSHAKE_DEADLINE, MAX_HANDSHAKES};
use longshore_wire::tls::Secured;
use tokio::{
    net::{TcpListener, TcpStream},
    task::{JoinSet, yield_now},
    time::timeout,
};

use super::{register::Register, unencrypted};
use crate::{accept::Accept, connections::Origin, log::Seldom, places::Places};

/// A listener of connections that have completed the handshake.
pub(crate) struct Handshakes {
    listener: TcpListener,
    register: Arc<Register>,
    under_way: JoinSet<(io::Result<Option<Secured>>, Origin)>,
    places: Places,
    full: Seldom,
    failed: Seldom,
}

impl Handshakes {
    /// `possible` is the number of connections that the descriptors allow.
    pub(crate) fn new(listener: TcpListener, register: Arc<Register>, possible: usize) -> Handshakes {
        // Three quarters of the connections are left to those past the handshake.
        let places = Places::new(MAX_HANDSHAKES.min(possible / 4));
        let (full, failed) = (Seldom::default(), Seldom::default());
        Handshakes { listener, register, under_way: JoinSet::new(), places, full, failed }
    }

    /// Starts a handshake. Returns whether an earlier handshake was ended for it.
    fn begin(&mut self, socket: TcpStream, origin: Origin) -> bool {
        let tls = self.register.now().tls.clone();
        let task = self.under_way.spawn(async move {
            let late = || io::Error::new(io::ErrorKind::TimedOut, "the handshake was not finished in time");
            let shaken = async {
                let mut first = [0];
                match socket.peek(&mut first).await {
                    Ok(1..) if unencrypted::is_unencrypted(first[0]) => {
                        Err(unencrypted::turn_away(socket).await)
                    }
                    Ok(1..) => tls.accept(socket).await.map(Some),
                    // A port probe sends no byte and begins no handshake.
                    _ => Ok(None),
                }
            };
            let shaken = timeout(HANDSHAKE_DEADLINE, shaken).await;
            (shaken.unwrap_or_else(|_| Err(late())), origin)
        });
        let ended = self.places.take(origin, task);
        if ended {
            let most = self.places.most();
            self.full.say(|| {
                tracing::info!(most, "many handshakes at once: the oldest of the same origin are ended")
            });
        }
        ended
    }
}

impl Accept for Handshakes {
    type Socket = Secured;

    async fn accept(&mut self) -> io::Result<(Secured, Origin)> {
        loop {
            tokio::select! {
                Some(done) = self.under_way.join_next_with_id() => match done {
                    Ok((id, (shaken, origin))) => {
                        self.places.give_back(id);
                        match shaken {
                            Ok(Some(socket)) => return Ok((socket, origin)),
                            Ok(None) => tracing::debug!(?origin, "a connection was closed before its first byte"),
                            // A failed handshake is no failure of `accept`, which would cause a pause.
                            Err(error) => {
                                tracing::debug!(?origin, %error, "a handshake failed");
                                self.failed.say(|| tracing::info!(?origin, %error, "a handshake failed"));
                            }
                        }
                    }
                    Err(ended) => self.places.give_back(ended.id()),
                },
                accepted = Accept::accept(&mut self.listener) => {
                    let (socket, origin) = accepted?;
                    if self.begin(socket, origin) {
                        yield_now().await;
                    }
                }
            }
        }
    }
}
