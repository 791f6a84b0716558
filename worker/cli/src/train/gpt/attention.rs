//! Causal self-attention between its two projections, forward and backward.
//!
//! Each thread takes whole sequences, which stay in a core's cache. The products are too small to be worth
//! dividing.

use rayon::prelude::*;

use super::{Tensor, config::Shape, product::Real, rows};

/// Tensors of one sequence for backward: three of [heads, context, head width], and the attention weights.
pub(super) struct Saved<T> {
    query: Tensor<T>,
    key: Tensor<T>,
    value: Tensor<T>,
    weights: Tensor<T>,
}

impl<T> Saved<T> {
    pub(super) fn tensors(&self) -> [&Tensor<T>; 4] {
        [&self.query, &self.key, &self.value, &self.weights]
    }
}

/// Returns the heads' outputs side by side. Each row of `projected` is a query, a key and a value, all without
/// their `bias`.
pub(super) fn forward<T: Real>(
    projected: &Tensor<T>,
    bias: &Tensor<T>,
    shape: &Shape,
) -> (Tensor<T>, Vec<Saved<T>>) {
    let width = shape.width;
    let mut out = vec![T::from_f64(0.0); shape.rows() * width];
    let outs = out.par_chunks_exact_mut(shape.context * width);
    let sequences = outs.zip(projected.values().par_chunks_exact(shape.context * 3 * width));
    let saved = sequences.map(|(out, projected)| forward_sequence(projected, bias.values(), out, shape));
    let saved = saved.collect();
    (Tensor::matrix(out, width), saved)
}

fn forward_sequence<T: Real>(projected: &[T], bias: &[T], out: &mut [T], shape: &Shape) -> Saved<T> {
    let heads = |part| {
        let mut split = split(projected, 3, part, shape);
        add_bias(&mut split, &bias[part * shape.width..], shape);
        Tensor::new(shape.heads(), split)
    };
    let (query, key, value) = (heads(0), heads(1), heads(2));
    let scores = query.times(key.t());
    let scale = T::from_f64(shape.attention_scale());
    let weights = scores.like(rows::causal_softmax(scores.values(), shape.context, scale));
    merge(weights.times(&value).values(), out, 1, 0, shape);
    Saved { query, key, value, weights }
}

/// Returns the gradient of `projected`. The bias's gradient is the sum of its rows.
pub(super) fn backward<T: Real>(saved: &[Saved<T>], dy: &Tensor<T>, shape: &Shape) -> Tensor<T> {
    let width = shape.width;
    let mut out = vec![T::from_f64(0.0); shape.rows() * 3 * width];
    let outs = out.par_chunks_exact_mut(shape.context * 3 * width);
    let sequences = outs.zip(dy.values().par_chunks_exact(shape.context * width)).zip(saved);
    sequences.for_each(|((out, dy), saved)| backward_sequence(saved, dy, out, shape));
    Tensor::matrix(out, 3 * width)
}

fn backward_sequence<T: Real>(saved: &Saved<T>, dy: &[T], out: &mut [T], shape: &Shape) {
    let Saved { query, key, value, weights } = saved;
    let dy = Tensor::new(shape.heads(), split(dy, 1, 0, shape));
    let dweights = dy.times(value.t());
    let scale = T::from_f64(shape.attention_scale());
    let dscores = rows::causal_softmax_backward(weights.values(), dweights.values(), shape.context, scale);
    let dscores = weights.like(dscores);
    let parts = [dscores.times(key), dscores.t().times(query), weights.t().times(&dy)];
    for (part, gradient) in parts.iter().enumerate() {
        merge(gradient.values(), out, 3, part, shape);
    }
}

/// Returns one of the `parts` of each row of `x`, head by head, so that each head is one matrix.
fn split<T: Real>(x: &[T], parts: usize, part: usize, shape: &Shape) -> Vec<T> {
    let (width, size) = (shape.width, shape.head_width());
    let mut out = Vec::with_capacity(shape.context * width);
    for head in 0..shape.heads {
        for row in x.chunks_exact(parts * width) {
            out.extend_from_slice(&row[part * width + head * size..][..size]);
        }
    }
    out
}

fn merge<T: Real>(heads: &[T], out: &mut [T], parts: usize, part: usize, shape: &Shape) {
    let (width, size) = (shape.width, shape.head_width());
    for (head, rows) in heads.chunks_exact(shape.context * size).enumerate() {
        for (row, out) in rows.chunks_exact(size).zip(out.chunks_exact_mut(parts * width)) {
            out[part * width + head * size..][..size].copy_from_slice(row);
        }
    }
}

fn add_bias<T: Real>(heads: &mut [T], bias: &[T], shape: &Shape) {
    let size = shape.head_width();
    for (rows, bias) in heads.chunks_exact_mut(shape.context * size).zip(bias.chunks_exact(size)) {
        for row in rows.chunks_exact_mut(size) {
            row.iter_mut().zip(bias).for_each(|(value, bias)| *value += *bias);
        }
    }
}
