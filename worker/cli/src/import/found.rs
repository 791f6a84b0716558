//! What files have, and whether it is a job's parameters and their moments.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::bail;
use longshore_proto::{Fault, JobSpec, Layout, LeftOut, Param, StateArray};
use longshore_worker::Filling;

use super::tensors::{Files, Kind, Place, Tensor};
use crate::torch::{counts_steps, moments};

/// How many misfits an error lists.
const LISTED: usize = 5;

/// What an optimizer has of one parameter.
#[derive(Default)]
pub(super) struct Moments {
    /// By torch's name.
    pub(super) arrays: BTreeMap<String, Tensor>,
    pub(super) step: Option<f64>,
    /// Values of any shape may be in one row.
    pub(super) flat: bool,
}

/// What an optimizer has of all.
pub(super) struct State {
    /// The parameters are those of the job in its order, and have no names.
    pub(super) order: bool,
    pub(super) params: Vec<(String, Moments)>,
}

pub(super) struct Found {
    pub(super) from: PathBuf,
    pub(super) files: Files,
    pub(super) weights: BTreeMap<String, Tensor>,
    pub(super) state: Option<State>,
}

pub(super) fn invalid(
    field: &str,
    value: impl ToString,
    limit: impl ToString,
    remedy: &str,
) -> anyhow::Error {
    Fault::invalid(field, value.to_string(), limit.to_string(), remedy).into()
}

impl Found {
    /// What the job is filled with, if all of it is here.
    ///
    /// # Errors
    /// Names tensors that are missing, of another shape or type, or that are no parameter.
    pub(super) fn filling(
        self,
        spec: &JobSpec,
        layout: &Layout,
        ignore_extra: bool,
    ) -> anyhow::Result<Arrays> {
        let flat =
            self.state.as_ref().is_some_and(|state| state.params.iter().any(|(_, moments)| moments.flat));
        let weights = self.weights(spec, ignore_extra, flat)?;
        let mut arrays = Arrays {
            files: self.files,
            places: [weights, Vec::new(), Vec::new()],
            applied: None,
            left_out: Vec::new(),
        };
        if let Some(state) = self.state {
            let by_param = state.by_param(spec, layout, ignore_extra)?;
            (arrays.applied, arrays.left_out) = counts(spec, &by_param)?;
            for (array, key) in StateArray::of(spec.rule)[1..].iter().zip(moments(spec.rule)) {
                arrays.places[array.index()] = places(spec, &by_param, key)?;
            }
        }
        Ok(arrays)
    }

    fn weights(&self, spec: &JobSpec, ignore_extra: bool, flat: bool) -> anyhow::Result<Vec<Option<Place>>> {
        let (mut misfits, mut places) = (Vec::new(), Vec::new());
        for param in &spec.params {
            match self.weights.get(&param.name).map(|tensor| fit(&param.name, param, tensor, flat)) {
                None => misfits.push(format!("{} is missing", param.name)),
                Some(Err(why)) => misfits.push(why),
                Some(Ok(place)) => places.push(Some(place)),
            }
        }
        let known: BTreeSet<&str> = spec.params.iter().map(|param| param.name.as_str()).collect();
        let extra = self.weights.keys().filter(|name| !known.contains(name.as_str()));
        if !ignore_extra {
            misfits.extend(
                extra.map(|name| {
                    format!("{name} is no parameter of the job (--ignore-extra leaves it alone)")
                }),
            );
        }
        if misfits.is_empty() {
            return Ok(places);
        }
        let more = misfits.len().saturating_sub(LISTED);
        misfits.truncate(LISTED);
        let more = if more == 0 { String::new() } else { format!("; and {more} more") };
        bail!("{} does not fit job {}: {}{more}", self.from.display(), spec.name, misfits.join("; "))
    }
}

/// Where a tensor's values are, or why it does not fit.
fn fit(name: &str, param: &Param, tensor: &Tensor, flat: bool) -> Result<Place, String> {
    let in_a_row = flat && param.elements().is_some_and(|elements| tensor.shape == [elements]);
    if tensor.shape != param.shape && !in_a_row {
        return Err(format!("{name} has shape {:?}, but must have {:?}", tensor.shape, param.shape));
    }
    match &tensor.kind {
        Kind::Float(dtype) => Ok(Place { file: tensor.file, start: tensor.start, dtype: *dtype }),
        Kind::Other(other) => Err(format!("{name} is of type {other}, but must be of F32, F16 or BF16")),
    }
}

impl State {
    /// By parameter of the job; None for those that are frozen, which have no moments.
    fn by_param(
        self,
        spec: &JobSpec,
        layout: &Layout,
        ignore_extra: bool,
    ) -> anyhow::Result<Vec<Option<Moments>>> {
        let places: Vec<usize> =
            (0..spec.params.len()).filter(|&param| !layout.is_param_frozen(param)).collect();
        if self.order && self.params.len() != places.len() {
            let (value, limit) = (
                format!("of {} parameters without names", self.params.len()),
                format!("of {}", places.len()),
            );
            let remedy = "save it from an optimizer that was given model.named_parameters()";
            return Err(invalid("optimizer", value, limit, remedy));
        }
        let of_name: BTreeMap<&str, usize> =
            places.iter().map(|&place| (spec.params[place].name.as_str(), place)).collect();
        let mut found: Vec<Option<Moments>> = spec.params.iter().map(|_| None).collect();
        for (index, (name, moments)) in self.params.into_iter().enumerate() {
            let place = if self.order { Some(places[index]) } else { of_name.get(name.as_str()).copied() };
            match place {
                Some(place) => found[place] = Some(moments),
                None if ignore_extra => {}
                None => {
                    let remedy = "import it into a job of this model, or leave it alone with --ignore-extra";
                    return Err(invalid(&name, "in the state", "a trained parameter of the job", remedy));
                }
            }
        }
        match places.into_iter().find(|&place| found[place].is_none()) {
            Some(lacking) => {
                let remedy = "a parameter that never got a gradient has no state: freeze it, or import the weights alone";
                Err(invalid(&spec.params[lacking].name, "absent in the state", "there", remedy))
            }
            None => Ok(found),
        }
    }
}

/// Where one array of the moments is, by parameter.
fn places(spec: &JobSpec, by_param: &[Option<Moments>], key: &str) -> anyhow::Result<Vec<Option<Place>>> {
    let place = |(param, found): (&Param, &Option<Moments>)| -> anyhow::Result<Option<Place>> {
        let Some(found) = found else { return Ok(None) };
        let field = format!("{}.{key}", param.name);
        let rule = spec.rule.name();
        if let Some(other) = found.arrays.keys().find(|other| !moments(spec.rule).contains(&other.as_str())) {
            let limit = format!("one of {}", moments(spec.rule).join(", "));
            let remedy = "open the job with the rule that the state is of (amsgrad is not here)";
            return Err(invalid(
                &format!("{}.{other}", param.name),
                format!("there, in a job of {rule}"),
                limit,
                remedy,
            ));
        }
        let Some(tensor) = found.arrays.get(key) else {
            return Err(invalid(
                &field,
                "absent",
                format!("there, for {rule}"),
                "take a state of this rule, or import the weights alone",
            ));
        };
        let fits = fit(&field, param, tensor, found.flat);
        fits.map(Some).map_err(|why| anyhow::anyhow!("{why}: take the state of this model, in fp32"))
    };
    spec.params.iter().zip(by_param).map(place).collect()
}

/// How many updates made the state, and which parameters have fewer.
fn counts(spec: &JobSpec, by_param: &[Option<Moments>]) -> anyhow::Result<(Option<u64>, Vec<LeftOut>)> {
    let mut steps = Vec::new();
    for (index, moments) in by_param.iter().enumerate() {
        let Some(moments) = moments else { continue };
        let field = format!("{}.step", spec.params[index].name);
        let step = match moments.step {
            Some(step) => step,
            // torch does not count the steps of momentum: it goes on as after any update.
            None if !counts_steps(spec.rule) => 1.0,
            None => {
                return Err(invalid(
                    &field,
                    "absent",
                    "there",
                    "take a state in which every parameter has it",
                ));
            }
        };
        if step.fract() != 0.0 || !(0.0..1e15).contains(&step) {
            return Err(invalid(&field, step, "a whole number", "look at how the state was made"));
        }
        steps.push((index as u32, step as u64));
    }
    let most = steps.iter().map(|&(_, step)| step).max().unwrap_or(0);
    if most == 0 {
        return Err(invalid("step", 0, "at least 1", "import the weights alone: nothing was trained"));
    }
    let fewer = steps.into_iter().filter(|&(_, step)| step < most);
    Ok((Some(most), fewer.map(|(param, step)| LeftOut { param, steps: most - step, now: false }).collect()))
}

/// What a job is filled with.
pub(super) struct Arrays {
    files: Files,
    /// By array and parameter. Frozen parameters have weights alone.
    places: [Vec<Option<Place>>; 3],
    applied: Option<u64>,
    left_out: Vec<LeftOut>,
}

impl Filling for Arrays {
    fn applied(&self) -> Option<u64> {
        self.applied
    }

    fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    fn write(
        &self,
        array: StateArray,
        param: usize,
        at: u64,
        target: &mut [u8],
    ) -> longshore_worker::Result<()> {
        match self.places[array.index()].get(param).copied().flatten() {
            Some(place) => Ok(self.files.write(place, at, target)?),
            None => {
                let (value, limit) = (format!("{array} of parameter {param}"), "in a file");
                Err(Fault::invalid("from", value, limit, "import the weights of a frozen parameter alone")
                    .into())
            }
        }
    }
}
