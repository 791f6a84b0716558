//! `AdamW.state_dict()` and the like as `torch.save` wrote it, by itself or within a checkpoint.

mod archive;
mod pickle;
mod zip;

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, bail};

pub(super) use self::archive::Archive;
use self::pickle::{Id, Object};
use super::{
    found::{Moments, State, invalid},
    tensors::{Files, Kind, Tensor},
};

/// What programs call the optimizer's state in their checkpoints.
const OPTIMIZERS: [&str; 3] = ["optimizer", "optimizer_state_dict", "optimizer_states"];
/// And the model's weights.
const MODELS: [&str; 4] = ["model", "model_state_dict", "state_dict", "module"];

/// The state of a torch optimizer.
pub(super) fn state(path: &Path, files: &mut Files) -> anyhow::Result<State> {
    let archive = Archive::open(path, files)?;
    let dict = archive.state_dict().with_context(|| {
        let known = OPTIMIZERS.join(", ");
        format!("{} has no state of an optimizer, by itself or as one of {known}", path.display())
    })?;
    let (state, names) = archive.numbered(dict).with_context(|| format!("cannot read {}", path.display()))?;
    let mut found = State { order: names.is_none(), params: Vec::new() };
    for (number, id) in state {
        let name = match &names {
            Some(names) => names.get(&number).cloned().unwrap_or_else(|| format!("parameter {number}")),
            None => number.to_string(),
        };
        let moments = archive.moments(id, &name, files)?;
        found.params.push((name, moments));
    }
    Ok(found)
}

/// The weights of a model, by name.
pub(super) fn weights(path: &Path, files: &mut Files) -> anyhow::Result<BTreeMap<String, Tensor>> {
    let archive = Archive::open(path, files)?;
    let pickle = archive.pickle();
    let root = pickle.root();
    let dict = MODELS.iter().find_map(|name| pickle.entry(root, name)).unwrap_or(root);
    let entries =
        pickle.entries(dict).with_context(|| format!("{} is no dict of weights", path.display()))?;
    let named: Vec<(String, Id)> =
        entries.iter().filter_map(|&(key, value)| Some((pickle.text(key)?.to_string(), value))).collect();
    let mut found = BTreeMap::new();
    for (name, id) in named {
        if let Some(tensor) = archive.tensor(id).with_context(|| format!("{name} of {}", path.display()))? {
            found.insert(name, tensor);
        }
    }
    Ok(found)
}

/// By its number: a parameter's state.
type Numbered = Vec<(u64, Id)>;

impl Archive {
    /// The one tensor of a file of a universal checkpoint.
    pub(super) fn only_tensor(&self) -> anyhow::Result<Option<Tensor>> {
        let root = self.pickle().root();
        self.tensor(self.pickle().entry(root, "param").unwrap_or(root))
    }

    /// A number, which may be a tensor of one.
    fn number(&self, id: Id, files: &Files) -> anyhow::Result<Option<f64>> {
        match *self.pickle().get(id) {
            Object::Int(value) => return Ok(Some(value as f64)),
            Object::Float(value) => return Ok(Some(value)),
            _ => {}
        }
        let Some(Tensor { file, start, shape, kind }) = self.tensor(id)? else { return Ok(None) };
        if shape.iter().any(|&size| size != 1) {
            return Ok(None);
        }
        let mut bytes = [0; 8];
        Ok(match kind {
            Kind::Float(dtype) => {
                let place = super::tensors::Place { file, start, dtype };
                files.write(place, 0, &mut bytes[..4])?;
                Some(f32::from_le_bytes(bytes[..4].try_into()?).into())
            }
            Kind::Other(kind) if kind == "DoubleStorage" || kind == "LongStorage" => {
                files.read(file, start, &mut bytes)?;
                let is_whole = kind == "LongStorage";
                Some(if is_whole { i64::from_le_bytes(bytes) as f64 } else { f64::from_le_bytes(bytes) })
            }
            Kind::Other(_) => None,
        })
    }

    /// The step count that ZeRO-3 has in one place for all parameters.
    pub(super) fn step_of_all(&self, files: &Files) -> Option<f64> {
        let pickle = self.pickle();
        let state = pickle.entry(pickle.entry(pickle.root(), "optimizer_state_dict")?, "state")?;
        let step = pickle.entry(pickle.entries(state)?.first()?.1, "step")?;
        self.number(step, files).ok().flatten()
    }

    pub(super) fn root_number(&self, files: &Files) -> anyhow::Result<Option<f64>> {
        let root = self.pickle().root();
        self.number(root, files)
    }

    fn state_dict(&self) -> Option<Id> {
        let pickle = self.pickle();
        let root = pickle.root();
        let mut candidates = std::iter::once(root).chain(OPTIMIZERS.iter().filter_map(|name| {
            let found = pickle.entry(root, name)?;
            // Lightning has a list of one.
            pickle.items(found).map_or(Some(found), |items| items.first().copied())
        }));
        let is_state =
            |&id: &Id| pickle.entry(id, "state").is_some() && pickle.entry(id, "param_groups").is_some();
        candidates.find(is_state)
    }

    /// Each parameter's state by its number, in the order of the optimizer; and its name, where the optimizer knew it.
    fn numbered(&self, dict: Id) -> anyhow::Result<(Numbered, Option<BTreeMap<u64, String>>)> {
        let pickle = self.pickle();
        let broken = "its state is not what torch's optimizers save";
        let whole = |id: Id| pickle.int(id).and_then(|number| u64::try_from(number).ok());
        let groups = pickle.entry(dict, "param_groups").and_then(|id| pickle.items(id)).context(broken)?;
        let (mut names, mut numbers) = (BTreeMap::new(), Vec::new());
        for &group in groups {
            let params = pickle.entry(group, "params").and_then(|id| pickle.items(id)).context(broken)?;
            let of_group: Vec<u64> =
                params.iter().map(|&id| whole(id)).collect::<Option<_>>().context(broken)?;
            let given =
                pickle.entry(group, "param_names").and_then(|id| pickle.items(id)).unwrap_or_default();
            let given = given.iter().filter_map(|&id| Some(pickle.text(id)?.to_string()));
            names.extend(of_group.iter().copied().zip(given));
            numbers.extend(of_group);
        }
        let named = (names.len() == numbers.len()).then_some(names);
        if named.is_none() && groups.len() > 1 {
            return Err(invalid(
                "param_groups",
                format!("{} without param_names", groups.len()),
                "named, or one",
                "save it from an optimizer that was given model.named_parameters(), or load it in Python with load_state_dict",
            ));
        }
        let state = pickle.entry(dict, "state").and_then(|id| pickle.entries(id)).context(broken)?;
        let by_number: BTreeMap<u64, Id> = state
            .iter()
            .map(|&(key, value)| Some((whole(key)?, value)))
            .collect::<Option<_>>()
            .context(broken)?;
        if let Some(number) = by_number.keys().find(|number| !numbers.contains(number)) {
            bail!("it has state of parameter {number}, which is in no param group");
        }
        Ok((numbers.iter().filter_map(|number| Some((*number, *by_number.get(number)?))).collect(), named))
    }

    fn moments(&self, id: Id, name: &str, files: &Files) -> anyhow::Result<Moments> {
        let pickle = self.pickle();
        let entries = pickle.entries(id).with_context(|| format!("the state of {name} is no dict"))?;
        let entries: Vec<(String, Id)> =
            entries.iter().filter_map(|&(key, value)| Some((pickle.text(key)?.to_string(), value))).collect();
        let mut moments = Moments::default();
        for (key, value) in entries {
            let of = || format!("{name}.{key}");
            if key == "step" {
                let step = self.number(value, files).with_context(of)?;
                let unknown = || invalid(&of(), "no number", "a whole number", "look at how it was saved");
                moments.step = Some(step.ok_or_else(unknown)?);
            } else if *self.pickle().get(value) != Object::None {
                let tensor = self.tensor(value).with_context(of)?;
                let unknown = || invalid(&of(), "no tensor", "a tensor", "look at how it was saved");
                moments.arrays.insert(key.clone(), tensor.ok_or_else(unknown)?);
            }
        }
        Ok(moments)
    }
}
