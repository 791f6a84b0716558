//! Servers inside this process. Their callers here need no socket: a call is a future, and runs on its caller's thread.
//! Through a Unix socket a small step spent most of its time on HTTP/2 and on waking threads.

use std::{
    future::Future,
    pin::Pin,
    process,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    task::{Context, Poll},
};

use bytes::Bytes;
use http::Request;
use http_body::{Frame, SizeHint};
use tokio::sync::watch;
use tonic::{Status, body::Body};

use crate::{
    Answer, Channel,
    direct::{Bounds, Connection},
};

/// The servers that run in this process. A forked process inherits the list, but none of the servers' threads.
static SERVERS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

struct Entry {
    address: String,
    process: u32,
    server: Weak<Local>,
}

/// A server's entry in the list. Dropping the entry ends all calls that reached the server without a socket.
pub struct Local {
    carry: Box<dyn Fn(Request<Body>) -> Answer + Send + Sync>,
    bounds: Arc<Bounds>,
    /// Dropped with the entry, which ends the calls.
    running: watch::Sender<()>,
}

/// Lists a server of this process by its address. `carry` answers calls, within the limits of `bounds`.
pub fn serve(
    address: &str,
    bounds: &Arc<Bounds>,
    carry: impl Fn(Request<Body>) -> Answer + Send + Sync + 'static,
) -> Arc<Local> {
    let (carry, bounds) = (Box::new(carry), Arc::clone(bounds));
    let local = Arc::new(Local { carry, bounds, running: watch::Sender::default() });
    let mut servers = servers();
    servers.retain(|entry| entry.server.strong_count() > 0);
    let server = Arc::downgrade(&local);
    servers.push(Entry { address: address.into(), process: process::id(), server });
    local
}

/// Returns a connection to the server of this process with this address; None if there is none.
pub fn channel(address: &str) -> Option<Channel> {
    let is_asked = |entry: &&Entry| entry.address == address && entry.process == process::id();
    let weak = servers().iter().find(is_asked)?.server.clone();
    let connection = Connection::local(&weak.upgrade()?.bounds);
    Some(Channel::carried(move |mut request| {
        let Some(server) = weak.upgrade() else { return Box::pin(async { Ok(ended().into_http()) }) };
        request.extensions_mut().insert(connection.clone());
        let (answer, mut over) = ((server.carry)(request), over(server.running.subscribe()));
        Box::pin(async move {
            tokio::select! {
                // The server's end is checked first, since it aborts the server's tasks. The output of an aborted task
                // is no answer.
                biased;
                () = &mut over => Ok(ended().into_http()),
                answer = answer => Ok(answer?.map(|body| Body::new(Ending { body, over: Some(over) }))),
            }
        })
    }))
}

fn servers() -> MutexGuard<'static, Vec<Entry>> {
    SERVERS.lock().unwrap_or_else(PoisonError::into_inner)
}

type Over = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Resolves when the server has ended.
fn over(mut running: watch::Receiver<()>) -> Over {
    Box::pin(async move { while running.changed().await.is_ok() {} })
}

fn ended() -> Status {
    Status::unavailable("the server of this process has ended")
}

/// The body of an answer, which ends with its server. Dropping the server's body ends the task that feeds it.
struct Ending {
    body: Body,
    /// Resolves at the server's end. None once it has resolved.
    over: Option<Over>,
}

impl http_body::Body for Ending {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(over) = &mut self.over
            && over.as_mut().poll(context).is_ready()
        {
            (self.body, self.over) = (Body::empty(), None);
            return Poll::Ready(Some(Err(ended())));
        }
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
