//! Gives the model its weights from the servers' images: all of them for a whole step (stage 2), or layer by layer
//! (stage 3).

use std::ops::Range;

use longshore_proto::{Dtype, Layout};
use longshore_worker::{
    convert,
    device::{Buffer, Device, Lease},
    error::Result,
    pull::Feed,
};

use super::{
    LayerImages, WholeImages,
    gpt::{BoxError, Gpt, Tensor, Weights},
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

/// Stage 2: one version's whole image in device memory, used by forward and backward.
pub struct WholeWeights<'a> {
    model: &'a Gpt,
    layout: &'a Layout,
    images: &'a mut WholeImages,
    feed: Feed,
    lent: Option<Lease>,
}

impl<'a> WholeWeights<'a> {
    pub fn new(
        model: &'a Gpt,
        layout: &'a Layout,
        images: &'a mut WholeImages,
        feed: Feed,
    ) -> WholeWeights<'a> {
        WholeWeights { model, layout, images, feed, lent: None }
    }
}

impl Weights for WholeWeights<'_> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor>, BoxError> {
        let WholeWeights { model, layout, images, feed, lent } = self;
        *lent = Some(reserve(images.staging.device(), model, stage)?);
        let range = stage_range(model, layout, stage);
        images.layer(feed, stage, range, |bytes| Ok(widen(model, layout, stage, feed.dtype(), bytes)))
    }

    fn release(&mut self, _stage: usize, weights: Vec<Tensor>) {
        drop(weights);
        self.lent = None;
    }
}

/// Pulls a layer's flat range of the version in use.
pub type PullLayer<'a> = Box<dyn Fn(Range<u64>) -> Result<Feed> + 'a>;

/// Stage 3: a layer's image is pulled just before use and freed after it. The next layer's image arrives meanwhile.
pub struct StagedWeights<'a> {
    model: &'a Gpt,
    layout: &'a Layout,
    images: &'a mut LayerImages,
    pull: PullLayer<'a>,
    /// Whether a backward pass follows, from the last stage to the first.
    training: bool,
    /// Whether the model's last stage has been acquired, so that stages are now acquired in backward order.
    backward: bool,
    ready: Option<(usize, Feed, Buffer)>,
    lent: Option<(Buffer, Lease)>,
}

impl<'a> StagedWeights<'a> {
    pub fn new(
        model: &'a Gpt,
        layout: &'a Layout,
        images: &'a mut LayerImages,
        pull: PullLayer<'a>,
        training: bool,
    ) -> StagedWeights<'a> {
        StagedWeights { model, layout, images, pull, training, backward: false, ready: None, lent: None }
    }

    fn pull(&mut self, stage: usize) -> Result<(usize, Feed, Buffer), BoxError> {
        let range = stage_range(self.model, self.layout, stage);
        let buffer = self.images.take()?;
        Ok((stage, (self.pull)(range)?, buffer))
    }

    /// The stage that is acquired after this one, in the order the model promises.
    fn next(&mut self, stage: usize) -> Option<usize> {
        let last = self.model.stages().len() - 1;
        self.backward = self.training && (self.backward || stage == last);
        match self.backward {
            // The embedding's gradient needs no weights.
            true if stage <= 1 => {
                self.backward = false;
                None
            }
            true => Some(stage - 1),
            false if stage == last => None,
            false => Some(stage + 1),
        }
    }

    /// Gives back the layer in use.
    fn free(&mut self) {
        if let Some((buffer, _)) = self.lent.take() {
            self.images.give_back(buffer);
        }
    }

    /// Gives back a layer that was fetched ahead.
    fn discard(&mut self) {
        if let Some((_, _, buffer)) = self.ready.take() {
            self.images.give_back(buffer);
        }
    }
}

impl Weights for StagedWeights<'_> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor>, BoxError> {
        self.free();
        if self.ready.as_ref().is_some_and(|(ready, ..)| *ready != stage) {
            self.discard();
        }
        let ready = self.ready.take().map_or_else(|| self.pull(stage), Ok);
        let (_, feed, buffer) = ready?;
        let next = self.next(stage);
        self.ready = next.map(|next| self.pull(next)).transpose()?;
        let StagedWeights { model, layout, images, .. } = self;
        let widened = reserve(images.staging.device(), model, stage)?;
        let range = stage_range(model, layout, stage);
        let bytes = (range.end - range.start) * feed.dtype().bytes();
        images.staging.copy_in(&buffer, 0, bytes, |host| Ok(feed.read_raw(range, host)?))?;
        let read = |bytes: &[u8]| Ok(widen(model, layout, stage, feed.dtype(), bytes));
        let tensors = images.staging.copy_out(&buffer, 0, bytes, read)?;
        self.lent = Some((buffer, widened));
        Ok(tensors)
    }

    fn release(&mut self, _stage: usize, weights: Vec<Tensor>) {
        drop(weights);
        self.free();
    }
}

impl Drop for StagedWeights<'_> {
    fn drop(&mut self) {
        self.free();
        self.discard();
    }
}
