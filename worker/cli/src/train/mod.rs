//! The native trainer of `longshore train`: a byte-level GPT on text, with its optimizer on servers.

pub mod gpt;
mod gradients;
mod keep;
mod launch;
mod memory;
mod plot;
mod rank;
mod recorded;
mod report;
mod settings;
mod staging;
mod stop;
mod tested;
pub mod text;
mod weights;

pub(crate) use self::stop::{LastWords, Part, Stop, Stopped};
pub use self::{
    gradients::{LayerGradients, Sink},
    launch::run,
    settings::{LossScale, LossScaleMode, Settings},
    weights::{DeviceImages, ImageWeights},
};
