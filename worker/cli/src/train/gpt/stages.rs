//! The first and the last stage, and what all stages share: shapes, and tensors seen as slices.

use candle_core::{Error, Result, Storage, Tensor};

use super::{
    Batch, Config, VOCABULARY,
    block::norm_gradient,
    rows::{self, Real},
};

/// The sizes of one pass. `context` is the batch's own, at most the model's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) sequences: usize,
    pub(super) context: usize,
    pub(super) width: usize,
    pub(super) heads: usize,
}

impl Shape {
    pub(super) fn new(config: &Config, batch: &Batch) -> Shape {
        let (sequences, context) = (batch.sequences, batch.context);
        Shape { sequences, context, width: config.width, heads: config.heads }
    }

    /// A row is one position of one sequence.
    pub(super) fn rows(&self) -> usize {
        self.sequences * self.context
    }

    pub(super) fn head_width(&self) -> usize {
        self.width / self.heads
    }

    /// One matrix for each head of a sequence.
    pub(super) fn heads(&self) -> (usize, usize, usize) {
        (self.heads, self.context, self.head_width())
    }

    pub(super) fn attention_scale(&self) -> f64 {
        1.0 / (self.head_width() as f64).sqrt()
    }
}

/// Calls `body` with the tensors' elements, in place.
pub(super) fn read<T: Real, R, const COUNT: usize>(
    tensors: [&Tensor; COUNT],
    body: impl FnOnce([&[T]; COUNT]) -> R,
) -> Result<R> {
    let views = tensors.map(|tensor| tensor.storage_and_layout());
    let mut slices: [&[T]; COUNT] = [&[]; COUNT];
    for ((storage, layout), slice) in views.iter().zip(&mut slices) {
        let Storage::Cpu(storage) = &**storage else {
            return Err(Error::Msg("a tensor is not in the CPU's memory".to_owned()));
        };
        let Some((start, end)) = layout.contiguous_offsets() else {
            return Err(Error::Msg(format!("a tensor of shape {:?} is not contiguous", layout.shape())));
        };
        *slice = &storage.as_slice::<T>()?[start..end];
    }
    Ok(body(slices))
}

/// Calls `body` with one tensor's elements, in place.
pub(in crate::train) fn elements<R>(tensor: &Tensor, body: impl FnOnce(&[f32]) -> R) -> Result<R> {
    read([tensor], |[elements]| body(elements))
}

/// A matrix of that many columns, on the device of `model`.
pub(super) fn matrix<T: Real>(values: Vec<T>, columns: usize, model: &Tensor) -> Result<Tensor> {
    let rows = values.len() / columns;
    Tensor::from_vec(values, (rows, columns), model.device())
}

pub(super) fn like<T: Real>(values: Vec<T>, model: &Tensor) -> Result<Tensor> {
    Tensor::from_vec(values, model.shape(), model.device())
}

pub(super) fn vector<T: Real>(values: Vec<T>, model: &Tensor) -> Result<Tensor> {
    let length = values.len();
    Tensor::from_vec(values, length, model.device())
}

/// The sum of each byte's vector and its position's.
pub(super) fn embed<T: Real>(weights: &[Tensor], batch: &Batch, shape: &Shape) -> Result<Tensor> {
    let width = shape.width;
    let x = read::<T, _, _>([&weights[0], &weights[1]], |[bytes, positions]| {
        let mut x = Vec::with_capacity(shape.rows() * width);
        for (row, byte) in batch.inputs.iter().enumerate() {
            let byte = &bytes[*byte as usize * width..][..width];
            let position = &positions[row % shape.context * width..][..width];
            x.extend(byte.iter().zip(position).map(|(byte, position)| *byte + *position));
        }
        x
    })?;
    matrix(x, width, &weights[0])
}

/// Needs no weights: `positions` is the length of the table of positions, of which a short batch reaches only
/// a part.
pub(super) fn embed_backward<T: Real>(
    batch: &Batch,
    dx: &Tensor,
    positions: usize,
    shape: &Shape,
) -> Result<Vec<Tensor>> {
    let width = shape.width;
    let mut dbytes = vec![T::from_f64(0.0); VOCABULARY * width];
    let mut dpositions = vec![T::from_f64(0.0); positions * width];
    read::<T, _, _>([dx], |[dx]| {
        for (row, (byte, dx)) in batch.inputs.iter().zip(dx.chunks_exact(width)).enumerate() {
            let dbyte = &mut dbytes[*byte as usize * width..][..width];
            let dposition = &mut dpositions[row % shape.context * width..][..width];
            for ((dx, dbyte), dposition) in dx.iter().zip(dbyte).zip(dposition) {
                *dbyte += *dx;
                *dposition += *dx;
            }
        }
    })?;
    Ok(vec![matrix(dbytes, width, dx)?, matrix(dpositions, width, dx)?])
}

/// The final norm, and the logits made from it.
pub(super) fn head<T: Real>(x: &Tensor, weights: &[Tensor]) -> Result<(Tensor, Tensor)> {
    let inputs = [x, &weights[0], &weights[1]];
    let normal = like(read::<T, _, _>(inputs, |[x, gain, bias]| rows::norm(x, gain, bias))?, x)?;
    let logits = normal.matmul(&weights[2].t()?)?;
    Ok((normal, logits))
}

pub(super) fn loss<T: Real>(logits: &Tensor, batch: &Batch) -> Result<f64> {
    read::<T, _, _>([logits], |[logits]| rows::loss(logits, &batch.targets, VOCABULARY))
}

/// The gradients of `loss_scale` times the loss: of the stage's input, and of its parameters.
pub(super) fn head_backward<T: Real>(
    x: &Tensor,
    weights: &[Tensor],
    (normal, logits): (&Tensor, &Tensor),
    batch: &Batch,
    loss_scale: f32,
) -> Result<(Tensor, Vec<Tensor>)> {
    let scale = T::from_f64(loss_scale as f64);
    let dlogits =
        read::<T, _, _>([logits], |[logits]| rows::loss_backward(logits, &batch.targets, VOCABULARY, scale))?;
    let dlogits = like(dlogits, logits)?;
    let dweight = dlogits.t()?.matmul(normal)?;
    let dnormal = dlogits.matmul(&weights[2])?;
    let (dx, [dgain, dbias]) = norm_gradient::<T>(x, &weights[0], &dnormal, &x.zeros_like()?)?;
    Ok((dx, vec![dgain, dbias, dweight]))
}
