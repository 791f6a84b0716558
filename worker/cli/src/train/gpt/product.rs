//! Number types of the model, and matrix products over slices with checked bounds. Only this module calls the crate
//! `gemm`, whose functions take raw pointers.

use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Sub, SubAssign};

use gemm_common::Parallelism;

/// A function of `gemm`: `destination = alpha * destination + beta * left * right`. Each matrix is a pointer, the
/// distance between columns and the distance between rows.
type Gemm<T> = unsafe fn(
    rows: usize,
    columns: usize,
    depth: usize,
    destination: *mut T,
    destination_column: isize,
    destination_row: isize,
    read_destination: bool,
    left: *const T,
    left_column: isize,
    left_row: isize,
    right: *const T,
    right_column: isize,
    right_row: isize,
    alpha: T,
    beta: T,
    conjugate_destination: bool,
    conjugate_left: bool,
    conjugate_right: bool,
    parallelism: Parallelism,
);

/// f32 for training, and f64 for tests with finite differences.
pub(super) trait Real:
    Copy
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + 'static
{
    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn exp(self) -> Self;
    fn gemm() -> Gemm<Self>;
}

#[cfg(test)]
impl Real for f64 {
    fn from_f64(value: f64) -> f64 {
        value
    }

    fn to_f64(self) -> f64 {
        self
    }

    fn exp(self) -> f64 {
        f64::exp(self)
    }

    fn gemm() -> Gemm<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
}

impl Real for f32 {
    #[inline(always)]
    fn from_f64(value: f64) -> f32 {
        value as f32
    }

    #[inline(always)]
    fn to_f64(self) -> f64 {
        self as f64
    }

    /// Cephes' polynomial, within 3e-7 of the true value. Unlike libm's function it vectorises, and has the same
    /// bits on every machine. Comparisons replace `clamp`, so that NaN stays NaN and an overflow is seen.
    #[inline(always)]
    fn exp(self) -> f32 {
        const ROUND: f32 = 12_582_912.0; // 1.5 x 2^23: adding it leaves the nearest integer in the low bits
        let x = if self < -87.0 { -87.0 } else { self };
        let x = if x > 88.0 { 88.0 } else { x };
        let shifted = x * std::f32::consts::LOG2_E + ROUND;
        let whole = shifted - ROUND;
        let r = x - whole * 0.693_359_4 + whole * 2.121_944_4e-4;
        let p = 1.987_569_1e-4 * r + 1.398_199_9e-3;
        let p = p * r + 8.333_452e-3;
        let p = p * r + 4.166_579_6e-2;
        let p = p * r + 1.666_666_5e-1;
        let p = p * r + 0.5;
        let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
        (p * r * r + r + 1.0) * power
    }

    fn gemm() -> Gemm<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
}

/// A slice as a matrix. The element (row, column) lies at `row * row_stride + column * column_stride`. For every row
/// below `rows` and column below `columns`, this place is inside the slice.
#[derive(Clone, Copy)]
pub(super) struct Matrix<'a, T> {
    values: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    pub(super) fn new(values: &'a [T], columns: usize) -> Matrix<'a, T> {
        assert!(columns > 0 && values.len().is_multiple_of(columns), "{} in rows of {columns}", values.len());
        Matrix { values, rows: values.len() / columns, columns, row_stride: columns, column_stride: 1 }
    }

    pub(super) fn transposed(self) -> Matrix<'a, T> {
        Matrix {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn columns(&self) -> usize {
        self.columns
    }
}

/// Writes `left` times `right` to `out`, row after row.
///
/// The bits do not depend on the number of threads: threads divide rows and columns, never a sum.
pub(super) fn multiply<T: Real>(left: Matrix<T>, right: Matrix<T>, out: &mut [T]) {
    assert_eq!(left.columns, right.rows, "the depths of a product");
    assert_eq!(out.len(), left.rows * right.columns, "the elements of a product");
    if right.columns > 1 {
        // gemm's kernels write columns, so the transposed product is computed.
        product(right.transposed(), left.transposed(), out, (right.columns, 1))
    } else {
        product(left, right, out, (1, 1))
    }
}

/// `strides` are the distances between columns and between rows of `out`.
#[allow(unsafe_code)]
fn product<T: Real>(left: Matrix<T>, right: Matrix<T>, out: &mut [T], strides: (usize, usize)) {
    let (zero, one) = (T::from_f64(0.0), T::from_f64(1.0));
    let threads = rayon::current_num_threads();
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let gemm = T::gemm();
    // SAFETY: a `Matrix` lies inside its slice, and `multiply` checked that the depths agree and that `out` is as long
    // as the product, whose rows or columns follow each other. `T::gemm` gives the function for this element type.
    unsafe {
        gemm(
            left.rows,
            right.columns,
            left.columns,
            out.as_mut_ptr(),
            strides.0 as isize,
            strides.1 as isize,
            false,
            left.values.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.values.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            zero,
            one,
            false,
            false,
            false,
            parallelism,
        );
    }
}
