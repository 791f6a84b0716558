//! Data of the commit at which a rank joined, from which its pipeline continues.

use longshore_proto::Version;

use super::options::PipelineOptions;
use crate::{envelope::Envelope, error::Result, loss_scale::LossScaler, session::Joined};

/// The state from which a pipeline continues.
pub(super) struct Resume {
    pub(super) scaler: LossScaler,
    pub(super) scales: Vec<(Version, f64)>,
    /// The version that waits for an operator, and its loss scale, if the job is paused at the smallest loss
    /// scale.
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

#[cfg(test)]
mod tests {
    use longshore_proto::{Commit, Correction, Incarnation, Step};

    use super::*;
    use crate::loss_scale::LossScalerOptions;

    fn joined(loss_scale: f64, paused: Option<&str>) -> Joined {
        let options = LossScalerOptions { initial: 8.0, min: 8.0, ..Default::default() };
        let scaler = LossScaler::dynamic(options).unwrap();
        let trainer = b"loader".to_vec();
        let envelope = Envelope { scaler, previous_loss_scale: 16.0, origins: Vec::new(), trainer };
        let commit = Commit {
            step: Step(3),
            skip: paused.is_some(),
            gradient_scale: 1.0,
            clip_coefficient: 1.0,
            correction: Correction::None,
            left_out: Vec::new(),
            groups: Vec::new(),
            norm: 0.0,
            loss_scale,
            trainer_state: envelope.encode(),
            decided_by: Incarnation(1),
            pause_reason: paused.unwrap_or_default().to_string(),
            placement: None,
        };
        let (incarnation, version) = (Incarnation(1), Version(3));
        let paused = paused.map(str::to_string);
        let left_out = Vec::new();
        Joined { incarnation, version, applied: 3, last_commit: Some(commit), left_out, paused }
    }

    fn resume(joined: &Joined) -> Resume {
        let options = PipelineOptions::new(LossScaler::fixed(1.0).unwrap(), |_| Vec::new());
        Resume::from(joined, &options).unwrap()
    }

    #[test]
    fn scaler_scales_and_trainer_come_from_the_commit() {
        let resume = resume(&joined(8.0, None));
        assert_eq!(resume.scaler.scale(), 8.0);
        assert_eq!(resume.scales, [(Version(2), 16.0), (Version(3), 8.0)]);
        assert_eq!(resume.trainer.as_deref(), Some(&b"loader"[..]));
    }

    #[test]
    fn an_operators_scale_counts() {
        let resume = resume(&joined(0.5, None));
        assert_eq!((resume.scaler.scale(), resume.floor), (0.5, None));
        assert_eq!(resume.scales[1], (Version(3), 0.5));
    }

    #[test]
    fn paused_at_the_floor_the_version_waits_for_an_operator() {
        let resume = resume(&joined(8.0, Some("overflow")));
        assert_eq!(resume.floor, Some((Version(3), 8.0)));
        assert_eq!(resume.scales, [(Version(2), 16.0)]);
    }
}
