//! Limited places for connections by strangers. Once all places are taken, the origin with the most connections gives
//! one place up.

use std::collections::HashMap;

use tokio::task::{AbortHandle, Id};

use crate::connections::Origin;

/// Places, each taken by the task of a connection, oldest first.
pub(crate) struct Places {
    taken: Vec<Place>,
    most: usize,
}

struct Place {
    origin: Origin,
    task: AbortHandle,
}

impl Places {
    /// Creates the table. `most` is the limit, at least 1.
    pub(crate) fn new(most: usize) -> Places {
        Places { taken: Vec::new(), most: most.max(1) }
    }

    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Assigns a place to the task. Returns whether an earlier task was aborted to free the place. An aborted task
    /// closes its socket only when scheduled, so the caller should yield. Otherwise a flood is accepted 128 connections
    /// at a time, and as many extra sockets are open.
    pub(crate) fn take(&mut self, origin: Origin, task: AbortHandle) -> bool {
        let origin = origin.of_host();
        let full = self.taken.len() >= self.most;
        if full && let Some(oldest) = self.oldest_of_the_most() {
            self.taken.remove(oldest).task.abort();
        }
        self.taken.push(Place { origin, task });
        full
    }

    /// Frees the place of a task that has ended.
    pub(crate) fn give_back(&mut self, task: Id) {
        self.taken.retain(|place| place.task.id() != task);
    }

    fn oldest_of_the_most(&self) -> Option<usize> {
        let mut of_origin = HashMap::new();
        for place in &self.taken {
            *of_origin.entry(place.origin).or_insert(0_usize) += 1;
        }
        let most = of_origin.values().copied().max();
        self.taken.iter().position(|place| of_origin.get(&place.origin).copied() == most)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use tokio::task::JoinSet;

    use super::*;

    fn host(last: u8) -> Origin {
        Origin::Host(IpAddr::from([10, 0, 0, last]))
    }

    #[tokio::test]
    async fn who_has_the_most_gives_way_and_the_oldest_among_equals() {
        let (mut places, mut tasks) = (Places::new(3), JoinSet::new());
        let mut take = |places: &mut Places, last| {
            let task = tasks.spawn(std::future::pending::<()>());
            (places.take(host(last), task.clone()), task.id())
        };
        let origins = |places: &Places| places.taken.iter().map(|place| place.origin).collect::<Vec<_>>();
        let (_, reader) = take(&mut places, 1);
        for _ in 0..100 {
            take(&mut places, 2);
        }
        // The flood holds only places that no other origin uses.
        assert_eq!(origins(&places), [host(1), host(2), host(2)]);
        assert!(take(&mut places, 3).0, "none was ended for it");
        assert_eq!(origins(&places), [host(1), host(2), host(3)]);
        take(&mut places, 4);
        assert_eq!(origins(&places), [host(2), host(3), host(4)]);
        // The reader's task was aborted, so its place belongs to another by now.
        places.give_back(reader);
        assert_eq!(places.taken.len(), 3);
        let last = places.taken[2].task.id();
        places.give_back(last);
        assert!(!take(&mut places, 5).0, "one was ended although there was room");
        assert_eq!(origins(&places), [host(2), host(3), host(5)]);
    }
}
