//! The connections of a server: their limit, and the order in which they are closed once the limit is reached.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    convert::Infallible,
    net::IpAddr,
    sync::{Arc, Mutex, Weak},
    time::{Duration, Instant, SystemTime},
};

use longshore_proto::limits::{
    CONNECTIONS_PER_RANK, LOCAL_CONNECTIONS, OTHERS_CONNECTIONS, SPARE_CONNECTIONS,
};
use longshore_wire::direct::{Bounds, Direct, Kept, Owner, Socket, Standing, network};
use rustix::process::geteuid;

use crate::{jobs::Jobs, lock::lock, log::Seldom, trust::Register};

/// Origin of a connection. Connections of the origin that has most are closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Origin {
    Host(IpAddr),
    /// A user of this host over loopback; None if the kernel names no user.
    Neighbour {
        address: IpAddr,
        user: Option<u32>,
    },
    /// A user of the Unix socket.
    Local(u32),
}

impl Origin {
    fn address(self) -> Option<IpAddr> {
        match self {
            Origin::Host(address) | Origin::Neighbour { address, .. } => Some(address),
            Origin::Local(_) => None,
        }
    }

    /// Returns the origin by which connections are counted: a host has all addresses of its network.
    pub(crate) fn of_host(self) -> Origin {
        match self {
            Origin::Host(address) => Origin::Host(network(address)),
            Origin::Neighbour { .. } | Origin::Local(_) => self,
        }
    }

    /// Returns whether the peer is root or the server's own user, whose connections are always taken.
    fn is_operator(self) -> bool {
        matches!(self, Origin::Local(user) if user == 0 || user == geteuid().as_raw())
    }
}

/// Time after a connection's begin, and after each call's end, in which the connection is not closed to make room.
const SETTLED: Duration = Duration::from_secs(1);
/// Age from which a connection may be cut during a call, while strangers' calls take all places.
const CALL: Duration = Duration::from_secs(10);
/// Interval of the check for expired certificates and lost credentials.
const LOOK: Duration = Duration::from_secs(1);
/// Divisor for the number of connections closed at a time. Finding many connections to close costs no more than finding
/// one.
const SHARE_ENDED: usize = 16;

/// Table of open connections. [`crate::accept`] registers each accepted one.
pub(crate) struct Connections {
    bounds: Arc<Bounds>,
    configured: Option<usize>,
    /// Connections that the limit of descriptors allows.
    possible: usize,
    jobs: Arc<Jobs>,
    entries: Mutex<Vec<Entry>>,
    full: Seldom,
    short: Seldom,
}

struct Entry {
    origin: Origin,
    /// Expiry of the client's certificate.
    expires: Option<SystemTime>,
    kept: Weak<Mutex<Kept>>,
    /// The credential was lost at the last check. Calls are refused with that reason, before the next check ends the
    /// connection.
    lost: bool,
    standing: Weak<Standing>,
}

impl Connections {
    pub(crate) fn new(
        bounds: &Arc<Bounds>,
        configured: Option<usize>,
        possible: usize,
        jobs: Arc<Jobs>,
    ) -> Arc<Connections> {
        Arc::new(Connections {
            bounds: Arc::clone(bounds),
            configured,
            possible,
            jobs,
            entries: Mutex::default(),
            full: Seldom::default(),
            short: Seldom::default(),
        })
    }

    /// Registers a new connection. Returns None if the connection is refused for lack of room.
    pub(crate) fn welcome<S: Socket>(&self, socket: S, origin: Origin) -> Option<Direct<S>> {
        let origin = origin.of_host();
        let (now, most) = (self.bounds.connections(), self.most());
        let share = most - OTHERS_CONNECTIONS.min(most / 4);
        self.bounds.allow(share);
        let beside = if matches!(origin, Origin::Local(_)) { LOCAL_CONNECTIONS } else { 0 };
        let of_origin = self.of(origin);
        if (now >= most + beside || of_origin >= share) && !origin.is_operator() {
            let ended = self.make_room(most, (of_origin >= share).then_some(origin));
            self.full.say(|| {
                tracing::warn!(
                    most,
                    ended,
                    "all connections are taken, and those without a call are ended. See who connects, or raise \
                     --max-connections and the limit of descriptors"
                );
            });
            // Connections that were just closed may still count as open, so some more than the limit are accepted.
            let grace = (most / SHARE_ENDED).max(1);
            if ended == 0 || now >= most + beside + grace || of_origin >= share + grace {
                return None;
            }
        }
        let expires = socket.expires();
        let (direct, standing) = Direct::serve(socket, &self.bounds, origin.address());
        if let Origin::Local(user) = origin {
            standing.account.belongs_to(Owner::User(user));
        }
        let kept = direct.kept();
        lock(kept).push(Box::new(origin));
        let kept = Arc::downgrade(kept);
        let mut entries = lock(&self.entries);
        if entries.len() >= 2 * now + 64 {
            entries.retain(|entry| entry.standing.strong_count() > 0);
        }
        entries.push(Entry { origin, expires, kept, lost: false, standing: Arc::downgrade(&standing) });
        Some(direct)
    }

    fn of(&self, origin: Origin) -> usize {
        let entries = lock(&self.entries);
        entries.iter().filter(|entry| entry.origin == origin && entry.standing.strong_count() > 0).count()
    }

    /// Closes connections and their calls. Reasons are an expired certificate, a credential taken back, and an
    /// answer that has waited too long for its reader. Clients with new credentials reconnect.
    pub(crate) async fn watch(self: Arc<Self>, register: Option<Arc<Register>>) -> Infallible {
        loop {
            tokio::time::sleep(LOOK).await;
            let ended = self.end_expired(SystemTime::now());
            if ended > 0 {
                tracing::info!(ended, "connections were ended, since their certificates have expired");
            }
            let ended = register.as_deref().map_or(0, |register| self.end_lost(register));
            if ended > 0 {
                tracing::info!(ended, "connections were ended, since their credentials were taken back");
            }
            let ended = self.end_overdue(Instant::now());
            if ended > 0 {
                tracing::info!(ended, "connections were ended, since their answers were not taken in time");
            }
        }
    }

    fn end_expired(&self, now: SystemTime) -> usize {
        let mut entries = lock(&self.entries);
        let expired = entries.extract_if(.., |entry| entry.expires.is_some_and(|expires| expires < now));
        expired.filter_map(|entry| entry.standing.upgrade()).map(|standing| standing.cut()).count()
    }

    /// Ends connections whose credential was lost at two checks in a row.
    fn end_lost(&self, register: &Register) -> usize {
        let mut entries = lock(&self.entries);
        let lost = entries.extract_if(.., |entry| {
            let Some(kept) = entry.kept.upgrade() else { return false };
            let lost = register.has_lost(&lock(&kept));
            std::mem::replace(&mut entry.lost, lost) && lost
        });
        lost.filter_map(|entry| entry.standing.upgrade()).map(|standing| standing.cut()).count()
    }

    fn end_overdue(&self, now: Instant) -> usize {
        let entries = lock(&self.entries);
        let open = entries.iter().filter_map(|entry| entry.standing.upgrade());
        open.filter(|standing| standing.account.is_overdue(now)).map(|standing| standing.cut()).count()
    }

    /// Logs that the host lacks a descriptor or memory for another connection, and closes some.
    pub(crate) fn run_short(&self, error: &std::io::Error) {
        let connections = self.bounds.connections();
        let ended = self.make_room(connections, None);
        self.short.say(|| {
            tracing::warn!(
                %error,
                connections,
                ended,
                "cannot accept connections, and those without a call are ended. Raise the limit of descriptors with \
                 ulimit -n or LimitNOFILE"
            );
        });
    }

    fn most(&self) -> usize {
        let ranks =
            || -> usize { self.jobs.all().iter().map(|handle| handle.job.spec().world_size as usize).sum() };
        let wanted = self.configured.unwrap_or_else(|| SPARE_CONNECTIONS + CONNECTIONS_PER_RANK * ranks());
        wanted.min(self.possible)
    }

    /// Closes some of `all` connections, or some of one origin, and returns the number of closed ones.
    fn make_room(&self, all: usize, of: Option<Origin>) -> usize {
        let mut entries = lock(&self.entries);
        entries.retain(|entry| entry.standing.strong_count() > 0);
        let (mut of_origin, mut with_unused) = (HashMap::new(), HashSet::new());
        let mut found = Vec::new();
        for Entry { origin, standing, .. } in &*entries {
            *of_origin.entry(*origin).or_insert(0_usize) += 1;
            if of.unwrap_or(*origin) == *origin
                && !origin.is_operator()
                && let Some(standing) = standing.upgrade()
                && !standing.account.is_vouched()
            {
                let turn = turn(&standing);
                if turn == Turn::Unused {
                    with_unused.insert(*origin);
                }
                if has_waited(&standing, turn) {
                    found.push((*origin, turn, standing));
                }
            }
        }
        // Connections of a burst have no call yet, and must not end older connections of their origin that have called.
        found.retain(|(origin, turn, _)| *turn == Turn::Unused || !with_unused.contains(origin));
        // Connections with a call are closed only if no connection without a call is left to close.
        if found.iter().any(|(_, turn, _)| *turn < Turn::Calling) {
            found.retain(|(_, turn, _)| *turn < Turn::Calling);
        }
        found.sort_by_cached_key(|(origin, turn, standing)| {
            (Reverse(of_origin[origin]), *turn, Reverse(standing.quiet_for()))
        });
        found.truncate((all / SHARE_ENDED).max(1));
        for (_, turn, standing) in &found {
            if *turn == Turn::Calling { standing.cut() } else { standing.end() }
        }
        found.len()
    }
}

/// Order in which connections are closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Unused,
    Quiet,
    Calling,
}

/// Returns a connection's place in the closing order.
fn turn(standing: &Standing) -> Turn {
    match (standing.has_calls(), standing.has_called()) {
        (true, _) => Turn::Calling,
        (false, true) => Turn::Quiet,
        (false, false) => Turn::Unused,
    }
}

/// Returns whether a connection was open for long enough to be closed.
fn has_waited(standing: &Standing, turn: Turn) -> bool {
    match turn {
        Turn::Calling => standing.age() >= CALL,
        Turn::Unused | Turn::Quiet => standing.quiet_for() >= SETTLED,
    }
}
