//! Places of the read window: the part of an image that each holds, and the place to evict next. Nothing is
//! moved here.

use longshore_proto::Version;

use crate::ids::OwnedShard;

/// An unused prefetch is given up after this many requests a place. Its pull has ended then, or its version
/// is gone.
const PATIENCE: u64 = 4;

/// Data of a shard that pulls read from a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tier::nvme) enum Kept {
    Image { version: Version, slot: u8 },
    Frozen,
}

/// A part of a shard's stored data, counted from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tier::nvme) struct PartOf {
    pub(in crate::tier::nvme) owned: OwnedShard,
    pub(in crate::tier::nvme) kept: Kept,
    pub(in crate::tier::nvme) part: usize,
}

/// Place of a part, for a reader that wants it. The reader is a user of that place until [`Places::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The part is in this place, or on its way there.
    Here(usize),
    /// The reader must read the part into this place, whose old part is evicted.
    Read(usize),
    /// All places are in use, and one of them will be released.
    Full,
}

/// The places of the read window.
pub(super) struct Places {
    places: Vec<Place>,
    /// Number of requests for parts so far.
    clock: u64,
}

#[derive(Clone, Default)]
struct Place {
    /// The part that a reader may find here, if any.
    holds: Option<PartOf>,
    reading: bool,
    /// Number of readers. A place with users is not evicted.
    users: usize,
    /// The part was read ahead, and nobody has asked for it yet.
    expected: bool,
    /// Time of the last request or prefetch, by the clock.
    used: u64,
}

impl Places {
    pub(super) fn new(count: usize) -> Places {
        Places { places: vec![Place::default(); count], clock: 0 }
    }

    fn find(&self, part: PartOf) -> Option<usize> {
        self.places.iter().position(|place| place.holds == Some(part))
    }

    fn is_free(place: &Place) -> bool {
        place.users == 0 && !place.reading
    }

    /// Returns the place to evict: an empty one, or the one whose part was requested longest ago.
    fn idle(&self) -> Option<usize> {
        let overdue = self.clock.saturating_sub(PATIENCE * self.places.len() as u64);
        let idle = |place: &Place| Places::is_free(place) && (!place.expected || place.used < overdue);
        let places = self.places.iter().enumerate().filter(|(_, place)| idle(place));
        places.min_by_key(|(_, place)| place.holds.map(|_| place.used)).map(|(index, _)| index)
    }

    /// Finds a part, or a place for it. If all parts are still expected, the latest prefetch is evicted.
    pub(super) fn want(&mut self, part: PartOf) -> Found {
        self.clock += 1;
        let found = self.find(part);
        let free = || self.places.iter().enumerate().filter(|(_, place)| Places::is_free(place));
        let last = || free().max_by_key(|(_, place)| place.used).map(|(index, _)| index);
        let Some(index) = found.or_else(|| self.idle()).or_else(last) else { return Found::Full };
        let place = &mut self.places[index];
        (place.expected, place.used) = (false, self.clock);
        place.users += 1;
        if found.is_some() {
            return Found::Here(index);
        }
        (place.holds, place.reading) = (Some(part), true);
        Found::Read(index)
    }

    /// Returns the place to prefetch a part into. None if the part is here already, or no place can be
    /// evicted.
    pub(super) fn ahead(&mut self, part: PartOf) -> Option<usize> {
        if self.find(part).is_some() {
            return None;
        }
        let index = self.idle()?;
        self.places[index] =
            Place { holds: Some(part), reading: true, users: 0, expected: true, used: self.clock };
        Some(index)
    }

    /// Ends a read. A part that was not read whole cannot be found.
    pub(super) fn arrived(&mut self, index: usize, whole: bool) {
        let place = &mut self.places[index];
        place.reading = false;
        place.holds = place.holds.filter(|_| whole);
    }

    pub(super) fn is_reading(&self, index: usize) -> bool {
        self.places[index].reading
    }

    pub(super) fn release(&mut self, index: usize) {
        self.places[index].users -= 1;
    }

    /// Makes all parts unfindable.
    pub(super) fn forget(&mut self) {
        self.places.iter_mut().for_each(|place| place.holds = None);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn part(part: usize) -> PartOf {
        PartOf { owned: OwnedShard(0), kept: Kept::Frozen, part }
    }

    /// Reads a part as a pull does. Returns true if it was there.
    fn pull(places: &mut Places, wanted: usize) -> bool {
        let found = places.want(part(wanted));
        match found {
            Found::Here(index) => {
                places.arrived(index, true);
                places.release(index);
                true
            }
            Found::Read(index) => {
                places.arrived(index, true);
                places.release(index);
                false
            }
            Found::Full => panic!("nobody uses any"),
        }
    }

    #[test]
    fn a_pull_in_order_finds_all_but_the_first() {
        for down in [false, true] {
            let mut places = Places::new(6);
            let order = |step: usize| if down { 1000 - step } else { step };
            let mut missed = 0;
            for step in 0..100 {
                for next in step + 1..step + 5 {
                    if let Some(index) = places.ahead(part(order(next))) {
                        places.arrived(index, true);
                    }
                }
                missed += usize::from(!pull(&mut places, order(step)));
            }
            assert_eq!(missed, 1);
        }
    }

    #[test]
    fn what_nobody_came_for_gives_way_after_a_while() {
        let room = |pulls: usize| {
            let mut places = Places::new(4);
            for left in 0..4 {
                let index = places.ahead(part(100 + left)).unwrap();
                places.arrived(index, true);
            }
            for _ in 0..pulls {
                pull(&mut places, 0);
            }
            (1..9).filter(|&next| places.ahead(part(next)).is_some()).count()
        };
        // A pull takes a place from an expected part. After four times four pulls no part is waited for.
        assert_eq!([0, 1, 16, 17].map(room), [0, 1, 1, 4]);
    }

    #[test]
    fn readers_of_one_part_share_it_and_others_wait() {
        let mut places = Places::new(1);
        assert_eq!(places.want(part(7)), Found::Read(0));
        assert_eq!(places.want(part(7)), Found::Here(0));
        assert!(places.is_reading(0));
        assert_eq!((places.want(part(8)), places.ahead(part(8))), (Found::Full, None));
        places.arrived(0, true);
        places.release(0);
        assert_eq!(places.want(part(8)), Found::Full);
        places.release(0);
        assert_eq!(places.want(part(8)), Found::Read(0));
        // A part that could not be read is not found.
        places.arrived(0, false);
        places.release(0);
        assert_eq!(places.want(part(8)), Found::Read(0));
    }

    proptest! {
        /// Whatever readers do, a part is found only where it was read, and no place in use is evicted. There
        /// is a place for a reader unless readers and drives hold all of them.
        #[test]
        fn no_place_in_use_gives_way(
            count in 1..5usize,
            events in prop::collection::vec((0..6u8, 0..9usize, any::<bool>()), 1..200),
        ) {
            let mut places = Places::new(count);
            let mut holds: Vec<Option<usize>> = vec![None; count];
            let mut users = vec![0usize; count];
            let mut reading = vec![false; count];
            for (event, which, whole) in events {
                let at = which % count;
                match event {
                    0 | 1 => match places.want(part(which)) {
                        Found::Here(index) => {
                            prop_assert_eq!(holds[index], Some(which));
                            users[index] += 1;
                        }
                        Found::Read(index) => {
                            prop_assert!(users[index] == 0 && !reading[index]);
                            prop_assert!(!holds.contains(&Some(which)));
                            (holds[index], reading[index], users[index]) = (Some(which), true, 1);
                        }
                        Found::Full => {
                            prop_assert!((0..count).all(|place| users[place] > 0 || reading[place]));
                        }
                    },
                    2 => if let Some(index) = places.ahead(part(which)) {
                        prop_assert!(users[index] == 0 && !reading[index]);
                        prop_assert!(!holds.contains(&Some(which)));
                        (holds[index], reading[index]) = (Some(which), true);
                    },
                    3 if reading[at] => {
                        places.arrived(at, whole);
                        reading[at] = false;
                        holds[at] = holds[at].filter(|_| whole);
                    }
                    4 if users[at] > 0 => {
                        places.release(at);
                        users[at] -= 1;
                    }
                    5 if which == 0 => {
                        places.forget();
                        holds.fill(None);
                    }
                    _ => {}
                }
                for (place, &reading) in reading.iter().enumerate() {
                    prop_assert_eq!(places.is_reading(place), reading);
                }
            }
        }
    }
}
