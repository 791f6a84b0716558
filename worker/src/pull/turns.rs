//! Orders the pulls of a connection. Units pulled ahead are needed one after the other. Side by side, the first unit
//! would arrive as late as the last.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use longshore_proto::Version;
use tokio::sync::Notify;

use crate::lock;

/// A pull is requested when at most this many bytes of earlier pulls are missing. So the link stays busy until the
/// pull's first bytes arrive, and the earlier pulls lose almost nothing.
///
/// On a 100 MB/s link, a request queues behind gradients for some 40 ms. With 2 MiB the link stood still for 22 ms
/// before each unit.
const OVERLAP_BYTES: u64 = 4 << 20;

/// Pulls over one connection to one server. Only pulls of one version wait for each other: an unfinished version
/// delays no pull of a finished version.
#[derive(Default)]
pub(super) struct Turns {
    waiting: Mutex<BTreeMap<u64, Waiting>>,
    changed: Notify,
}

struct Waiting {
    version: Version,
    missing: u64,
}

/// A pull's place in the order, held until dropped.
pub(super) struct Turn {
    turns: Arc<Turns>,
    number: u64,
    /// Set when a reader waits for the feed.
    hurry: Arc<Hurry>,
}

/// True once a reader waits for a feed's weights: its pulls then skip the order.
#[derive(Default)]
pub(super) struct Hurry {
    needed: AtomicBool,
    changed: Notify,
}

impl Hurry {
    pub(super) fn up(&self) {
        self.needed.store(true, Ordering::Release);
        self.changed.notify_waiters();
    }
}

impl Turns {
    /// Enters a pull behind all others.
    pub(super) fn enter(self: &Arc<Self>, version: Version, bytes: u64, hurry: &Arc<Hurry>) -> Turn {
        let mut waiting = lock(&self.waiting);
        let number = waiting.last_key_value().map_or(0, |(last, _)| last + 1);
        waiting.insert(number, Waiting { version, missing: bytes });
        Turn { turns: self.clone(), number, hurry: hurry.clone() }
    }
}

impl Turn {
    /// Returns once earlier pulls lack at most `OVERLAP_BYTES`, or once a reader waits for this pull.
    pub(super) async fn come(&self) {
        loop {
            let (changed, hurried) = (self.turns.changed.notified(), self.hurry.changed.notified());
            if self.is_next() || self.hurry.needed.load(Ordering::Acquire) {
                return;
            }
            tokio::select! {
                () = changed => {}
                () = hurried => {}
            }
        }
    }

    fn is_next(&self) -> bool {
        let waiting = lock(&self.turns.waiting);
        let Some(mine) = waiting.get(&self.number) else { return true };
        let before = waiting.range(..self.number).filter(|(_, before)| before.version == mine.version);
        before.map(|(_, before)| before.missing).sum::<u64>() <= OVERLAP_BYTES
    }

    /// Notes that `bytes` have arrived.
    pub(super) fn arrived(&self, bytes: u64) {
        if let Some(mine) = lock(&self.turns.waiting).get_mut(&self.number) {
            mine.missing = mine.missing.saturating_sub(bytes);
        }
        self.turns.changed.notify_waiters();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.turns.waiting).remove(&self.number);
        self.turns.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, task::Poll};

    use proptest::prelude::*;

    use super::*;

    const VERSION: Version = Version(3);
    const UNIT: u64 = 8 << 20;

    /// Returns true if the turn has come, without waiting.
    fn has_come(turn: &Turn) -> bool {
        let waker = std::task::Waker::noop();
        pin!(turn.come()).poll(&mut std::task::Context::from_waker(waker)) == Poll::Ready(())
    }

    #[test]
    fn pulls_of_the_same_weights_come_one_after_the_other() {
        let (turns, calm) = (Arc::new(Turns::default()), Arc::new(Hurry::default()));
        let [first, second, third] = [0; 3].map(|_| turns.enter(VERSION, UNIT, &calm));
        assert_eq!([&first, &second, &third].map(has_come), [true, false, false]);
        first.arrived(UNIT - OVERLAP_BYTES - 1);
        assert!(!has_come(&second));
        first.arrived(1);
        assert_eq!(
            [&second, &third].map(has_come),
            [true, false],
            "the end of the first and the start of the second"
        );
        drop(second);
        assert!(has_come(&third), "what is not wanted any more is waited for by nobody");
    }

    #[test]
    fn what_is_needed_now_or_of_another_version_waits_for_nothing() {
        let (turns, calm, needed) =
            (Arc::new(Turns::default()), Arc::new(Hurry::default()), Arc::new(Hurry::default()));
        let _first = turns.enter(VERSION, UNIT, &calm);
        let other = turns.enter(Version(4), UNIT, &calm);
        let (needs, waits) = (turns.enter(VERSION, UNIT, &needed), turns.enter(VERSION, UNIT, &calm));
        assert_eq!([&other, &needs, &waits].map(has_come), [true, false, false]);
        needed.up();
        assert_eq!([&needs, &waits].map(has_come), [true, false]);
    }

    #[tokio::test]
    async fn who_waits_is_woken() {
        for is_hurried in [false, true] {
            let (turns, calm) = (Arc::new(Turns::default()), Arc::new(Hurry::default()));
            let hurry = Arc::new(Hurry::default());
            let [first, second] = [0; 2].map(|_| turns.enter(VERSION, UNIT, &calm));
            let third = turns.enter(VERSION, UNIT, &hurry);
            let waits = tokio::spawn(async move { third.come().await });
            tokio::task::yield_now().await;
            assert!(!waits.is_finished());
            if is_hurried {
                hurry.up();
            } else {
                second.arrived(UNIT);
                drop(first);
            }
            tokio::time::timeout(std::time::Duration::from_secs(60), waits).await.unwrap().unwrap();
        }
    }

    proptest! {
        /// After any events, the first of the remaining pulls may start: no pull waits for ever.
        #[test]
        fn the_first_one_may_always_come(events in prop::collection::vec((0..4u8, 0..8usize, 0..2u64, 0..3 * UNIT), 1..60)) {
            let (turns, calm) = (Arc::new(Turns::default()), Arc::new(Hurry::default()));
            let mut left: Vec<(u64, Turn)> = Vec::new();
            for (event, at, version, bytes) in events {
                match event {
                    0 | 1 => left.push((version, turns.enter(Version(version), bytes, &calm))),
                    2 if at < left.len() => drop(left.remove(at)),
                    _ => left.iter().skip(at).take(1).for_each(|(_, turn)| turn.arrived(bytes)),
                }
                for version in 0..2 {
                    let first = left.iter().find(|(of, _)| *of == version);
                    prop_assert!(first.is_none_or(|(_, turn)| has_come(turn)));
                }
            }
            drop(left);
            prop_assert!(lock(&turns.waiting).is_empty());
        }
    }
}
