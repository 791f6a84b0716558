//! Reads the commit at which a rank joined, for `Pipeline::new`.

use longshore_proto::Version;

use super::options::PipelineOptions;
use crate::{envelope::Envelope, error::Result, loss_scale::LossScaler, session::Joined};

/// State with which a pipeline begins.
pub(super) struct Resume {
    pub(super) scaler: LossScaler,
    pub(super) scales: Vec<(Version, f64)>,
    /// Version and loss scale of a pause at the smallest loss scale, which an operator ends.
    pub(super) floor: Option<(Version, f64)>,
    pub(super) trainer: Option<Vec<u8>>,
}

impl Resume {
    pub(super) fn from(joined: &Joined, options: &PipelineOptions) -> Result<Resume> {
        let Some(commit) = &joined.last_commit else {
            let scaler = options.scaler.clone();
            let scales = vec![(joined.version, scaler.scale())];
            return Ok(Resume { scaler, scales, floor: None, trainer: None });
        };
        let envelope = Envelope::decode(&commit.trainer_state)?;
        let Envelope { mut scaler, previous_loss_scale, trainer, .. } = envelope;
        // The server's scale wins: an operator may have resumed with another scale.
        if scaler.scale() != commit.loss_scale {
            scaler.set_scale(commit.loss_scale)?;
        }
        let mut scales = vec![(Version(joined.version.0 - 1), previous_loss_scale)];
        let now = (joined.version, commit.loss_scale);
        let floor = (!commit.pause_reason.is_empty()).then_some(now);
        if floor.is_none() {
            scales.push(now);
        }
        Ok(Resume { scaler, scales, floor, trainer: Some(trainer) })
    }
}
