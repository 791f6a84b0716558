//! State that the trainer, the driver and the watcher of a pipeline share.

use std::sync::Mutex;

use super::{board::Board, outcome::Outcomes};

pub(super) struct PipelineInner {
    pub(super) board: Board,
    /// Versions of rank 0's decisions that are not paused any more, with the loss scale to continue with. The
    /// watcher posts them. The driver waits for a version after a decision at the smallest loss scale.
    pub(super) resumed: Board,
    pub(super) outcomes: Outcomes,
    /// Trainer's bytes in the newest commit that a rank other than 0 has seen since it joined.
    pub(super) trainer: Mutex<Option<Vec<u8>>>,
}
