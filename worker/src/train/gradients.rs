//! A layer's gradients on their way to the servers, as soon as backward has made them.

use candle_core::Tensor;

use super::gpt::{BoxError, Gpt, Gradients};
use crate::{device::Budget, push::Assembler};

/// Hands each gradient to the step's assembler; the layer's fp32 gradient is the only one on the device.
pub struct Sink<'a> {
    model: &'a Gpt,
    device: Budget,
    assembler: Assembler,
}

impl<'a> Sink<'a> {
    pub fn new(model: &'a Gpt, device: Budget, assembler: Assembler) -> Sink<'a> {
        Sink { model, device, assembler }
    }

    /// The micro-step's last gradient has been emitted.
    pub fn finish(self) -> crate::error::Result<()> {
        self.assembler.finish()
    }
}

impl Gradients for Sink<'_> {
    fn emit(&mut self, stage: usize, gradients: Vec<Tensor>) -> Result<(), BoxError> {
        let elements: usize = gradients.iter().map(Tensor::elem_count).sum();
        let _lease = self.device.reserve("fp32 gradients of a layer", elements as u64 * 4)?;
        let params = self.model.stages()[stage].params.clone();
        // Backward order within the layer too: its last tensors come from the flat space's end.
        for (param, gradient) in params.zip(gradients).rev() {
            self.assembler.put(param, &gradient.flatten_all()?.to_vec1::<f32>()?)?;
        }
        Ok(())
    }
}
