//! Formats of a job's optimizer state, the same in memory, on disk and in checkpoints. Their numbers are those of
//! common.proto.

use std::{fmt, str::FromStr};

use crate::{
    fault::Fault,
    hyper::{Moment, Rule},
    limits::QUANTIZATION_ELEMENTS,
};

/// An array of a shard's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateArray {
    Master = 0,
    /// First moments, or the first state slot of another rule.
    First = 1,
    Second = 2,
}

impl StateArray {
    pub const ALL: [StateArray; 3] = [StateArray::Master, StateArray::First, StateArray::Second];

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

    pub fn name(self) -> &'static str {
        match self {
            StateArray::Master => "master weights",
            StateArray::First => "first moments",
            StateArray::Second => "second moments",
        }
    }
}

impl fmt::Display for StateArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
    /// number (all below 2^-126) gets scale 0 and decodes to zeros. The codes of both are 0.
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
    /// Returns whether no array is rounded to fewer bits.
    pub fn is_fp32(&self) -> bool {
        self.state == StateFormat::F32 && self.master == MasterFormat::F32
    }

    /// Returns whether the formats are the default. Headers omit the default, so files of fp32 jobs stay as in
    /// earlier releases.
    pub(crate) fn is_default(&self) -> bool {
        *self == Formats::default()
    }
}

impl StateFormat {
    pub const ALL: [StateFormat; 3] = [StateFormat::F32, StateFormat::Bf16, StateFormat::Block8];

    /// Returns the bytes of `count` elements, `count` being a multiple of [`QUANTIZATION_ELEMENTS`].
    pub fn bytes(self, count: usize) -> usize {
        match self {
            StateFormat::F32 => 4 * count,
            StateFormat::Bf16 => 2 * count,
            StateFormat::Block8 => count + 4 * (count / QUANTIZATION_ELEMENTS),
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            StateFormat::F32 => "fp32",
            StateFormat::Bf16 => "bf16",
            StateFormat::Block8 => "block8",
        }
    }
}

impl MasterFormat {
    pub const ALL: [MasterFormat; 2] = [MasterFormat::F32, MasterFormat::Bf16];

    pub fn bytes(self, count: usize) -> usize {
        match self {
            MasterFormat::F32 => 4 * count,
            MasterFormat::Bf16 => 2 * count,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            MasterFormat::F32 => "fp32",
            MasterFormat::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for StateFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for MasterFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StateFormat {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        match text {
            "fp32" | "f32" => Ok(StateFormat::F32),
            "bf16" => Ok(StateFormat::Bf16),
            "block8" => Ok(StateFormat::Block8),
            _ => Err(Fault::invalid("state", text, "one of fp32, bf16, block8", "name one of them")),
        }
    }
}

impl FromStr for MasterFormat {
    type Err = Fault;

    fn from_str(text: &str) -> Result<Self, Fault> {
        match text {
            "fp32" | "f32" => Ok(MasterFormat::F32),
            "bf16" => Ok(MasterFormat::Bf16),
            _ => Err(Fault::invalid("master", text, "one of fp32, bf16", "name one of them")),
        }
    }
}
