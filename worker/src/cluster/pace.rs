//! Limits the link between a rank and its servers to a given speed, for measurements. All data connections share
//! the limit, which holds for each direction.

use std::{
    future::Future,
    io::{self, IoSlice, IoSliceMut},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use longshore_memory::Part;
use longshore_wire::direct::Socket;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};

use crate::lock;

/// The longest idle time that a link makes up for. Timers fire some milliseconds late, and a busy link must not lose
/// the time until they fire.
const CREDIT: Duration = Duration::from_millis(4);

/// The link of a rank. Clones share one link.
#[derive(Clone)]
pub(super) struct Pace {
    bytes_per_s: f64,
    incoming: Arc<Mutex<Instant>>,
    outgoing: Arc<Mutex<Instant>>,
}

impl Pace {
    pub(super) fn new(bytes_per_s: u64) -> Pace {
        let idle = || Arc::new(Mutex::new(Instant::now()));
        Pace { bytes_per_s: bytes_per_s as f64, incoming: idle(), outgoing: idle() }
    }

    fn direction(&self, free_at: &Arc<Mutex<Instant>>) -> Direction {
        Direction { bytes_per_s: self.bytes_per_s, free_at: free_at.clone(), timer: None }
    }
}

/// Bytes that one socket sends, or receives, over a link of a set speed.
struct Direction {
    bytes_per_s: f64,
    /// The time at which the link has moved all bytes accepted so far.
    free_at: Arc<Mutex<Instant>>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Direction {
    /// Becomes ready once the link is free.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        loop {
            let free_at = *lock(&self.free_at);
            if free_at <= Instant::now() {
                self.timer = None;
                return Poll::Ready(());
            }
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(free_at.into())));
            ready!(timer.as_mut().poll(context));
            self.timer = None;
        }
    }

    fn took(&self, bytes: usize) {
        let mut free_at = lock(&self.free_at);
        let now = Instant::now();
        let earliest = now.checked_sub(CREDIT).unwrap_or(now);
        *free_at = (*free_at).max(earliest) + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s);
    }
}

/// A socket that waits for its link's turn. Without a `Pace` the socket has its own speed.
pub(super) struct Paced<S> {
    socket: S,
    directions: Option<[Direction; 2]>,
}

impl<S> Paced<S> {
    pub(super) fn new(socket: S, pace: Option<&Pace>) -> Paced<S> {
        let directions =
            pace.map(|pace| [&pace.incoming, &pace.outgoing].map(|free_at| pace.direction(free_at)));
        Paced { socket, directions }
    }

    fn poll_incoming(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.directions.as_mut().map_or(Poll::Ready(()), |[incoming, _]| incoming.poll_turn(context))
    }

    fn poll_outgoing(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.directions.as_mut().map_or(Poll::Ready(()), |[_, outgoing]| outgoing.poll_turn(context))
    }

    fn came(&self, bytes: usize) {
        if let Some([incoming, _]) = &self.directions {
            incoming.took(bytes);
        }
    }

    fn went(&self, bytes: usize) {
        if let Some([_, outgoing]) = &self.directions {
            outgoing.took(bytes);
        }
    }
}

impl<S: Socket> Socket for Paced<S> {
    fn poll_read_into(
        &mut self,
        context: &mut Context<'_>,
        places: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_incoming(context));
        let count = ready!(self.socket.poll_read_into(context, places))?;
        self.came(count);
        Poll::Ready(Ok(count))
    }

    fn takes_addresses(&self) -> bool {
        self.socket.takes_addresses()
    }

    fn poll_write_parts(&mut self, context: &mut Context<'_>, parts: &[Part<'_>]) -> Poll<io::Result<usize>> {
        ready!(self.poll_outgoing(context));
        let count = ready!(self.socket.poll_write_parts(context, parts))?;
        self.went(count);
        Poll::Ready(Ok(count))
    }

    fn size_buffers(&self) {
        self.socket.size_buffers();
    }
}

impl<S: Socket> AsyncRead for Paced<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let paced = self.get_mut();
        ready!(paced.poll_incoming(context));
        let before = buffer.filled().len();
        ready!(Pin::new(&mut paced.socket).poll_read(context, buffer))?;
        paced.came(buffer.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl<S: Socket> AsyncWrite for Paced<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let paced = self.get_mut();
        ready!(paced.poll_outgoing(context));
        let count = ready!(Pin::new(&mut paced.socket).poll_write(context, bytes))?;
        paced.went(count);
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let paced = self.get_mut();
        ready!(paced.poll_outgoing(context));
        let count = ready!(Pin::new(&mut paced.socket).poll_write_vectored(context, slices))?;
        paced.went(count);
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sockets together keep to the link's speed, plus its credit.
    #[tokio::test]
    async fn two_sockets_share_a_link() {
        const RATE: u64 = 1_000_000;
        const BYTES: usize = 20_000;
        let pace = Pace::new(RATE);
        let [mut first, mut second] = [(), ()].map(|()| pace.direction(&pace.incoming));
        let begun = Instant::now();
        for _ in 0..5 {
            for direction in [&mut first, &mut second] {
                std::future::poll_fn(|context| direction.poll_turn(context)).await;
                direction.took(BYTES);
            }
        }
        std::future::poll_fn(|context| first.poll_turn(context)).await;
        let least = Duration::from_secs_f64(10.0 * BYTES as f64 / RATE as f64) - 2 * CREDIT;
        assert!(begun.elapsed() >= least, "{:?} are below {least:?}", begun.elapsed());
        // The other direction has moved nothing.
        let mut other = pace.direction(&pace.outgoing);
        let free = std::future::poll_fn(|context| Poll::Ready(other.poll_turn(context).is_ready())).await;
        assert!(free);
    }
}
