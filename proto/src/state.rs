//! The formats in which a job keeps its optimizer state: in memory, on disk and in checkpoints alike.

use std::{fmt, str::FromStr};

use crate::{
    fault::Fault,
    hyper::{Moment, Rule},
    limits::QUANTIZATION_ELEMENTS,
};

/// One of the arrays that a shard's state consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateArray {
    Master,
    /// The first moments; also what another rule keeps in its first state slot.
    First,
    Second,
}

impl StateArray {
    pub const ALL: [StateArray; 3] = [StateArray::Master, StateArray::First, StateArray::Second];

    /// The arrays that a rule has.
    pub fn of(rule: Rule) -> &'static [StateArray] {
        &StateArray::ALL[..=rule.state_slots()]
    }

    /// Its place among [`StateArray::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }

    /// Whether a rule keeps sums of squares there, which have no sign.
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

/// How a moment is kept: Adam's two, momentum, or sums of squares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateFormat {
    #[default]
    #[serde(rename = "fp32")]
    F32,
    /// Updates round stochastically. A value beyond the largest finite bf16 may round to infinity.
    Bf16,
    /// A code of 8 bits for each element and an f32 scale, the largest magnitude, for each [`QUANTIZATION_ELEMENTS`].
    /// Updates round stochastically.
    ///
    /// A group with an element that is not finite gets a NaN scale and decodes to NaN everywhere. A group without a
    /// normal number (all below 2^-126) gets scale 0 and decodes to zeros. The codes of both are 0.
    Block8,
}

/// How master weights are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterFormat {
    #[default]
    #[serde(rename = "fp32")]
    F32,
    /// Updates round stochastically. The image is made of the rounded weights, in an update as well as when it is
    /// made anew from stored ones.
    Bf16,
}

/// The formats of one job. All but fp32 trade bits for bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Formats {
    pub state: StateFormat,
    pub master: MasterFormat,
    /// The seed of stochastic rounding, which draws an element's bits from it, the step and the element's index. It
    /// is unused where all is fp32.
    pub seed: u64,
}

impl Formats {
    /// Whether nothing is ever rounded to fewer bits.
    pub fn is_fp32(&self) -> bool {
        self.state == StateFormat::F32 && self.master == MasterFormat::F32
    }

    /// Whether these are the default, which is written to no header, so that an fp32 job's files are as they were
    /// before there were other formats.
    pub(crate) fn is_default(&self) -> bool {
        *self == Formats::default()
    }
}

impl StateFormat {
    /// How many bytes `count` elements take, `count` being a multiple of [`QUANTIZATION_ELEMENTS`].
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
