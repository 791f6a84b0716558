//! DeepSpeed's universal checkpoints: a folder for each parameter, with a file for each array.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};

use super::{
    found::{Found, Moments, State, invalid},
    tensors::Files,
    torch::Archive,
};

const WEIGHTS: &str = "fp32";
const ARRAYS: [&str; 2] = ["exp_avg", "exp_avg_sq"];

/// The folder of parameters in a universal checkpoint, or in the folder above it. None if it is none.
pub(super) fn folder(from: &Path) -> Option<PathBuf> {
    let latest = || fs::read_to_string(from.join("latest_universal")).ok();
    let zero = from.join("zero");
    if zero.is_dir() {
        return Some(zero);
    }
    Some(from.join(latest()?.trim()).join("zero")).filter(|zero| zero.is_dir())
}

/// All of it. `step` is the step count where no file says it.
pub(super) fn read(zero: &Path, step: Option<u64>) -> anyhow::Result<Found> {
    let mut files = Files::new();
    let (mut weights, mut params) = (BTreeMap::new(), Vec::new());
    let mut entries: Vec<_> = fs::read_dir(zero)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(|entry| entry.file_name());
    for entry in entries.into_iter().filter(|entry| entry.path().is_dir()) {
        let (folder, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        let mut moments = Moments { flat: true, ..Moments::default() };
        // Since DeepSpeed 0.19 frozen parameters and buffers have weights there, which nothing has trained.
        let is_trained = ARRAYS.iter().any(|array| folder.join(format!("{array}.pt")).is_file());
        let arrays = if is_trained { ARRAYS.as_slice() } else { &[] };
        for array in [WEIGHTS].iter().chain(arrays).copied() {
            let (path, field) = (folder.join(format!("{array}.pt")), format!("{name}.{array}"));
            if !path.is_file() {
                let limit = format!("in {}", path.display());
                return Err(invalid(
                    &field,
                    "absent",
                    limit,
                    "take a whole universal checkpoint of this model",
                ));
            }
            let tensor = Archive::open(&path, &mut files)?.only_tensor().context(field.clone())?;
            let tensor =
                tensor.ok_or_else(|| invalid(&field, "no tensor", "a tensor", "look at how it was made"))?;
            match array {
                WEIGHTS => weights.insert(name.clone(), tensor),
                _ => moments.arrays.insert(array.to_string(), tensor),
            };
        }
        let counted = folder.join("step.pt");
        if counted.is_file() {
            moments.step = Archive::open(&counted, &mut files)?.root_number(&files)?;
        }
        if is_trained {
            params.push((name, moments));
        }
    }
    ensure!(!params.is_empty(), "{} has no folder of a parameter", zero.display());
    if params.iter().all(|(_, moments)| moments.step.is_none()) {
        let all = Archive::open(&zero.join("optimizer_state.pt"), &mut files);
        let said = all.ok().and_then(|archive| archive.step_of_all(&files));
        let count = step.map(|step| step as f64).or(said);
        let unknown =
            || invalid("step", "in no file", "known", "name the optimizer's step count with --step");
        let count = count.ok_or_else(unknown)?;
        params.iter_mut().for_each(|(_, moments)| moments.step = Some(count));
    }
    let state = State { order: false, params };
    Ok(Found { from: zero.to_path_buf(), files, weights, state: Some(state) })
}
