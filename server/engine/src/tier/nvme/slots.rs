//! Slots: where each version lies on the drives, and where the next one goes.

use serde::{Deserialize, Serialize};

use super::plan::STATE_SLOTS;

/// The slots of the version that all shards have, or had before the current step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Slots {
    pub(super) state: u8,
    pub(super) image: u8,
    /// The slot of the image of the version before. None at the first version kept.
    pub(super) older_image: Option<u8>,
}

impl Slots {
    /// The slots for the version that an update makes. Nothing is overwritten that this version or the image
    /// before it needs.
    pub(super) fn updated(&self) -> Slots {
        let taken = |slot: u8| slot == self.image || Some(slot) == self.older_image;
        let image = (0..).find(|&slot| !taken(slot)).unwrap_or_default();
        Slots { state: (self.state + 1) % STATE_SLOTS, image, older_image: Some(self.image) }
    }

    /// The slots after a skipped step: the same state, and one image for both versions.
    pub(super) fn skipped(&self) -> Slots {
        Slots { older_image: Some(self.image), ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_needed_is_overwritten() {
        let mut slots = Slots::default();
        for step in 0..50u32 {
            if step % 5 == 3 {
                slots = slots.skipped();
                continue;
            }
            let next = slots.updated();
            assert_ne!(next.state, slots.state);
            assert!(next.image < super::super::plan::IMAGE_SLOTS);
            assert!(next.image != slots.image && Some(next.image) != slots.older_image);
            assert_eq!(next.older_image, Some(slots.image));
            slots = next;
        }
    }
}
