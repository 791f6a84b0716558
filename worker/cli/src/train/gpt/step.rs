//! A pass over a batch, stage by stage. Decides which weights and activations are held at which time.

use tracing::debug_span;

use super::{
    Batch, BoxError, Error, Gpt, Tensor,
    block::{self, Saved},
    config::Shape,
    product::Real,
    stages,
};

/// Source of a stage's weights.
///
/// A micro-step of n stages acquires stages 0, 1 .. n-1, and then n-2 .. 1. Each stage is released before the next one is
/// acquired. The last stage is acquired once for both passes, and the embedding's gradient needs no weights. The
/// order never changes, so a source can prefetch.
pub trait Weights<T = f32> {
    /// Returns the tensors, in the order and the shapes of the stage's parameters.
    fn acquire(&mut self, stage: usize) -> Result<Vec<Tensor<T>>, BoxError>;
    /// Releases the weights. Called for every successful `acquire`, also if the computation in between fails.
    fn release(&mut self, stage: usize, weights: Vec<Tensor<T>>);
}

/// Sink of gradients, from the last stage to the first.
pub trait Gradients<T = f32> {
    /// Takes gradients in the order of the stage's parameters, multiplied by the loss scale.
    fn emit(&mut self, stage: usize, gradients: Vec<Tensor<T>>) -> Result<(), BoxError>;
}

/// Computes the gradients of the batch's mean loss times `loss_scale`. Returns the unscaled loss, in nats a byte.
pub fn micro_step(
    model: &Gpt,
    weights: &mut dyn Weights,
    gradients: &mut dyn Gradients,
    batch: &Batch,
    loss_scale: f32,
) -> Result<f32, Error> {
    Ok(Pass::<f32>::new(model, weights, batch).micro_step(gradients, loss_scale)? as f32)
}

/// Returns the mean loss of the batches, in nats a byte.
pub fn evaluate(model: &Gpt, weights: &mut dyn Weights, batches: &[Batch]) -> Result<f32, Error> {
    let (mut total, mut bytes) = (0.0, 0);
    for batch in batches {
        total += Pass::<f32>::new(model, weights, batch).loss()? * batch.targets.len() as f64;
        bytes += batch.targets.len();
    }
    Ok((total / bytes as f64) as f32)
}

/// A batch on its way through the stages. `T` is f64 only in tests that compare gradients with differences of the loss.
pub(super) struct Pass<'a, T> {
    model: &'a Gpt,
    weights: &'a mut dyn Weights<T>,
    batch: &'a Batch,
    shape: Shape,
}

impl<'a, T: Real> Pass<'a, T> {
    pub(super) fn new(model: &'a Gpt, weights: &'a mut dyn Weights<T>, batch: &'a Batch) -> Pass<'a, T> {
        let shape = Shape::new(model.config(), batch);
        Pass { model, weights, batch, shape }
    }

    pub(super) fn loss(mut self) -> Result<f64, Error> {
        let batch = self.batch;
        let x = (1..=self.blocks())
            .try_fold(self.embed()?, |x, stage| Ok::<_, Error>(self.block(stage, &x)?.0))?;
        self.with(self.head(), |weights| stages::loss(&stages::head(&x, weights).1, batch))
    }

    pub(super) fn micro_step(
        mut self,
        gradients: &mut dyn Gradients<T>,
        loss_scale: f32,
    ) -> Result<f64, Error> {
        let (batch, shape, blocks) = (self.batch, self.shape, self.blocks());
        let mut inputs = vec![self.embed()?];
        let mut kept: Vec<Saved<T>> = Vec::new(); // of the last few blocks
        for stage in 1..=blocks {
            let (y, saved) = self.block(stage, &inputs[stage - 1])?;
            self.keep(&mut kept, saved, blocks - stage);
            inputs.push(y);
        }
        let x = &inputs[blocks];
        let (loss, (mut dy, of_head)) = self.with(self.head(), |weights| {
            let (normal, logits) = stages::head(x, weights);
            let loss = stages::loss(&logits, batch);
            (loss, stages::head_backward(x, weights, (&normal, &logits), batch, loss_scale))
        })?;
        self.emit(gradients, self.head(), of_head)?;
        inputs.truncate(blocks);
        for stage in (1..=blocks).rev() {
            let _stage = debug_span!(target: "stage", "backward", stage).entered();
            let (x, saved) = (inputs.pop(), kept.pop());
            let (dx, of_block) = self.with(stage, |weights| {
                let saved = match (saved, x) {
                    (Some(saved), _) => saved,
                    (None, Some(x)) => block::forward(&x, weights, &shape).1,
                    (None, None) => unreachable!("every block's input was pushed"),
                };
                block::backward(&saved, weights, &dy, &shape)
            })?;
            self.emit(gradients, stage, of_block)?;
            dy = dx;
        }
        let of_embedding = stages::embed_backward(batch, &dy, self.model.config().context, &shape);
        self.emit(gradients, 0, of_embedding)?;
        Ok(loss)
    }

    /// Keeps the activations of a block with `after` blocks behind it, if the activations of all of them fit the
    /// budget. The last block's activations are always kept, since backward needs them at once.
    fn keep(&self, kept: &mut Vec<Saved<T>>, saved: Saved<T>, after: usize) {
        if saved.bytes().saturating_mul(after + 1) <= self.model.activation_budget_bytes || after == 0 {
            kept.push(saved);
        }
    }

    fn blocks(&self) -> usize {
        self.model.config().layers
    }

    fn head(&self) -> usize {
        self.blocks() + 1
    }

    fn embed(&mut self) -> Result<Tensor<T>, Error> {
        let (batch, shape) = (self.batch, self.shape);
        self.with(0, |weights| stages::embed(weights, batch, &shape))
    }

    fn block(&mut self, stage: usize, x: &Tensor<T>) -> Result<(Tensor<T>, Saved<T>), Error> {
        let _stage = debug_span!(target: "stage", "forward", stage).entered();
        let shape = self.shape;
        self.with(stage, |weights| block::forward(x, weights, &shape))
    }

    /// Calls `body` with a stage's borrowed weights, on a thread of rayon's pool. On another thread, each of the many
    /// short parallel passes would put the thread to sleep and wake it again.
    fn with<R: Send>(
        &mut self,
        stage: usize,
        body: impl FnOnce(&[Tensor<T>]) -> R + Send,
    ) -> Result<R, Error> {
        let acquired = self.weights.acquire(stage);
        let name = || self.model.stages()[stage].name.clone();
        let weights = acquired.map_err(|source| Error::Acquire { stage: name(), source })?;
        let result = rayon::scope(|_| body(&weights));
        self.weights.release(stage, weights);
        Ok(result)
    }

    fn emit(
        &self,
        gradients: &mut dyn Gradients<T>,
        stage: usize,
        tensors: Vec<Tensor<T>>,
    ) -> Result<(), Error> {
        let name = || self.model.stages()[stage].name.clone();
        gradients.emit(stage, tensors).map_err(|source| Error::Emit { stage: name(), source })
    }
}
