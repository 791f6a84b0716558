//! What trainer, driver and watcher of a pipeline share.

use super::{board::Board, outcome::Outcomes};

pub(super) struct PipelineInner {
    pub(super) board: Board,
    /// The versions that rank 0 decided and that are not paused any more, with the loss scale to go on with. The
    /// watcher posts them, and the driver waits for one after a decision at the smallest loss scale.
    pub(super) resumed: Board,
    pub(super) outcomes: Outcomes,
}
