//! Tensors in the CPU's memory, row-major, and products of their matrices.

use std::sync::Arc;

use super::product::{Matrix, Real, multiply};

/// A shape and its elements. Clones share the elements.
#[derive(Debug, Clone)]
pub struct Tensor<T = f32> {
    shape: Vec<usize>,
    values: Arc<Vec<T>>,
}

impl<T> Tensor<T> {
    /// # Panics
    /// If the number of values differs from the shape's elements.
    pub fn new(shape: impl Into<Vec<usize>>, values: Vec<T>) -> Tensor<T> {
        let shape = shape.into();
        assert_eq!(shape.iter().product::<usize>(), values.len(), "elements of shape {shape:?}");
        Tensor { shape, values: Arc::new(values) }
    }

    /// Makes a matrix with as many rows as the values fill.
    pub(super) fn matrix(values: Vec<T>, columns: usize) -> Tensor<T> {
        Tensor::new([values.len() / columns, columns], values)
    }

    pub(super) fn vector(values: Vec<T>) -> Tensor<T> {
        Tensor::new([values.len()], values)
    }

    /// Makes a tensor of the same shape.
    pub(super) fn like<U>(&self, values: Vec<U>) -> Tensor<U> {
        Tensor::new(self.shape.as_slice(), values)
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub fn values(&self) -> &[T] {
        &self.values
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(self.values())
    }

    /// Length of a matrix's rows.
    pub(super) fn columns(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Returns the transposed matrix, as a factor.
    pub(super) fn t(&self) -> Factor<'_, T> {
        Factor { tensor: self, transposed: true }
    }

    pub(super) fn times<'a>(&'a self, right: impl Into<Factor<'a, T>>) -> Tensor<T>
    where
        T: Real,
    {
        Factor::from(self).times(right)
    }
}

/// A tensor in a product, plain or transposed, without a copy.
pub(super) struct Factor<'a, T> {
    tensor: &'a Tensor<T>,
    transposed: bool,
}

impl<'a, T> From<&'a Tensor<T>> for Factor<'a, T> {
    fn from(tensor: &'a Tensor<T>) -> Factor<'a, T> {
        Factor { tensor, transposed: false }
    }
}

impl<'a, T: Real> Factor<'a, T> {
    /// Returns the product of two matrices, or of two stacks of them, matrix by matrix.
    pub(super) fn times(self, right: impl Into<Factor<'a, T>>) -> Tensor<T> {
        let right = right.into();
        let stack = self.stack();
        assert_eq!(stack, right.stack(), "stacks of different heights");
        let (rows, columns) = (self.of_stack(0).rows(), right.of_stack(0).columns());
        let mut out = vec![T::from_f64(0.0); stack.iter().product::<usize>() * rows * columns];
        for (index, out) in out.chunks_exact_mut(rows * columns).enumerate() {
            multiply(self.of_stack(index), right.of_stack(index), out);
        }
        Tensor::new([stack, &[rows, columns]].concat(), out)
    }

    /// Returns the shape without the matrices' own: empty for a single matrix.
    fn stack(&self) -> &'a [usize] {
        let shape = &self.tensor.shape;
        &shape[..shape.len() - 2]
    }

    fn of_stack(&self, index: usize) -> Matrix<'a, T> {
        let shape = &self.tensor.shape;
        let [rows, columns] = [shape[shape.len() - 2], shape[shape.len() - 1]];
        let values = &self.tensor.values[index * rows * columns..][..rows * columns];
        let matrix = Matrix::new(values, columns);
        if self.transposed { matrix.transposed() } else { matrix }
    }
}
