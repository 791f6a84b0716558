//! Device memory of training.

use std::ops::Range;

use longshore_proto::Layout;
use longshore_worker::{
    device::Budget,
    error::{Result, Shortage},
};

use super::{
    Flags,
    gpt::{self, Gpt},
};

/// Bytes of activations that a model without a device budget keeps, instead of computing them again in backward.
/// Keeping them saves half of the time of a forward pass.
const KEPT_ACTIVATIONS: usize = 256 << 20;

/// Returns the bytes of all activations: the inputs of all stages, and the larger of two parts. The first part is the
/// inside of one block: its attention matrix, and 16 times its input. The second part is the logits and their gradient.
pub(super) fn activations(model: &Gpt, sequences: usize, device_budget: Option<u64>) -> u64 {
    let config = model.config();
    let rows = (sequences * config.context) as u64;
    let input = rows * config.width as u64;
    let attention = rows * (config.context * config.heads) as u64;
    let logits = 2 * rows * gpt::VOCABULARY as u64;
    let inputs = (config.layers as u64 + 1) * input;
    let inside = 16 * input + attention;
    let kept = match device_budget {
        None => inside.saturating_mul(4 * (config.layers as u64 - 1)).min(KEPT_ACTIVATIONS as u64),
        Some(_) => 0,
    };
    (inputs + inside.max(logits)) * 4 + kept
}

pub(super) fn with_kept_activations(model: Gpt, device_budget: Option<u64>) -> Gpt {
    match device_budget {
        None => model.with_activation_budget(KEPT_ACTIVATIONS),
        Some(_) => model,
    }
}

pub(super) fn largest_stage(model: &Gpt) -> u64 {
    (0..model.stages().len()).map(|stage| stage_elements(model, stage)).max().unwrap_or(0)
}

/// Flat range of one stage, from its first parameter's start to its last one's end.
pub(super) fn stage_range(model: &Gpt, layout: &Layout, stage: usize) -> Range<u64> {
    let params = &model.stages()[stage].params;
    layout.param_range(params.start).start..layout.param_range(params.end - 1).end
}

pub(super) fn stage_elements(model: &Gpt, stage: usize) -> u64 {
    model.params()[model.stages()[stage].params.clone()].iter().map(|param| param.elements() as u64).sum()
}

/// Checks that training fits the device: all 16-bit weights, one layer widened to fp32, that layer's gradient, and the
/// activations.
///
/// # Errors
/// `Shortage` if it does not fit.
pub(super) fn check_room(model: &Gpt, layout: &Layout, flags: &Flags, device: &Budget) -> Result<()> {
    let bytes = layout.elements() * flags.weight_dtype.bytes()
        + 2 * largest_stage(model) * 4
        + activations(model, flags.batch, flags.device_budget());
    if bytes <= device.free() {
        return Ok(());
    }
    Err(Shortage {
        device: device.name().to_string(),
        field: "all 16-bit weights, one fp32 layer with its gradient, and activations".to_string(),
        asked: bytes,
        free: device.free(),
        budget: device.limit(),
        remedy: "raise --device-budget, use a smaller --batch, or train a PyTorch model with longshore.shard",
    }
    .into())
}
