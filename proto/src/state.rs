//! Formats of a job's optimizer state, the same in memory, on disk and in checkpoints. The formats' numbers are as in
//! common.proto.

use crate::{
    hyper::{Moment, Rule},
    limits::QUANTIZATION_ELEMENTS,
    named::named,
};

/// An array of a shard's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateArray {
    Master = 0,
    /// First moments, or the first state slot of another rule.
    First = 1,
    Second = 2,
}

named!(StateArray; Master = "master weights", First = "first moments", Second = "second moments");

impl StateArray {
    pub fn of(rule: Rule) -> &'static [StateArray] {
        &StateArray::ALL[..=rule.state_slots()]
    }

    pub fn index(self) -> usize {
        self as usize
    }

    /// Returns whether the rule keeps sums of squares in this array, which have no sign.
    pub fn is_squares(self, rule: Rule) -> bool {
        self.index().checked_sub(1).and_then(|slot| rule.moments().get(slot)) == Some(&Moment::Squares)
    }
}

/// Format of a moment: Adam's two, momentum, or sums of squares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateFormat {
    #[default]
    #[serde(rename = "fp32")]
    F32 = 1,
    /// Updates round stochastically. A value beyond the largest finite bf16 may round to infinity.
    Bf16 = 2,
    /// 8 bits for each element, and an f32 scale (the largest magnitude) for each [`QUANTIZATION_ELEMENTS`]. Updates
    /// round stochastically.
    ///
    /// A group with a non-finite element gets a NaN scale and decodes to NaN everywhere. A group without a normal
    /// number (all below 2^-126) gets scale 0 and decodes to zeros. In both cases all codes are 0.
    Block8 = 3,
}

/// Format of master weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterFormat {
    #[default]
    #[serde(rename = "fp32")]
    F32 = 1,
    /// Updates round stochastically. The image is always cast from the rounded weights, during an update and when
    /// rebuilt from stored weights.
    Bf16 = 2,
}

/// Formats of one job. Formats other than fp32 trade precision for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Formats {
    pub state: StateFormat,
    pub master: MasterFormat,
    /// Seed of stochastic rounding. Random bits depend on seed, step and element index. Unused if all formats are
    /// fp32.
    pub seed: u64,
}

impl Formats {
    /// Returns whether all arrays are fp32, so that none is rounded to fewer bits.
    pub fn is_fp32(&self) -> bool {
        self.state == StateFormat::F32 && self.master == MasterFormat::F32
    }

    /// Returns whether the formats are the default. Headers omit the default, so files of fp32 jobs stay as in
    /// earlier releases.
    pub(crate) fn is_default(&self) -> bool {
        *self == Formats::default()
    }
}

named!(StateFormat, "state"; F32 = "fp32" | "f32", Bf16 = "bf16", Block8 = "block8");

impl StateFormat {
    /// Returns the bytes of `count` elements, `count` being a multiple of [`QUANTIZATION_ELEMENTS`].
    pub fn bytes(self, count: usize) -> usize {
        match self {
            StateFormat::F32 => 4 * count,
            StateFormat::Bf16 => 2 * count,
            StateFormat::Block8 => count + 4 * (count / QUANTIZATION_ELEMENTS),
        }
    }
}

named!(MasterFormat, "master"; F32 = "fp32" | "f32", Bf16 = "bf16");

impl MasterFormat {
    pub fn bytes(self, count: usize) -> usize {
        match self {
            MasterFormat::F32 => 4 * count,
            MasterFormat::Bf16 => 2 * count,
        }
    }
}
