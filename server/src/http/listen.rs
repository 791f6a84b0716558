//! Connections to the HTTP address: how many, and for how long.

use std::{convert::Infallible, sync::Arc, time::Duration};

use http::{Request, header::ACCEPT};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};

use super::{answers::Answers, report::Listen};
use crate::{accept::Accept, log::Seldom, places::Places, service::Services};

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

/// Serves until it is dropped.
pub(crate) async fn serve(mut listener: TcpListener, services: Services, listen: Listen) -> Infallible {
    let answers = Arc::new(Answers::new(services, listen));
    let (mut places, full) = (Places::new(MOST), Seldom::default());
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(ended) = connections.join_next_with_id() => {
                places.give_back(ended.map_or_else(|error| error.id(), |(id, ())| id));
            }
            accepted = Accept::accept(&mut listener) => match accepted {
                Ok((socket, origin)) => {
                    let answers = Arc::clone(&answers);
                    let task = connections.spawn(async move { answer(socket, &answers).await });
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

async fn answer(socket: TcpStream, answers: &Arc<Answers>) {
    let service = service_fn(|request: Request<Incoming>| {
        let answers = Arc::clone(answers);
        async move {
            let accept =
                request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
            Ok::<_, Infallible>(answers.to(request.method(), request.uri(), accept).await)
        }
    });
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
