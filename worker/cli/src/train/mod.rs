//! The native trainer of `longshore train`: a byte-level GPT on text, with its optimizer on servers.

mod flags;
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
pub mod text;
mod weights;

pub use self::{
    flags::Flags,
    gradients::{LayerGradients, Sink},
    launch::run,
    settings::Settings,
    weights::{DeviceImages, ImageWeights},
};
pub(crate) use self::{
    flags::preset,
    stop::{LastWords, Part, Stop, Stopped},
};
