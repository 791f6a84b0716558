//! Asks every server for its jobs. A silent server does not hide the others.

use std::time::Duration;

use anyhow::bail;
use longshore_proto::{Fault, FaultKind};
use longshore_wire::v1;
use longshore_worker::session::whole;

use crate::{
    commands::admin::ServersArgs,
    servers::{Servers, Silent, Unanswered, jobs_of, name_silent, no_such_job},
};

/// The longest wait for a state hash: all of the state is read, after the decided updates.
const HASHING: Duration = Duration::from_secs(600);

pub(super) const GONE: &str = "does not hold this job: it restarted, or belongs to another one";

/// Each server's address and answer.
pub(super) type Answers = Vec<(String, v1::DescribeResponse)>;
/// Addresses of servers without an answer, each with the reason.
pub(super) type Without = Vec<(String, String)>;

/// Answers of all servers.
pub(super) struct Found {
    servers: Servers,
    patience: Duration,
    pub(super) lists: Vec<(String, v1::ListJobsResponse)>,
    pub(super) silent: Silent,
}

impl Found {
    /// Connects, and lists the jobs of all servers.
    ///
    /// # Errors
    /// If no server answers within `patience`.
    pub(super) fn ask(args: &ServersArgs, patience: Duration) -> anyhow::Result<Found> {
        let (mut servers, mut silent) = Servers::reach(&args.servers, &args.access)?;
        let answers = servers.answers_within(patience, |mut admin| async move {
            admin.list_jobs(v1::ListJobsRequest {}).await
        });
        let mut lists = Vec::new();
        for (address, answer) in answers {
            match answer {
                Ok(list) => lists.push((address, list)),
                Err(fault) => silent.push((address, format!("does not answer: {fault}"))),
            }
        }
        if lists.is_empty() {
            return Err(Unanswered::new(&silent).into());
        }
        servers.leave_out(&silent);
        Ok(Found { servers, patience, lists, silent })
    }

    /// Returns the names of all jobs, or the named job.
    pub(super) fn jobs(&self, named: Option<&str>) -> anyhow::Result<Vec<String>> {
        let jobs = jobs_of(&self.lists);
        let Some(named) = named else { return Ok(jobs) };
        if jobs.iter().any(|job| job == named) {
            return Ok(vec![named.to_string()]);
        }
        let silent = if self.silent.is_empty() {
            String::new()
        } else {
            format!(". Not asked: {}", name_silent(&self.silent))
        };
        bail!("{}{silent}", no_such_job(named, &jobs))
    }

    /// Returns the answers of the servers that hold the job, and the reasons of the others. An operator needs a
    /// status most when a server has restarted empty, cannot read its drives, or is stopped.
    pub(super) fn describe(&mut self, job: &str, with_steps: bool) -> (Answers, Without) {
        let steps_after = with_steps.then_some(0);
        let request =
            v1::DescribeRequest { job: job.to_string(), steps_after, ..v1::DescribeRequest::default() };
        let found = self.servers.answers_within(self.patience, |admin| whole(admin, request.clone()));
        let (mut answers, mut without) = (Vec::new(), self.silent.clone());
        for (address, answer) in found {
            match answer {
                Ok(answer) => answers.push((address, answer)),
                Err(fault) => without.push((address, reason(&fault))),
            }
        }
        (answers, without)
    }
}

/// Adds each server's hashes to its answer. Returns why a server has none.
pub(super) fn hashed(found: &mut Found, job: &str, answers: &mut Answers) -> Option<String> {
    let request =
        v1::DescribeRequest { job: job.to_string(), state_hash: true, brief: true, ..Default::default() };
    let asked: Vec<String> = answers.iter().map(|(address, _)| address.clone()).collect();
    let hashes = found.servers.answers_within(HASHING, |admin| whole(admin, request.clone()));
    let mut failed = None;
    for (address, answer) in hashes.into_iter().filter(|(address, _)| asked.contains(address)) {
        let Some((_, known)) = answers.iter_mut().find(|(known, _)| *known == address) else { continue };
        match answer {
            // The fields beside the hashes are newer too.
            Ok(answer) => {
                let (spec, placement) = (known.spec.take(), known.placement.take());
                let steps = std::mem::take(&mut known.steps);
                *known = v1::DescribeResponse { spec, placement, steps, ..answer };
            }
            Err(fault) => failed = Some(format!("{address} gave none: {fault}")),
        }
    }
    failed
}

/// Returns why a server has no answer.
fn reason(fault: &Fault) -> String {
    match (fault.kind, fault.field.as_str()) {
        (FaultKind::NotFound, "job") => GONE.to_string(),
        (FaultKind::Unavailable, "job") => format!("is recovering this job: {}", fault.remedy),
        _ => format!("does not serve this job: {fault}"),
    }
}
