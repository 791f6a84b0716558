//! Sizes of a model, checked before anything is allocated, and the presets of the command line.

use super::Batch;

/// Bytes are the tokens, so no tokenizer has to be fetched or trained before the first step.
pub const VOCABULARY: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// The longest sequence, in bytes. Positions are learned, with one vector each.
    pub context: usize,
    pub width: usize,
    pub heads: usize,
    pub layers: usize,
}

/// Shapes other than "tiny" are published ones of GPT-2 and GPT-3, with a vocabulary of bytes.
pub const PRESETS: &[(&str, Config)] = &[
    ("tiny", Config { context: 128, width: 128, heads: 4, layers: 4 }),
    ("small", Config { context: 256, width: 384, heads: 6, layers: 6 }),
    ("gpt2", Config { context: 1024, width: 768, heads: 12, layers: 12 }),
    ("gpt2-medium", Config { context: 1024, width: 1024, heads: 16, layers: 24 }),
    ("gpt2-large", Config { context: 1024, width: 1280, heads: 20, layers: 36 }),
    ("gpt2-xl", Config { context: 1024, width: 1600, heads: 25, layers: 48 }),
    ("7b", Config { context: 2048, width: 4096, heads: 32, layers: 32 }),
];

pub fn preset(name: &str) -> Option<Config> {
    PRESETS.iter().find(|(known, _)| *known == name).map(|(_, config)| *config)
}

/// Largest sizes. A larger value is a typing error: the largest published dense models stay well below each limit.
const CONTEXT_MAX: usize = 1 << 17;
const WIDTH_MAX: usize = 1 << 15;
const HEADS_MAX: usize = 256;
const LAYERS_MAX: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{field} is {value}, outside 1 to {limit}; choose a value within it, or a preset")]
    OutOfRange { field: &'static str, value: usize, limit: usize },
    #[error(
        "width is {width}, not a multiple of heads, which is {heads}; each head takes an equal part of the \
         width: set width to {nearest}, or heads to a divisor of {width}"
    )]
    UnevenHeads { width: usize, heads: usize, nearest: usize },
}

impl Config {
    pub fn validate(&self) -> Result<(), ConfigError> {
        let ranges = [
            ("context", self.context, CONTEXT_MAX),
            ("width", self.width, WIDTH_MAX),
            ("heads", self.heads, HEADS_MAX),
            ("layers", self.layers, LAYERS_MAX),
        ];
        for (field, value, limit) in ranges {
            if value == 0 || value > limit {
                return Err(ConfigError::OutOfRange { field, value, limit });
            }
        }
        if !self.width.is_multiple_of(self.heads) {
            let nearest = self.width.next_multiple_of(self.heads);
            return Err(ConfigError::UnevenHeads { width: self.width, heads: self.heads, nearest });
        }
        Ok(())
    }

    pub(super) fn hidden(&self) -> usize {
        4 * self.width
    }
}

/// Sizes of one pass. `context` is the batch's own, at most the model's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) sequences: usize,
    pub(super) context: usize,
    pub(super) width: usize,
    pub(super) heads: usize,
}

impl Shape {
    pub(super) fn new(config: &Config, batch: &Batch) -> Shape {
        let (sequences, context) = (batch.sequences, batch.context);
        Shape { sequences, context, width: config.width, heads: config.heads }
    }

    /// Number of rows. A row is one position of one sequence.
    pub(super) fn rows(&self) -> usize {
        self.sequences * self.context
    }

    pub(super) fn head_width(&self) -> usize {
        self.width / self.heads
    }

    /// Shape of a sequence's heads: one matrix per head.
    pub(super) fn heads(&self) -> [usize; 3] {
        [self.heads, self.context, self.head_width()]
    }

    pub(super) fn attention_scale(&self) -> f64 {
        1.0 / (self.head_width() as f64).sqrt()
    }
}
