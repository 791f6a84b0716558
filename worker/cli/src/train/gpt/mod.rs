//! A GPT whose weights live elsewhere. The model borrows one stage's weights at a time, and emits gradients as they
//! appear.
//!
//! Forward keeps only the inputs of stages (activation checkpointing). Backward walks the stages in reverse,
//! computes each stage's inside again, and emits its gradients at once. So neither all weights nor all gradients
//! are ever in one place, as in ZeRO-3 offload.
//!
//! Backward is hand-written instead of using automatic differentiation. A stage's gradients are then return values
//! that cannot be forgotten, and no weights are copied for tracking.

mod attention;
mod block;
mod config;
mod layout;
mod product;
mod rows;
mod stages;
mod step;
mod tensor;
#[cfg(test)]
mod tests;

pub use config::{Config, ConfigError, PRESETS, VOCABULARY, preset};
pub use layout::{Gpt, Group, Param, Stage};
pub use step::{Gradients, Weights, evaluate, micro_step};
pub use tensor::Tensor;

use super::text::Batch;

/// The error of a source of weights or of a sink of gradients.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("cannot acquire the weights of stage {stage}")]
    Acquire { stage: String, source: BoxError },
    #[error("cannot hand over the gradients of stage {stage}")]
    Emit { stage: String, source: BoxError },
}
