//! The peak device memory of a rank's step, by component.

use super::{Model, model::Division};

#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) sequences: u64,
    pub(crate) context: u64,
    /// True if backward recomputes a block's inside from its input, instead of keeping it.
    pub(crate) checkpointing: bool,
    /// True if inputs of blocks wait for backward in the host's memory.
    pub(crate) offloading: bool,
    /// Versions of the trained weights that a device holds at stage 2: two in a delayed job.
    pub(crate) versions: u64,
    /// Trained part of the parameters, from 0 to 1, spread evenly over the model, as adapters are.
    pub(crate) trained: f64,
    pub(crate) division: Division,
}

/// The weights that a device holds, by ZeRO's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Two,
    /// Weights of the unit in use and of the next one.
    Three,
}

/// Bytes by component at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peak {
    pub(crate) weights: u64,
    /// Gradients of two units: a unit's gradients leave while the next unit's are made.
    pub(crate) gradients: u64,
    /// None if the model's sizes are unknown.
    pub(crate) activations: Option<u64>,
    pub(crate) on_host: u64,
}

pub(crate) const WIDTH: u64 = 2;
/// Bytes of a block's activations per token and element of its width, in 16 bits and with fused attention. From
/// Korthikanti et al. (2022), equation 1, without the attention matrix, which fused kernels do not keep.
const INSIDE: u64 = 34;
/// Bytes per token of the batch and entry of the vocabulary: a logit and its gradient, both in fp32.
const LOGITS: u64 = 8;

impl Peak {
    pub(crate) fn of(model: &Model, work: &Workload, stage: Stage) -> Peak {
        let units = model.unit_elements(work.division);
        let neighbours = in_use_and_next(&units);
        let trained = |elements: u64| (elements as f64 * work.trained).ceil() as u64;
        let weights = match stage {
            // Frozen weights have a single version.
            Stage::Two => (model.elements() + trained(model.elements()) * (work.versions - 1)) * WIDTH,
            Stage::Three => neighbours * WIDTH,
        };
        // Frozen parameters have no gradient.
        let gradients = trained(neighbours) * WIDTH;
        let (activations, on_host) = activations(model, work).unzip();
        Peak { weights, gradients, activations, on_host: on_host.unwrap_or(0) }
    }

    /// Returns the peak of a model of the same kind with `times` as many parameters.
    pub(crate) fn scaled(self, times: f64) -> Peak {
        let of = |bytes: u64| (bytes as f64 * times).ceil() as u64;
        Peak { weights: of(self.weights), gradients: of(self.gradients), ..self }
    }

    pub(crate) fn total(&self) -> u64 {
        (self.weights + self.gradients).saturating_add(self.activations.unwrap_or(0))
    }
}

fn in_use_and_next(units: &[u64]) -> u64 {
    let alone = units.iter().copied().max().unwrap_or(0);
    units.windows(2).map(|pair| pair[0] + pair[1]).max().unwrap_or(alone)
}

/// Returns the bytes of activations on the device, and on the host. The largest --sequences times the largest --context
/// need more than 64 bits, so the result saturates.
///
/// The device has the inputs of all blocks and the inside of one, or the insides of all. At the end of forward it
/// also has the logits. If inputs wait in the host's memory, the device has two of them. The block in use has
/// one, and another is on its way.
fn activations(model: &Model, work: &Workload) -> Option<(u64, u64)> {
    let sizes = model.transformer?;
    let layers = u128::from(sizes.layers);
    let tokens = u128::from(work.sequences * work.context);
    let input = tokens * u128::from(sizes.width * WIDTH);
    // A token goes through several experts, each with an inside of its own.
    let inside = tokens * u128::from(sizes.width * INSIDE * sizes.experts.0);
    let logits = tokens * u128::from(sizes.vocabulary * LOGITS);
    let (on_device, on_host) = match (work.checkpointing, work.offloading) {
        (true, true) => (input * layers.min(2) + inside.max(logits), input * layers),
        (true, false) => (input * layers + inside.max(logits), 0),
        (false, _) => (inside * layers + logits, 0),
    };
    let saturated = |bytes: u128| u64::try_from(bytes).unwrap_or(u64::MAX);
    Some((saturated(on_device), saturated(on_host)))
}

/// Returns the elements of the largest transformer that fits on a device at a stage. [`Model::transformer_of`] gives
/// its shape for each number of layers.
pub(crate) fn largest(device: u64, vocabulary: u64, work: &Workload, stage: Stage) -> u64 {
    let fits =
        |layers: u64| Peak::of(&Model::transformer_of(layers, vocabulary), work, stage).total() <= device;
    let mut largest = 0;
    // The search covers up to 16,383 layers. Ten thousand layers, of width 1.28 M, have 2e17 elements already.
    let mut step = 8192;
    while step > 0 {
        if fits(largest + step) {
            largest += step;
        }
        step /= 2;
    }
    if largest == 0 { 0 } else { Model::transformer_of(largest, vocabulary).elements() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Workload = Workload {
        sequences: 2,
        context: 1024,
        checkpointing: true,
        offloading: false,
        versions: 1,
        trained: 1.0,
        division: Division::Blocks,
    };

    #[test]
    fn stage_two_holds_the_model_and_stage_three_two_units() {
        let model = Model::transformer_of(8, 1000);
        let units = model.unit_elements(Division::Blocks);
        let two = Peak::of(&model, &WORK, Stage::Two);
        assert_eq!(two.weights, 2 * model.elements());
        assert_eq!(
            Peak::of(&model, &Workload { versions: 2, ..WORK }, Stage::Two).weights,
            4 * model.elements()
        );
        let three = Peak::of(&model, &WORK, Stage::Three);
        assert_eq!(three.weights, 2 * (units[1] + units[2]).max(units[0] + units[1]));
        assert_eq!(three.activations, two.activations);
        // The two tensors of the MLP are the largest neighbours.
        let tensors = Peak::of(&model, &Workload { division: Division::Tensors, ..WORK }, Stage::Three);
        assert_eq!(tensors.weights, 2 * 8 * 1024 * 1024);
    }

    #[test]
    fn frozen_parameters_are_weights_alone() {
        let model = Model::transformer_of(8, 1000);
        let work = Workload { trained: 0.01, versions: 2, ..WORK };
        for stage in [Stage::Two, Stage::Three] {
            let (whole, most) = (Peak::of(&model, &WORK, stage), Peak::of(&model, &work, stage));
            assert_eq!(most.gradients, (whole.gradients as f64 / 200.0).ceil() as u64 * 2, "{stage:?}");
            assert_eq!(most.activations, whole.activations);
        }
        // Only the trained parameters have a second version.
        let second = (model.elements() as f64 / 100.0).ceil() as u64;
        assert_eq!(Peak::of(&model, &work, Stage::Two).weights, 2 * (model.elements() + second));
    }

    #[test]
    fn checkpointing_keeps_inputs_and_the_inside_of_one_block() {
        let model = Model::transformer_of(8, 1000);
        let (tokens, width) = (2048, 1024);
        let kept = Peak::of(&model, &WORK, Stage::Two).activations;
        assert_eq!(kept, Some(8 * tokens * width * 2 + tokens * width * 34));
        let all = Peak::of(&model, &Workload { checkpointing: false, ..WORK }, Stage::Two).activations;
        assert_eq!(all, Some(8 * tokens * width * 34 + tokens * 1000 * 8));
        let most = Workload { sequences: 1 << 20, context: 1 << 24, ..WORK };
        let wide = Model::transformer_of(8192, 1000);
        assert_eq!(Peak::of(&wide, &most, Stage::Two).activations, Some(u64::MAX));
    }

    #[test]
    fn inputs_that_wait_on_the_host_leave_two_on_the_device() {
        let model = Model::transformer_of(8, 1000);
        let work = Workload { offloading: true, ..WORK };
        let (tokens, width) = (2048, 1024);
        let peak = Peak::of(&model, &work, Stage::Three);
        assert_eq!(peak.activations, Some(2 * tokens * width * 2 + tokens * width * 34));
        assert_eq!(peak.on_host, 8 * tokens * width * 2);
        assert_eq!(Peak::of(&model, &WORK, Stage::Three).on_host, 0);
        // The only block's input stays on the device, since no other block runs meanwhile.
        let one = Peak::of(&Model::transformer_of(1, 1000), &work, Stage::Three);
        assert_eq!(one.activations, Some(tokens * 128 * 2 + tokens * 1000 * 8));
    }

    #[test]
    fn the_largest_model_fits_and_the_next_does_not() {
        for stage in [Stage::Two, Stage::Three] {
            let device = 8 << 30;
            let found = largest(device, 50_257, &WORK, stage);
            let layers =
                (1..).find(|&layers| Model::transformer_of(layers, 50_257).elements() == found).unwrap();
            let total = |layers| Peak::of(&Model::transformer_of(layers, 50_257), &WORK, stage).total();
            assert!(total(layers) <= device && device < total(layers + 1), "{stage:?}: {layers} layers");
        }
        assert_eq!(largest(1 << 20, 50_257, &WORK, Stage::Three), 0);
    }
}
