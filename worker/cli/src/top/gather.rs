//! Polls all servers. A silent server hides no other, and is dialled again.

use std::{collections::BTreeMap, time::Duration};

use longshore_wire::v1;

use super::{
    job::{Known, job_view},
    view::{ServerView, View},
};
use crate::{
    access::Access,
    servers::{Servers, Silent, brief, jobs_of},
    speeds::MEAN_OF,
};

/// The longest wait for a connection and for an answer: the picture should move.
const PATIENCE: Duration = Duration::from_secs(3);

pub(crate) struct Poller {
    addresses: Vec<String>,
    access: Access,
    servers: Option<Servers>,
    silent: Silent,
    known: BTreeMap<String, Known>,
}

impl Poller {
    pub(crate) fn new(addresses: Vec<String>, access: Access) -> Poller {
        Poller { addresses, access, servers: None, silent: Vec::new(), known: BTreeMap::new() }
    }

    /// Asks every server for its jobs.
    ///
    /// # Errors
    /// If addresses or certificates cannot be used. A server that does not answer is a part of the view.
    pub(crate) fn look(&mut self) -> anyhow::Result<View> {
        if self.servers.is_none() || !self.silent.is_empty() {
            let (servers, silent) = Servers::reach_within(PATIENCE, &self.addresses, &self.access)?;
            (self.servers, self.silent) = (Some(servers), silent);
        }
        let Some(servers) = &mut self.servers else { return Ok(View::default()) };
        let lists = servers.lists(PATIENCE, &mut self.silent);
        let mut view = View {
            servers: self.addresses.iter().map(|address| seen(address, &lists, &self.silent)).collect(),
            ..View::default()
        };
        let now_ms = lists.iter().map(|(_, list)| list.unix_micros / 1000).max().unwrap_or(0);
        let jobs = jobs_of(&lists);
        self.known.retain(|job, _| jobs.contains(job));
        for job in jobs {
            let known = self.known.entry(job.clone()).or_default();
            // Speeds are means over steps that earlier looks have seen, too.
            let after = known.last_step().saturating_sub(MEAN_OF as u64 + 1);
            let request = v1::DescribeRequest { steps_after: Some(after), ..brief(&job) };
            let mut answers =
                servers.answers_within(PATIENCE, async |mut admin| admin.describe(request.clone()).await);
            servers.drop_others(&job, &mut answers);
            view.jobs.push(job_view(&job, &answers, known, now_ms));
        }
        Ok(view)
    }
}

fn seen(address: &str, lists: &[(String, v1::ListJobsResponse)], silent: &Silent) -> ServerView {
    let why = silent.iter().find(|(one, _)| one == address).map(|(_, why)| why.clone());
    match lists.iter().find(|(one, _)| one == address) {
        Some((_, list)) => ServerView {
            address: address.into(),
            silent: None,
            memory_budget: list.memory_budget,
            memory_reserved: list.memory_reserved,
            release: list.release.clone(),
        },
        None => ServerView { address: address.into(), silent: why, ..ServerView::default() },
    }
}
