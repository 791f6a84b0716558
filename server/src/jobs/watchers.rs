//! Live processes of ranks: those with an open Watch. Waits for a rank check this, since an evaluating process sends
//! nothing for minutes. A dead process never sends anything again.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use longshore_proto::{Incarnation, Rank};

/// Open watches of each rank's process.
#[derive(Default)]
pub(crate) struct Watchers(Mutex<BTreeMap<(Rank, Incarnation), u32>>);

/// Guard of one open Watch of a rank's process.
pub(crate) struct Watching {
    among: Arc<Watchers>,
    who: (Rank, Incarnation),
}

impl Watchers {
    pub(crate) fn enter(self: &Arc<Self>, rank: Rank, incarnation: Incarnation) -> Watching {
        let who = (rank, incarnation);
        self.change(|open| *open.entry(who).or_default() += 1);
        Watching { among: Arc::clone(self), who }
    }

    pub(crate) fn has(&self, rank: Rank, incarnation: Incarnation) -> bool {
        self.change(|open| open.contains_key(&(rank, incarnation)))
    }

    fn change<T>(&self, act: impl FnOnce(&mut BTreeMap<(Rank, Incarnation), u32>) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.among.change(|open| {
            let count = open.remove(&self.who).unwrap_or_default();
            if count > 1 {
                open.insert(self.who, count - 1);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_there_until_its_last_watch_ends() {
        let watchers = Arc::<Watchers>::default();
        let (rank, old, new) = (Rank(1), Incarnation(7), Incarnation(8));
        let first = watchers.enter(rank, old);
        let second = watchers.enter(rank, old);
        drop(first);
        assert!(watchers.has(rank, old) && !watchers.has(rank, new) && !watchers.has(Rank(0), old));
        drop(second);
        assert!(!watchers.has(rank, old));
    }
}
