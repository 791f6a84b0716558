//! Rank 0's decision on a step, and its checks.

use crate::{
    fault::Fault,
    hyper::{Hyper, Rule},
    ids::{Incarnation, Step},
    job::JobSpec,
    left_out::{self, LeftOut},
    limits::{GRADIENT_SCALES, MAX_DELAY, MAX_PAUSE_REASON_BYTES, MAX_TRAINER_STATE_BYTES},
    placement::PlacementChange,
};

/// Start of the name of a wait for rank 0's decision. Where several servers wait, a wait with another name shows why
/// the decision is missing.
pub const DECISION_AWAITED: &str = "the decision on ";
/// Start of the name of a wait for a shard's state on another server. Such a wait explains why ranks send no gradients.
pub const STATE_AWAITED: &str = "the state of ";

/// Decision to apply or skip a step, with everything that its update needs. All servers of a job get the same commit.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Commit {
    pub step: Step,
    /// The gradient overflowed: the version rises and no state is updated.
    pub skip: bool,
    /// Divisor of the summed gradient: loss scale x world size x micro-steps.
    pub gradient_scale: f64,
    /// 1 if the gradient is not clipped.
    pub clip_coefficient: f64,
    pub correction: Correction,
    pub groups: Vec<Hyper>,
    /// Parameters that this or any earlier step left out, in ascending order.
    #[serde(default)]
    pub left_out: Vec<LeftOut>,
    /// Global gradient norm before clipping, for status only.
    pub norm: f64,
    /// Loss scale of the steps that read this version.
    pub loss_scale: f64,
    /// Resume data of the trainer, opaque to servers.
    pub trainer_state: Vec<u8>,
    /// Incarnation of the rank 0 that decided, or 0 if the client sent none. Step and `decided_by` together name a
    /// version uniquely.
    #[serde(default)]
    pub decided_by: Incarnation,
    /// Reason of the pause that this decision begins. Empty: no pause.
    pub pause_reason: String,
    /// Change of the placement that comes with this decision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementChange>,
}

impl Commit {
    /// Returns the factor that kernels multiply a shard's summed gradient by, computed in f64 and rounded once. `share`
    /// is the shard's [`JobSpec::share`].
    pub fn gradient_multiplier(&self, share: f64) -> f32 {
        (self.clip_coefficient / (self.gradient_scale * share)) as f32
    }

    pub fn validate(&self, spec: &JobSpec) -> Result<(), Fault> {
        let bad = |field: &str, value: f64, limit: &str| {
            Err(Fault::invalid(format!("commit.{field}"), value, limit, "correct it and commit again"))
        };
        if self.step.0 == 0 {
            return bad("step", 0.0, "at least 1");
        }
        if !GRADIENT_SCALES.contains(&self.gradient_scale) {
            let limit = format!("{:e} to {:e}", GRADIENT_SCALES.start(), GRADIENT_SCALES.end());
            return bad("gradient_scale", self.gradient_scale, &limit);
        }
        if !(self.clip_coefficient > 0.0 && self.clip_coefficient <= 1.0) {
            return bad("clip_coefficient", self.clip_coefficient, "in (0, 1]");
        }
        if !(self.loss_scale.is_finite() && self.loss_scale > 0.0) {
            return bad("loss_scale", self.loss_scale, "finite and above 0");
        }
        self.correction.validate(spec)?;
        if self.groups.len() != spec.groups.len() {
            let limit = format!("{}, the job's number of param groups", spec.groups.len());
            let remedy = "send one entry for each group, in the order of JobSpec.groups";
            return Err(Fault::invalid("commit.groups", self.groups.len(), limit, remedy));
        }
        left_out::check(&self.left_out, spec.params.len(), spec.leave_out || self.skip)?;
        if self.trainer_state.len() > MAX_TRAINER_STATE_BYTES {
            let limit = format!("at most {MAX_TRAINER_STATE_BYTES} bytes");
            let remedy = "keep tensors out of the trainer's state";
            return Err(Fault::invalid("commit.trainer_state", self.trainer_state.len(), limit, remedy));
        }
        check_pause_reason("commit.pause_reason", &self.pause_reason)?;
        self.groups.iter().enumerate().try_for_each(|(index, hyper)| hyper.validate(index))
    }
}

/// Correction of the delay: the difference between a version's images and its master weights z.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Correction {
    /// Images are the master weights z, rounded to the image dtype. Exact steps and evaluations read such images.
    #[default]
    None,
    /// Images are ahead of z by the known part of the next step; docs/protocol.md has the formula. The learning rates
    /// are this step's, in the order of the param groups. Commits of earlier releases hold the next step's rates.
    LookAhead(Vec<f64>),
}

impl Correction {
    /// Returns the learning rates of a [`LookAhead`](Correction::LookAhead), empty without a correction.
    pub fn look_ahead(&self) -> &[f64] {
        match self {
            Correction::LookAhead(lr) => lr,
            Correction::None => &[],
        }
    }

    fn validate(&self, spec: &JobSpec) -> Result<(), Fault> {
        const REMEDY: &str = "correct it and commit again";
        let Correction::LookAhead(lr) = self else { return Ok(()) };
        let invalid = |part: &str, value: String, limit: String| {
            Err(Fault::invalid(format!("commit.look_ahead{part}"), value, limit, REMEDY))
        };
        if spec.max_delay < MAX_DELAY {
            return invalid("", "given".into(), "none for a job opened with max_delay 0".into());
        }
        if !spec.rule.can_look_ahead() {
            return invalid(
                "",
                spec.rule.to_string(),
                format!("a rule with momentum: {}", Rule::names(Rule::can_look_ahead)),
            );
        }
        if lr.len() != spec.groups.len() {
            let limit = format!("{}, the job's number of param groups", spec.groups.len());
            return invalid("", format!("{} learning rates", lr.len()), limit);
        }
        match lr.iter().position(|lr| !(lr.is_finite() && *lr >= 0.0)) {
            Some(group) => {
                invalid(&format!(".lr[{group}]"), lr[group].to_string(), "finite and at least 0".into())
            }
            None => Ok(()),
        }
    }
}

/// Checks the length of a pause's reason. A pause comes with a commit, or as a call of its own.
pub fn check_pause_reason(field: &str, reason: &str) -> Result<(), Fault> {
    if reason.len() <= MAX_PAUSE_REASON_BYTES {
        return Ok(());
    }
    let (value, limit) =
        (format!("{} bytes", reason.len()), format!("at most {MAX_PAUSE_REASON_BYTES} bytes"));
    Err(Fault::invalid(field, value, limit, "shorten it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JobName, Param, limits::BLOCK_ELEMENTS};

    fn spec(rule: Rule, max_delay: u32) -> JobSpec {
        JobSpec {
            groups: vec!["decay".into(), "no decay".into()],
            rule,
            max_delay,
            shard_elements: BLOCK_ELEMENTS,
            ..JobSpec::new(
                JobName::parse("name", "delayed").unwrap(),
                vec![Param { name: "weight".into(), shape: vec![100], group: 1 }],
            )
        }
    }

    #[test]
    fn a_correction_that_does_not_fit_the_job_is_refused() {
        let of = |rule, delay, correction: Correction| correction.validate(&spec(rule, delay));
        let ahead = |lr: &[f64]| Correction::LookAhead(lr.to_vec());
        for rule in [Rule::AdamW, Rule::Adam, Rule::Sgd] {
            assert_eq!(of(rule, 1, ahead(&[0.1, 0.0])), Ok(()));
        }
        assert_eq!(of(Rule::Lion, 0, Correction::None), Ok(()));
        for (rule, delay, correction, field, limit) in [
            (Rule::AdamW, 0, ahead(&[0.1, 0.1]), "commit.look_ahead", "max_delay 0"),
            (Rule::AdamW, 1, ahead(&[0.1]), "commit.look_ahead", "2, the job's number of param groups"),
            (Rule::AdamW, 1, ahead(&[]), "commit.look_ahead", "2, the job's number of param groups"),
            (Rule::AdamW, 1, ahead(&[0.1, f64::NAN]), "commit.look_ahead.lr[1]", "finite"),
            (Rule::AdamW, 1, ahead(&[-0.1, 0.1]), "commit.look_ahead.lr[0]", "at least 0"),
            (Rule::Lion, 1, ahead(&[0.1, 0.1]), "commit.look_ahead", "adamw, adam or sgd"),
            (Rule::Adagrad, 1, ahead(&[0.1, 0.1]), "commit.look_ahead", "adamw, adam or sgd"),
        ] {
            let fault = of(rule, delay, correction).unwrap_err();
            assert!(fault.field == field && fault.limit.contains(limit), "{fault}");
        }
    }
}
