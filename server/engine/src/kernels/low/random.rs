//! Random bits for stochastic rounding: a function of seed, step and flat index, so that they depend neither on the
//! instruction set nor on how a range is split into calls.

/// What says all about the random bits of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Random {
    /// One per job.
    pub seed: u64,
    /// The applied step, Adam's t: a step that is done again rounds as it did.
    pub step: u64,
    /// Index in the flat space of the first element of the call.
    pub first_element: u64,
}

/// Which 16 of an element's 32 random bits are meant: the first moment takes the low ones, the second the high ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Half {
    Low,
    High,
}

/// What is rounded.
#[derive(Clone, Copy)]
pub(in super::super) enum Usage {
    Moments,
    Master,
}

/// Of one step, 2^32 elements and one use of the bits.
#[derive(Clone, Copy)]
pub(in super::super) struct Key {
    pub(in super::super) before: u32,
    pub(in super::super) between: u32,
}

impl Key {
    pub(in super::super) const FIRST_MULTIPLIER: u32 = 0x7FEB_352D;
    pub(in super::super) const SECOND_MULTIPLIER: u32 = 0x846C_A68B;

    /// The element's 32 bits: two rounds of multiply and xorshift (constants of C. Wellons' `lowbias32`), the key
    /// going in before and between them. With only the former, two steps would draw the same numbers in another order.
    #[inline(always)]
    pub(in super::super) fn hash(self, index: u32) -> u32 {
        let mut x = index ^ self.before;
        x = (x ^ (x >> 16)).wrapping_mul(Key::FIRST_MULTIPLIER);
        x = (x ^ (x >> 15)).wrapping_add(self.between).wrapping_mul(Key::SECOND_MULTIPLIER);
        x ^ (x >> 16)
    }
}

impl Random {
    /// Of the elements from `count` on.
    pub(super) fn after(self, count: usize) -> Random {
        Random { first_element: self.first_element + count as u64, ..self }
    }

    /// Where, counted in the call, the key of element `at` ends.
    pub(super) fn end_of_key(self, at: usize) -> usize {
        let rest = (1 << 32) - (self.after(at).first_element & 0xFFFF_FFFF);
        at.saturating_add(rest as usize)
    }

    /// For `element` and all others that share the upper 32 bits of their indices.
    pub(in super::super) fn key(self, element: u64, usage: Usage) -> Key {
        let key = mix(mix(mix(self.seed ^ mix(self.step)) ^ (element >> 32)) ^ usage as u64);
        Key { before: key as u32, between: (key >> 32) as u32 }
    }
}

/// SplitMix64's step.
fn mix(x: u64) -> u64 {
    let z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
