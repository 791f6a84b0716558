//! A model's needs on a GPU, and the time of its steps, from numbers alone. Needs on servers come from the
//! engine's own arithmetic (`commands/plan.rs`).

mod device;
mod hardware;
mod hugging_face;
mod model;
mod schedule;
mod traffic;

pub(crate) use device::{Peak, Stage, WIDTH, Workload, largest};
pub(crate) use hardware::HardwareArgs;
pub(crate) use hugging_face::{files_of_index, header as safetensors_header, read};
pub(crate) use model::{Division, Model, Tensor, Transformer};
pub(crate) use schedule::{Hardware, Run, Step, Traffic, Unit, enough_servers};
pub(crate) use traffic::DriveTraffic;
