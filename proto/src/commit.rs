//! The decision on a step.

use crate::{
    fault::Fault,
    hyper::Hyper,
    ids::{Incarnation, Step},
    job::JobSpec,
    limits::{MAX_DELAY, MAX_PAUSE_REASON_BYTES, MAX_TRAINER_STATE_BYTES},
};

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
    /// The c in `image = cast(z - c*u)`.
    pub compensation: f64,
    pub groups: Vec<Hyper>,
    /// The global gradient norm before clipping, for status only.
    pub norm: f64,
    /// The loss scaler's value for steps that read this version.
    pub loss_scale: f64,
    /// The trainer's own resume data.
    pub trainer_state: Vec<u8>,
    /// The rank 0 that made the decision. With the step it names a version for good. 0 where the client did not say.
    #[serde(default)]
    pub decided_by: Incarnation,
    /// If not empty, the job is paused with this decision, for this reason.
    pub pause_reason: String,
}

impl Commit {
    /// The one factor that the kernels multiply the summed gradient by, formed in f64 and rounded once.
    pub fn gradient_multiplier(&self) -> f32 {
        (self.clip_coefficient / self.gradient_scale) as f32
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
        if !(0.0..=1.0).contains(&self.compensation) {
            return bad("compensation", self.compensation, "in [0, 1]");
        }
        if self.compensation != 0.0 && spec.max_delay < MAX_DELAY {
            return bad("compensation", self.compensation, "0 for a job opened with max_delay 0");
        }
        if self.groups.len() != spec.groups.len() {
            let limit = format!("{}, the job's number of param groups", spec.groups.len());
            let remedy = "send one entry for each group, in the order of JobSpec.groups";
            return Err(Fault::invalid("commit.groups", self.groups.len(), limit, remedy));
        }
        if self.trainer_state.len() > MAX_TRAINER_STATE_BYTES {
            let limit = format!("at most {MAX_TRAINER_STATE_BYTES} bytes");
            let remedy = "keep tensors out of the trainer's state";
            return Err(Fault::invalid("commit.trainer_state", self.trainer_state.len(), limit, remedy));
        }
        check_pause_reason("commit.pause_reason", &self.pause_reason)?;
        self.groups.iter().enumerate().try_for_each(|(index, hyper)| hyper.validate(index))
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
