//! What fuzz targets need of TLS and nobody else may have: a server's end over any socket, and a client's end that seals whatever it
//! is told.

use std::io;

use rustls::{ContentType, Error, crypto::cipher::OutboundChunks};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Credentials, Server, incoming::Incoming, stream::Stream};
use crate::direct::Socket;

const KEY_UPDATE: u8 = 24;

/// Shakes hands with a client over any socket.
///
/// # Errors
/// As [`Server::accept`].
pub async fn accept<S: Socket>(
    server: &Server,
    socket: S,
) -> io::Result<impl AsyncRead + AsyncWrite + Unpin> {
    Ok(server.shake(socket).await?.stream)
}

/// A client that has shaken hands.
pub struct Client<S> {
    stream: Stream<S>,
    /// What the server has sent and was not opened.
    incoming: Incoming,
}

impl<S: Socket> Client<S> {
    /// # Errors
    /// As [`Credentials::connect`].
    pub async fn connect(credentials: &Credentials, socket: S, host: &str) -> io::Result<Client<S>> {
        let stream = credentials.shake(socket, host).await?.stream;
        Ok(Client { stream, incoming: Incoming::new() })
    }

    pub fn socket(&mut self) -> &mut S {
        self.stream.socket()
    }

    /// A record with this content, whatever it is.
    pub fn seal(&mut self, kind: u8, content: &[u8]) -> Vec<u8> {
        let mut record = Vec::new();
        let sealed = self.stream.keys().seal(kind.into(), &OutboundChunks::Single(content), &mut record);
        sealed.expect("a number that no record has had");
        record
    }

    /// Seals with the next key from now on.
    pub fn take_next_key(&mut self) {
        self.stream.keys().take_next_sealing().expect("a key");
    }

    /// Opens what the server has sent, and adds its data.
    ///
    /// # Errors
    /// Where it has not sealed that so.
    pub fn open(&mut self, mut sent: &[u8], data: &mut Vec<u8>) -> Result<(), Error> {
        while !sent.is_empty() {
            let room = self.incoming.room();
            let now = room.len().min(sent.len());
            room[..now].copy_from_slice(&sent[..now]);
            self.incoming.filled(now);
            sent = &sent[now..];
            while let Some(record) = self.incoming.next_record()? {
                let (kind, bytes) = self.stream.keys().open(record)?;
                match kind {
                    ContentType::ApplicationData => data.extend_from_slice(&record[..bytes]),
                    ContentType::Handshake if record[0] == KEY_UPDATE => {
                        self.stream.keys().update_opening()?
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}
