//! Limits over all connections of a server, and the server's view of each connection.

use std::{
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use longshore_proto::limits::{CALLS_SHARE, MAX_CALLS, MAX_CONNECTION_CALLS};

use super::{
    allowances::{Allowances, Place, network},
    ledger::{Account, Held, Ledger, Owner},
    tap::{Line, Taps},
};

/// Counters of open connections, open calls and held bytes of a server.
#[derive(Default)]
pub struct Bounds {
    connections: AtomicUsize,
    calls: AtomicUsize,
    ledger: Arc<Ledger>,
    allowances: Allowances,
}

impl Bounds {
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    pub fn allow(&self, most: usize) {
        self.ledger.connections.store(most, Ordering::Relaxed);
    }

    /// Opens an account for a connection that no [`Direct`](super::Direct) serves.
    pub fn account(&self, owner: Owner) -> Arc<Account> {
        Arc::new(Account::new(&self.ledger, owner))
    }
}

/// The server's view of one connection.
pub struct Standing {
    began: Instant,
    pub(super) line: Arc<Line>,
    pub(super) taps: Taps,
    pub account: Arc<Account>,
    calls: AtomicUsize,
    called: AtomicBool,
    /// End of the last call, in milliseconds since the connection began.
    quiet: AtomicU64,
    ended: AtomicBool,
    cut: AtomicBool,
}

impl Standing {
    pub fn has_calls(&self) -> bool {
        self.calls.load(Ordering::Relaxed) > 0
    }

    pub fn has_called(&self) -> bool {
        self.called.load(Ordering::Relaxed)
    }

    pub fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// Returns the time since the last call ended.
    pub fn quiet_for(&self) -> Duration {
        let quiet = Duration::from_millis(self.quiet.load(Ordering::Relaxed));
        self.began.elapsed().saturating_sub(quiet)
    }

    /// Ends the connection, unless a call begins before that.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
        self.line.wake();
    }

    /// Ends the connection and its calls.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
        self.line.wake();
    }
}

/// The connection's own end of its standing. The connection counts as open until the guest is dropped.
pub(super) struct Guest {
    pub(super) standing: Arc<Standing>,
    bounds: Arc<Bounds>,
    held: Held,
    /// Place of the address's allowance. None for the Unix socket.
    place: Option<Place>,
    /// Streams of open calls.
    open: Vec<u32>,
    /// Highest stream that began a call.
    pub(super) last: u32,
}

impl Guest {
    pub(super) fn new(bounds: &Arc<Bounds>, address: Option<IpAddr>) -> Guest {
        bounds.connections.fetch_add(1, Ordering::Relaxed);
        let account =
            bounds.account(address.map_or(Owner::Local, |address| Owner::Address(network(address))));
        let standing = Standing {
            began: Instant::now(),
            line: Arc::default(),
            taps: Taps::default(),
            account: Arc::clone(&account),
            calls: AtomicUsize::new(0),
            called: AtomicBool::new(false),
            quiet: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            cut: AtomicBool::new(false),
        };
        Guest {
            standing: Arc::new(standing),
            bounds: Arc::clone(bounds),
            held: Held::nothing(account),
            place: address.map(|address| bounds.allowances.place(address)),
            open: Vec::new(),
            last: 0,
        }
    }

    pub(super) fn began(&self) -> Instant {
        self.standing.began
    }

    /// Records headers on a stream. Returns false if the server has more than [`MAX_CALLS`] and this connection more
    /// than [`CALLS_SHARE`].
    pub(super) fn call(&mut self, stream: u32) -> bool {
        if !self.begins(stream) {
            return true;
        }
        self.last = stream;
        self.open.push(stream);
        self.standing.calls.store(self.open.len(), Ordering::Relaxed);
        self.standing.called.store(true, Ordering::Relaxed);
        let all = self.bounds.calls.fetch_add(1, Ordering::Relaxed) + 1;
        all <= MAX_CALLS || self.open.len() <= CALLS_SHARE
    }

    pub(super) fn hang_up(&mut self, stream: u32) {
        let Some(at) = self.open.iter().position(|&open| open == stream) else { return };
        self.open.swap_remove(at);
        self.bounds.calls.fetch_sub(1, Ordering::Relaxed);
        self.standing.calls.store(self.open.len(), Ordering::Relaxed);
        let quiet = self.standing.began.elapsed().as_millis() as u64;
        self.standing.quiet.store(quiet, Ordering::Relaxed);
    }

    pub(super) fn is_to_end(&self) -> bool {
        let Standing { ended, cut, .. } = &*self.standing;
        ended.swap(false, Ordering::Relaxed) && self.open.is_empty() || cut.load(Ordering::Relaxed)
    }

    /// Returns whether headers on this stream begin a call, rather than being its trailers.
    pub(super) fn begins(&self, stream: u32) -> bool {
        stream > self.last
    }

    /// Returns whether the newest call counts as useless traffic. A rank's call counts if HTTP/2 refuses it, since the
    /// connection has too many open calls. A stranger's call counts beyond the few that every connection may have.
    /// Strangers who read their answers earn allowance back.
    pub(super) fn is_to_pay(&self, is_stranger: bool) -> bool {
        let most = if is_stranger { CALLS_SHARE } else { MAX_CONNECTION_CALLS as usize };
        self.open.len() > most
    }

    /// Takes `bytes` from the address's allowance. Returns false if fewer are left, and None without an address.
    pub(super) fn take(&self, bytes: u64) -> Option<bool> {
        self.place.map(|place| self.bounds.allowances.take(place, bytes))
    }

    /// Sets the held bytes of the connection. Returns false if there is no room.
    pub(super) fn hold(&mut self, bytes: usize) -> bool {
        self.held.resize(bytes)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.bounds.calls.fetch_sub(self.open.len(), Ordering::Relaxed);
        self.bounds.connections.fetch_sub(1, Ordering::Relaxed);
        self.standing.calls.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use longshore_proto::limits::SHARE_BYTES;

    use super::*;

    #[test]
    fn what_is_held_is_given_back() {
        let bounds = Arc::new(Bounds::default());
        let other = bounds.account(Owner::Local);
        let most = other.hold(SHARE_BYTES).unwrap();
        let mut guest = Guest::new(&bounds, None);
        assert!(!guest.hold(1));
        drop(most);
        assert!(guest.hold(SHARE_BYTES) && guest.hold(5));
        assert!(other.hold(SHARE_BYTES - 4).is_none());
        drop(guest);
        assert!(other.hold(SHARE_BYTES).is_some());
        assert_eq!(bounds.connections(), 0);
    }

    #[test]
    fn a_connection_always_has_its_share_of_calls() {
        let bounds = Arc::new(Bounds::default());
        let mut flood = Guest::new(&bounds, None);
        assert!((0..MAX_CALLS as u32).all(|call| flood.call(2 * call + 1)));
        assert!(!flood.call(1_000_001));
        let mut worker = Guest::new(&bounds, None);
        assert!((0..CALLS_SHARE as u32).all(|call| worker.call(2 * call + 1)));
        assert!(!worker.call(1001));
        worker.hang_up(1001);
        assert!(worker.call(1001), "trailers are no call");
        drop(flood);
        assert!(worker.call(1003));
        assert_eq!(bounds.calls(), CALLS_SHARE + 1);
    }

    #[test]
    fn strangers_pay_for_more_calls_than_a_few() {
        let mut guest = Guest::new(&Arc::new(Bounds::default()), None);
        let is_to_pay = |call: u32| {
            assert!(guest.begins(2 * call + 1) && guest.call(2 * call + 1) && !guest.begins(2 * call + 1));
            (guest.is_to_pay(true), guest.is_to_pay(false))
        };
        let paid: Vec<(bool, bool)> = (0..MAX_CONNECTION_CALLS + 1).map(is_to_pay).collect();
        assert_eq!(paid.iter().filter(|(stranger, _)| !stranger).count(), CALLS_SHARE);
        assert_eq!(paid.iter().filter(|(_, rank)| *rank).count(), 1, "what HTTP/2 refuses");
        (0..MAX_CONNECTION_CALLS).for_each(|call| guest.hang_up(2 * call + 1));
        assert!(guest.call(1001) && !guest.is_to_pay(true), "one after the other is free");
    }
}
