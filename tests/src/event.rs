//! Events of `longshore train --json` as types. A line that does not parse fails the test that reads it.

use serde::Deserialize;

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub enum Event {
    Start(Start),
    Step(Step),
    Validation { version: u64, loss: f32 },
    Checkpoint { name: String, version: u64 },
    End(End),
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Start {
    pub job: String,
    pub parameters: u64,
    pub shards: u32,
    pub servers: Vec<String>,
    pub embedded: bool,
    pub first_step: u64,
    pub steps: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Step {
    pub step: u64,
    pub loss: f32,
    pub norm: f64,
    pub skip: bool,
    pub overflow: Option<String>,
    pub loss_scale: f64,
    pub read_version: u64,
    pub step_ms: f64,
    pub exposed_ms: f64,
    pub pushed_bytes: u64,
    pub pulled_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct End {
    pub version: u64,
    pub state_hash: String,
    pub first_validation_loss: Option<f32>,
    pub validation_loss: f32,
    pub steps: u64,
    pub skipped: u64,
    pub step_ms: f64,
    pub device_peak_bytes: u64,
    pub export: Option<String>,
    pub checkpoint: Option<String>,
    pub weights_gone: bool,
}
