//! The model's weights, from the servers' images: all kept for a step (stage 2), or layer by layer (stage 3).

use std::ops::Range;

use candle_core::Tensor;
use longshore_proto::{Layout, Version};

use super::{
    gpt::{BoxError, Gpt, Weights},
    memory::stage_elements,
};
use crate::{
    device::{Budget, Lease},
    error::Result,
    pull::Feed,
    session::Session,
};

/// Widens one stage's parameters out of a feed, waiting for those still on the way.
fn widen(model: &Gpt, layout: &Layout, feed: &Feed, stage: usize) -> Result<Vec<Tensor>, BoxError> {
    let mut tensors = Vec::new();
    for index in model.stages()[stage].params.clone() {
        let param = &model.params()[index];
        let mut values = vec![0.0; param.elements()];
        feed.read(layout.param_range(index), &mut values)?;
        tensors.push(Tensor::from_vec(values, param.shape.as_slice(), model.device())?);
    }
    Ok(tensors)
}

/// The flat range of one stage, from its first parameter's start to its last one's end.
fn stage_range(model: &Gpt, layout: &Layout, stage: usize) -> Range<u64> {
    let params = &model.stages()[stage].params;
    layout.param_range(params.start).start..layout.param_range(params.end - 1).end
}

/// Stage 2: one version's whole image in device memory, used by forward and backward.
pub struct WholeWeights<'a> {
    model: &'a Gpt,
    layout: &'a Layout,
    device: Budget,
    feed: Feed,
    lent: Option<Lease>,
}

impl<'a> WholeWeights<'a> {
    pub fn new(model: &'a Gpt, layout: &'a Layout, device: Budget, feed: Feed) -> WholeWeights<'a> {
        WholeWeights { model, layout, device, feed, lent: None }
    }
}

impl Weights for WholeWeights<'_> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor>, BoxError> {
        self.lent =
            Some(self.device.reserve("fp32 weights of a layer", stage_elements(self.model, stage) * 4)?);
        widen(self.model, self.layout, &self.feed, stage)
    }

    fn release(&mut self, _stage: usize, weights: Vec<Tensor>) {
        drop(weights);
        self.lent = None;
    }
}

/// Stage 3: a layer's image is pulled just before use and freed after; the next one is on its way meanwhile.
pub struct StagedWeights<'a> {
    model: &'a Gpt,
    session: &'a Session,
    version: Version,
    device: Budget,
    /// Also backward, from the last stage to the first.
    training: bool,
    /// Whether the last acquired stage was the last one of the model, so that the order has turned.
    backward: bool,
    ready: Option<(usize, Feed, Lease)>,
    lent: Option<(Feed, Lease, Lease)>,
}

impl<'a> StagedWeights<'a> {
    pub fn new(
        model: &'a Gpt,
        session: &'a Session,
        version: Version,
        device: Budget,
        training: bool,
    ) -> StagedWeights<'a> {
        StagedWeights { model, session, version, device, training, backward: false, ready: None, lent: None }
    }

    fn pull(&self, stage: usize) -> Result<(usize, Feed, Lease), BoxError> {
        let dtype = self.session.spec().image_dtype;
        let range = stage_range(self.model, self.session.layout(), stage);
        let bytes = (range.end - range.start) * dtype.bytes();
        let lease = self.device.reserve("16-bit weights of a layer", bytes)?;
        Ok((stage, self.session.pull(self.version, &[range], dtype)?, lease))
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
}

impl Weights for StagedWeights<'_> {
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor>, BoxError> {
        let (_, feed, images) = match self.ready.take() {
            Some(ready) if ready.0 == stage => ready,
            _ => self.pull(stage)?,
        };
        let next = self.next(stage);
        self.ready = next.map(|next| self.pull(next)).transpose()?;
        let widened =
            self.device.reserve("fp32 weights of a layer", stage_elements(self.model, stage) * 4)?;
        let tensors = widen(self.model, self.session.layout(), &feed, stage)?;
        self.lent = Some((feed, images, widened));
        Ok(tensors)
    }

    fn release(&mut self, _stage: usize, weights: Vec<Tensor>) {
        drop(weights);
        self.lent = None;
    }
}
