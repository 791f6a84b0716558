//! A job as a universal checkpoint of DeepSpeed: a folder for each parameter, with a file for each array of its state.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use longshore_proto::{Fault, FaultKind, Hyper, JobSpec, Layout, LeftOut, Rule, StateArray};

use super::{
    archive::Archive,
    extents::Extents,
    optimizer::{hyperparameters, missed},
    pickle::Value,
    target::{Draft, failed, sync},
};
use crate::torch::moments;

/// The file that names the newest checkpoint of a folder.
const LATEST: &str = "latest_universal";
const WEIGHTS: &str = "fp32";
const STEP: &str = "step";
const OPTIMIZER: &str = "optimizer_state.pt";
/// What the engine keeps beside parameters: the file's name in ZeRO's stages 1 and 2, and in stage 3.
const MODEL_STATES: [&str; 2] = ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"];
/// The DeepSpeed release that the layout was introduced with, which its loaders ask for.
const DEEPSPEED: &str = "0.14.0";
/// The hyperparameters that DeepSpeed's loaders take.
const SETTINGS: [&str; 4] = ["lr", "weight_decay", "betas", "eps"];

pub(super) struct Universal {
    draft: Draft,
    /// The checkpoint's folder in the draft, until its name is known.
    folder: PathBuf,
    rule: Rule,
    groups: Vec<Hyper>,
    archives: Vec<Archive>,
    /// By array of the state: the archive of each parameter.
    extents: Vec<Extents<usize>>,
    /// The parameters that are trained, by number and name.
    params: Vec<(usize, String)>,
}

impl Universal {
    /// Reserves all space. `groups` are the hyperparameters of the last step.
    ///
    /// # Errors
    /// A fault where DeepSpeed has no such state, or there is no room.
    pub(super) fn create(
        draft: Draft,
        spec: &JobSpec,
        layout: &Layout,
        groups: Vec<Hyper>,
    ) -> Result<Universal, Fault> {
        if !matches!(spec.rule, Rule::AdamW | Rule::Adam) {
            let remedy = "export safetensors with --optimizer: universal checkpoints have Adam's moments";
            return Err(Fault::invalid("rule", spec.rule, "adamw or adam", remedy));
        }
        let folder = draft.path().join("unnamed");
        let arrays = [WEIGHTS].iter().chain(moments(spec.rule));
        let trained = (0..spec.params.len()).filter(|&param| !layout.is_param_frozen(param));
        let params: Vec<(usize, String)> =
            trained.map(|param| (param, spec.params[param].name.clone())).collect();
        let (mut archives, mut extents) = (Vec::new(), Vec::new());
        for array in arrays {
            let mut of_array = Vec::new();
            for (param, name) in &params {
                let of_param = folder_of(&folder, name)?;
                fs::create_dir_all(&of_param).map_err(failed("create", &of_param))?;
                let (shape, flat) = (spec.params[*param].shape.clone(), layout.param_range(*param));
                let size = (flat.end - flat.start) * 4;
                // What DeepSpeed's loaders look for in the file.
                let content =
                    dict([("cat_dim", Value::Int(0)), ("param", Value::Tensor { number: 0, shape })]);
                of_array.push((flat, archives.len()));
                archives.push(Archive::create(of_param.join(format!("{array}.pt")), &content, &[size])?);
            }
            extents.push(Extents::new(of_array));
        }
        Ok(Universal { draft, folder, rule: spec.rule, groups, archives, extents, params })
    }

    /// Writes fp32 values of flat elements from `at`.
    pub(super) fn write(&self, array: StateArray, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        let Some(extents) = self.extents.get(array.index()) else { return Ok(()) };
        extents.deal(at, bytes, 4, |&archive, from, values| self.archives[archive].write(0, from, values))
    }

    /// Adds what is known now that all values are there, and publishes the checkpoint. Returns its bytes, and the names of what the
    /// folder has.
    pub(super) fn publish(self, applied: u64, left_out: &[LeftOut]) -> Result<(u64, Vec<String>), Fault> {
        let count = applied.saturating_sub(missed_by_all(&self.params, left_out)?);
        let mut bytes = 0;
        for archive in self.archives {
            bytes += archive.seal()?;
        }
        let step = || Value::Tensor { number: 0, shape: Vec::new() };
        let counted = |path: PathBuf, content: &Value| -> Result<u64, Fault> {
            let archive = Archive::create(path, content, &[4])?;
            archive.write(0, 0, &(count as f32).to_le_bytes())?;
            archive.seal()
        };
        for (_, name) in &self.params {
            let of_param = folder_of(&self.folder, name)?;
            bytes += counted(of_param.join(format!("{STEP}.pt")), &step())?;
            sync(&of_param)?;
        }
        let zero = self.folder.join("zero");
        let groups = || Value::List(self.groups.iter().map(|hyper| settings(self.rule, hyper)).collect());
        let state = Value::Dict(vec![(Value::Int(0), dict([(STEP, step())]))]);
        // Loaders of ZeRO's stages 1 and 2 ask for the settings in one place, and that of stage 3 in another.
        let whole = dict([("state", state), ("param_groups", groups())]);
        let about =
            [("param_groups", groups()), ("optimizer_state_dict", whole), ("ds_version", DEEPSPEED.into())];
        bytes += counted(zero.join(OPTIMIZER), &dict(about))?;
        for name in MODEL_STATES {
            bytes += Archive::create(self.folder.join(name), &model_states(count), &[])?.seal()?;
        }
        let tag = format!("global_step{applied}_universal");
        let (named, latest) = (self.draft.path().join(&tag), self.draft.path().join(LATEST));
        fs::rename(&self.folder, &named).map_err(failed("rename", &named))?;
        fs::write(&latest, &tag).map_err(failed("write", &latest))?;
        for folder in [&named.join("zero"), &named, &latest, self.draft.path()] {
            sync(folder)?;
        }
        self.draft.publish()?;
        Ok((bytes, vec![tag, LATEST.to_string()]))
    }
}

/// The folder of one parameter. A name from a server must not lead elsewhere.
fn folder_of(checkpoint: &Path, name: &str) -> Result<PathBuf, Fault> {
    let is_inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if !is_inside || name.is_empty() {
        let remedy = "export safetensors, or name the parameter otherwise in a new job";
        return Err(Fault::invalid("name", name, "a name of a folder", remedy));
    }
    Ok(checkpoint.join("zero").join(name))
}

/// How many updates each parameter has missed. DeepSpeed has one step count for all, so that it must be the same number.
fn missed_by_all(params: &[(usize, String)], left_out: &[LeftOut]) -> Result<u64, Fault> {
    let Some(((first, first_name), others)) = params.split_first() else { return Ok(0) };
    let of_first = missed(left_out, *first);
    let other = others.iter().find(|(param, _)| missed(left_out, *param) != of_first);
    let Some((param, name)) = other else { return Ok(of_first) };
    let value = format!("{name} missed {} updates", missed(left_out, *param));
    let limit = format!("{of_first}, as {first_name} did, since DeepSpeed has one step count for all");
    let remedy = "export safetensors with --optimizer, or train with missing gradients as zeros";
    Err(Fault::new(FaultKind::Precondition, "step", value, limit, remedy))
}

fn dict<const COUNT: usize>(entries: [(&str, Value); COUNT]) -> Value {
    Value::Dict(entries.into_iter().map(|(key, value)| (key.into(), value)).collect())
}

fn settings(rule: Rule, hyper: &Hyper) -> Value {
    let all = hyperparameters(rule, hyper).into_iter();
    let is_taken = |key: &Value| matches!(key, Value::Text(key) if SETTINGS.contains(&key.as_str()));
    Value::Dict(all.filter(|(key, _)| is_taken(key)).collect())
}

/// What DeepSpeed's engine asks of a checkpoint beside parameters.
fn model_states(applied: u64) -> Value {
    dict([
        ("module", Value::Dict(Vec::new())),
        ("buffer_names", Value::List(Vec::new())),
        ("optimizer", Value::None),
        ("lr_scheduler", Value::None),
        ("sparse_tensor_module_names", Value::List(Vec::new())),
        ("skipped_steps", Value::Int(0)),
        ("global_steps", Value::Int(applied)),
        ("global_samples", Value::Int(0)),
        ("dp_world_size", Value::Int(1)),
        ("mp_world_size", Value::Int(1)),
        ("ds_config", Value::Dict(Vec::new())),
        ("ds_version", DEEPSPEED.into()),
    ])
}
