//! The decision on a step.

use crate::{
    fault::Fault,
    hyper::Hyper,
    ids::{Incarnation, Step},
    job::JobSpec,
    left_out::{self, LeftOut},
    limits::{MAX_DELAY, MAX_GAMMA, MAX_PAUSE_REASON_BYTES, MAX_TRAINER_STATE_BYTES},
};

/// What the name of a wait for a decision begins with. Where several servers wait, the one whose wait begins otherwise says
/// why there is no decision.
pub const DECISION_AWAITED: &str = "the decision on ";

/// Apply or skip, and everything that the update of one step needs. It is the same on every server of a job.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Commit {
    pub step: Step,
    /// Overflow: the version rises and nothing is updated.
    pub skip: bool,
    /// What the summed gradient is divided by: loss scale x world size x micro-steps.
    pub gradient_scale: f64,
    /// It is 1 when the gradient is not clipped.
    pub clip_coefficient: f64,
    pub correction: Correction,
    /// The gamma of the amended image, which this step makes of the image of the step before. None where this step makes
    /// no amended image.
    #[serde(default)]
    pub amend: Option<f64>,
    pub groups: Vec<Hyper>,
    /// The parameters that this or any earlier step left out, in ascending order.
    #[serde(default)]
    pub left_out: Vec<LeftOut>,
    /// The global gradient norm before clipping, for status only.
    pub norm: f64,
    /// The loss scaler's value for steps that read this version.
    pub loss_scale: f64,
    /// The trainer's own resume data.
    pub trainer_state: Vec<u8>,
    /// The incarnation of the rank 0 that made the decision, or 0 if the client did not say it. With the step it names
    /// a version for good.
    #[serde(default)]
    pub decided_by: Incarnation,
    /// If it is not empty, this decision pauses the job, for this reason.
    pub pause_reason: String,
}

impl Commit {
    /// The one factor that the kernels multiply a shard's summed gradient by, formed in f64 and rounded once. `share` is
    /// the shard's [`JobSpec::share`].
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
        if !(self.gradient_scale.is_finite() && self.gradient_scale > 0.0) {
            return bad("gradient_scale", self.gradient_scale, "finite and above 0");
        }
        if !(self.clip_coefficient > 0.0 && self.clip_coefficient <= 1.0) {
            return bad("clip_coefficient", self.clip_coefficient, "in (0, 1]");
        }
        if !(self.loss_scale.is_finite() && self.loss_scale > 0.0) {
            return bad("loss_scale", self.loss_scale, "finite and above 0");
        }
        self.correction.validate(spec)?;
        self.check_amend(spec)?;
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

impl Commit {
    /// How the newest gradient amends an image. None where this step makes no amended image.
    pub fn amendment(&self, share: f64) -> Option<Amendment> {
        let gamma = self.amend.filter(|_| !self.skip)?;
        let limit =
            |hyper: &Hyper| (gamma * hyper.lr * (1.0 - hyper.beta1) / (1.0 - hyper.beta2).sqrt()) as f32;
        Some(Amendment {
            multiplier: (gamma * self.clip_coefficient / (self.gradient_scale * share)) as f32,
            limits: self.groups.iter().map(limit).collect(),
        })
    }

    /// Whether servers make amended images with this decision.
    pub fn amends(&self) -> bool {
        self.amend.is_some() && !self.skip
    }

    /// Whether the images of this version lack the newest gradient alone, so that the next step amends them.
    pub fn is_worker_local(&self) -> bool {
        matches!(self.correction, Correction::WorkerLocal(_))
    }

    fn check_amend(&self, spec: &JobSpec) -> Result<(), Fault> {
        let Some(gamma) = self.amend else { return Ok(()) };
        let refused =
            |limit: String| Err(Fault::invalid("commit.amend", gamma, limit, "correct it and commit again"));
        if !spec.worker_local {
            return refused("none for a job opened without worker_local".into());
        }
        if self.skip {
            return refused("none in a commit that skips".into());
        }
        if !(gamma > 0.0 && gamma <= MAX_GAMMA) {
            return refused(format!("a gamma in (0, {MAX_GAMMA}]"));
        }
        Ok(())
    }
}

/// How the newest gradient amends an image: `image - clamp(rate * (gradient * multiplier), limit)`. Its numbers are formed in
/// f64 and rounded once.
#[derive(Clone, Debug, PartialEq)]
pub struct Amendment {
    pub multiplier: f32,
    /// By param group: the most that Adam's own step moves an element for its newest gradient, whatever its second moment
    /// was. A rate is made of older second moments, so that the first gradient after a long time, as of a token that is
    /// rare, would move its weights by thousands of such steps.
    pub limits: Vec<f32>,
}

/// What makes up for a delay: how the images of a version differ from its master weights z.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub enum Correction {
    /// Images are `cast(z)`. Exact steps read these, and so do evaluations.
    #[default]
    None,
    /// A number c in (0, 1]: images are `cast(z - c*u)`, where u = old z - z is this step's displacement.
    Compensation(f64),
    /// Images are ahead of z by what is known of the next step: docs/protocol.md has the formula. These are the
    /// learning rates of that step, one for each param group.
    LookAhead(Vec<f64>),
    /// Images are ahead of z by what is known of the next step but for its gradient, which the worker adds:
    /// docs/protocol.md has the formula. These are the learning rates of that step, one for each param group.
    WorkerLocal(Vec<f64>),
}

impl Correction {
    /// The c of a [`Compensation`](Correction::Compensation). It is 0 for other corrections.
    pub fn compensation(&self) -> f64 {
        match self {
            Correction::Compensation(c) => *c,
            Correction::None | Correction::LookAhead(_) | Correction::WorkerLocal(_) => 0.0,
        }
    }

    /// The learning rates of a [`LookAhead`](Correction::LookAhead). Other corrections have none.
    pub fn look_ahead(&self) -> &[f64] {
        match self {
            Correction::LookAhead(lr) => lr,
            Correction::None | Correction::Compensation(_) | Correction::WorkerLocal(_) => &[],
        }
    }

    fn validate(&self, spec: &JobSpec) -> Result<(), Fault> {
        const REMEDY: &str = "correct it and commit again";
        let field = match self {
            Correction::None => return Ok(()),
            Correction::Compensation(_) => "commit.compensation",
            Correction::LookAhead(_) => "commit.look_ahead",
            Correction::WorkerLocal(_) => "commit.worker_local",
        };
        let invalid =
            |field: &str, value: String, limit: String| Err(Fault::invalid(field, value, limit, REMEDY));
        match self {
            Correction::Compensation(c) if !(0.0..=1.0).contains(c) => {
                invalid(field, c.to_string(), "in [0, 1]".into())
            }
            Correction::Compensation(c) if spec.max_delay < MAX_DELAY => {
                invalid(field, c.to_string(), "0 for a job opened with max_delay 0".into())
            }
            Correction::LookAhead(_) if spec.max_delay < MAX_DELAY => {
                invalid(field, "given".into(), "none for a job opened with max_delay 0".into())
            }
            Correction::LookAhead(_) if !spec.rule.can_look_ahead() => {
                invalid(field, spec.rule.to_string(), "a rule with momentum: adamw, adam or sgd".into())
            }
            Correction::WorkerLocal(_) if !spec.worker_local => {
                invalid(field, "given".into(), "none for a job opened without worker_local".into())
            }
            Correction::LookAhead(lr) | Correction::WorkerLocal(lr) => match check_learning_rates(lr, spec) {
                Ok(()) => Ok(()),
                Err((part, value, limit)) => invalid(&format!("{field}{part}"), value, limit),
            },
            Correction::None | Correction::Compensation(_) => Ok(()),
        }
    }
}

/// Checks the learning rates of the next step. An error is the part of the field, its value and its limit.
fn check_learning_rates(lr: &[f64], spec: &JobSpec) -> Result<(), (String, String, String)> {
    if lr.len() != spec.groups.len() {
        let limit = format!("{}, the job's number of param groups", spec.groups.len());
        return Err((String::new(), format!("{} learning rates", lr.len()), limit));
    }
    match lr.iter().position(|lr| !(lr.is_finite() && *lr >= 0.0)) {
        Some(group) => Err((format!(".lr[{group}]"), lr[group].to_string(), "finite and at least 0".into())),
        None => Ok(()),
    }
}

/// Checks the reason of a pause, whether or not it comes with a decision.
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
    use crate::{JobName, Param, Rule, limits::BLOCK_ELEMENTS};

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
        assert_eq!(of(Rule::Lion, 1, Correction::Compensation(1.0)), Ok(()));
        assert_eq!(of(Rule::Lion, 0, Correction::None), Ok(()));
        for (rule, delay, correction, field, limit) in [
            (Rule::AdamW, 0, ahead(&[0.1, 0.1]), "commit.look_ahead", "max_delay 0"),
            (Rule::AdamW, 0, Correction::Compensation(0.5), "commit.compensation", "max_delay 0"),
            (Rule::AdamW, 1, Correction::Compensation(1.5), "commit.compensation", "in [0, 1]"),
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
