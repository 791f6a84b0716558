//! Connections to the HTTP address: how many, and for how long.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, header::ACCEPT};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use longshore_proto::{Fault, limits::HANDSHAKE_DEADLINE};
use longshore_wire::tls::Reader;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};

use super::{
    answers::{self, Answers},
    report::Listen,
};
use crate::{accept::Accept, log::Seldom, places::Places, service::Services, trust::Readers};

/// Connections at once. One that comes beyond it ends the oldest of the origin that has the most, so that who holds all of them keeps
/// no probe waiting.
const MOST: usize = 32;
/// The longest wait for a request's headers, and for the next request of a connection.
const HEADERS: Duration = Duration::from_secs(10);
/// The longest life of a connection. One that is at an answer by then may finish it.
const LIFE: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(5);
/// The memory of a connection's headers. With [`MOST`] connections that is 1 MiB, and what browsers send is below 8 KiB.
const HEADER_BYTES: usize = 32 * 1024;
/// The wait after a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(100);
/// The first byte of a TLS record of a handshake.
const TLS_HANDSHAKE: u8 = 0x16;

/// Serves until it is dropped.
pub(crate) async fn serve(
    mut listener: TcpListener,
    services: Services,
    listen: Listen,
    readers: Option<Readers>,
) -> Infallible {
    let (answers, readers) = (Arc::new(Answers::new(services, listen)), Arc::new(readers));
    let (mut places, full) = (Places::new(MOST), Seldom::default());
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(ended) = connections.join_next_with_id() => {
                places.give_back(ended.map_or_else(|error| error.id(), |(id, ())| id));
            }
            accepted = Accept::accept(&mut listener) => match accepted {
                Ok((socket, origin)) => {
                    let (answers, readers) = (Arc::clone(&answers), Arc::clone(&readers));
                    let task = connections.spawn(async move { answer(socket, &answers, readers.as_ref().as_ref()).await });
                    if places.take(origin, task) {
                        full.say(|| tracing::info!(most = MOST, "many HTTP connections at once: the oldest of the same origin are ended"));
                        yield_now().await;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "no HTTP connection accepted");
                    sleep(PAUSE).await;
                }
            }
        }
    }
}

/// Without `readers` the connection is not encrypted, and everybody reads. With them it has TLS, and they alone read the pages.
async fn answer(socket: TcpStream, answers: &Arc<Answers>, readers: Option<&Readers>) {
    let Some(readers) = readers else {
        return speak(socket, |request| answered(answers, request, Ok(()))).await;
    };
    let mut first = [0];
    // Who only asks whether the port is open has begun no handshake.
    match timeout(HANDSHAKE_DEADLINE, socket.peek(&mut first)).await {
        Ok(Ok(1..)) if first[0] != TLS_HANDSHAKE => {
            return speak(socket, |_| async { answers::unencrypted() }).await;
        }
        Ok(Ok(1..)) => {}
        _ => return,
    }
    // A handshake that fails concerns the reader alone, who is told by TLS.
    if let Ok(Ok(Reader { socket, certificate })) = timeout(HANDSHAKE_DEADLINE, readers.accept(socket)).await
    {
        let certificate = certificate.as_deref();
        let answered = |request: Request<Incoming>| {
            let admitted = readers.admit(certificate, request.headers());
            answered(answers, request, admitted)
        };
        speak(socket, answered).await;
    }
}

async fn answered(
    answers: &Answers,
    request: Request<Incoming>,
    admitted: Result<(), Fault>,
) -> Response<Full<Bytes>> {
    let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    answers.to(request.method(), request.uri(), accept, admitted).await
}

/// Speaks HTTP/1.1 until the connection has lived for long enough.
async fn speak<S, F>(socket: S, answered: impl Fn(Request<Incoming>) -> F)
where
    S: AsyncRead + AsyncWrite + Unpin,
    F: Future<Output = Response<Full<Bytes>>>,
{
    let answered = &answered;
    let service = service_fn(|request| async move { Ok::<_, Infallible>(answered(request).await) });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS)
        .max_buf_size(HEADER_BYTES)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = std::pin::pin!(connection);
    // How a reader's connection ends concerns the reader alone.
    if timeout(LIFE, connection.as_mut()).await.is_err() {
        connection.as_mut().graceful_shutdown();
        let _ = timeout(GRACE, connection).await;
    }
}
