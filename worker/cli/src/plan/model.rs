//! The model of a plan: its tensors in forward order, the units acquired together, and the sizes of its
//! activations.

use std::ops::Range;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<u64>,
}

impl Tensor {
    pub(crate) fn new(name: impl Into<String>, shape: &[u64]) -> Tensor {
        Tensor { name: name.into(), shape: shape.to_vec() }
    }

    pub(crate) fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |elements, &size| elements.saturating_mul(size))
    }
}

/// Sizes of a transformer, which decide the bytes of activations and the compute of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transformer {
    pub(crate) layers: u64,
    pub(crate) width: u64,
    pub(crate) vocabulary: u64,
    /// Experts of a layer that a token goes through, and all experts: (1, 1) in a dense model.
    pub(crate) experts: (u64, u64),
}

/// The parameters acquired together at stage 3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Division {
    /// The parameters of a block
    #[default]
    Blocks,
    /// Each tensor by itself, as models take that are too wide for a device to hold two blocks
    Tensors,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) transformer: Option<Transformer>,
}

impl Model {
    /// Returns a transformer of GPT's kind with this many layers. Its width is 128 times the layers, about as in
    /// GPT-3's family.
    pub(crate) fn transformer_of(layers: u64, vocabulary: u64) -> Model {
        let width = 128 * layers;
        let mut tensors = vec![Tensor::new("embedding.weight", &[vocabulary, width])];
        for layer in 0..layers {
            // Four products of attention and two of the MLP: 12 * width^2 elements.
            for (name, outputs) in [("attention.in", 3), ("attention.out", 1), ("mlp.in", 4), ("mlp.out", 4)]
            {
                tensors.push(Tensor::new(format!("blocks.{layer}.{name}.weight"), &[outputs * width, width]));
            }
        }
        let transformer = Transformer { layers, width, vocabulary, experts: (1, 1) };
        Model { tensors, transformer: Some(transformer) }
    }

    pub(crate) fn of_about(elements: u64, vocabulary: u64) -> Model {
        let distance =
            |layers: &u64| Model::transformer_of(*layers, vocabulary).elements().abs_diff(elements);
        let cube_root = (elements as f64 / (12.0 * 128.0 * 128.0)).cbrt() as u64;
        let near = cube_root.saturating_sub(8).max(1)..=cube_root + 1;
        let layers = near.min_by_key(distance).unwrap_or(1);
        Model::transformer_of(layers, vocabulary)
    }

    pub(crate) fn elements(&self) -> u64 {
        sum(&self.tensors)
    }

    /// Returns the elements that a token's forward pass multiplies by: all but the experts that the token skips.
    pub(crate) fn active(&self) -> u64 {
        let (through, all) = self.transformer.map_or((1, 1), |transformer| transformer.experts);
        let elements = |tensor: &Tensor| match tensor.name.contains(".experts.") {
            true => tensor.elements() * through / all,
            false => tensor.elements(),
        };
        self.tensors.iter().map(elements).sum()
    }

    /// Returns the runs of parameters that are acquired and released together: each block, and each run of other
    /// tensors.
    pub(crate) fn units(&self) -> Vec<Range<usize>> {
        let mut units: Vec<Range<usize>> = Vec::new();
        for index in 0..self.tensors.len() {
            match units.last_mut() {
                Some(unit) if block(&self.tensors[unit.start].name) == block(&self.tensors[index].name) => {
                    unit.end = index + 1;
                }
                _ => units.push(index..index + 1),
            }
        }
        units
    }

    pub(crate) fn unit_elements(&self, division: Division) -> Vec<u64> {
        let elements = |unit: Range<usize>| sum(&self.tensors[unit]);
        match division {
            Division::Blocks => self.units().into_iter().map(elements).collect(),
            Division::Tensors => self.tensors.iter().map(Tensor::elements).collect(),
        }
    }
}

/// Returns the number of elements of all `tensors`. A file from elsewhere may claim any shape, so the sum saturates,
/// and the job's limit then refuses it.
fn sum(tensors: &[Tensor]) -> u64 {
    tensors.iter().fold(0, |sum, tensor| sum.saturating_add(tensor.elements()))
}

/// Returns a tensor's block: its name up to the first part that is a number, as in `model.layers.7`.
fn block(name: &str) -> Option<&str> {
    let mut end = 0;
    for part in name.split('.') {
        end += part.len();
        if part.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(&name[..end]);
        }
        end += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_blocks_and_what_lies_between_them() {
        let names = [
            "wte.weight",
            "wpe.weight",
            "h.0.a.weight",
            "h.0.b.weight",
            "h.1.a.weight",
            "h.10.a.weight",
            "ln_f.weight",
        ];
        let tensors = names.iter().map(|name| Tensor::new(*name, &[2, 3])).collect();
        let model = Model { tensors, transformer: None };
        assert_eq!(model.units(), [0..2, 2..4, 4..5, 5..6, 6..7]);
        assert_eq!(model.unit_elements(Division::Blocks), [12, 12, 6, 6, 6]);
        assert_eq!(model.unit_elements(Division::Tensors), [6; 7]);
        let tensors = vec![Tensor::new("a", &[1 << 40, 1 << 40]), Tensor::new("b", &[2])];
        assert_eq!(Model { tensors, transformer: None }.elements(), u64::MAX);
    }
}
