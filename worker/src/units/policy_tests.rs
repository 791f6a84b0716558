//! The policy against random passes, and against Belady's optimum where that is known.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[path = "policy_clock.rs"]
mod clock;

/// Device memory as a driver would have it. It does what the policy says and checks that it may be done.
struct Device {
    policy: Policy,
    sizes: Vec<u64>,
    capacity: u64,
    coming: BTreeSet<Item>,
    arriving: BTreeSet<Item>,
    here: BTreeSet<Item>,
    /// Labels up to this one can be had.
    newest: u64,
    loads: BTreeMap<Label, usize>,
    last_loads: Vec<Item>,
    by_demand: usize,
}

impl Device {
    fn new(sizes: Vec<u64>, capacity: u64, window: u64) -> Device {
        let policy = Policy::new(sizes.clone(), capacity, window);
        let (coming, arriving, here) = Default::default();
        Device {
            policy,
            sizes,
            capacity,
            coming,
            arriving,
            here,
            newest: 0,
            loads: BTreeMap::new(),
            last_loads: Vec::new(),
            by_demand: 0,
        }
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Load(item) => {
                    assert!(!self.here.contains(&item) && !self.arriving.contains(&item), "{item:?}");
                    assert!(self.coming.insert(item), "{item:?} is asked for twice");
                    self.last_loads.push(item);
                    *self.loads.entry(item.label).or_default() += 1;
                }
                Action::Drop(item) => {
                    assert!(
                        self.coming.remove(&item) || self.here.remove(&item),
                        "{item:?} cannot be dropped"
                    );
                }
            }
            let bytes = self.bytes();
            assert!(bytes <= self.capacity, "{bytes} of {}", self.capacity);
        }
        assert_eq!(self.bytes(), self.policy.used_bytes());
    }

    fn bytes(&self) -> u64 {
        let all = self.coming.iter().chain(&self.arriving).chain(&self.here);
        all.map(|item| self.sizes[item.unit]).sum()
    }

    /// Brings what `pick` chooses one stage further. False if nothing can be had.
    fn bring(&mut self, pick: usize) -> bool {
        let ready: Vec<Item> =
            self.coming.iter().copied().filter(|item| item.label.0 <= self.newest).collect();
        let all: Vec<Item> = ready.into_iter().chain(self.arriving.iter().copied()).collect();
        let Some(&item) = all.get(pick % all.len().max(1)) else { return false };
        if self.coming.remove(&item) {
            assert!(self.policy.arriving(item));
            self.arriving.insert(item);
        } else {
            self.arriving.remove(&item);
            self.here.insert(item);
            let actions = self.policy.arrived(item);
            self.act(actions);
        }
        true
    }

    fn settle(&mut self) {
        while self.bring(0) {}
    }

    /// Gets a unit, as a driver does that waits for whatever comes. Returns false if there is no room beside held units.
    fn acquire(&mut self, unit: usize, mut pick: impl FnMut() -> usize) -> bool {
        self.policy.uses(unit);
        loop {
            let (demand, actions) = self.policy.demand(unit);
            self.act(actions);
            match demand {
                Demand::Here => return true,
                Demand::Coming { by_demand } => self.by_demand += usize::from(by_demand),
                Demand::Full => {}
                Demand::NoRoom { held } => {
                    assert!(held + self.sizes[unit] > self.capacity, "there is room beside {held}");
                    return false;
                }
            }
            assert!(self.bring(pick()), "unit {unit} is awaited and nothing can come");
        }
    }

    fn release(&mut self, unit: usize) {
        let actions = self.policy.release(unit);
        self.act(actions);
    }

    /// A step of some passes in this order, whose weights can be had from now on.
    fn step(&mut self, label: u64, order: &[usize], passes: usize, known_ahead: bool) {
        self.newest = label;
        let next = |pass: usize| {
            let again = std::iter::repeat_n(Label(label), passes - 1 - pass);
            again.chain(known_ahead.then_some(Label(label + 1))).collect()
        };
        for pass in 0..passes {
            let actions = self.policy.begin(Label(label), next(pass));
            self.act(actions);
            for &unit in order {
                self.settle();
                assert!(self.acquire(unit, || 0));
                self.settle();
                self.release(unit);
            }
            let mut upcoming = next(pass);
            if pass + 1 == passes && !known_ahead {
                upcoming.push(Label(label + 1));
            }
            let actions = self.policy.end(upcoming);
            self.act(actions);
        }
    }
}

/// The loads of each label by Belady's optimum, with room for so many units.
fn optimum(uses: &[Item], room: usize) -> BTreeMap<Label, usize> {
    let mut held: Vec<Item> = Vec::new();
    let mut loads = BTreeMap::new();
    for (at, item) in uses.iter().enumerate() {
        if held.contains(item) {
            continue;
        }
        *loads.entry(item.label).or_default() += 1;
        if held.len() == room {
            let next = |held: &Item| uses[at..].iter().position(|item| item == held).unwrap_or(usize::MAX);
            let last = (0..held.len()).max_by_key(|&index| next(&held[index])).unwrap();
            held.swap_remove(last);
        }
        held.push(*item);
    }
    loads
}

fn there_and_back(units: usize) -> Vec<usize> {
    (0..units).chain((0..units).rev()).collect()
}

fn all_uses(order: &[usize], passes: usize, labels: u64) -> Vec<Item> {
    let step = |label| {
        let uses = std::iter::repeat_n(order, passes).flatten();
        uses.map(move |&unit| Item { unit, label: Label(label) })
    };
    (0..labels).flat_map(step).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Passes of any order, with several units held at once, whose loads come in any order; the next version's do not
    /// come at all before the step ends.
    #[test]
    fn the_budget_is_kept_and_every_unit_comes(
        sizes in prop::collection::vec(1u64..20, 1..8),
        more in 0u64..60,
        window in 1u64..80,
        passes in prop::collection::vec(
            (any::<bool>(), 0u64..3, prop::collection::vec((any::<u8>(), any::<u8>()), 0..24)),
            1..8,
        ),
        known_ahead in any::<bool>(),
    ) {
        let capacity = sizes.iter().max().unwrap() + more;
        let mut device = Device::new(sizes.clone(), capacity, window);
        let mut label = 0;
        for (training, newer, uses) in passes {
            label += newer;
            device.newest = label;
            let actions = match training {
                true => {
                    let ahead = known_ahead.then_some(Label(label + 1));
                    device.policy.begin(Label(label), ahead.into_iter().collect())
                }
                false => device.policy.evaluate(Label(label)),
            };
            device.act(actions);
            let mut held: Vec<usize> = Vec::new();
            for (unit, chance) in uses {
                let unit = unit as usize % sizes.len();
                if held.contains(&unit) {
                    continue;
                }
                let mut picks = usize::from(chance);
                let came = device.acquire(unit, || {
                    picks = picks.wrapping_mul(31).wrapping_add(7);
                    picks
                });
                if came {
                    held.push(unit);
                }
                if !came || chance % 3 > 0 {
                    held.drain(..).for_each(|unit| device.release(unit));
                }
                for pick in 0..chance % 4 {
                    device.bring(usize::from(pick));
                }
            }
            held.into_iter().for_each(|unit| device.release(unit));
            prop_assert_eq!(device.policy.held().count(), 0);
            let actions = device.policy.end(vec![Label(label + 1)]);
            device.act(actions);
        }
    }

    /// What stays from forward to backward, and from one micro-step to the next, is as much as can: no schedule with this
    /// budget has fewer loads.
    #[test]
    fn forward_and_back_has_as_few_loads_as_any_schedule(
        units in 1usize..10,
        room in 1usize..14,
        window in 1u64..5,
        passes in 1usize..4,
        known_ahead in any::<bool>(),
    ) {
        let order = there_and_back(units);
        let mut device = Device::new(vec![1; units], room as u64, window);
        (0..6).for_each(|label| device.step(label, &order, passes, known_ahead));
        let expected = optimum(&all_uses(&order, passes, 6), room);
        for label in (1..5).map(Label) {
            prop_assert_eq!(device.loads[&label], expected[&label], "{:?}", label);
        }
        if passes == 1 {
            prop_assert_eq!(expected[&Label(2)], 2 * units - room.min(units));
        }
    }

    /// Any order is learned in one step: from the second one on nothing is asked for late. Beside the unit in use there is
    /// room for one unit less, and no schedule with that room has fewer loads.
    #[test]
    fn another_order_is_followed_from_its_second_step_on(
        before in prop::collection::vec(0usize..6, 1..20),
        after in prop::collection::vec(0usize..6, 1..20),
        room in 2usize..8,
        known_ahead in any::<bool>(),
    ) {
        let mut device = Device::new(vec![1; 6], room as u64, 2);
        (0..2).for_each(|label| device.step(label, &before, 1, known_ahead));
        device.step(2, &after, 1, known_ahead);
        let late = device.by_demand;
        (3..7).for_each(|label| device.step(label, &after, 1, known_ahead));
        prop_assert_eq!(device.by_demand, late);
        let expected = optimum(&all_uses(&after, 1, 7), room - 1);
        // What the third step reads may have been asked for in the order before.
        for label in (4..6).map(Label) {
            prop_assert!(device.loads[&label] <= expected[&label], "{:?}", label);
        }
    }

    /// Blocks that forward leaves out at random are not loaded for backward. Experts that it chooses at random are
    /// expected by backward.
    #[test]
    fn backward_follows_what_forward_did(
        blocks in 2usize..8,
        steps in prop::collection::vec(prop::collection::vec((any::<bool>(), 0usize..4), 8), 2..6),
    ) {
        // Each block has a part that is always there and four experts, of which a step uses one.
        let units = 5 * blocks;
        let mut device = Device::new(vec![1; units], 3, 2);
        for (label, choices) in steps.iter().enumerate() {
            let label = label as u64;
            let mut forward = Vec::new();
            for (block, (skipped, expert)) in choices.iter().enumerate().take(blocks) {
                if block == 0 || !skipped {
                    forward.extend([5 * block, 5 * block + 1 + expert]);
                }
            }
            device.newest = label;
            let actions = device.policy.begin(Label(label), Vec::new());
            device.act(actions);
            for &unit in &forward {
                device.settle();
                assert!(device.acquire(unit, || 0));
                device.release(unit);
            }
            let late = device.by_demand;
            device.settle();
            device.last_loads.clear();
            for &unit in forward.iter().rev() {
                device.settle();
                assert!(device.acquire(unit, || 0));
                device.release(unit);
            }
            // The first use of backward says that forward has ended. If a block at the end was left out, nothing said so
            // before.
            prop_assert!(device.by_demand <= late + 1, "backward asked late");
            // The first step learns the order.
            if label > 0 {
                let left_out = device.last_loads.iter().find(|item| !forward.contains(&item.unit));
                prop_assert_eq!(left_out, None);
            }
            let actions = device.policy.end(vec![]);
            device.act(actions);
        }
    }
}

#[test]
fn a_unit_that_does_not_fit_beside_those_held_is_refused() {
    let mut device = Device::new(vec![6, 5], 10, 10);
    let actions = device.policy.begin(Label(0), Vec::new());
    device.act(actions);
    assert!(device.acquire(0, || 0));
    assert!(!device.acquire(1, || 0));
    device.release(0);
    assert!(device.acquire(1, || 0));
}
