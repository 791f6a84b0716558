//! Messages of decisions: commits, hyperparameters, and parameters left out.

use longshore_proto::{
    Correction,
    commit::Commit,
    fault::Fault,
    hyper::Hyper,
    ids::{Incarnation, Step},
    left_out::LeftOut,
    placement::PlacementChange,
};

use super::{
    convert::{LOOK_AHEAD, Wire, missing},
    v1,
};

fn hyper_from_wire(hyper: v1::Hyper) -> Hyper {
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
        momentum_decay: hyper.momentum_decay,
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
        momentum_decay: hyper.momentum_decay,
    }
}

impl Wire for Commit {
    type Message = v1::Commit;

    fn from_wire(commit: Option<v1::Commit>) -> Result<Commit, Fault> {
        let commit = commit.ok_or_else(|| missing("commit"))?;
        let correction = correction_from_wire(&commit)?;
        Ok(Commit {
            step: Step(commit.step),
            skip: commit.skip,
            gradient_scale: commit.gradient_scale,
            clip_coefficient: commit.clip_coefficient,
            correction,
            left_out: left_outs_from_wire(commit.left_out),
            groups: commit.groups.into_iter().map(hyper_from_wire).collect(),
            norm: commit.norm,
            loss_scale: commit.loss_scale,
            trainer_state: commit.trainer_state.into(),
            decided_by: Incarnation(commit.decided_by),
            pause_reason: commit.pause_reason,
            placement: commit.placement.map(|change| PlacementChange::from_wire(Some(change))).transpose()?,
        })
    }

    #[expect(deprecated, reason = "the fields of earlier versions are named, so that none is forgotten")]
    fn to_wire(&self) -> v1::Commit {
        let look_ahead = match &self.correction {
            Correction::LookAhead(lr) => Some(v1::LookAhead { lr: lr.clone() }),
            Correction::None => None,
        };
        v1::Commit {
            step: self.step.0,
            skip: self.skip,
            gradient_scale: self.gradient_scale,
            clip_coefficient: self.clip_coefficient,
            look_ahead,
            compensation: 0.0,
            worker_local: None,
            amend: None,
            left_out: left_outs_to_wire(&self.left_out),
            groups: self.groups.iter().map(hyper_to_wire).collect(),
            norm: self.norm,
            loss_scale: self.loss_scale,
            trainer_state: self.trainer_state.clone().into(),
            decided_by: self.decided_by.0,
            pause_reason: self.pause_reason.clone(),
            placement: self.placement.as_ref().map(Wire::to_wire),
        }
    }
}

/// Converts the list of an upload or of a job's progress. The job checks the list against its parameters.
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

/// Refuses the corrections of earlier releases by name.
#[expect(deprecated, reason = "a worker of an earlier version may still send them")]
fn correction_from_wire(commit: &v1::Commit) -> Result<Correction, Fault> {
    let retired = [
        ("worker_local", commit.worker_local.is_some()),
        ("amend", commit.amend.is_some()),
        ("compensation", commit.compensation != 0.0),
    ];
    if let Some((field, _)) = retired.into_iter().find(|(_, given)| *given) {
        let limit = "left out: look_ahead is the one correction of a delay";
        return Err(Fault::invalid(format!("commit.{field}"), "given", limit, LOOK_AHEAD));
    }
    Ok(commit.look_ahead.as_ref().map_or(Correction::None, |ahead| Correction::LookAhead(ahead.lr.clone())))
}

#[cfg(test)]
mod tests {
    use longshore_proto::job::JobSpec;

    use super::*;

    #[test]
    #[expect(deprecated, reason = "the fields of earlier versions")]
    fn corrections_of_earlier_versions_are_refused_by_name() {
        let wrong = [
            ("commit.compensation", v1::Commit { compensation: 0.5, ..Default::default() }),
            (
                "commit.worker_local",
                v1::Commit { worker_local: Some(Default::default()), ..Default::default() },
            ),
            ("commit.amend", v1::Commit { amend: Some(Default::default()), ..Default::default() }),
        ];
        for (field, commit) in wrong {
            let fault = Commit::from_wire(Some(commit)).unwrap_err();
            assert!(fault.field == field && fault.remedy.contains("look-ahead"), "{fault}");
        }
        let spec = v1::JobSpec { worker_local: true, ..Default::default() };
        assert_eq!(JobSpec::from_wire(Some(spec)).unwrap_err().field, "spec.worker_local");
        let plain = v1::Commit { look_ahead: Some(v1::LookAhead { lr: vec![0.1] }), ..Default::default() };
        let correction = Commit::from_wire(Some(plain)).unwrap().correction;
        assert_eq!(correction, Correction::LookAhead(vec![0.1]));
    }
}
