//! Sends a layer's gradients to the servers as soon as backward has made them.

use std::sync::Arc;

use longshore_proto::Dtype;
use longshore_worker::{
    Assembler, convert,
    device::{Buffer, Device},
    error::Result,
};

use super::{
    gpt::{BoxError, Gpt, Gradients, Tensor},
    memory::largest_stage,
    staging::Staging,
};

/// Device memory for the fp32 gradients of one layer. No other gradients are ever on the device.
pub struct LayerGradients {
    staging: Staging,
    buffer: Buffer,
}

impl LayerGradients {
    /// Allocates the memory.
    ///
    /// # Errors
    /// `Shortage` if the device's budget has no room for the largest layer's gradients.
    pub fn allocate(device: Arc<dyn Device>, model: &Gpt) -> Result<LayerGradients> {
        let buffer = device.allocate("fp32 gradients of a layer", largest_stage(model) * 4)?;
        Ok(LayerGradients { staging: Staging::new(device), buffer })
    }
}

/// Passes each gradient to the micro-step's assembler.
pub struct Sink<'a> {
    model: &'a Gpt,
    memory: &'a mut LayerGradients,
    assembler: &'a mut Assembler,
}

impl<'a> Sink<'a> {
    pub fn new(model: &'a Gpt, memory: &'a mut LayerGradients, assembler: &'a mut Assembler) -> Sink<'a> {
        Sink { model, memory, assembler }
    }
}

impl Gradients for Sink<'_> {
    fn emit(&mut self, stage: usize, gradients: Vec<Tensor>) -> Result<(), BoxError> {
        let LayerGradients { staging, buffer } = &mut *self.memory;
        let params = self.model.stages()[stage].params.clone();
        let mut offset = 0;
        let mut places = Vec::with_capacity(gradients.len());
        // The model computes on the CPU, so its gradients are copied to where a GPU would have left them.
        for (param, gradient) in params.zip(gradients) {
            let bytes = gradient.values().len() as u64 * 4;
            staging.copy_in(buffer, offset, bytes, |host| {
                convert::from_f32(Dtype::F32, gradient.values(), host);
                Ok(())
            })?;
            places.push((param, offset, bytes));
            offset += bytes;
        }
        let mut values = Vec::new();
        // Within a layer, too, gradients leave in backward order: the last parameter first.
        for (param, offset, bytes) in places.into_iter().rev() {
            values.resize(bytes as usize / 4, 0.0);
            staging.copy_out(buffer, offset, bytes, |host| {
                convert::to_f32(Dtype::F32, host, &mut values);
                Ok(())
            })?;
            self.assembler.put(param, &values)?;
        }
        Ok(())
    }
}
