//! Sizes that all stages of a pass share.

use super::{Batch, Config};

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
