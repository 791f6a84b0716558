//! A job's moments and step counts as torch's optimizer of its rule saves them: `optimizer.pt`.

use std::path::Path;

use longshore_proto::{Fault, Hyper, JobSpec, Layout, LeftOut, Rule, StateArray};

use super::{archive::Archive, extents::Extents, pickle::Value, target::OPTIMIZER};
use crate::torch::{counts_steps, moments};

pub(super) struct Optimizer {
    archive: Archive,
    /// By moment: the tensor of each parameter.
    extents: [Extents<usize>; 2],
    /// By parameter that is trained: the tensor of its step count.
    steps: Vec<(usize, usize)>,
}

impl Optimizer {
    /// Reserves all space in a folder. `groups` are the hyperparameters of the last step.
    pub(super) fn create(
        folder: &Path,
        spec: &JobSpec,
        layout: &Layout,
        groups: &[Hyper],
    ) -> Result<Optimizer, Fault> {
        let (mut state, mut param_groups, mut sizes) = (Vec::new(), Vec::new(), Vec::new());
        let (mut extents, mut steps) = ([Vec::new(), Vec::new()], Vec::new());
        let mut count = 0u64;
        for (group, hyper) in groups.iter().enumerate() {
            let in_group = |param: &usize| {
                layout.param_group(*param) as usize == group && !layout.is_param_frozen(*param)
            };
            let params: Vec<usize> = (0..spec.params.len()).filter(in_group).collect();
            let (first, mut names) = (count, Vec::new());
            for &param in &params {
                let (shape, flat) = (spec.params[param].shape.clone(), layout.param_range(param));
                let mut entries = Vec::new();
                if counts_steps(spec.rule) {
                    entries.push(("step".into(), Value::Tensor { number: sizes.len(), shape: Vec::new() }));
                    steps.push((param, sizes.len()));
                    sizes.push(4);
                }
                for (of_moment, &name) in extents.iter_mut().zip(moments(spec.rule)) {
                    let tensor = sizes.len();
                    entries.push((name.into(), Value::Tensor { number: tensor, shape: shape.clone() }));
                    of_moment.push((flat.clone(), tensor));
                    sizes.push((flat.end - flat.start) * 4);
                }
                names.push(Value::Text(spec.params[param].name.clone()));
                state.push((Value::Int(count), Value::Dict(entries)));
                count += 1;
            }
            let mut about = hyperparameters(spec.rule, hyper);
            about.push(("params".into(), Value::List((first..count).map(Value::Int).collect())));
            about.push(("param_names".into(), Value::List(names)));
            param_groups.push(Value::Dict(about));
        }
        let content = Value::Dict(vec![
            ("state".into(), Value::Dict(state)),
            ("param_groups".into(), Value::List(param_groups)),
        ]);
        let archive = Archive::create(folder.join(OPTIMIZER), &content, &sizes)?;
        Ok(Optimizer { archive, extents: extents.map(Extents::new), steps })
    }

    /// Writes fp32 values of flat elements from `at`.
    pub(super) fn write(&self, array: StateArray, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let Some(extents) = array.index().checked_sub(1).and_then(|moment| self.extents.get(moment)) else {
            return Ok(());
        };
        extents.deal(at, bytes, 4, |&tensor, from, values| self.archive.write(tensor, from, values))
    }

    /// Writes each parameter's step count, and makes the file whole and durable. Returns its bytes.
    pub(super) fn seal(self, applied: u64, left_out: &[LeftOut]) -> Result<u64, Fault> {
        for &(param, tensor) in &self.steps {
            let step = (applied.saturating_sub(missed(left_out, param)) as f32).to_le_bytes();
            self.archive.write(tensor, 0, &step)?;
        }
        self.archive.seal()
    }
}

/// How many of the updates a parameter has missed.
pub(super) fn missed(left_out: &[LeftOut], param: usize) -> u64 {
    let found = left_out.binary_search_by_key(&(param as u32), |left_out| left_out.param);
    found.map_or(0, |index| left_out[index].steps)
}

/// A param group's settings in torch's names, as its optimizer of this rule saves them.
pub(super) fn hyperparameters(rule: Rule, hyper: &Hyper) -> Vec<(Value, Value)> {
    let off = ["maximize", "differentiable"].map(|name| (name, Value::Bool(false)));
    let open = ["foreach", "fused"].map(|name| (name, Value::None));
    let number = Value::Float;
    let betas = || Value::Tuple(vec![number(hyper.beta1), number(hyper.beta2)]);
    let mut known = vec![("lr", number(hyper.lr)), ("weight_decay", number(hyper.weight_decay))];
    match rule {
        Rule::AdamW | Rule::Adam => known.extend([
            ("betas", betas()),
            ("eps", number(hyper.eps)),
            ("amsgrad", Value::Bool(false)),
            ("capturable", Value::Bool(false)),
            ("decoupled_weight_decay", Value::Bool(rule == Rule::AdamW)),
        ]),
        Rule::Sgd => known.extend([
            ("momentum", number(hyper.momentum)),
            ("dampening", number(hyper.dampening)),
            ("nesterov", Value::Bool(hyper.nesterov)),
        ]),
        Rule::Lion => known.push(("betas", betas())),
        Rule::Adagrad => known.extend([
            ("lr_decay", number(hyper.lr_decay)),
            ("eps", number(hyper.eps)),
            ("initial_accumulator_value", number(0.0)),
        ]),
    }
    known.into_iter().chain(off).chain(open).map(|(name, value)| (name.into(), value)).collect()
}
