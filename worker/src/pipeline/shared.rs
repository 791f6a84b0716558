//! What trainer, driver and watcher of a pipeline share.

use super::{board::Board, outcome::Outcomes};

pub(super) struct PipelineInner {
    pub(super) board: Board,
    /// Versions that were decided at the loss scale's floor, with the scale to go on with. The watcher tells them to
    /// the driver.
    pub(super) resumed: Board,
    pub(super) outcomes: Outcomes,
}
