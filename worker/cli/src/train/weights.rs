//! Gives the model its weights from the servers' images, by units of one stage each.

use std::ops::Range;

use longshore_proto::{Dtype, Layout};
use longshore_worker::{
    Unit, Units, convert,
    device::{Device, Lease},
};

use super::{
    gpt::{self, BoxError, Gpt, Tensor, Weights},
    memory::{stage_elements, stage_range},
};

/// The tensors of one stage from its bytes.
fn widen(model: &Gpt, layout: &Layout, stage: usize, dtype: Dtype, bytes: &[u8]) -> Vec<Tensor> {
    let mut tensors = Vec::new();
    let start = stage_range(model, layout, stage).start;
    for index in model.stages()[stage].params.clone() {
        let param = &model.params()[index];
        let Range { start: first, end } = layout.param_range(index);
        let [first, end] = [first, end].map(|element| ((element - start) * dtype.bytes()) as usize);
        let mut values = vec![0.0; param.elements()];
        convert::to_f32(dtype, &bytes[first..end], &mut values);
        tensors.push(Tensor::new(param.shape.as_slice(), values));
    }
    tensors
}

/// The room that a widened layer takes.
fn reserve(device: &dyn Device, model: &Gpt, stage: usize) -> Result<Lease, BoxError> {
    Ok(device.reserve("fp32 weights of a layer", stage_elements(model, stage) * 4)?)
}

/// The units of a model: its stages.
pub fn stage_units(model: &Gpt) -> Vec<Unit> {
    let unit = |stage: &gpt::Stage| Unit { name: stage.name.clone(), params: stage.params.clone().collect() };
    model.stages().iter().map(unit).collect()
}

/// Weights as units bring them: each layer's from just before its use on, or all of them where the device has the room.
pub struct UnitsOf<'a> {
    model: &'a Gpt,
    layout: &'a Layout,
    device: &'a dyn Device,
    units: &'a Units,
    dtype: Dtype,
    /// The layer in use, and the room that it takes when widened.
    lent: Option<(usize, Lease)>,
}

impl<'a> UnitsOf<'a> {
    /// The weights of the pass that `units` are at.
    pub fn new(
        model: &'a Gpt,
        layout: &'a Layout,
        device: &'a dyn Device,
        units: &'a Units,
        dtype: Dtype,
    ) -> UnitsOf<'a> {
        UnitsOf { model, layout, device, units, dtype, lent: None }
    }
}

impl UnitsOf<'_> {
    /// Gives back the layer in use.
    fn free(&mut self) {
        if let Some((stage, widened)) = self.lent.take() {
            drop(widened);
            if let Err(error) = self.units.release(stage) {
                tracing::error!(%error, "a layer's memory was not freed");
            }
        }
    }
}

impl Weights for UnitsOf<'_> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor>, BoxError> {
        // A sample of text keeps the tensors of all layers. These are in the host's memory.
        self.free();
        let widened = reserve(self.device, self.model, stage)?;
        self.units.acquire(stage)?;
        self.lent = Some((stage, widened));
        let UnitsOf { model, layout, dtype, .. } = *self;
        Ok(self.units.read(stage, |bytes| widen(model, layout, stage, dtype, bytes))?)
    }

    fn release(&mut self, stage: usize, weights: Vec<Tensor>) {
        drop(weights);
        if self.lent.as_ref().is_some_and(|(lent, _)| *lent == stage) {
            self.free();
        }
    }
}

impl Drop for UnitsOf<'_> {
    fn drop(&mut self) {
        self.free();
    }
}
