//! The order in which units are used: learned from the last pass, and corrected while the pass in hand differs from it.

use std::collections::VecDeque;

/// What is expected of a pass. At first that is registration order, and for training the same way back.
pub(super) struct Order {
    /// The units that a whole pass uses, as the last one did.
    learned: Vec<usize>,
    /// What is still expected of the pass in hand, the next unit first.
    ahead: VecDeque<usize>,
    /// What the pass in hand has used.
    used: Vec<usize>,
}

impl Order {
    pub(super) fn forward(units: usize) -> Order {
        Order { learned: (0..units).collect(), ahead: VecDeque::new(), used: Vec::new() }
    }

    pub(super) fn forward_and_back(units: usize) -> Order {
        Order { learned: (0..units).chain((0..units).rev()).collect(), ..Order::forward(0) }
    }

    pub(super) fn begin(&mut self) {
        self.end();
        self.ahead = self.learned.iter().copied().collect();
    }

    /// Learns the pass that was used, unless nothing was.
    pub(super) fn end(&mut self) {
        self.ahead.clear();
        if !self.used.is_empty() {
            self.learned = std::mem::take(&mut self.used);
        }
    }

    /// Notes that a unit is used. If another one was expected, the rest of the pass is expected otherwise, too: what
    /// forward leaves out or adds, backward mostly leaves out or adds at the same place.
    pub(super) fn used(&mut self, unit: usize) {
        match self.ahead.iter().position(|&expected| expected == unit) {
            Some(at) => {
                let left_out: Vec<usize> = self.ahead.drain(..=at).take(at).collect();
                for unit in left_out {
                    if let Some(again) = self.ahead.iter().position(|&expected| expected == unit) {
                        self.ahead.remove(again);
                    }
                }
            }
            None => {
                let before = self.used.last().copied();
                if let Some(at) = before.and_then(|before| self.ahead.iter().position(|&unit| unit == before))
                {
                    self.ahead.insert(at, unit);
                }
            }
        }
        self.used.push(unit);
    }

    /// Whether nothing more is expected of the pass in hand.
    pub(super) fn is_over(&self) -> bool {
        self.ahead.is_empty()
    }

    /// What is expected of the pass in hand.
    pub(super) fn ahead(&self) -> impl Iterator<Item = usize> + '_ {
        self.ahead.iter().copied()
    }

    /// What is expected of a pass that has not begun: what the pass in hand has used and will use, or the last one used.
    pub(super) fn whole(&self) -> impl Iterator<Item = usize> + '_ {
        let idle = self.used.is_empty();
        let learned = self.learned.iter().filter(move |_| idle);
        let in_hand = self.used.iter().chain(&self.ahead).filter(move |_| !idle);
        learned.chain(in_hand).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ahead(order: &Order) -> Vec<usize> {
        order.ahead().collect()
    }

    #[test]
    fn an_order_is_learned_and_followed() {
        let mut order = Order::forward_and_back(3);
        order.begin();
        assert_eq!(ahead(&order), [0, 1, 2, 2, 1, 0]);
        [2, 0, 1].into_iter().for_each(|unit| order.used(unit));
        order.begin();
        assert_eq!(ahead(&order), [2, 0, 1]);
    }

    #[test]
    fn what_is_left_out_is_left_out_on_the_way_back() {
        let mut order = Order::forward_and_back(5);
        order.begin();
        [0, 3].into_iter().for_each(|unit| order.used(unit));
        assert_eq!(ahead(&order), [4, 4, 3, 0]);
    }

    #[test]
    fn what_is_added_is_expected_again_on_the_way_back() {
        let mut order = Order::forward_and_back(4);
        order.begin();
        [0, 1, 2, 3, 3, 2, 1, 0].into_iter().for_each(|unit| order.used(unit));
        order.begin();
        // An expert that the last pass did not choose.
        [0, 1, 9].into_iter().for_each(|unit| order.used(unit));
        assert_eq!(ahead(&order), [2, 3, 3, 2, 9, 1, 0]);
        // Two units that change places do so on the way back.
        order.begin();
        [0, 1, 2, 3, 3, 2, 1, 0].into_iter().for_each(|unit| order.used(unit));
        order.begin();
        [0, 2, 1, 3].into_iter().for_each(|unit| order.used(unit));
        assert_eq!(ahead(&order), [3, 1, 2, 0]);
    }
}
