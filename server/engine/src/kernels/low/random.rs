//! Random bits for stochastic rounding, a function of seed, step and flat index. So neither the instruction
//! set nor the split of a range into calls changes them.

/// Inputs of a call's random bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Random {
    /// A job has one seed.
    pub seed: u64,
    /// The number of the applied step: Adam's t. A repeated step rounds as it did before.
    pub step: u64,
    /// The index in the flat space of the call's first element.
    pub first_element: u64,
}

/// Half of an element's 32 random bits. The first moment takes the low 16, the second the high 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Half {
    Low,
    High,
}

/// Target of the rounding.
#[derive(Clone, Copy)]
pub(in super::super) enum Usage {
    Moments,
    Master,
}

/// The key of one step, 2^32 elements and one use of the bits.
#[derive(Clone, Copy)]
pub(in super::super) struct Key {
    pub(in super::super) before: u32,
    pub(in super::super) between: u32,
}

impl Key {
    pub(in super::super) const FIRST_MULTIPLIER: u32 = 0x7FEB_352D;
    pub(in super::super) const SECOND_MULTIPLIER: u32 = 0x846C_A68B;

    /// The element's 32 bits, by two rounds of multiply and xorshift (constants of C. Wellons' `lowbias32`).
    /// The key goes in before the rounds and between them. With the key only before them, two steps would
    /// draw the same numbers in another order.
    #[inline(always)]
    pub(in super::super) fn hash(self, index: u32) -> u32 {
        let mut x = index ^ self.before;
        x = (x ^ (x >> 16)).wrapping_mul(Key::FIRST_MULTIPLIER);
        x = (x ^ (x >> 15)).wrapping_add(self.between).wrapping_mul(Key::SECOND_MULTIPLIER);
        x ^ (x >> 16)
    }
}

impl Random {
    /// The random bits of the elements from `count` on.
    pub(super) fn after(self, count: usize) -> Random {
        Random { first_element: self.first_element + count as u64, ..self }
    }

    /// Returns the index in the call of the first element after `at` that has another key.
    pub(super) fn end_of_key(self, at: usize) -> usize {
        let rest = (1 << 32) - (self.after(at).first_element & 0xFFFF_FFFF);
        at.saturating_add(rest as usize)
    }

    /// The key of `element` and of all others that share the upper 32 bits of their indices.
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
