//! The first and the last stage.

use super::{
    Batch, Tensor, VOCABULARY,
    block::{norm, norm_gradient},
    config::Shape,
    product::Real,
    rows,
};

/// Returns the sum of each byte's vector and its position's.
pub(super) fn embed<T: Real>(weights: &[Tensor<T>], batch: &Batch, shape: &Shape) -> Tensor<T> {
    let width = shape.width;
    let (bytes, positions) = (weights[0].values(), weights[1].values());
    let mut x = Vec::with_capacity(shape.rows() * width);
    for (row, byte) in batch.inputs.iter().enumerate() {
        let byte = &bytes[*byte as usize * width..][..width];
        let position = &positions[row % shape.context * width..][..width];
        x.extend(byte.iter().zip(position).map(|(byte, position)| *byte + *position));
    }
    Tensor::matrix(x, width)
}

/// Returns the gradients of the first stage's parameters, which need no weights. `positions` is the length of the
/// table of positions; a short batch uses a part of it.
pub(super) fn embed_backward<T: Real>(
    batch: &Batch,
    dx: &Tensor<T>,
    positions: usize,
    shape: &Shape,
) -> Vec<Tensor<T>> {
    let width = shape.width;
    let mut dbytes = vec![T::from_f64(0.0); VOCABULARY * width];
    let mut dpositions = vec![T::from_f64(0.0); positions * width];
    for (row, (byte, dx)) in batch.inputs.iter().zip(dx.values().chunks_exact(width)).enumerate() {
        let dbyte = &mut dbytes[*byte as usize * width..][..width];
        let dposition = &mut dpositions[row % shape.context * width..][..width];
        for ((dx, dbyte), dposition) in dx.iter().zip(dbyte).zip(dposition) {
            *dbyte += *dx;
            *dposition += *dx;
        }
    }
    vec![Tensor::matrix(dbytes, width), Tensor::matrix(dpositions, width)]
}

/// Returns the final norm, and the logits made from it.
pub(super) fn head<T: Real>(x: &Tensor<T>, weights: &[Tensor<T>]) -> (Tensor<T>, Tensor<T>) {
    let normal = norm(x, &weights[0], &weights[1]);
    let logits = normal.times(weights[2].t());
    (normal, logits)
}

pub(super) fn loss<T: Real>(logits: &Tensor<T>, batch: &Batch) -> f64 {
    rows::loss(logits.values(), &batch.targets, VOCABULARY)
}

/// Returns the gradients of `loss_scale` times the loss: of the stage's input, and of its parameters.
pub(super) fn head_backward<T: Real>(
    x: &Tensor<T>,
    weights: &[Tensor<T>],
    (normal, logits): (&Tensor<T>, &Tensor<T>),
    batch: &Batch,
    loss_scale: f32,
) -> (Tensor<T>, Vec<Tensor<T>>) {
    let scale = T::from_f64(loss_scale as f64);
    let dlogits = logits.like(rows::loss_backward(logits.values(), &batch.targets, VOCABULARY, scale));
    let dweight = dlogits.t().times(normal);
    let dnormal = dlogits.times(&weights[2]);
    let around = x.like(vec![T::from_f64(0.0); x.values().len()]);
    let (dx, [dgain, dbias]) = norm_gradient(x, &weights[0], &dnormal, &around);
    (dx, vec![dgain, dbias, dweight])
}
