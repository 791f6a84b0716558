//! Which of the model fits the device: ZeRO stage 2 or 3, and what each keeps there.

use longshore_proto::{Dtype, Layout};

use super::gpt::Gpt;
use crate::{
    device::Budget,
    error::{Result, Shortage},
};

/// ZeRO's names for where the 16-bit weights are between their uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// On the device.
    Two,
    /// On the servers: each layer is pulled just before use, freed after, and the next one prefetched.
    Three,
}

/// Bytes of device memory that a stage needs for weights at most at once: the 16-bit ones, and one layer widened to
/// fp32 to compute with, its gradient beside it.
fn need(stage: Stage, model: &Gpt, layout: &Layout, dtype: Dtype, delay: u32) -> u64 {
    let largest = (0..model.stages().len()).map(|stage| stage_elements(model, stage)).max().unwrap_or(0);
    let working = 2 * largest * 4;
    match stage {
        Stage::Two => whole_images(layout, dtype, delay) + working,
        // The layer in use and the one being prefetched.
        Stage::Three => 2 * largest * dtype.bytes() + working,
    }
}

/// Bytes of the whole model's 16-bit weights at stage 2: a delayed step computes with one version while the next one
/// arrives.
pub(super) fn whole_images(layout: &Layout, dtype: Dtype, delay: u32) -> u64 {
    layout.elements() * dtype.bytes() * u64::from(1 + delay)
}

/// Elements of one stage's parameters.
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
    dtype: Dtype,
    delay: u32,
    device: &Budget,
) -> Result<Stage> {
    let fits = |stage: Stage| {
        let bytes = need(stage, model, layout, dtype, delay);
        if bytes <= device.free() {
            return Ok(stage);
        }
        Err(Shortage {
            device: device.name().to_string(),
            field: match stage {
                Stage::Two => "all 16-bit weights and one fp32 layer with its gradient (stage 2)".to_string(),
                Stage::Three => "one layer: 16-bit twice, fp32, and its gradient (stage 3)".to_string(),
            },
            asked: bytes,
            free: device.free(),
            budget: device.limit(),
            remedy: match stage {
                Stage::Two => "use --stage 3, or raise --device-budget",
                Stage::Three => "raise --device-budget, or choose a narrower model",
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
