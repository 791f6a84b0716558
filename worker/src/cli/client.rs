//! Operators' calls to several servers at once, for commands that belong to no rank.

use std::time::Duration;

use anyhow::Context;
use longshore_proto::{
    limits::MAX_CONTROL_MESSAGE_BYTES,
    wire::{
        fault_from_status,
        v1::{self, admin_client::AdminClient},
    },
};
use tokio::runtime::Runtime;
use tonic::{Status, transport::Channel};

use crate::session::endpoint;

/// Longest wait for a connection; an operator wants to know soon.
const CONNECT: Duration = Duration::from_secs(5);

pub(super) struct Server {
    pub(super) address: String,
    pub(super) admin: AdminClient<Channel>,
}

pub(super) struct Servers {
    runtime: Runtime,
    servers: Vec<Server>,
}

impl Servers {
    /// Connects to every server; an unreachable one is an error that names it.
    pub(super) fn connect(addresses: &[String]) -> anyhow::Result<Servers> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut servers = Vec::new();
        for address in addresses {
            let endpoint = endpoint(address)?.connect_timeout(CONNECT);
            let channel = runtime.block_on(endpoint.connect()).with_context(|| {
                format!("{address} cannot be reached: check that longshored runs there, and --servers")
            })?;
            let admin = AdminClient::new(channel).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
            servers.push(Server { address: address.clone(), admin });
        }
        Ok(Servers { runtime, servers })
    }

    /// One call on every server in turn; the first refusal ends it.
    pub(super) fn each<T, F>(
        &mut self,
        mut call: impl FnMut(AdminClient<Channel>) -> F,
    ) -> anyhow::Result<Vec<(String, T)>>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let mut answers = Vec::new();
        for server in &self.servers {
            let answer = self.runtime.block_on(call(server.admin.clone()));
            let answer = answer.map_err(|status| fault_from_status(&status, &server.address));
            answers
                .push((server.address.clone(), answer.with_context(|| server.address.clone())?.into_inner()));
        }
        Ok(answers)
    }

    /// The job to act on: the one named, or the only one there is.
    pub(super) fn job(&mut self, named: Option<&String>) -> anyhow::Result<String> {
        if let Some(name) = named {
            return Ok(name.clone());
        }
        let lists = self.each(|mut admin| async move { admin.list_jobs(v1::ListJobsRequest {}).await })?;
        let mut jobs: Vec<String> = lists.into_iter().flat_map(|(_, list)| list.jobs).collect();
        jobs.sort();
        jobs.dedup();
        match jobs.as_slice() {
            [job] => Ok(job.clone()),
            [] => anyhow::bail!("no job on these servers: start one with `longshore train --servers ...`"),
            several => {
                anyhow::bail!("several jobs on these servers, name one with --job: {}", several.join(", "))
            }
        }
    }
}
