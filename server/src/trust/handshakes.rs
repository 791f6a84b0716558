//! TLS connections. Handshakes run concurrently, so that a silent stranger delays no one else.

use std::{io, sync::Arc, time::Duration};

use longshore_proto::limits::{HANDSHAKE_DEADLINE, MAX_HANDSHAKES};
use longshore_wire::tls::Secured;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::{JoinSet, yield_now},
    time::timeout,
};

use super::register::Register;
use crate::{accept::Accept, connections::Origin, log::Seldom, places::Places};

/// First byte of HTTP/2's preface, and of HTTP/1's POST. A TLS handshake record begins with 0x16.
const FIRST_BYTE: u8 = b'P';
/// Length of the connection's preface (RFC 9113, 3.4), and of each frame header behind it.
const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;
/// Type of the frame that begins a call. The next constant is HTTP/2's default limit of a frame's length.
const HEADERS: u8 = 1;
const MOST_FRAME_BYTES: u64 = 16 * 1024;
/// Longest wait for the first call. A client with a call in flight learns why it failed. A client without a call would
/// only see the connection close.
const FOR_A_CALL: Duration = Duration::from_secs(1);
const WHY: &[u8] = b"this server speaks TLS";
/// GOAWAY error code INADEQUATE_SECURITY (RFC 9113, 7).
const INADEQUATE_SECURITY: u8 = 0xc;

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
        // Three quarters of the connections are left to connections past their handshake.
        let places = Places::new(MAX_HANDSHAKES.min(possible / 4));
        let (full, failed) = (Seldom::default(), Seldom::default());
        Handshakes { listener, register, under_way: JoinSet::new(), places, full, failed }
    }

    /// Starts a handshake. Returns whether an earlier handshake was ended to free its place.
    fn begin(&mut self, socket: TcpStream, origin: Origin) -> bool {
        let tls = self.register.now().tls.clone();
        let task = self.under_way.spawn(async move {
            let late = || io::Error::new(io::ErrorKind::TimedOut, "the handshake was not finished in time");
            let shaken = async {
                let mut first = [0];
                match socket.peek(&mut first).await {
                    Ok(1..) if first[0] == FIRST_BYTE => Err(turn_away(socket).await),
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

/// Answers unencrypted HTTP/2 by its own error, since such a client cannot read TLS alerts. Returns the error for the
/// log. Then reads until the peer hangs up, for at most 2 s. Closing a socket with unread bytes would discard the
/// sent error.
async fn turn_away(mut socket: TcpStream) -> io::Error {
    let said = async {
        socket.write_all(&SETTINGS).await?;
        // The error is sent even if no call came.
        let _ = timeout(FOR_A_CALL, first_call(&mut socket)).await;
        socket.write_all(&goaway()).await?;
        socket.shutdown().await?;
        while socket.read(&mut [0; 256]).await? > 0 {}
        io::Result::Ok(())
    };
    // The outcome of sending is not logged: the peer's first byte is the cause already.
    let _ = timeout(2 * FOR_A_CALL, said).await;
    io::Error::new(io::ErrorKind::InvalidData, "the other end speaks without TLS")
}

/// Empty SETTINGS, which each end of HTTP/2 sends first. Some clients begin a call only after they have received
/// SETTINGS.
const SETTINGS: [u8; HEADER_BYTES] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

fn goaway() -> Vec<u8> {
    let length = (8 + WHY.len()) as u8;
    let start =
        [0, 0, length, 7, 0, 0, 0, 0, 0, /* no stream */ 0, 0, 0, 0, 0, 0, 0, INADEQUATE_SECURITY];
    [&start[..], WHY].concat()
}

async fn first_call(socket: &mut TcpStream) -> io::Result<()> {
    socket.read_exact(&mut [0; PREFACE_BYTES]).await?;
    loop {
        let mut header = [0; HEADER_BYTES];
        socket.read_exact(&mut header).await?;
        let bytes = u64::from(u32::from_be_bytes([0, header[0], header[1], header[2]]));
        if header[3] == HEADERS || bytes > MOST_FRAME_BYTES {
            return Ok(());
        }
        tokio::io::copy(&mut (&mut *socket).take(bytes), &mut tokio::io::sink()).await?;
    }
}
