//! The result of one look at the servers: servers with their memory, and jobs with their steps and troubles.

use serde::Serialize;

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct View {
    pub(crate) servers: Vec<ServerView>,
    pub(crate) jobs: Vec<JobView>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct ServerView {
    pub(crate) address: String,
    pub(crate) silent: Option<String>,
    pub(crate) memory_budget: u64,
    pub(crate) memory_reserved: u64,
    pub(crate) release: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    Training,
    /// No rank is connected.
    #[default]
    Idle,
    Paused,
    Loading,
    Failed,
    /// No server serves the job.
    Away,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Trouble {
    pub(crate) what: String,
    pub(crate) remedy: String,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct JobView {
    pub(crate) job: String,
    pub(crate) state: State,
    pub(crate) troubles: Vec<Trouble>,
    pub(crate) waiting_for: String,
    /// A change of the job's servers that is under way.
    pub(crate) moves: Option<MovesView>,
    pub(crate) version: u64,
    pub(crate) applied: u64,
    pub(crate) parameters: u64,
    pub(crate) tensors: u32,
    pub(crate) steps_per_s: Option<f64>,
    /// Bytes a second, over the last steps: a sum over servers, but for `update_per_s`, which is their mean.
    pub(crate) pushed_per_s: Option<f64>,
    pub(crate) pulled_per_s: Option<f64>,
    pub(crate) update_per_s: Option<f64>,
    pub(crate) parts: Vec<Part>,
    pub(crate) ranks: Vec<RankView>,
    /// The last steps, oldest first.
    pub(crate) steps: Vec<StepView>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Part {
    pub(crate) server: String,
    pub(crate) version: u64,
    pub(crate) elements: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) drive_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) threads: u32,
    pub(crate) isa: String,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct MovesView {
    pub(crate) wanted: Vec<String>,
    /// Shards on their way, over all servers.
    pub(crate) awaited_shards: u32,
    /// Bytes that servers have fetched since the job was opened on them.
    pub(crate) fetched_bytes: u64,
    /// Reason why nothing moves. Empty if nothing is in the way.
    pub(crate) obstacle: String,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct RankView {
    pub(crate) rank: u32,
    pub(crate) state: &'static str,
    pub(crate) transport: String,
    pub(crate) last_step: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct StepView {
    pub(crate) step: u64,
    pub(crate) unix_ms: u64,
    pub(crate) seconds: Option<f64>,
    pub(crate) skipped: bool,
    pub(crate) norm: f64,
    pub(crate) learning_rate: f64,
    pub(crate) loss: Option<f64>,
    pub(crate) exposed_seconds: Option<f64>,
}
