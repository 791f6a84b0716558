//! Parses `longshore status --json`: the state of jobs, seen from outside.

use serde::Deserialize;

use crate::command::longshore;

#[derive(Clone, Debug, Deserialize)]
pub struct JobStatus {
    pub job: String,
    pub state_format: Option<String>,
    pub master_format: Option<String>,
    pub servers: Vec<ServerStatus>,
    pub servers_without: Vec<String>,
    pub reasons_without: Vec<String>,
    pub state_version: Option<u64>,
    pub state_hash: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct ServerStatus {
    pub address: String,
    pub phase: String,
    pub version: u64,
    pub applied: u64,
    pub memory_bytes: u64,
    pub pushed_bytes: u64,
    pub pulled_bytes: u64,
    pub waiting_for: String,
    pub disk_bytes: u64,
    pub disk_written_bytes: u64,
    pub disk_written_bytes_per_step: Option<u64>,
    pub disk_written_bytes_per_day: Option<u64>,
    pub drive_endurance_days: Option<f64>,
    pub threads: u32,
    pub isa: String,
    pub checkpoints: Option<CheckpointStatus>,
    pub ranks: Vec<RankStatus>,
    pub owner: Option<String>,
    pub idle_seconds: f64,
}

/// The result of a server's last checkpoint of the job.
#[derive(Clone, Debug, Deserialize)]
pub struct CheckpointStatus {
    pub name: Option<String>,
    pub version: u64,
    pub failure: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct RankStatus {
    pub state: String,
    pub transport: String,
}

/// Returns all jobs of these servers.
pub fn status(servers: &[String]) -> Vec<JobStatus> {
    let output = longshore(["status", "--json", "--servers", &servers.join(",")]);
    assert_eq!(output.code, 0, "{output:?}");
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"));
    output.stdout.lines().map(parse).collect()
}

/// Returns the only job of these servers.
pub fn job_status(servers: &[String]) -> JobStatus {
    let mut jobs = status(servers);
    assert_eq!(jobs.len(), 1, "one job was expected: {jobs:?}");
    jobs.remove(0)
}
