//! Connections to the HTTP address: how many, and for how long.

use std::{convert::Infallible, sync::Arc, time::Duration};

use http::{Request, header::ACCEPT};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};

use super::answers::Answers;
use crate::service::Services;

/// Connections at once. Those that come beyond it wait until one ends.
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
pub(crate) async fn serve(listener: TcpListener, services: Services) -> Infallible {
    let answers = Arc::new(Answers::new(services));
    let places = Arc::new(Semaphore::new(MOST));
    loop {
        // The semaphore is never closed.
        let place = Arc::clone(&places).acquire_owned().await.ok();
        match listener.accept().await {
            Ok((socket, _)) => {
                let answers = Arc::clone(&answers);
                tokio::spawn(async move {
                    answer(socket, &answers).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::debug!(%error, "no HTTP connection accepted");
                sleep(PAUSE).await;
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
