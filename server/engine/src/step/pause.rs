//! Pauses. A pause begins with a decision, or at rank 0's request. An operator's resume ends it. While a pause lasts,
//! the server accepts nothing for later steps.

use longshore_proto::{Incarnation, Version, limits::GRADIENT_SCALES};

use super::{
    machine::{Machine, Phase},
    refusal::Refusal,
};
use crate::record::{Record, Standing};

impl Machine {
    /// Pauses the job. A job that is paused already keeps its reason. Returns true if the tier must keep the
    /// change.
    pub fn pause(&mut self, incarnation: Incarnation, reason: String) -> Result<bool, Refusal> {
        self.check_not_loading()?;
        self.check_rank_zero(incarnation)?;
        let begins = self.phase == Phase::Training;
        if begins {
            self.pauses += 1;
            self.phase = Phase::Paused { reason: reason.clone() };
            // A loss scale that an operator chose for this version stays.
            let loss_scale = self.standing.take().and_then(|standing| standing.loss_scale);
            self.standing = Some(Standing { paused: Some(reason), loss_scale });
        }
        Ok(begins)
    }

    /// Ends the pause that began at `version`, or the current one. Returns true if the tier must keep the
    /// change, and false if that pause had ended before.
    pub fn resume(&mut self, version: Option<Version>, loss_scale: f64) -> Result<bool, Refusal> {
        let contributions = self.spec.contributions(self.world_size);
        // A loss scale outside the range makes servers refuse the next commit, so the job would stand still.
        if loss_scale != 0.0 && !GRADIENT_SCALES.contains(&(loss_scale * contributions as f64)) {
            return Err(Refusal::UnusableLossScale { loss_scale, contributions });
        }
        match version {
            Some(version) if version > self.version => {
                return Err(Refusal::PauseTooNew { version, current: self.version });
            }
            Some(version) if version < self.version => return Ok(false),
            _ => {}
        }
        let Phase::Paused { .. } = self.phase else { return self.check_resumed(loss_scale).map(|()| false) };
        // The loss scale may change only if the pause came with the decision: no rank has begun a step with this
        // version then. Such a pause has no standing yet.
        if loss_scale != 0.0 && self.standing.is_some() {
            return Err(Refusal::LossScaleInUse { loss_scale, version: self.version });
        }
        let chosen = Some(loss_scale).filter(|&scale| scale != 0.0);
        if let (Some(decided), Some(_)) = (self.commits.back_mut(), chosen) {
            decided.resumed_loss_scale = chosen;
        }
        let before = self.standing.take().and_then(|standing| standing.loss_scale);
        self.standing = Some(Standing { paused: None, loss_scale: chosen.or(before) });
        self.phase = Phase::Training;
        self.resumes += 1;
        self.resumed_loss_scale = loss_scale;
        Ok(true)
    }

    /// Returns true if the pause that came with the last decision has ended.
    pub(super) fn is_resumed(&self) -> bool {
        self.standing.is_some()
    }

    /// Checks a resume of a job that is not paused: it is a repeat of the last one, or a mistake.
    fn check_resumed(&self, loss_scale: f64) -> Result<(), Refusal> {
        self.check_not_loading().map_err(|_| Refusal::NotPaused)?;
        if self.standing.is_none() {
            return Err(Refusal::NotPaused);
        }
        match self.commits.back().map(|decided| decided.loss_scale()) {
            Some(earlier) if loss_scale != 0.0 && loss_scale != earlier => {
                Err(Refusal::OtherResume { loss_scale, earlier })
            }
            _ => Ok(()),
        }
    }

    /// Refuses events that belong after the pause, while the pause lasts.
    pub(super) fn check_running(&self) -> Result<(), Refusal> {
        match &self.phase {
            Phase::Paused { reason } => Err(Refusal::Paused { reason: reason.clone() }),
            _ => Ok(()),
        }
    }

    /// The current version as a tier keeps it.
    pub fn record(&self) -> Record {
        let commit = self.commits.back().map(|decided| decided.commit.clone());
        let (version, applied, standing) = (self.version, self.applied, self.standing.clone());
        let placement = self.changed_placement();
        Record { version, applied, commit, left_out: self.filled_without().to_vec(), standing, placement }
    }
}
