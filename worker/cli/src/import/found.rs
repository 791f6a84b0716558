//! Compares the tensors of files with a job's parameters: names, shapes and types.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use anyhow::bail;
use longshore_proto::{Fault, JobSpec, Param, StateArray};
use longshore_worker::Filling;

use super::tensors::{Files, Kind, Place, Tensor};

/// The most misfits that an error lists.
const LISTED: usize = 5;

pub(super) struct Found {
    pub(super) from: PathBuf,
    pub(super) files: Files,
    pub(super) weights: BTreeMap<String, Tensor>,
}

impl Found {
    /// Returns the filling of a job with these weights.
    ///
    /// # Errors
    /// Names tensors that are missing, that have another shape or type, or that are no parameter.
    pub(super) fn filling(self, spec: &JobSpec, ignore_extra: bool) -> anyhow::Result<Weights> {
        let places = self.places(spec, ignore_extra)?;
        Ok(Weights { files: self.files, places })
    }

    fn places(&self, spec: &JobSpec, ignore_extra: bool) -> anyhow::Result<Vec<Place>> {
        let (mut misfits, mut places) = (Vec::new(), Vec::new());
        for param in &spec.params {
            match self.weights.get(&param.name).map(|tensor| fit(param, tensor)) {
                None => misfits.push(format!("{} is missing", param.name)),
                Some(Err(why)) => misfits.push(why),
                Some(Ok(place)) => places.push(place),
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

/// Returns the place of a tensor's values, or why the tensor does not fit.
fn fit(param: &Param, tensor: &Tensor) -> Result<Place, String> {
    let name = &param.name;
    if tensor.shape != param.shape {
        return Err(format!("{name} has shape {:?}, but must have {:?}", tensor.shape, param.shape));
    }
    match &tensor.kind {
        Kind::Float(dtype) => Ok(Place { file: tensor.file, start: tensor.start, dtype: *dtype }),
        Kind::Other(other) => Err(format!("{name} is of type {other}, but must be of F32, F16 or BF16")),
    }
}

/// Weights in files, as the filling of a new job.
pub(super) struct Weights {
    files: Files,
    /// Places by parameter.
    places: Vec<Place>,
}

impl Filling for Weights {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn write(
        &self,
        array: StateArray,
        param: usize,
        at: u64,
        target: &mut [u8],
    ) -> longshore_worker::Result<()> {
        match self.places.get(param) {
            Some(&place) if array == StateArray::Master => Ok(self.files.write(place, at, target)?),
            _ => {
                let value = format!("{array} of parameter {param}");
                let remedy = "report this as a defect of Longshore";
                Err(Fault::invalid("from", value, "weights of a parameter", remedy).into())
            }
        }
    }
}
