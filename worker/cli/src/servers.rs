//! Operators' calls to several servers at once, for commands without a rank.

use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::future::join_all;
use longshore_proto::{Fault, FaultKind, limits::MAX_CONTROL_MESSAGE_BYTES};
use longshore_wire::{
    self as wire, Channel, fault_from_status,
    v1::{self, admin_client::AdminClient},
};
use longshore_worker::session::{Address, untrusted, whole, with_sources};
use tokio::runtime::{Handle, Runtime};
use tonic::Status;

use crate::{access::Access, output::wrong_use};

/// The longest wait for a connection, since an operator wants to know soon.
const CONNECT: Duration = Duration::from_secs(10);
/// The longest wait for an answer that takes no work. A connection alone shows no living server, since the kernel
/// accepts connections even for a stopped process.
pub(crate) const PROMPTLY: Duration = Duration::from_secs(10);

/// The error of servers that cannot be reached.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Unanswered {
    text: String,
    pub(crate) fault: Fault,
}

impl Unanswered {
    /// Makes an error that begins with `lead`.
    pub(crate) fn new(lead: &str, silent: &Silent) -> Unanswered {
        let addresses: Vec<&str> = silent.iter().map(|(address, _)| address.as_str()).collect();
        let remedy = "see what `longshore doctor` says of them";
        let limit = "servers that answer";
        let fault = Fault::new(FaultKind::Unavailable, "--servers", addresses.join(","), limit, remedy);
        Unanswered { text: format!("{lead}{}", name_silent(silent)), fault }
    }
}

/// The longest wait for a server that recovers the job: a session's `slow_deadline`.
pub(crate) const RECOVERY: Duration = Duration::from_secs(1800);
const RECOVERY_POLL: Duration = Duration::from_millis(200);

#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) admin: AdminClient<Channel>,
}

pub(crate) struct Servers {
    runtime: Runtime,
    servers: Vec<Server>,
}

/// Addresses of servers without an answer, each with the reason.
pub(crate) type Silent = Vec<(String, String)>;
pub(crate) type Admin = AdminClient<Channel>;
type Answer<T> = Result<tonic::Response<T>, Status>;
/// Each server's address and answer.
pub(crate) type Answers<T> = Vec<(String, Result<T, Fault>)>;

impl Servers {
    pub(crate) fn connect(addresses: &[String], access: &Access) -> anyhow::Result<Servers> {
        let (servers, silent) = Servers::reach(addresses, access)?;
        if !silent.is_empty() {
            return Err(Unanswered::new("", &silent).into());
        }
        Ok(servers)
    }

    /// Connects to the servers that can be reached, in the given order.
    pub(crate) fn reach(addresses: &[String], access: &Access) -> anyhow::Result<(Servers, Silent)> {
        Servers::reach_within(CONNECT, addresses, access)
    }

    pub(crate) fn reach_within(
        patience: Duration,
        addresses: &[String],
        access: &Access,
    ) -> anyhow::Result<(Servers, Silent)> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let (servers, silent) = connect_on(&runtime, patience, addresses, access)?;
        Ok((Servers { runtime, servers }, silent))
    }

    pub(crate) fn list(&self) -> &[Server] {
        &self.servers
    }

    pub(crate) fn handle(&self) -> &Handle {
        self.runtime.handle()
    }

    /// Makes one call on every server at once. Returns the first refusal as the error. Waits while a server recovers
    /// the job.
    pub(crate) fn each<T>(&self, call: impl AsyncFn(Admin) -> Answer<T>) -> anyhow::Result<Vec<(String, T)>> {
        self.once_recovered(|| self.answers(&call))
    }

    /// Calls as `each` does, for a call that a server answers at once. A silent server is an error.
    pub(crate) fn each_promptly<T>(
        &self,
        call: impl AsyncFn(Admin) -> Answer<T>,
    ) -> anyhow::Result<Vec<(String, T)>> {
        self.once_recovered(|| self.answers_within(PROMPTLY, &call))
    }

    /// Repeats calls while a server recovers the job. Such a server is alive, and reads all of its state.
    fn once_recovered<T>(&self, call: impl Fn() -> Answers<T>) -> anyhow::Result<Vec<(String, T)>> {
        let start = Instant::now();
        let mut told = false;
        loop {
            let answers = call();
            let recovers = |(_, answer): &&(String, Result<T, Fault>)| {
                answer
                    .as_ref()
                    .is_err_and(|fault| fault.kind == FaultKind::Unavailable && fault.field == "job")
            };
            let Some((address, _)) = answers.iter().find(recovers).filter(|_| start.elapsed() < RECOVERY)
            else {
                let named = |(address, answer): (String, Result<T, Fault>)| {
                    let answer = answer.with_context(|| address.clone())?;
                    Ok((address, answer))
                };
                return answers.into_iter().map(named).collect();
            };
            if !std::mem::replace(&mut told, true) {
                say_aside!("{address} recovers the job: waiting until it has read its state");
            }
            std::thread::sleep(RECOVERY_POLL);
        }
    }

    /// Makes one call on every server at once. Returns each answer within `patience`.
    pub(crate) fn answers_within<T>(
        &self,
        patience: Duration,
        call: impl AsyncFn(Admin) -> Answer<T>,
    ) -> Answers<T> {
        self.runtime.block_on(self.asked_within(patience, call))
    }

    /// Asks as `answers_within` does, but from a task.
    pub(crate) async fn asked_within<T>(
        &self,
        patience: Duration,
        call: impl AsyncFn(Admin) -> Answer<T>,
    ) -> Answers<T> {
        let call = async |admin| {
            let answer = tokio::time::timeout(patience, call(admin)).await;
            answer.unwrap_or_else(|_| Err(silence(patience)))
        };
        self.asked(call).await
    }

    /// Makes one call on every server at once. Returns each answer.
    pub(crate) fn answers<T>(&self, call: impl AsyncFn(Admin) -> Answer<T>) -> Answers<T> {
        self.runtime.block_on(self.asked(call))
    }

    async fn asked<T>(&self, call: impl AsyncFn(Admin) -> Answer<T>) -> Answers<T> {
        let answers = join_all(self.servers.iter().map(|server| call(server.admin.clone()))).await;
        let answer = |(server, answer): (&Server, Answer<T>)| {
            let answer = answer.map_err(|status| fault_from_status(&status, &server.address));
            (server.address.clone(), answer.map(tonic::Response::into_inner))
        };
        self.servers.iter().zip(answers).map(answer).collect()
    }

    /// Lists the jobs of the servers that answer within `patience`. The other servers are added to `silent`, and asked
    /// no more.
    pub(crate) fn lists(
        &mut self,
        patience: Duration,
        silent: &mut Silent,
    ) -> Vec<(String, v1::ListJobsResponse)> {
        let mut lists = Vec::new();
        for (address, answer) in self
            .answers_within(patience, async |mut admin| admin.list_jobs(v1::ListJobsRequest::default()).await)
        {
            match answer {
                Ok(list) => lists.push((address, list)),
                Err(fault) => silent.push((address, format!("does not answer: {fault}"))),
            }
        }
        self.servers.retain(|server| silent.iter().all(|(address, _)| *address != server.address));
        lists
    }

    pub(crate) fn described(&self, job: &str) -> anyhow::Result<Vec<v1::DescribeResponse>> {
        let answers = self.each_promptly(async |mut admin| admin.describe(brief(job)).await)?;
        Ok(answers.into_iter().map(|(_, answer)| answer).collect())
    }

    /// Asks every server for its whole description of the job.
    pub(crate) fn wholes(&self, job: &str) -> Answers<v1::DescribeResponse> {
        let request = v1::DescribeRequest { job: job.to_string(), ..Default::default() };
        self.answers_within(PROMPTLY, async |admin| whole(admin, request.clone()).await)
    }

    /// Returns the description by the first server that holds the job.
    pub(crate) fn described_whole(&self, job: &str) -> anyhow::Result<v1::DescribeResponse> {
        let found = self.once_recovered(|| {
            let mut found = self.wholes(job);
            if found.iter().any(|(_, answer)| answer.is_ok()) {
                found.retain(|(_, answer)| !answer.as_ref().is_err_and(is_not_there));
            }
            found
        })?;
        let first = found.into_iter().next();
        first.map(|(_, answer)| answer).context("--servers names no server")
    }

    /// Drops the answers of servers that hold nothing of the job, unless a part of the job is missing.
    pub(crate) fn drop_others(&self, job: &str, found: &mut Answers<v1::DescribeResponse>) {
        let is_elsewhere =
            |(_, answer): &(String, Result<_, Fault>)| answer.as_ref().is_err_and(is_not_there);
        if !found.iter().any(is_elsewhere) {
            return;
        }
        if is_complete(self.wholes(job).iter().filter_map(|(_, answer)| answer.as_ref().ok())) {
            found.retain(|one| !is_elsewhere(one));
        }
    }

    /// Leaves out the servers that are no members of the job, and adds members that were not named. If a member's
    /// answer is missing, every named server stays: one of them has lost that member's part.
    pub(crate) fn of_job(self, job: &str, access: &Access) -> anyhow::Result<Servers> {
        let mut servers = self.with_members(job, access)?;
        let mut stay = are_members(&servers.wholes(job)).into_iter();
        servers.servers.retain(|_| stay.next().unwrap_or(true));
        Ok(servers)
    }

    /// Adds the servers of the job that were not named.
    pub(crate) fn with_members(mut self, job: &str, access: &Access) -> anyhow::Result<Servers> {
        let silent = self.add_members(job, access)?;
        if !silent.is_empty() {
            return Err(Unanswered::new("", &silent).into());
        }
        Ok(self)
    }

    /// Connects to the job's servers that were not named, and to the servers that these name in turn: a named server
    /// may have an old placement. Returns the members that cannot be reached.
    pub(crate) fn add_members(&mut self, job: &str, access: &Access) -> anyhow::Result<Silent> {
        let mut all_silent = Silent::new();
        loop {
            let known = self.servers.iter().map(|server| &server.address);
            let tried: Vec<&String> = known.chain(all_silent.iter().map(|(address, _)| address)).collect();
            let missing = missing(&self.wholes(job), &tried);
            if missing.is_empty() {
                return Ok(all_silent);
            }
            let (more, silent) = connect_on(&self.runtime, CONNECT, &missing, access)?;
            self.servers.extend(more);
            all_silent.extend(silent);
        }
    }

    /// Drops all other servers if the job has left the `named` ones. Returns the job's servers then.
    pub(crate) fn keep_left(&mut self, job: &str, named: &[String]) -> Option<Vec<String>> {
        let there = has_left(&self.wholes(job), named)?;
        self.servers.retain(|server| named.contains(&server.address));
        Some(there)
    }

    /// Returns a function that asks all servers for their progress, and sums the results of `of`. Another thread may
    /// call the function while the caller's thread waits. The function returns None if no server reports progress.
    pub(crate) fn follow(
        &self,
        job: &str,
        of: impl Fn(&v1::DescribeResponse) -> Option<(u64, u64)> + Send + 'static,
    ) -> impl FnMut() -> Option<(u64, u64)> + Send + 'static {
        let runtime = self.handle().clone();
        let admins: Vec<_> = self.servers.iter().map(|server| server.admin.clone()).collect();
        let request = brief(job);
        move || {
            let ask = |mut admin: Admin| {
                let request = request.clone();
                async move { tokio::time::timeout(PROMPTLY, admin.describe(request)).await.ok()?.ok() }
            };
            let answers = runtime.block_on(join_all(admins.iter().cloned().map(ask)));
            let said = answers.iter().flatten().filter_map(|answer| of(answer.get_ref()));
            said.reduce(|(done, all), (more, of)| (done + more, all + of))
        }
    }

    /// Returns the named job, or the only job there is.
    pub(crate) fn job(&self, named: Option<&String>) -> anyhow::Result<String> {
        if let Some(name) = named {
            return Ok(name.clone());
        }
        let jobs = self.jobs()?;
        match jobs.as_slice() {
            [job] => Ok(job.clone()),
            [] => anyhow::bail!(
                "no job on these servers: start one with `longshore train --servers ...`, or name the job of a checkpoint with --job"
            ),
            several => {
                anyhow::bail!("several jobs on these servers, name one with --job: {}", several.join(", "))
            }
        }
    }

    pub(crate) fn check_job(&self, name: &str) -> anyhow::Result<()> {
        let jobs = self.jobs()?;
        anyhow::ensure!(jobs.iter().any(|job| job == name), "{}", no_such_job(name, &jobs));
        Ok(())
    }

    pub(crate) fn has_job(&self, name: &str) -> anyhow::Result<bool> {
        Ok(self.jobs()?.iter().any(|job| job == name))
    }

    fn jobs(&self) -> anyhow::Result<Vec<String>> {
        let lists =
            self.each_promptly(async |mut admin| admin.list_jobs(v1::ListJobsRequest::default()).await)?;
        Ok(jobs_of(&lists))
    }
}

/// Connects to the servers that can be reached, in the given order. Connections live as long as the runtime.
fn connect_on(
    runtime: &Runtime,
    patience: Duration,
    addresses: &[String],
    access: &Access,
) -> anyhow::Result<(Vec<Server>, Silent)> {
    let credentials = access.credentials().map_err(wrong_use)?;
    let checked = addresses.iter().map(|address| Address::new(address, credentials.as_ref()));
    let checked = checked.collect::<Result<Vec<Address>, Fault>>().map_err(wrong_use)?;
    let connect = |address: &Address| {
        let address = address.clone();
        async move { tokio::time::timeout(patience, address.connect()).await }
    };
    let channels = runtime.block_on(join_all(checked.iter().map(connect)));
    let (mut servers, mut silent) = (Vec::new(), Vec::new());
    for (address, channel) in addresses.iter().cloned().zip(channels) {
        let why = match channel {
            Ok(Ok(channel)) => {
                let admin = AdminClient::new(channel).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES);
                servers.push(Server { address, admin });
                continue;
            }
            Ok(Err(error)) => match untrusted(&error) {
                Some(fault) => {
                    silent.push((address, format!("is not connected to: {fault}")));
                    continue;
                }
                None => with_sources(&error),
            },
            Err(_) => "no answer".to_string(),
        };
        silent.push((
            address,
            format!("cannot be reached ({why}): check that longshored runs there, and --servers"),
        ));
    }
    Ok((servers, silent))
}

/// Returns whether a server refused a call because it does not hold the job.
pub(crate) fn is_not_there(fault: &Fault) -> bool {
    (fault.kind, fault.field.as_str()) == (FaultKind::NotFound, "job")
}

/// Leaves out the answers of servers that were opened for a move which no decision has begun. Such a server loads, by a
/// placement newer than any other server's.
fn begun<'a>(
    answers: impl Iterator<Item = &'a v1::DescribeResponse> + Clone,
) -> impl Iterator<Item = &'a v1::DescribeResponse> + Clone {
    let epoch = |answer: &v1::DescribeResponse| answer.placement.as_ref().map_or(0, |of| of.epoch);
    let loads = |answer: &v1::DescribeResponse| {
        answer.progress.as_ref().is_some_and(|progress| progress.phase() == v1::Phase::Loading)
    };
    let newest = answers.clone().filter(|answer| !loads(answer)).map(epoch).max();
    answers.filter(move |answer| !loads(answer) || newest.is_none_or(|newest| epoch(answer) <= newest))
}

fn newest<'a>(answers: impl Iterator<Item = &'a v1::DescribeResponse> + Clone) -> Option<&'a v1::Placement> {
    begun(answers).filter_map(|answer| answer.placement.as_ref()).max_by_key(|of| of.epoch)
}

/// Returns the members of the newest placement that have not answered and were not `tried`. Members are identified by
/// their numbers, since an address here may differ from the address that ranks dial.
fn missing(found: &Answers<v1::DescribeResponse>, tried: &[&String]) -> Vec<String> {
    let answers = found.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let has_answered = |server| begun(answers.clone()).any(|answer| answer.server == server);
    let members = newest(answers.clone()).into_iter().flat_map(|of| (0..).zip(&of.servers));
    let missing = members.filter(|(server, address)| !address.is_empty() && !has_answered(*server));
    missing.map(|(_, address)| address.clone()).filter(|address| !tried.contains(&address)).collect()
}

/// Returns the members of the newest placement, if each `named` server has an older part of the job or nothing.
fn has_left(found: &Answers<v1::DescribeResponse>, named: &[String]) -> Option<Vec<String>> {
    let members = &newest(found.iter().filter_map(|(_, answer)| answer.as_ref().ok()))?.servers;
    let is_left = |answer: &Result<v1::DescribeResponse, Fault>| match answer {
        Ok(answer) => members.get(answer.server as usize).is_none_or(String::is_empty),
        Err(fault) => is_not_there(fault),
    };
    let of_named = || found.iter().filter(|(address, _)| named.contains(address));
    let has_part = of_named().any(|(_, answer)| answer.is_ok());
    let members = members.iter().filter(|address| !address.is_empty()).cloned();
    (has_part && of_named().all(|(_, answer)| is_left(answer))).then(|| members.collect())
}

/// Returns the members of the newest placement among `answers`. None if some member has not answered.
fn members<'a>(answers: impl Iterator<Item = &'a v1::DescribeResponse> + Clone) -> Option<Vec<u32>> {
    let answers = begun(answers);
    let members = (0..).zip(&newest(answers.clone())?.servers).filter(|(_, address)| !address.is_empty());
    let members: Vec<u32> = members.map(|(server, _)| server).collect();
    let has_answered = |server: &u32| answers.clone().any(|answer| answer.server == *server);
    members.iter().all(has_answered).then_some(members)
}

/// Returns whether every member of the newest placement among `answers` has answered.
pub(crate) fn is_complete<'a>(answers: impl Iterator<Item = &'a v1::DescribeResponse> + Clone) -> bool {
    members(answers).is_some()
}

/// Returns for each answer whether its server may be a member of the job.
pub(crate) fn are_members(found: &Answers<v1::DescribeResponse>) -> Vec<bool> {
    let answers = found.iter().filter_map(|(_, answer)| answer.as_ref().ok());
    let members = members(answers.clone());
    let has_begun = |answer| begun(answers.clone()).any(|other| std::ptr::eq(other, answer));
    let is_member = |answer: &Result<v1::DescribeResponse, Fault>| match (answer, &members) {
        (Ok(answer), _) if !has_begun(answer) => false,
        (_, None) => true,
        (Ok(answer), Some(members)) => members.contains(&answer.server),
        (Err(fault), Some(_)) => !is_not_there(fault),
    };
    found.iter().map(|(_, answer)| is_member(answer)).collect()
}

pub(crate) fn jobs_of(lists: &[(String, v1::ListJobsResponse)]) -> Vec<String> {
    let mut jobs: Vec<String> = lists.iter().flat_map(|(_, list)| list.jobs.clone()).collect();
    jobs.sort();
    jobs.dedup();
    jobs
}

pub(crate) fn no_such_job(name: &str, jobs: &[String]) -> String {
    let there =
        if jobs.is_empty() { "none is there".to_string() } else { format!("there are {}", jobs.join(", ")) };
    format!("no job {name:?} on these servers: {there}")
}

/// Returns the request for a job's progress, without its layout.
pub(crate) fn brief(job: &str) -> v1::DescribeRequest {
    v1::DescribeRequest { job: job.to_string(), brief: true, ..Default::default() }
}

/// Returns the status of a process that accepts connections and calls, and answers none.
fn silence(patience: Duration) -> Status {
    let remedy = "see whether that process is stopped or its host overloaded, and its log";
    let value = format!("silent for {} s", patience.as_secs());
    wire::status(&Fault::new(FaultKind::Deadline, "server", value, "answering", remedy))
}

pub(crate) fn name_silent(silent: &Silent) -> String {
    let named: Vec<String> = silent.iter().map(|(address, why)| format!("{address} {why}")).collect();
    named.join("; ")
}

/// Returns the state of a rank, in a word or two.
pub(crate) fn standing(rank: &v1::RankStatus) -> &'static str {
    match (rank.incarnation, rank.left, rank.watches || !rank.transport.is_empty()) {
        (0, ..) => "never joined",
        (_, true, _) => "left",
        (_, false, true) => "joined",
        (_, false, false) => "not connected",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_with_an_old_placement_leads_to_the_newest_and_is_left() {
        let answer = |address: &str, server, epoch, servers: &[&str]| {
            let servers = servers.iter().map(|server| server.to_string()).collect();
            let placement = Some(v1::Placement { epoch, servers, ..Default::default() });
            (address.to_string(), Ok(v1::DescribeResponse { server, placement, ..Default::default() }))
        };
        let [a, b, c] = ["a:1", "b:1", "c:1"].map(String::from);
        let named = [a.clone()];
        let old = answer("a:1", 0, 5, &["a:1", "b:1"]);
        let mut found = vec![old.clone()];
        assert_eq!((missing(&found, &[&a]), has_left(&found, &named)), (vec![b.clone()], None));
        found.push(answer("b:1", 1, 9, &["", "b:1", "c:1"]));
        assert_eq!(missing(&found, &[&a, &b]), [&*c]);
        assert_eq!(missing(&found, &[&a, &b, &c]), Vec::<String>::new());
        assert_eq!(has_left(&found, &named), Some(vec![b.clone(), c]));
        assert_eq!(has_left(&found, &[a, b]), None);
        let gone = Fault::new(FaultKind::NotFound, "job", "j", "open", "open it");
        assert_eq!(has_left(&vec![("a:1".to_string(), Err(gone)), found.remove(1)], &named), None);
    }

    #[test]
    fn servers_that_are_no_members_are_left_out_where_all_members_answer() {
        let answer = |server, epoch, servers: &[&str]| {
            let servers = servers.iter().map(|server| server.to_string()).collect();
            let placement = Some(v1::Placement { epoch, servers, ..Default::default() });
            Ok(v1::DescribeResponse { server, placement, ..Default::default() })
        };
        let fault = |kind| Err(Fault::new(kind, "job", "j", "open", "open it"));
        let stay = |found: &[Result<v1::DescribeResponse, Fault>]| {
            are_members(&found.iter().map(|answer| (String::new(), answer.clone())).collect())
        };
        let (gone, opened) = (fault(FaultKind::NotFound), answer(1, 1, &["c:1"]));
        assert_eq!(stay(&[opened.clone(), answer(0, 1, &["c:1"]), gone.clone()]), [false, true, false]);
        // Server 0 knows the placement before its removal.
        assert_eq!(stay(&[answer(0, 1, &["c:1"]), answer(1, 2, &["", "d:1"])]), [false, true]);
        assert_eq!(stay(&[opened, gone]), [true, true], "a member is missing");
        // Rank 0 opens a new server with the placement of its plan.
        let mut planned = answer(1, 2, &["c:1", "d:1"]);
        let progress = v1::JobProgress { phase: v1::Phase::Loading.into(), ..Default::default() };
        planned.as_mut().unwrap().progress = Some(progress);
        assert_eq!(stay(&[answer(0, 1, &["c:1"]), planned]), [true, false]);
        assert_eq!(stay(&[answer(0, 1, &["c:1"]), fault(FaultKind::Unavailable)]), [true, true]);
    }
}
