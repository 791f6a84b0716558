//! Contents with which rank 0 fills a new job.

use std::cell::RefCell;

use longshore_proto::{Dtype, JobSpec, Layout, LeftOut, StateArray};

use crate::{
    convert,
    error::{Error, GradientError, Result},
};

/// Weights, or an optimizer's whole state.
pub trait Filling {
    /// Number of updates that made the state; None for weights alone.
    fn applied(&self) -> Option<u64>;

    /// Parameters whose state fewer updates made.
    fn left_out(&self) -> &[LeftOut] {
        &[]
    }

    /// Writes elements of one array of a parameter, from element `at` on, as little-endian fp32. The arrays of a
    /// shard are requested in the order of [`StateArray::ALL`], and again for a server that is retried.
    fn write(&self, array: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()>;
}

/// Weights that a function makes parameter by parameter. A single parameter is in memory at a time.
pub(super) struct ByParam<'a> {
    spec: &'a JobSpec,
    layout: &'a Layout,
    weights: &'a dyn Fn(usize) -> Vec<f32>,
    held: RefCell<Option<(usize, Vec<f32>)>>,
}

impl<'a> ByParam<'a> {
    pub(super) fn new(
        spec: &'a JobSpec,
        layout: &'a Layout,
        weights: &'a dyn Fn(usize) -> Vec<f32>,
    ) -> ByParam<'a> {
        ByParam { spec, layout, weights, held: RefCell::default() }
    }

    fn make(&self, param: usize) -> Result<Vec<f32>> {
        let values = (self.weights)(param);
        let (given, place) = (values.len() as u64, self.layout.param_range(param));
        if given == place.end - place.start {
            return Ok(values);
        }
        let name = format!("{} (its initial weights)", self.spec.params[param].name);
        Err(Error::Gradient(GradientError::Length { name, given, expected: place.end - place.start }))
    }
}

impl Filling for ByParam<'_> {
    fn applied(&self) -> Option<u64> {
        None
    }

    fn write(&self, _: StateArray, param: usize, at: u64, target: &mut [u8]) -> Result<()> {
        let mut held = self.held.borrow_mut();
        let values = match held.take() {
            Some((of, values)) if of == param => values,
            _ => self.make(param)?,
        };
        let (_, values) = held.insert((param, values));
        let at = at as usize;
        convert::from_f32(Dtype::F32, &values[at..at + target.len() / size_of::<f32>()], target);
        Ok(())
    }
}
