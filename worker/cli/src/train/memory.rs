//! Which part of the model fits the device: ZeRO stage 2 or 3, and what each keeps there.

use std::ops::Range;

use longshore_proto::{Dtype, Layout};
use longshore_worker::{
    device::Budget,
    error::{Result, Shortage},
};

use super::gpt::{self, Gpt};

/// ZeRO's names for where the 16-bit weights are between their uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// On the device.
    Two,
    /// On the servers: each layer is pulled before its use. As many stay on the device as its budget holds.
    Three,
}

/// How much a rank does at a time.
pub struct Workload {
    pub dtype: Dtype,
    pub delay: u32,
    /// The sequences of one micro-step.
    pub sequences: usize,
    pub device_budget: Option<u64>,
}

/// How many bytes of activations a model without a device budget keeps, instead of computing them again in backward.
/// That saves half of the time of a forward pass.
const KEPT_ACTIVATIONS: usize = 256 << 20;

/// The bytes of all activations. These are the inputs of all stages, and beside them the larger of two things: the
/// inside of one block (its attention matrix, and 16 times its input for projections and the MLP), or the logits and
/// their gradient.
pub(super) fn activations(model: &Gpt, sequences: usize, device_budget: Option<u64>) -> u64 {
    let config = model.config();
    let rows = (sequences * config.context) as u64;
    let input = rows * config.width as u64;
    let attention = rows * (config.context * config.heads) as u64;
    let logits = 2 * rows * gpt::VOCABULARY as u64;
    let inputs = (config.layers as u64 + 1) * input;
    let inside = 16 * input + attention;
    let kept = match device_budget {
        None => (inside * 4 * (config.layers as u64 - 1)).min(KEPT_ACTIVATIONS as u64),
        Some(_) => 0,
    };
    (inputs + inside.max(logits)) * 4 + kept
}

/// Lets a model keep activations where there is room for them.
pub(super) fn with_kept_activations(model: Gpt, device_budget: Option<u64>) -> Gpt {
    match device_budget {
        None => model.with_activation_budget(KEPT_ACTIVATIONS),
        Some(_) => model,
    }
}

/// The device memory beside the 16-bit weights, in bytes: one layer widened to fp32 to compute with, that layer's gradient,
/// and the activations.
fn working(model: &Gpt, work: &Workload) -> u64 {
    2 * largest_stage(model) * 4 + activations(model, work.sequences, work.device_budget)
}

/// The least device memory for 16-bit weights at a stage, in bytes.
fn least_weights(stage: Stage, model: &Gpt, layout: &Layout, work: &Workload) -> u64 {
    match stage {
        Stage::Two => whole_images(layout, work.dtype, work.delay),
        // These are the layer in use and the one that comes next.
        Stage::Three => 2 * largest_layer(model, layout) * work.dtype.bytes(),
    }
}

/// The most device memory that training at a stage needs at once, in bytes.
fn need(stage: Stage, model: &Gpt, layout: &Layout, work: &Workload) -> u64 {
    least_weights(stage, model, layout, work) + working(model, work)
}

/// The device memory for 16-bit weights. Stage 3 that was asked for takes no more than it must. Stage 3 that was found takes
/// what the device has left, since what stays there is not pulled again.
pub(super) fn weights_budget(
    asked: Option<u32>,
    stage: Stage,
    (model, layout): (&Gpt, &Layout),
    work: &Workload,
    device: &Budget,
) -> u64 {
    let least = least_weights(stage, model, layout, work);
    match (stage, asked) {
        (Stage::Two, _) | (Stage::Three, Some(_)) => least,
        (Stage::Three, None) => device.free().saturating_sub(working(model, work)).max(least),
    }
}

/// The elements of the largest stage's parameters.
pub(super) fn largest_stage(model: &Gpt) -> u64 {
    (0..model.stages().len()).map(|stage| stage_elements(model, stage)).max().unwrap_or(0)
}

/// The elements of the largest stage's flat range.
pub(super) fn largest_layer(model: &Gpt, layout: &Layout) -> u64 {
    let elements = |stage| {
        let range = stage_range(model, layout, stage);
        range.end - range.start
    };
    (0..model.stages().len()).map(elements).max().unwrap_or(0)
}

/// The flat range of one stage, from its first parameter's start to its last one's end.
pub(super) fn stage_range(model: &Gpt, layout: &Layout, stage: usize) -> Range<u64> {
    let params = &model.stages()[stage].params;
    layout.param_range(params.start).start..layout.param_range(params.end - 1).end
}

/// The bytes of the whole model's 16-bit weights at stage 2. They are there twice in a delayed job, since a step
/// computes with one version while the next one arrives.
pub(super) fn whole_images(layout: &Layout, dtype: Dtype, delay: u32) -> u64 {
    layout.elements() * dtype.bytes() * u64::from(1 + delay)
}

/// The elements of one stage's parameters.
pub(super) fn stage_elements(model: &Gpt, stage: usize) -> u64 {
    model.params()[model.stages()[stage].params.clone()].iter().map(|param| param.elements() as u64).sum()
}

/// The stage asked for if it fits, or the lowest that does.
///
/// # Errors
/// `Shortage` when not even one layer fits.
pub fn plan_stage(
    asked: Option<u32>,
    model: &Gpt,
    layout: &Layout,
    work: &Workload,
    device: &Budget,
) -> Result<Stage> {
    let fits = |stage: Stage| {
        let bytes = need(stage, model, layout, work);
        if bytes <= device.free() {
            return Ok(stage);
        }
        Err(Shortage {
            device: device.name().to_string(),
            field: match stage {
                Stage::Two => {
                    "all 16-bit weights, one fp32 layer with its gradient, and activations (stage 2)"
                        .to_string()
                }
                Stage::Three => {
                    "one layer (16-bit twice, fp32, and its gradient) and activations (stage 3)".to_string()
                }
            },
            asked: bytes,
            free: device.free(),
            budget: device.limit(),
            remedy: match stage {
                Stage::Two => "use --stage 3, or raise --device-budget",
                Stage::Three => "raise --device-budget, use a smaller --batch, or choose a narrower model",
            },
        })
    };
    let stage = match asked {
        Some(2) => fits(Stage::Two),
        Some(3) => fits(Stage::Three),
        _ => fits(Stage::Two).or_else(|_| fits(Stage::Three)),
    };
    Ok(stage?)
}
