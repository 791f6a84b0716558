//! Operators' calls to several servers at once, for commands that belong to no rank.

use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use longshore_proto::{
    Fault,
    limits::MAX_CONTROL_MESSAGE_BYTES,
    wire::{
        fault_from_status,
        v1::{self, admin_client::AdminClient},
    },
};
use tokio::runtime::{Handle, Runtime};
use tonic::{Status, transport::Channel};

use crate::session::endpoint;

/// Longest wait for a connection; an operator wants to know soon.
const CONNECT: Duration = Duration::from_secs(5);

pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) admin: AdminClient<Channel>,
}

pub(crate) struct Servers {
    runtime: Runtime,
    servers: Vec<Server>,
}

impl Servers {
    /// Connects to every server; an unreachable one is an error that names it.
    pub(crate) fn connect(addresses: &[String]) -> anyhow::Result<Servers> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
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

    pub(crate) fn list(&self) -> &[Server] {
        &self.servers
    }

    /// Where calls of several threads run.
    pub(crate) fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// One call on every server at once; the first refusal is the answer.
    pub(crate) fn each<T, F>(
        &mut self,
        call: impl FnMut(AdminClient<Channel>) -> F,
    ) -> anyhow::Result<Vec<(String, T)>>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let named = |(address, answer): (String, Result<T, Fault>)| {
            let answer = answer.with_context(|| address.clone())?;
            Ok((address, answer))
        };
        self.answers(call).into_iter().map(named).collect()
    }

    /// One call on every server at once, with what each says.
    pub(super) fn answers<T, F>(
        &mut self,
        call: impl FnMut(AdminClient<Channel>) -> F,
    ) -> Vec<(String, Result<T, Fault>)>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let all: Vec<String> = self.servers.iter().map(|server| server.address.clone()).collect();
        self.answers_of(&all, call)
    }

    /// As `answers`, of some servers.
    pub(super) fn answers_of<T, F>(
        &mut self,
        addresses: &[String],
        mut call: impl FnMut(AdminClient<Channel>) -> F,
    ) -> Vec<(String, Result<T, Fault>)>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let asked: Vec<_> =
            self.servers.iter().filter(|server| addresses.contains(&server.address)).collect();
        let answers = self.runtime.block_on(join_all(asked.iter().map(|server| call(server.admin.clone()))));
        let answer = |(server, answer): (&Server, Result<tonic::Response<T>, Status>)| {
            let answer = answer.map_err(|status| fault_from_status(&status, &server.address));
            (server.address.clone(), answer.map(tonic::Response::into_inner))
        };
        asked.into_iter().zip(answers).map(answer).collect()
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
