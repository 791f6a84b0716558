//! Passes weights to the model, layer by layer, from a copy of the servers' images in device memory.

use std::{ops::Range, sync::Arc};

use longshore_proto::{Dtype, Layout, Version};
use longshore_worker::{
    Feed, convert,
    device::{Buffer, Device, Lease},
    error::Result,
};

use super::{
    gpt::{BoxError, Gpt, Tensor, Weights},
    memory::{stage_elements, stage_range},
    staging::Staging,
};

/// Device memory for the 16-bit weights of all layers, each of the version that was read last.
pub struct DeviceImages {
    device: Arc<dyn Device>,
    staging: Staging,
    layers: Vec<Layer>,
}

struct Layer {
    range: Range<u64>,
    buffer: Buffer,
    version: Option<Version>,
}

impl DeviceImages {
    /// Allocates memory for all layers.
    ///
    /// # Errors
    /// `Shortage` if the device's budget has no room for all layers.
    pub fn allocate(
        device: Arc<dyn Device>,
        (model, layout): (&Gpt, &Layout),
        dtype: Dtype,
    ) -> Result<DeviceImages> {
        let layer = |stage| {
            let range = stage_range(model, layout, stage);
            let bytes = (range.end - range.start) * dtype.bytes();
            Ok(Layer { range, buffer: device.allocate("16-bit weights of a layer", bytes)?, version: None })
        };
        let layers = (0..model.stages().len()).map(layer).collect::<Result<_>>()?;
        Ok(DeviceImages { staging: Staging::new(device.clone()), device, layers })
    }

    /// Forgets the layers' versions, so that each layer is copied again at its next use. Corrected images, which
    /// delayed steps read, differ from the images of the same version that an evaluation reads.
    pub fn forget(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.version = None);
    }

    /// Passes the bytes of a layer to `read`. The bytes come from the feed unless the device has that version.
    fn read<R>(&mut self, stage: usize, feed: &Feed, read: impl FnOnce(&[u8]) -> R) -> Result<R, BoxError> {
        let Layer { range, buffer, version } = &mut self.layers[stage];
        let bytes = buffer.bytes();
        if *version != Some(feed.version()) {
            *version = None;
            self.staging.copy_in(buffer, 0, bytes, |host| Ok(feed.read_raw(range.clone(), host)?))?;
            *version = Some(feed.version());
        }
        self.staging.copy_out(buffer, 0, bytes, |host| Ok(read(host)))
    }
}

/// Weights of one version. Each layer is widened to fp32 while it is in use.
pub struct ImageWeights<'a> {
    model: &'a Gpt,
    layout: &'a Layout,
    feed: Feed,
    images: &'a mut DeviceImages,
    widened: Option<Lease>,
}

impl<'a> ImageWeights<'a> {
    pub fn new(
        (model, layout): (&'a Gpt, &'a Layout),
        feed: Feed,
        images: &'a mut DeviceImages,
    ) -> ImageWeights<'a> {
        ImageWeights { model, layout, feed, images, widened: None }
    }
}

impl Weights for ImageWeights<'_> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor>, BoxError> {
        let bytes = stage_elements(self.model, stage) * 4;
        self.widened = Some(self.images.device.reserve("fp32 weights of a layer", bytes)?);
        let (model, layout, dtype) = (self.model, self.layout, self.feed.dtype());
        self.images.read(stage, &self.feed, |bytes| widen(model, layout, stage, dtype, bytes))
    }

    fn release(&mut self, _stage: usize, weights: Vec<Tensor>) {
        drop(weights);
        self.widened = None;
    }
}

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
