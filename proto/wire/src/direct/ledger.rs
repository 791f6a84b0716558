//! Bytes that peers make a server hold. Their sum over all connections is bounded, and so is the share of each identity
//! or address.
//!
//! Bytes are reserved before they are held, and released by drop. A rank's connection has [`RANK_SHARE_BYTES`] of its
//! own, which admission of its job has counted. All other bytes come out of the shared room.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use longshore_proto::limits::{ANSWER_DEADLINE, MAX_UNFINISHED_BYTES, RANK_SHARE_BYTES, SHARE_BYTES};
use tokio::sync::{Mutex as Turn, Notify};

use super::lock;

/// Holder of a share of the room.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// A host, until its callers show an identity.
    Address(IpAddr),
    /// A user of the Unix socket.
    User(u32),
    /// The Unix socket, until the kernel has named its user.
    Local,
    Identity(String),
}

/// The room for bytes that all connections share, and each owner's share of the room.
#[derive(Default)]
pub(super) struct Ledger {
    /// Connections that one owner may have; 0 until known.
    pub(super) connections: AtomicUsize,
    room: Room,
    shares: Mutex<HashMap<Owner, Weak<Room>>>,
}

/// Bytes that several connections hold together, and the calls that wait for more.
#[derive(Default)]
struct Room {
    held: AtomicUsize,
    freed: Notify,
    /// Held by the call that looks for room, so one call looks at a time. When 4096 calls looked at once, they took a
    /// core.
    turn: Turn<()>,
}

impl Room {
    fn add(&self, bytes: usize, most: usize) -> bool {
        let add = |now: usize| now.checked_add(bytes).filter(|&sum| sum <= most);
        self.held.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_ok()
    }

    fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.held.fetch_sub(bytes, Ordering::AcqRel);
            self.freed.notify_one();
        }
    }

    fn has(&self, bytes: usize, most: usize) -> bool {
        self.held.load(Ordering::Acquire).saturating_add(bytes) <= most
    }
}

impl Ledger {
    fn share(&self, owner: &Owner) -> Arc<Room> {
        let mut shares = lock(&self.shares);
        if let Some(share) = shares.get(owner).and_then(Weak::upgrade) {
            return share;
        }
        shares.retain(|_, share| share.strong_count() > 0);
        let share = Arc::<Room>::default();
        shares.insert(owner.clone(), Arc::downgrade(&share));
        share
    }
}

/// Bytes that one connection makes the server hold.
pub struct Account {
    ledger: Arc<Ledger>,
    state: Mutex<State>,
    vouched: AtomicBool,
    vouching: Notify,
    freed: Notify,
}

struct State {
    owner: Owner,
    share: Arc<Room>,
    held: usize,
    /// Part of `held` that counts against the shared room.
    charged: usize,
    /// Start times of the answers that their reader has not taken, keyed by the answer's number.
    answers: BTreeMap<u64, Instant>,
    next: u64,
}

impl Account {
    pub(super) fn new(ledger: &Arc<Ledger>, owner: Owner) -> Account {
        let share = ledger.share(&owner);
        let state = State { owner, share, held: 0, charged: 0, answers: BTreeMap::new(), next: 0 };
        Account {
            ledger: Arc::clone(ledger),
            state: Mutex::new(state),
            vouched: AtomicBool::new(false),
            vouching: Notify::new(),
            freed: Notify::new(),
        }
    }

    /// Makes the connection's bytes part of this owner's share.
    pub fn belongs_to(&self, owner: Owner) {
        let mut state = self.state();
        if state.owner == owner {
            return;
        }
        let share = self.ledger.share(&owner);
        // Bytes that the connection holds already may exceed the new share for a while.
        share.held.fetch_add(state.charged, Ordering::AcqRel);
        state.share.give_back(state.charged);
        (state.owner, state.share) = (owner, share);
    }

    /// Returns how many connections one owner may have. None until the server knows.
    pub fn most_connections(&self) -> Option<usize> {
        Some(self.ledger.connections.load(Ordering::Relaxed)).filter(|most| *most > 0)
    }

    /// Marks the connection as an admitted rank's, whose buffers are counted with the job.
    pub fn vouch(&self) {
        self.vouched.store(true, Ordering::Release);
        self.settle();
        self.vouching.notify_waiters();
    }

    /// Takes back the mark of [`Account::vouch`] when the job is closed.
    pub fn unvouch(&self) {
        self.vouched.store(false, Ordering::Release);
        self.settle();
    }

    pub fn is_vouched(&self) -> bool {
        self.vouched.load(Ordering::Acquire)
    }

    pub async fn vouched(&self) {
        let mut vouching = pin!(self.vouching.notified());
        vouching.as_mut().enable();
        if !self.is_vouched() {
            vouching.await;
        }
    }

    /// Returns whether an answer in the shared room was not taken within [`ANSWER_DEADLINE`]. A rank may leave weights
    /// unread for any time, within its own bytes.
    pub fn is_overdue(&self, now: Instant) -> bool {
        let begun = |begun: &Instant| now.saturating_duration_since(*begun) > ANSWER_DEADLINE;
        let state = self.state();
        state.charged > 0 && state.answers.values().next().is_some_and(begun)
    }

    /// Reserves `bytes`. None if there is no room.
    pub fn hold(self: &Arc<Self>, bytes: usize) -> Option<Held> {
        let mut held = Held::nothing(Arc::clone(self));
        held.resize(bytes).then_some(held)
    }

    /// Reserves `bytes` once there is room, in order of arrival. Never returns if `bytes` exceed the whole room.
    pub async fn room(self: &Arc<Self>, bytes: usize) -> Held {
        loop {
            let mut freed = pin!(self.freed.notified());
            freed.as_mut().enable();
            // A rank waits until its own bytes suffice, and not in the strangers' queue.
            let of_rank = self.is_vouched() && bytes <= RANK_SHARE_BYTES;
            let has_own = !of_rank || self.state().held + bytes <= RANK_SHARE_BYTES;
            if has_own && let Some(held) = self.hold(bytes) {
                return held;
            }
            tokio::select! {
                () = freed => {}
                () = self.vouched(), if !of_rank && !self.is_vouched() => {}
                () = self.in_turn(bytes), if !of_rank => {}
            }
        }
    }

    /// Waits until `bytes` are free in the share and in the shared room. Another call may still take these bytes before
    /// the caller does.
    async fn in_turn(&self, bytes: usize) {
        let share = Arc::clone(&self.state().share);
        let _of_share = share.turn.lock().await;
        until(&share, bytes, SHARE_BYTES).await;
        let room = &self.ledger.room;
        let _turn = room.turn.lock().await;
        until(room, bytes, MAX_UNFINISHED_BYTES).await;
    }

    fn own(&self) -> usize {
        if self.is_vouched() { RANK_SHARE_BYTES } else { 0 }
    }

    fn resize(&self, from: usize, to: usize) -> bool {
        let mut state = self.state();
        let held = state.held - from + to;
        let charged = held.saturating_sub(self.own());
        if charged > state.charged {
            let more = charged - state.charged;
            if !state.share.add(more, SHARE_BYTES) {
                return false;
            }
            if !self.ledger.room.add(more, MAX_UNFINISHED_BYTES) {
                state.share.give_back(more);
                return false;
            }
        } else {
            state.share.give_back(state.charged - charged);
            self.ledger.room.give_back(state.charged - charged);
        }
        (state.held, state.charged) = (held, charged);
        drop(state);
        if to < from {
            self.freed.notify_waiters();
        }
        true
    }

    /// Charges the held bytes again after `vouched` has changed, even beyond limits.
    fn settle(&self) {
        let mut state = self.state();
        let charged = state.held.saturating_sub(self.own());
        for room in [&*state.share, &self.ledger.room] {
            room.held.fetch_add(charged, Ordering::AcqRel);
            room.give_back(state.charged);
        }
        state.charged = charged;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

async fn until(room: &Room, bytes: usize, most: usize) {
    loop {
        // A stored notification of an earlier release only causes one more look.
        let freed = room.freed.notified();
        if room.has(bytes, most) {
            return;
        }
        freed.await;
    }
}

/// Reservation of bytes, which count as held until the reservation is dropped.
pub struct Held {
    account: Arc<Account>,
    bytes: usize,
    answer: Option<u64>,
}

impl Held {
    pub(super) fn nothing(account: Arc<Account>) -> Held {
        Held { account, bytes: 0, answer: None }
    }

    /// Changes the reservation to `bytes`. Returns false, and changes nothing, if there is no room.
    pub fn resize(&mut self, bytes: usize) -> bool {
        let held = bytes == self.bytes || self.account.resize(self.bytes, bytes);
        if held {
            self.bytes = bytes;
        }
        held
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Makes the bytes an answer, which its reader has to take within [`ANSWER_DEADLINE`].
    #[must_use]
    pub fn as_answer(mut self) -> Held {
        let mut state = self.account.state();
        let number = state.next;
        state.next += 1;
        state.answers.insert(number, Instant::now());
        drop(state);
        self.answer = Some(number);
        self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(answer) = self.answer {
            self.account.state().answers.remove(&answer);
        }
        self.resize(0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn account(ledger: &Arc<Ledger>, host: u8) -> Arc<Account> {
        Arc::new(Account::new(ledger, Owner::Address([10, 0, 0, host].into())))
    }

    #[test]
    fn one_address_leaves_room_for_others_and_an_identity_is_one_whatever_its_addresses() {
        let ledger = Arc::<Ledger>::default();
        let (first, second, other) = (account(&ledger, 1), account(&ledger, 1), account(&ledger, 2));
        let most = first.hold(SHARE_BYTES).unwrap();
        assert!(second.hold(1).is_none() && other.hold(MAX_UNFINISHED_BYTES - SHARE_BYTES).is_some());
        first.belongs_to(Owner::Identity("team".into()));
        assert!(second.hold(1).is_some());
        other.belongs_to(Owner::Identity("team".into()));
        assert!(other.hold(1).is_none());
        drop(most);
        assert!(other.hold(SHARE_BYTES).is_some());
    }

    #[test]
    fn a_rank_has_bytes_of_its_own_until_its_job_is_closed() {
        let ledger = Arc::<Ledger>::default();
        let (rank, flood) = (account(&ledger, 1), account(&ledger, 2));
        let flooded = [flood.hold(SHARE_BYTES), account(&ledger, 3).hold(MAX_UNFINISHED_BYTES - SHARE_BYTES)];
        assert!(flooded.iter().all(Option::is_some) && rank.hold(1).is_none());
        rank.vouch();
        let own = rank.hold(RANK_SHARE_BYTES).unwrap();
        assert!(rank.hold(1).is_none(), "beyond its own it draws on the shared room");
        rank.unvouch();
        assert_eq!(ledger.room.held.load(Ordering::Relaxed), MAX_UNFINISHED_BYTES + RANK_SHARE_BYTES);
        drop((flooded, own));
        assert_eq!(ledger.room.held.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_answer_that_nobody_takes_is_overdue() {
        let account = account(&Arc::default(), 1);
        let later = Instant::now() + ANSWER_DEADLINE + Duration::from_secs(1);
        let request = account.hold(9).unwrap();
        assert!(!account.is_overdue(later));
        let answer = account.hold(9).unwrap().as_answer();
        assert!(account.is_overdue(later) && !account.is_overdue(Instant::now()));
        drop(answer);
        assert!(!account.is_overdue(later));
        drop(request);
    }

    #[tokio::test]
    async fn strangers_wait_for_room_in_turn_and_ranks_for_their_own_bytes() {
        let ledger = Arc::<Ledger>::default();
        let (flood, other) = (account(&ledger, 1), account(&ledger, 2));
        let full = [flood.hold(SHARE_BYTES), other.hold(MAX_UNFINISHED_BYTES - SHARE_BYTES)];
        let waiter = |account: &Arc<Account>| {
            let account = Arc::clone(account);
            tokio::spawn(async move { account.room(1000).await.bytes() })
        };
        let rank = account(&ledger, 3);
        let waits = [waiter(&flood), waiter(&other), waiter(&rank)];
        tokio::task::yield_now().await;
        assert!(waits.iter().all(|waits| !waits.is_finished()));
        rank.vouch();
        let [of_flood, of_other, of_rank] = waits;
        assert_eq!(of_rank.await.unwrap(), 1000);
        drop(full);
        assert_eq!((of_flood.await.unwrap(), of_other.await.unwrap()), (1000, 1000));
    }

    proptest! {
        /// Whatever is held, resized, vouched for and dropped: sums are exact, and strangers stay within the room.
        #[test]
        fn sums_are_of_what_is_held(acts in prop::collection::vec((0..4u8, 0..6usize, 0..2 * RANK_SHARE_BYTES), 0..80)) {
            let ledger = Arc::<Ledger>::default();
            let accounts: Vec<_> = (0..6).map(|host| account(&ledger, host / 2)).collect();
            let mut held: Vec<Held> = Vec::new();
            for (act, at, bytes) in acts {
                match act {
                    0 => held.extend(accounts[at].hold(bytes)),
                    1 if at < held.len() => drop(held.swap_remove(at)),
                    2 if at < held.len() => {
                        held[at].resize(bytes);
                    }
                    3 if at == 0 => accounts[at].vouch(),
                    3 if at == 1 => accounts[0].unvouch(),
                    _ => {}
                }
                let of = |account: &Arc<Account>| {
                    let bytes = held.iter().filter(|held| Arc::ptr_eq(&held.account, account)).map(|held| held.bytes);
                    bytes.sum::<usize>().saturating_sub(account.own())
                };
                let sum: usize = accounts.iter().map(of).sum();
                prop_assert_eq!(ledger.room.held.load(Ordering::Relaxed), sum);
                prop_assert!(sum <= MAX_UNFINISHED_BYTES + RANK_SHARE_BYTES);
            }
            drop(held);
            prop_assert_eq!(ledger.room.held.load(Ordering::Relaxed), 0);
        }
    }
}
