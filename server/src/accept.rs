//! Accepts connections, even while file descriptors are short.

use std::{io, sync::Arc, time::Duration};

use futures_util::{Stream, stream};
use longshore_wire::direct::{Direct, Socket};
use rustix::io::Errno;
use tokio::net::{TcpListener, TcpStream};

use crate::connections::{Connections, Origin};

/// Pause after a failure. Each successive failure doubles the pause, up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(320);

/// A listener whose connections the server accepts.
pub(crate) trait Accept: Send {
    type Socket: Socket;

    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Socket, Origin)>> + Send;
}

impl Accept for TcpListener {
    type Socket = TcpStream;

    async fn accept(&mut self) -> io::Result<(TcpStream, Origin)> {
        let (socket, address) = TcpListener::accept(self).await?;
        // Nagle's algorithm and delayed acknowledgements together cost 40 ms whenever a small answer follows another.
        socket.set_nodelay(true)?;
        Ok((socket, Origin::Host(address.ip().to_canonical())))
    }
}

/// Yields accepted connections for which there is room.
pub(crate) fn incoming<L: Accept>(
    listener: L,
    connections: Arc<Connections>,
) -> impl Stream<Item = io::Result<Direct<L::Socket>>> {
    stream::unfold((listener, connections), async |(mut listener, connections)| {
        let direct = next(&mut listener, &connections).await;
        Some((Ok(direct), (listener, connections)))
    })
}

async fn next<L: Accept>(listener: &mut L, connections: &Connections) -> Direct<L::Socket> {
    let mut pause = PAUSE;
    loop {
        match listener.accept().await {
            Ok((socket, origin)) => {
                pause = PAUSE;
                if let Some(direct) = connections.welcome(socket, origin) {
                    return direct;
                }
            }
            Err(error) => {
                if is_shortage(&error) {
                    connections.run_short(&error);
                } else {
                    tracing::debug!(%error, "a connection was gone before it was accepted");
                }
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        }
    }
}

/// Returns whether the process or the host is short of resources, rather than one connection failed.
fn is_shortage(error: &io::Error) -> bool {
    let short = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    short.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
