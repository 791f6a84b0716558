//! Decisions: commits, hyperparameters, and parameters left out, as messages.

use longshore_proto::{
    Correction,
    commit::Commit,
    fault::Fault,
    hyper::Hyper,
    ids::{Incarnation, Step},
    left_out::LeftOut,
};

use super::{
    convert::{Wire, missing},
    v1,
};

pub fn hyper_from_wire(hyper: v1::Hyper) -> Hyper {
    Hyper {
        lr: hyper.lr,
        beta1: hyper.beta1,
        beta2: hyper.beta2,
        eps: hyper.eps,
        weight_decay: hyper.weight_decay,
        momentum: hyper.momentum,
        dampening: hyper.dampening,
        nesterov: hyper.nesterov,
        lr_decay: hyper.lr_decay,
    }
}

fn hyper_to_wire(hyper: &Hyper) -> v1::Hyper {
    v1::Hyper {
        lr: hyper.lr,
        beta1: hyper.beta1,
        beta2: hyper.beta2,
        eps: hyper.eps,
        weight_decay: hyper.weight_decay,
        momentum: hyper.momentum,
        dampening: hyper.dampening,
        nesterov: hyper.nesterov,
        lr_decay: hyper.lr_decay,
    }
}

impl Wire for Commit {
    type Message = v1::Commit;

    fn from_wire(commit: Option<v1::Commit>) -> Result<Commit, Fault> {
        let commit = commit.ok_or_else(|| missing("commit"))?;
        let correction = correction_from_wire(commit.compensation, commit.look_ahead, commit.worker_local)?;
        Ok(Commit {
            step: Step(commit.step),
            skip: commit.skip,
            gradient_scale: commit.gradient_scale,
            clip_coefficient: commit.clip_coefficient,
            correction,
            amend: commit.amend.map(|amend| amend.gamma),
            left_out: left_outs_from_wire(commit.left_out),
            groups: commit.groups.into_iter().map(hyper_from_wire).collect(),
            norm: commit.norm,
            loss_scale: commit.loss_scale,
            trainer_state: commit.trainer_state.into(),
            decided_by: Incarnation(commit.decided_by),
            pause_reason: commit.pause_reason,
        })
    }

    fn to_wire(&self) -> v1::Commit {
        let (look_ahead, worker_local) = match &self.correction {
            Correction::LookAhead(lr) => (Some(v1::LookAhead { lr: lr.clone() }), None),
            Correction::WorkerLocal(lr) => (None, Some(v1::WorkerLocal { lr: lr.clone() })),
            Correction::None | Correction::Compensation(_) => (None, None),
        };
        v1::Commit {
            step: self.step.0,
            skip: self.skip,
            gradient_scale: self.gradient_scale,
            clip_coefficient: self.clip_coefficient,
            compensation: self.correction.compensation(),
            look_ahead,
            worker_local,
            amend: self.amend.map(|gamma| v1::Amend { gamma }),
            left_out: left_outs_to_wire(&self.left_out),
            groups: self.groups.iter().map(hyper_to_wire).collect(),
            norm: self.norm,
            loss_scale: self.loss_scale,
            trainer_state: self.trainer_state.clone().into(),
            decided_by: self.decided_by.0,
            pause_reason: self.pause_reason.clone(),
        }
    }
}

/// A list as an upload or a job's progress has it. Whether it fits the job is for the job to say.
pub fn left_outs_from_wire(left_out: Vec<v1::LeftOut>) -> Vec<LeftOut> {
    left_out.into_iter().map(left_out_from_wire).collect()
}

pub fn left_outs_to_wire(left_out: &[LeftOut]) -> Vec<v1::LeftOut> {
    left_out.iter().map(left_out_to_wire).collect()
}

fn left_out_from_wire(left_out: v1::LeftOut) -> LeftOut {
    LeftOut { param: left_out.param, steps: left_out.steps, now: left_out.now }
}

fn left_out_to_wire(left_out: &LeftOut) -> v1::LeftOut {
    v1::LeftOut { param: left_out.param, steps: left_out.steps, now: left_out.now }
}

fn correction_from_wire(
    compensation: f64,
    look_ahead: Option<v1::LookAhead>,
    worker_local: Option<v1::WorkerLocal>,
) -> Result<Correction, Fault> {
    const REMEDY: &str = "give one correction";
    match (compensation, look_ahead, worker_local) {
        (0.0, None, None) => Ok(Correction::None),
        (0.0, Some(ahead), None) => Ok(Correction::LookAhead(ahead.lr)),
        (0.0, None, Some(local)) => Ok(Correction::WorkerLocal(local.lr)),
        (0.0, Some(_), Some(_)) => {
            Err(Fault::invalid("commit.worker_local", "given", "none beside look_ahead", REMEDY))
        }
        (c, None, None) => Ok(Correction::Compensation(c)),
        (c, ..) => Err(Fault::invalid("commit.compensation", c, "0 beside another correction", REMEDY)),
    }
}
