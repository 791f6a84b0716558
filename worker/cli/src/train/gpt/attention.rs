//! Causal self-attention between its two projections, forward and backward.
//!
//! Threads share out the sequences, each of which stays in a core's cache: the products here are too small to
//! be worth dividing one by one.

use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

use super::{
    rows::{self, Real},
    stages::{Shape, matrix, read},
};

/// What backward needs again, of one sequence: [heads, context, head width], and the attention weights.
pub(super) struct Saved {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Tensor,
}

impl Saved {
    pub(super) fn tensors(&self) -> [&Tensor; 4] {
        [&self.query, &self.key, &self.value, &self.weights]
    }
}

/// From `projected`, in which each row is a query, a key and a value still lacking `bias`, to the heads'
/// outputs side by side.
pub(super) fn forward<T: Real>(
    projected: &Tensor,
    bias: &Tensor,
    shape: &Shape,
) -> Result<(Tensor, Vec<Saved>)> {
    let width = shape.width;
    let mut out = vec![T::from_f64(0.0); shape.rows() * width];
    let saved: Result<Vec<Saved>> = read::<T, _, _>([projected, bias], |[projected, bias]| {
        let outs = out.par_chunks_exact_mut(shape.context * width);
        let sequences = outs.zip(projected.par_chunks_exact(shape.context * 3 * width));
        sequences.map(|(out, projected)| forward_sequence(projected, bias, out, shape)).collect()
    })?;
    Ok((matrix(out, width, projected)?, saved?))
}

fn forward_sequence<T: Real>(projected: &[T], bias: &[T], out: &mut [T], shape: &Shape) -> Result<Saved> {
    let heads = |part| -> Result<Tensor> {
        let mut split = split(projected, 3, part, shape);
        add_bias(&mut split, &bias[part * shape.width..], shape);
        Tensor::from_vec(split, shape.heads(), &Device::Cpu)
    };
    let (query, key, value) = (heads(0)?, heads(1)?, heads(2)?);
    let scores = query.matmul(&key.t()?)?;
    let scale = T::from_f64(shape.attention_scale());
    let weights = read::<T, _, _>([&scores], |[s]| rows::causal_softmax(s, shape.context, scale))?;
    let weights = Tensor::from_vec(weights, scores.shape(), &Device::Cpu)?;
    read::<T, _, _>([&weights.matmul(&value)?], |[heads]| merge(heads, out, 1, 0, shape))?;
    Ok(Saved { query, key, value, weights })
}

/// The gradient of `projected`; the bias's is the sum of its rows.
pub(super) fn backward<T: Real>(saved: &[Saved], dy: &Tensor, shape: &Shape) -> Result<Tensor> {
    let width = shape.width;
    let mut out = vec![T::from_f64(0.0); shape.rows() * 3 * width];
    read::<T, _, _>([dy], |[dy]| {
        let outs = out.par_chunks_exact_mut(shape.context * 3 * width);
        let sequences = outs.zip(dy.par_chunks_exact(shape.context * width)).zip(saved);
        sequences.try_for_each(|((out, dy), saved)| backward_sequence(saved, dy, out, shape))
    })??;
    matrix(out, 3 * width, dy)
}

fn backward_sequence<T: Real>(saved: &Saved, dy: &[T], out: &mut [T], shape: &Shape) -> Result<()> {
    let Saved { query, key, value, weights } = saved;
    let dy = Tensor::from_vec(split(dy, 1, 0, shape), shape.heads(), &Device::Cpu)?;
    let dweights = dy.matmul(&value.t()?)?;
    let scale = T::from_f64(shape.attention_scale());
    let dscores = read::<T, _, _>([weights, &dweights], |[weights, dweights]| {
        rows::causal_softmax_backward(weights, dweights, shape.context, scale)
    })?;
    let dscores = Tensor::from_vec(dscores, weights.shape(), &Device::Cpu)?;
    let parts = [dscores.matmul(key)?, dscores.t()?.matmul(query)?, weights.t()?.matmul(&dy)?];
    for (part, gradient) in parts.iter().enumerate() {
        read::<T, _, _>([gradient], |[gradient]| merge(gradient, out, 3, part, shape))?;
    }
    Ok(())
}

/// One of the `parts` of each row of `x`, head by head, so that each head's is one matrix.
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

/// The inverse of [`split`].
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
