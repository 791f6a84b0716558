//! Arithmetic between the matrix products, forward and backward. A single pass over rows replaces a dozen
//! elementary operations, each of which would read and write memory.
//!
//! Threads take rows in chunks of a fixed size, and sums across rows are taken chunk by chunk in order. So a
//! result does not depend on the number of threads.

use rayon::prelude::*;

use super::product::Real;

/// Rows of a chunk: so many that handing a chunk to a thread costs little in comparison.
const CHUNK_ROWS: usize = 32;
/// Number of independent sums of a row. So the compiler vectorises them without a change of order within any sum.
const LANES: usize = 16;
const NORM_EPSILON: f64 = 1e-5;

fn zero<T: Real>() -> T {
    T::from_f64(0.0)
}

fn sum<T: Real>(count: usize, term: impl Fn(usize) -> T) -> T {
    let mut lanes = [zero::<T>(); LANES];
    let whole = count - count % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += term(start + lane);
        }
    }
    let tail = (whole..count).fold(zero(), |total: T, index| total + term(index));
    lanes.into_iter().fold(tail, |total, lane| total + lane)
}

fn add_to<T: Real>(totals: &mut [T], terms: &[T]) {
    totals.iter_mut().zip(terms).for_each(|(total, term)| *total += *term);
}

/// Fills a new matrix. `body` gets a row's index and its elements.
fn fill<T: Real>(rows: usize, width: usize, body: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    let mut out = vec![zero(); rows * width];
    out.par_chunks_mut(CHUNK_ROWS * width).enumerate().for_each(|(chunk, out)| {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            body(chunk * CHUNK_ROWS + row, out);
        }
    });
    out
}

/// Fills as [`fill`] does, and sums `totals` values over all rows.
fn fill_and_sum<T: Real>(
    rows: usize,
    width: usize,
    totals: usize,
    body: impl Fn(usize, &mut [T], &mut [T]) + Sync,
) -> (Vec<T>, Vec<T>) {
    let mut out = vec![zero(); rows * width];
    let chunks = out.par_chunks_mut(CHUNK_ROWS * width).enumerate().map(|(chunk, out)| {
        let mut sums = vec![zero(); totals];
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            body(chunk * CHUNK_ROWS + row, out, &mut sums);
        }
        sums
    });
    let chunks: Vec<Vec<T>> = chunks.collect();
    let mut sums = vec![zero(); totals];
    chunks.iter().for_each(|chunk| add_to(&mut sums, chunk));
    (out, sums)
}

fn row<T>(matrix: &[T], width: usize, index: usize) -> &[T] {
    &matrix[index * width..][..width]
}

/// Returns the mean of a row, and the reciprocal of its deviation.
fn moments<T: Real>(x: &[T]) -> (T, T) {
    let share = T::from_f64(1.0 / x.len() as f64);
    let mean = sum(x.len(), |i| x[i]) * share;
    let variance = sum(x.len(), |i| (x[i] - mean) * (x[i] - mean)) * share;
    (mean, T::from_f64(1.0 / (variance.to_f64() + NORM_EPSILON).sqrt()))
}

/// Layer normalisation of every row of `x`.
pub(super) fn norm<T: Real>(x: &[T], gain: &[T], bias: &[T]) -> Vec<T> {
    let width = gain.len();
    fill(x.len() / width, width, |index, out| {
        let x = row(x, width, index);
        let (mean, inverse) = moments(x);
        for i in 0..width {
            out[i] = (x[i] - mean) * inverse * gain[i] + bias[i];
        }
    })
}

/// Returns `residual` plus the gradient of `x`, and then the gradients of gain and bias in one vector.
pub(super) fn norm_backward<T: Real>(x: &[T], gain: &[T], dy: &[T], residual: &[T]) -> (Vec<T>, Vec<T>) {
    let width = gain.len();
    let share = T::from_f64(1.0 / width as f64);
    fill_and_sum(x.len() / width, width, 2 * width, |index, dx, sums| {
        let (x, dy, residual) = (row(x, width, index), row(dy, width, index), row(residual, width, index));
        let (mean, inverse) = moments(x);
        let (dgain, dbias) = sums.split_at_mut(width);
        for i in 0..width {
            dgain[i] += dy[i] * (x[i] - mean) * inverse;
            dbias[i] += dy[i];
        }
        let average = sum(width, |i| dy[i] * gain[i]) * share;
        let aligned = sum(width, |i| dy[i] * gain[i] * (x[i] - mean)) * inverse * share;
        for i in 0..width {
            let normal = (x[i] - mean) * inverse;
            dx[i] = residual[i] + (dy[i] * gain[i] - average - normal * aligned) * inverse;
        }
    })
}

// GELU in the tanh form of GPT-2: u * sigmoid(2 * sqrt(2/pi) * (u + 0.044715 u^3)).
const GELU_SLOPE: f64 = 1.595_769_121_605_730_7;
const GELU_CUBIC: f64 = 0.044_715;

fn gate<T: Real>(u: T) -> T {
    let (slope, cubic, one) = (T::from_f64(-GELU_SLOPE), T::from_f64(GELU_CUBIC), T::from_f64(1.0));
    one / (one + (slope * (u + cubic * u * u * u)).exp())
}

/// GELU of `x + bias`.
pub(super) fn gelu<T: Real>(x: &[T], bias: &[T]) -> Vec<T> {
    let width = bias.len();
    fill(x.len() / width, width, |index, out| {
        let x = row(x, width, index);
        for i in 0..width {
            let u = x[i] + bias[i];
            out[i] = u * gate(u);
        }
    })
}

/// Returns the gradients of `x` and of `bias`.
pub(super) fn gelu_backward<T: Real>(x: &[T], bias: &[T], dy: &[T]) -> (Vec<T>, Vec<T>) {
    let width = bias.len();
    let (slope, cubic, one) = (T::from_f64(GELU_SLOPE), T::from_f64(3.0 * GELU_CUBIC), T::from_f64(1.0));
    fill_and_sum(x.len() / width, width, width, |index, dx, dbias| {
        let (x, dy) = (row(x, width, index), row(dy, width, index));
        for i in 0..width {
            let u = x[i] + bias[i];
            let gate = gate(u);
            dx[i] = dy[i] * (gate + u * gate * (one - gate) * slope * (one + cubic * u * u));
        }
        add_to(dbias, dx);
    })
}

/// Returns `x + y + bias`, the end of a residual branch.
pub(super) fn residual<T: Real>(x: &[T], y: &[T], bias: &[T]) -> Vec<T> {
    let width = bias.len();
    fill(x.len() / width, width, |index, out| {
        let (x, y) = (row(x, width, index), row(y, width, index));
        for i in 0..width {
            out[i] = x[i] + (y[i] + bias[i]);
        }
    })
}

/// Returns the gradient of a bias that is added to every row.
pub(super) fn column_sums<T: Real>(dy: &[T], width: usize) -> Vec<T> {
    let chunks: Vec<Vec<T>> = dy
        .par_chunks(CHUNK_ROWS * width)
        .map(|chunk| {
            let mut sums = vec![zero(); width];
            chunk.chunks_exact(width).for_each(|row| add_to(&mut sums, row));
            sums
        })
        .collect();
    let mut sums = vec![zero(); width];
    chunks.iter().for_each(|chunk| add_to(&mut sums, chunk));
    sums
}

/// Returns attention weights from scores, a `length` x `length` matrix per head. A position sees itself and
/// earlier ones: later scores are not read, and their weights are exactly 0.
pub(super) fn causal_softmax<T: Real>(scores: &[T], length: usize, scale: T) -> Vec<T> {
    fill(scores.len() / length, length, |index, out| {
        let seen = index % length + 1;
        let (scores, out) = (&row(scores, length, index)[..seen], &mut out[..seen]);
        let largest = scores.iter().fold(scores[0], |a, b| if *b > a { *b } else { a });
        for i in 0..seen {
            out[i] = ((scores[i] - largest) * scale).exp();
        }
        let inverse = T::from_f64(1.0) / sum(seen, |i| out[i]);
        out.iter_mut().for_each(|value| *value *= inverse);
    })
}

/// Returns the gradient of the scores. `p` are the weights.
pub(super) fn causal_softmax_backward<T: Real>(p: &[T], dp: &[T], length: usize, scale: T) -> Vec<T> {
    fill(p.len() / length, length, |index, out| {
        let seen = index % length + 1;
        let (p, dp) = (&row(p, length, index)[..seen], &row(dp, length, index)[..seen]);
        let average = sum(seen, |i| p[i] * dp[i]);
        for i in 0..seen {
            out[i] = p[i] * (dp[i] - average) * scale;
        }
    })
}

/// Returns the cross entropy of a row of logits against the next byte, in nats. The largest logit and the sum of
/// exponentials follow.
fn cross_entropy<T: Real>(logits: &[T], target: usize) -> (f64, T, T) {
    let largest = logits.iter().fold(logits[0], |a, b| if *b > a { *b } else { a });
    let total = sum(logits.len(), |i| (logits[i] - largest).exp());
    (total.to_f64().ln() - (logits[target] - largest).to_f64(), largest, total)
}

/// Returns the mean loss of all rows.
pub(super) fn loss<T: Real>(logits: &[T], targets: &[u32], width: usize) -> f64 {
    let each = logits.par_chunks_exact(width).zip(targets);
    let each: Vec<f64> = each.map(|(logits, target)| cross_entropy(logits, *target as usize).0).collect();
    each.iter().sum::<f64>() / targets.len() as f64
}

/// Returns the gradient of `loss_scale` times the mean loss.
pub(super) fn loss_backward<T: Real>(logits: &[T], targets: &[u32], width: usize, loss_scale: T) -> Vec<T> {
    let weight = loss_scale / T::from_f64(targets.len() as f64);
    fill(targets.len(), width, |index, out| {
        let (logits, target) = (row(logits, width, index), targets[index] as usize);
        let (_, largest, total) = cross_entropy(logits, target);
        let inverse = weight / total;
        for i in 0..width {
            out[i] = (logits[i] - largest).exp() * inverse;
        }
        out[target] -= weight;
    })
}
