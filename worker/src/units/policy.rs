//! Decides which units' weights are in device memory: what is loaded next, and what makes room for it. It is
//! synchronous and deterministic, and moves nothing itself.
//!
//! The order of uses is known ([`Order`]), so what makes room is what is used again last, as in Belady's optimum. Loads
//! come in the order of uses, and never take the place of what is used before them. So how many units stay from
//! forward to backward follows from the budget alone.

use std::collections::BTreeMap;

use super::order::Order;

/// Which weights of a unit: a version, and whether this worker amends it. The weights of two labels differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Label(pub(crate) u64);

/// One unit's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Item {
    pub(super) unit: usize,
    pub(super) label: Label,
}

/// What a pass is for. Each kind has an order of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Training,
    Evaluation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Take memory for these weights and ask for them.
    Load(Item),
    /// Free the memory of these weights. If they are still on their way they are not wanted any more.
    Drop(Item),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Asked for. This can be taken back at once.
    Coming,
    /// Being written into device memory, which must not be used otherwise meanwhile.
    Arriving,
    Here,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    state: State,
    held: bool,
}

/// What becomes of a wish for a unit that is needed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Demand {
    Here,
    /// It is on its way. `by_demand`: only since now.
    Coming {
        by_demand: bool,
    },
    /// There is room once a copy under way has ended: ask again then.
    Full,
    /// There is no room beside the units that are held, which take so many bytes.
    NoRoom {
        held: u64,
    },
}

/// How many of the passes to come are looked at. The last use in one pass and the first in the next are what decides
/// what stays, and every release and arrival goes through all of them.
const PASSES_AHEAD: usize = 2;

pub(super) struct Policy {
    sizes: Vec<u64>,
    capacity: u64,
    /// How many bytes are asked for ahead at a time.
    window: u64,
    entries: BTreeMap<Item, Entry>,
    used: u64,
    training: Order,
    evaluation: Order,
    kind: Kind,
    label: Label,
    /// Whether the pass is over, so that it reads its label no more.
    over: bool,
    /// The labels of the passes that follow the one in hand, as far as they can be asked for.
    upcoming: Vec<Label>,
}

impl Policy {
    /// `sizes` are the units' bytes. None is above `capacity`.
    pub(super) fn new(sizes: Vec<u64>, capacity: u64, window: u64) -> Policy {
        let units = sizes.len();
        Policy {
            sizes,
            capacity,
            window,
            entries: BTreeMap::new(),
            used: 0,
            training: Order::forward_and_back(units),
            evaluation: Order::forward(units),
            kind: Kind::Training,
            label: Label(0),
            over: true,
            upcoming: Vec::new(),
        }
    }

    /// Begins a pass of training that reads `label`. `upcoming` are the labels of the passes after it that can be asked
    /// for already.
    pub(super) fn begin(&mut self, label: Label, upcoming: Vec<Label>) -> Vec<Action> {
        self.upcoming = upcoming;
        self.turn(Kind::Training, label)
    }

    /// Begins a pass of an evaluation. What was upcoming still is.
    pub(super) fn evaluate(&mut self, label: Label) -> Vec<Action> {
        self.turn(Kind::Evaluation, label)
    }

    fn turn(&mut self, kind: Kind, label: Label) -> Vec<Action> {
        self.order().end();
        (self.kind, self.label, self.over) = (kind, label, false);
        self.order().begin();
        self.plan()
    }

    /// Ends the pass in hand.
    pub(super) fn end(&mut self, upcoming: Vec<Label>) -> Vec<Action> {
        self.order().end();
        self.over = true;
        self.upcoming = upcoming;
        self.plan()
    }

    /// Notes that the pass uses a unit now.
    pub(super) fn uses(&mut self, unit: usize) {
        // An evaluation goes over the model once for each batch.
        if self.kind == Kind::Evaluation && self.evaluation.is_over() {
            self.evaluation.begin();
        }
        self.order().used(unit);
    }

    /// Asks for a unit that is needed now, and holds it unless the answer is `Full` or `NoRoom`.
    pub(super) fn demand(&mut self, unit: usize) -> (Demand, Vec<Action>) {
        let item = Item { unit, label: self.label };
        if let Some(entry) = self.entries.get_mut(&item) {
            entry.held = true;
            let here = entry.state == State::Here;
            let demand = if here { Demand::Here } else { Demand::Coming { by_demand: false } };
            return (demand, self.plan());
        }
        let expected: Vec<Item> = self.expected().collect();
        let first_uses = first_uses(&expected);
        let spare = self.entries.keys().filter(|item| self.may_go(item));
        let spare = spare.map(|item| (*item, first_uses.get(item).copied().unwrap_or(usize::MAX))).collect();
        let Some(out) = self.last_used(self.sizes[unit], &spare, None) else {
            let demand = match self.awaits_copy(unit) {
                true => Demand::Full,
                false => Demand::NoRoom { held: self.held_bytes() },
            };
            return (demand, Vec::new());
        };
        let mut actions = Vec::new();
        out.into_iter().for_each(|item| self.drop(item, &mut actions));
        self.load(item, true, &mut actions);
        actions.append(&mut self.plan());
        (Demand::Coming { by_demand: true }, actions)
    }

    /// Notes that a held unit is used no more for now.
    pub(super) fn release(&mut self, unit: usize) -> Vec<Action> {
        if let Some(entry) = self.entries.get_mut(&Item { unit, label: self.label }) {
            entry.held = false;
        }
        self.plan()
    }

    /// Notes that weights are now written into device memory. False if they are not wanted any more.
    pub(super) fn arriving(&mut self, item: Item) -> bool {
        let entry = self.entries.get_mut(&item);
        entry.map(|entry| entry.state = State::Arriving).is_some()
    }

    /// Notes that weights are in device memory.
    pub(super) fn arrived(&mut self, item: Item) -> Vec<Action> {
        if let Some(entry) = self.entries.get_mut(&item) {
            entry.state = State::Here;
        }
        self.plan()
    }

    /// Forgets weights that could not be had, whoever holds them. They are asked for again when they are needed.
    pub(super) fn failed(&mut self, item: Item) {
        if self.entries.remove(&item).is_some() {
            self.used -= self.sizes[item.unit];
        }
    }

    pub(super) fn label(&self) -> Label {
        self.label
    }

    /// Whether there is no room for a unit that is needed before a copy under way has ended.
    pub(super) fn awaits_copy(&self, unit: usize) -> bool {
        let free = self.capacity.saturating_sub(self.used);
        let spare = self.entries.keys().filter(|item| self.may_go(item)).map(|item| self.sizes[item.unit]);
        let is_arriving = |entry: &Entry| entry.state == State::Arriving && !entry.held;
        free + spare.sum::<u64>() < self.sizes[unit] && self.entries.values().any(is_arriving)
    }

    #[cfg(test)]
    pub(super) fn used_bytes(&self) -> u64 {
        self.used
    }

    /// The units in use.
    pub(super) fn held(&self) -> impl Iterator<Item = Item> + '_ {
        self.entries.iter().filter(|(_, entry)| entry.held).map(|(item, _)| *item)
    }

    fn held_bytes(&self) -> u64 {
        self.held().map(|item| self.sizes[item.unit]).sum()
    }

    fn order(&mut self) -> &mut Order {
        match self.kind {
            Kind::Training => &mut self.training,
            Kind::Evaluation => &mut self.evaluation,
        }
    }

    /// The uses that are expected, the next one first.
    fn expected(&self) -> impl Iterator<Item = Item> + '_ {
        let order = match self.kind {
            Kind::Training => &self.training,
            Kind::Evaluation => &self.evaluation,
        };
        let now = order.ahead().map(|unit| Item { unit, label: self.label });
        // Training follows an evaluation.
        let after = self
            .upcoming
            .iter()
            .take(PASSES_AHEAD)
            .flat_map(|&label| self.training.whole().map(move |unit| Item { unit, label }));
        now.chain(after)
    }

    /// Drops what is of no more use, and loads what comes next as far as there is room.
    ///
    /// It goes through the uses that are expected and makes room for each in thought: with what is used last of all, but
    /// for the unit that is in use just before. A load begins now if what makes room for it is not used any more until
    /// then. It waits otherwise, and so do those after it.
    fn plan(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        self.drop_old(&mut actions);
        let expected: Vec<Item> = self.expected().collect();
        let first_uses = first_uses(&expected);
        let again = uses_again(&expected);
        let next_use = |item: &Item| first_uses.get(item).copied().unwrap_or(usize::MAX);
        let mut held: BTreeMap<Item, usize> =
            self.entries.keys().map(|item| (*item, next_use(item))).collect();
        for (at, item) in expected.iter().enumerate() {
            if let Some(next) = held.get_mut(item) {
                *next = again[at];
                continue;
            }
            let size = self.sizes[item.unit];
            let before = at.checked_sub(1).map(|before| expected[before]);
            let Some(out) = self.taken_back(size, at, &first_uses) else { break };
            out.into_iter().for_each(|item| {
                held.remove(&item);
                self.drop(item, &mut actions);
            });
            let Some(out) = self.last_used(size, &held, before) else { break };
            if out.iter().any(|item| next_use(item) < at || !self.may_go(item)) {
                break;
            }
            out.into_iter().for_each(|item| {
                held.remove(&item);
                self.drop(item, &mut actions);
            });
            self.load(*item, false, &mut actions);
            held.insert(*item, again[at]);
        }
        actions
    }

    /// Drops weights that no pass reads any more.
    fn drop_old(&mut self, actions: &mut Vec<Action>) {
        let read =
            |item: &Item| !self.over && item.label == self.label || self.upcoming.contains(&item.label);
        let old = |(item, entry): (&Item, &Entry)| {
            (!read(item) && !entry.held && entry.state != State::Arriving).then_some(*item)
        };
        let old: Vec<Item> = self.entries.iter().filter_map(old).collect();
        for item in old {
            self.drop(item, actions);
        }
    }

    /// What is asked for and must be taken back, so that so many bytes may be asked for ahead, for a use `at`: only what is
    /// used later. None if that is not enough.
    fn taken_back(&self, size: u64, at: usize, first_uses: &BTreeMap<Item, usize>) -> Option<Vec<Item>> {
        let mut under_way: u64 = 0;
        let mut later = Vec::new();
        for (item, _) in self.entries.iter().filter(|(_, entry)| entry.state != State::Here) {
            under_way += self.sizes[item.unit];
            let next = first_uses.get(item).copied().unwrap_or(usize::MAX);
            if self.may_go(item) && next > at {
                later.push((next, *item));
            }
        }
        later.sort_unstable();
        let mut out = Vec::new();
        while under_way > 0 && under_way + size > self.window {
            let (_, item) = later.pop()?;
            under_way -= self.sizes[item.unit];
            out.push(item);
        }
        Some(out)
    }

    /// What makes room for so many bytes: those of `held` that are used last, but for one item. `held` has the next use of
    /// each. None if that is not enough.
    fn last_used(&self, size: u64, held: &BTreeMap<Item, usize>, but: Option<Item>) -> Option<Vec<Item>> {
        let mut free = self.capacity.saturating_sub(self.used);
        if free >= size {
            return Some(Vec::new());
        }
        let others = held.iter().filter(|(item, _)| Some(**item) != but);
        let mut by_use: Vec<(usize, Item)> = others.map(|(item, next)| (*next, *item)).collect();
        by_use.sort_unstable();
        let mut out = Vec::new();
        while free < size {
            let (_, item) = by_use.pop()?;
            free += self.sizes[item.unit];
            out.push(item);
        }
        Some(out)
    }

    /// Whether the memory of these weights can be freed at once.
    fn may_go(&self, item: &Item) -> bool {
        self.entries.get(item).is_some_and(|entry| !entry.held && entry.state != State::Arriving)
    }

    fn load(&mut self, item: Item, held: bool, actions: &mut Vec<Action>) {
        self.entries.insert(item, Entry { state: State::Coming, held });
        self.used += self.sizes[item.unit];
        actions.push(Action::Load(item));
    }

    fn drop(&mut self, item: Item, actions: &mut Vec<Action>) {
        self.failed(item);
        actions.push(Action::Drop(item));
    }
}

/// When each item is used first, counted in uses from now.
fn first_uses(expected: &[Item]) -> BTreeMap<Item, usize> {
    let mut first = BTreeMap::new();
    for (at, item) in expected.iter().enumerate() {
        first.entry(*item).or_insert(at);
    }
    first
}

/// For each use: when the same item is used again.
fn uses_again(expected: &[Item]) -> Vec<usize> {
    let mut later = BTreeMap::new();
    let mut again: Vec<usize> = expected
        .iter()
        .enumerate()
        .rev()
        .map(|(at, item)| later.insert(*item, at).unwrap_or(usize::MAX))
        .collect();
    again.reverse();
    again
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
