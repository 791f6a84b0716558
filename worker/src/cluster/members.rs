//! The job's servers as this rank knows them: placement, connected servers and losses. Decisions change them during
//! the session. Also asks servers for a newer placement.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use futures_util::future::{join, join_all};
use longshore_proto::{
    Epoch, Fault, FaultKind, NO_SERVER, Placement, PlacementChange, Rank, ServerId, ShardId, Step, TierKind,
    Version,
};
use longshore_wire::{
    Wire, fault_from_status,
    v1::{DescribeRequest, DescribeResponse, MemberAddress, Phase},
};
use tokio::sync::Notify;
use tonic::{Code, Status};

use super::{Backoff, ByServer, Cluster, Peer, call::recovers, peer::whole};
use crate::{
    error::{Outdated, Result},
    host::{self, Instant},
};

/// The longest wait for a server's answer about the placement.
pub(super) const GLANCE: Duration = Duration::from_secs(2);

/// Placement of the newest decision that this rank knows, and the connected servers.
pub(super) struct Members {
    state: RwLock<State>,
    changed: Notify,
}

struct State {
    placement: Arc<Placement>,
    connected: Vec<ServerId>,
    /// Servers that are given up. A decision of rank 0 removes them from the placement later.
    lost: BTreeSet<ServerId>,
    /// Servers that answered that they lack the job.
    forgetful: BTreeSet<ServerId>,
    /// True if a server that rank 0 has given up runs again, without the job.
    is_back: bool,
    /// Servers that rank 0 reaches at another address than the placement's.
    moved: Vec<MemberAddress>,
    /// Tier of each server's part of the job, as the server's last answer named it.
    tiers: BTreeMap<ServerId, TierKind>,
}

impl State {
    /// The placement's servers, and joined servers that a coming decision adds.
    fn members(&self) -> impl Iterator<Item = ServerId> {
        let added = |server: &&ServerId| server.0 as usize >= self.placement.servers.len();
        self.placement.members().chain(self.connected.iter().filter(added).copied())
    }

    fn has_left(&self, server: ServerId) -> bool {
        let address = self.placement.servers.get(server.0 as usize);
        address.is_some_and(String::is_empty) || self.lost.contains(&server)
    }
}

impl Members {
    pub(super) fn new(placement: Placement, connected: Vec<ServerId>) -> Members {
        let (lost, forgetful, is_back, moved, tiers) = Default::default();
        let state =
            State { placement: Arc::new(placement), connected, lost, forgetful, is_back, moved, tiers };
        Members { state: RwLock::new(state), changed: Notify::new() }
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let changed = change(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_waiters();
        changed
    }

    /// Notes servers that answer at another address than the placement's.
    pub(super) fn readdress(&self, moved: Vec<MemberAddress>) {
        self.change(|state| {
            let servers = &mut Arc::make_mut(&mut state.placement).servers;
            for MemberAddress { server, address } in &moved {
                servers.get_mut(*server as usize).into_iter().for_each(|known| known.clone_from(address));
            }
            state.moved = moved;
        });
    }

    pub(super) fn give_up(&self, named: &[ServerId]) {
        self.change(|state| {
            let lost: Vec<ServerId> = state.members().filter(|member| named.contains(member)).collect();
            if state.placement.last_of(&lost).is_none() {
                state.connected.retain(|server| !lost.contains(server));
                state.lost.extend(lost);
            }
        });
    }

    fn read<T>(&self, read: impl FnOnce(&State) -> T) -> T {
        read(&self.state.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Cluster {
    pub(crate) fn placement(&self) -> Arc<Placement> {
        self.members.read(|state| Arc::clone(&state.placement))
    }

    /// The job's servers with their addresses, also joined servers that a coming decision adds.
    pub(super) fn members(&self) -> BTreeMap<ServerId, String> {
        self.members.read(|state| {
            let known = |server: ServerId| state.placement.servers.get(server.0 as usize);
            let address = |server| known(server).map_or_else(|| self.address(server).into(), String::clone);
            state.members().map(|server| (server, address(server))).collect()
        })
    }

    /// The connected servers of the job, in the order of their numbers.
    pub(crate) fn servers(&self) -> std::vec::IntoIter<ServerId> {
        self.members.read(|state| state.connected.clone()).into_iter()
    }

    /// Notes the tier that a server's answer names. Servers of an earlier release name none.
    pub(crate) fn keeps(&self, server: ServerId, tier: i32) {
        let Some(tier) = TierKind::from_number(tier) else { return };
        if self.members.read(|state| state.tiers.get(&server) == Some(&tier)) {
            return;
        }
        self.members.change(|state| state.tiers.insert(server, tier));
        if tier != self.spec().tier {
            let server = self.peers.get(server).map(|peer| &*peer.address);
            tracing::info!(job = %self.job(), server, "keeps the job in tier {tier}");
        }
    }

    /// Tier of a server's part of the job. If a server has not named its tier, the longest-lasting tier of the others
    /// counts, or else the spec's. A shorter-lived tier would count surviving state as lost.
    pub(crate) fn tier(&self, server: ServerId) -> TierKind {
        let known = self.members.read(|state| {
            let of = state.tiers.get(&server).or_else(|| state.tiers.values().max());
            of.copied()
        });
        known.unwrap_or(self.spec().tier)
    }

    /// Returns true if some server makes versions durable only after their decision. A crash of such a server can take
    /// the newest version back.
    pub(crate) fn has_durable_later(&self) -> bool {
        self.servers().any(|server| self.tier(server).properties().durable_later)
    }

    /// The first connected server. Its order of events counts on all ranks.
    pub(crate) fn first(&self) -> ServerId {
        self.members.read(|state| state.connected.first().copied().unwrap_or_default())
    }

    /// Server from which ranks pull a shard after a step: the owner, unless the owner is lost.
    pub(crate) fn owner_at(&self, shard: ShardId, step: Step) -> ServerId {
        self.source_at(shard, step, 0)
    }

    /// Server to ask for a shard's version after `step`, once `failures` attempts have failed. Each failure turns to
    /// the next living holder.
    pub(crate) fn source_at(&self, shard: ShardId, step: Step, failures: usize) -> ServerId {
        self.members.read(|state| {
            let mut sources = state.placement.sources_at(shard, step);
            sources.retain(|server| !state.lost.contains(server));
            let count = sources.len().max(1);
            sources.get(failures % count).copied().unwrap_or(state.placement.owner_at(shard, step))
        })
    }

    /// The living servers that take a shard's gradients of a step, and make the step's version.
    pub(crate) fn holders_at(&self, shard: ShardId, step: Step) -> impl Iterator<Item = ServerId> + use<> {
        self.members.read(|state| {
            let holders = state.placement.holders_at(shard, step);
            let living = holders.filter(|server| !state.lost.contains(server));
            living.collect::<Vec<_>>().into_iter()
        })
    }

    /// The shards that a server owns at a step.
    pub(crate) fn owned_at(&self, server: ServerId, step: Step) -> Vec<ShardId> {
        let shards = (0..self.layout.shards()).map(ShardId);
        shards.filter(|&shard| self.owner_at(shard, step) == server).collect()
    }

    /// The shards that a server owns or replicates at a step.
    pub(crate) fn held_at(&self, server: ServerId, step: Step) -> Vec<ShardId> {
        let placement = self.placement();
        let shards = (0..self.layout.shards()).map(ShardId);
        shards.filter(|&shard| placement.holders_at(shard, step).any(|holder| holder == server)).collect()
    }

    /// Gives servers up: no call waits for them any more. Does nothing if a shard would lose its last holder.
    pub(crate) fn give_up(&self, lost: &[ServerId]) {
        self.members.give_up(lost);
    }

    /// Asks every server for losses, and returns the answers. All are asked, since a server that was given up may not
    /// know of it.
    pub(crate) async fn hear_of_losses(&self) -> ByServer<Result<DescribeResponse>> {
        let answers = self.on_each(|server| self.glance(server)).await;
        let scaling = answers.values().flatten().filter_map(|answer| answer.scaling.as_ref());
        let lost = scaling.flat_map(|scaling| scaling.lost.iter().copied().map(ServerId));
        self.give_up(&lost.collect::<Vec<_>>());
        if self.options.rank != Rank(0) {
            self.hear_of_decided_losses(&answers).await;
        }
        answers
    }

    /// Gives up the servers that the newest placement lacks. Servers report a loss only until its decision, and this
    /// rank may await the decision from the lost server itself.
    async fn hear_of_decided_losses(&self, answers: &ByServer<Result<DescribeResponse>>) {
        let epoch = |answer: &DescribeResponse| answer.scaling.as_ref().map_or(0, |scaling| scaling.epoch);
        let known =
            answers.iter().filter_map(|(server, answer)| Some((server, epoch(answer.as_ref().ok()?))));
        let newest = known.max_by_key(|(_, epoch)| *epoch);
        let placement = self.placement();
        let Some((server, _)) = newest.filter(|(_, epoch)| *epoch > placement.epoch.0) else { return };
        let asked = host::timeout(GLANCE, placement_of(&self.peers[server], self.job().as_str())).await;
        let Ok(Some(newest)) = asked else { return };
        let has_gone = |server: &ServerId| newest.members().all(|member| member != *server);
        self.give_up(&placement.members().filter(has_gone).collect::<Vec<_>>());
    }

    /// Notes that a server lacks the job. Returns true if other servers hold all of its shards.
    pub(super) fn is_made_up_for(&self, server: ServerId) -> bool {
        self.members.change(|state| {
            state.forgetful.insert(server);
            let gone: Vec<ServerId> = state.lost.union(&state.forgetful).copied().collect();
            let is_member = state.placement.members().any(|member| member == server);
            is_member && state.placement.last_of(&gone).is_none()
        })
    }

    /// Notes that a server that rank 0 has given up runs again, without the job.
    pub(super) fn came_back(&self) {
        self.members.change(|state| state.is_back = true);
    }

    /// Returns true once after a server came back. A plan may then add the server again.
    pub(crate) fn takes_back(&self) -> bool {
        self.members.read(|state| state.is_back)
            && self.members.change(|state| std::mem::take(&mut state.is_back))
    }

    /// Servers that are given up, and still in the placement.
    pub(crate) fn given_up(&self) -> Vec<ServerId> {
        self.members
            .read(|state| state.placement.members().filter(|server| state.lost.contains(server)).collect())
    }

    /// Given-up servers that this session had connected with.
    pub(crate) fn lost(&self) -> Vec<ServerId> {
        let lost = self.members.read(|state| state.lost.clone());
        lost.into_iter().filter(|&server| self.peers.get(server).is_some()).collect()
    }

    /// Applies a change of the placement that was decided with `step`. Removed and lost servers count as
    /// disconnected.
    pub(crate) fn change_placement(&self, change: &PlacementChange, step: Step) {
        let max_delay = self.spec().max_delay;
        self.members.change(|state| {
            Arc::make_mut(&mut state.placement).apply(change, step, max_delay);
            state
                .connected
                .retain(|server| !change.removed.contains(server) && !change.lost.contains(server));
        });
    }

    /// Notes that a server is connected and joined, unless it has left the job or was given up meanwhile.
    pub(crate) fn add_member(&self, server: ServerId) {
        self.members.change(|state| {
            if !state.has_left(server)
                && let Err(at) = state.connected.binary_search(&server)
            {
                state.connected.insert(at, server);
            }
        });
    }

    /// Returns true if a server has left the job, or is given up.
    pub(crate) fn has_left(&self, server: ServerId) -> bool {
        self.members.read(|state| state.has_left(server))
    }

    /// Servers that answer at another address than the placement's.
    pub(crate) fn moved(&self) -> Vec<MemberAddress> {
        self.members.read(|state| state.moved.clone())
    }

    /// Waits until a server has left the job, or is given up.
    pub(crate) async fn left(&self, server: ServerId) {
        loop {
            let changed = self.members.changed.notified();
            if self.has_left(server) {
                return;
            }
            changed.await;
        }
    }

    /// Waits until this rank is connected with the new owners of a change.
    pub(crate) async fn reach_owners(&self, change: &PlacementChange) {
        loop {
            let changed = self.members.changed.notified();
            let reached = self.members.read(|state| {
                let moves = change.moves.iter().chain(&change.replicas);
                let mut to = moves.map(|(_, to)| to).filter(|to| **to != NO_SERVER);
                to.all(|to| state.connected.binary_search(to).is_ok() || state.lost.contains(to))
            });
            if reached {
                return;
            }
            changed.await;
        }
    }

    /// Connects with a server that joins the job.
    pub(crate) async fn meet(&self, server: ServerId, address: &str) -> Result<()> {
        if self.peers.get(server).is_none() {
            let start = Instant::now();
            let peer = self.dial(address, (start, start + self.options.deadline)).await?;
            self.peers.get_or_make(server, || peer);
        }
        Ok(())
    }

    /// Notes the connections with a server that joins the job.
    pub(crate) fn add_peer(&self, server: ServerId, peer: Peer) {
        self.peers.get_or_make(server, || peer);
    }

    /// Asks the first server for the newest placement. Since this rank began to join, a decision may have changed the
    /// placement, or a step back restored an older one. A caller with lanes joins new servers before it sets the
    /// returned placement. Lanes send gradients to its owners at once.
    pub(crate) async fn newest_placement(&self) -> Option<Placement> {
        let peer = [self.peers[self.first()].clone()];
        let (job, ends) = (self.job().as_str(), self.patience());
        if self.placement().epoch <= Epoch(1) {
            return discover(job, &peer, ends).await.changed();
        }
        let mut backoff = Backoff::new();
        loop {
            let found = placement_of(&peer[0], job).await;
            if found.is_some() || !backoff.pause(ends.0).await {
                return found;
            }
        }
    }

    /// The placement as a server has it.
    pub(crate) async fn placement_on(&self, server: ServerId) -> Result<Placement> {
        let request = DescribeRequest { job: self.job().to_string(), ..Default::default() };
        let answer = self.call(server, "Describe", None, self.options.deadline, |peer| {
            let request = request.clone();
            async move { whole(peer.admin(), request).await }
        });
        Ok(Placement::from_wire(answer.await?.placement)?)
    }

    /// Ends of two waits that begin now: for a silent server, and for a server that recovers the job.
    fn patience(&self) -> (Instant, Instant) {
        let now = Instant::now();
        (now + self.options.deadline, now + self.options.slow_deadline)
    }

    /// Takes the placement of the server with the most progress, and connects with its new servers. Returns false if no
    /// server is new. The caller has opened no lanes yet.
    pub(crate) async fn meet_members(&self) -> Result<bool> {
        let peers: Vec<Peer> = self.servers().map(|server| self.peers[server].clone()).collect();
        match discover(self.job().as_str(), &peers, self.patience()).await.changed() {
            Some(placement) => self.meet_new(placement).await,
            None => Ok(false),
        }
    }

    /// Takes a placement, and connects with its new servers, as [`Cluster::meet_members`] does.
    pub(crate) async fn meet_new(&self, placement: Placement) -> Result<bool> {
        let new = self.not_joined(&placement);
        // The placement comes first: only its members can be given up.
        self.set_placement(placement);
        for (server, address) in &new {
            if self.unless_lost(*server, self.meet(*server, address)).await?.is_some() {
                self.add_member(*server);
            }
        }
        Ok(!new.is_empty())
    }

    /// Returns `Outdated` if the job's servers have changed since this rank connected. `server` is a server that has
    /// refused a call. Former servers are asked as well, since the job may be on them again.
    pub(crate) async fn check_not_moved(&self, server: &str) -> Result<()> {
        let (placement, job) = (self.placement(), self.job());
        let members: Vec<&Peer> = self.servers().map(|server| &self.peers[server]).collect();
        let is_member = |address: &str| members.iter().any(|member| member.address == address);
        let left = placement.addresses().filter(|address| !is_member(address)).map(async |address| {
            let soon = (Instant::now(), Instant::now() + GLANCE);
            changed_placement(&self.dial(address, soon).await.ok()?, job.as_str()).await
        });
        let asked = members.iter().map(|member| changed_placement(member, job.as_str()));
        let (asked, left) = join(join_all(asked), join_all(left)).await;
        let newest = asked.into_iter().chain(left).flatten().map(|placement| placement.epoch).max();
        let Some(theirs) = newest.filter(|&theirs| theirs > placement.epoch) else { return Ok(()) };
        let remedy = "connect again: the other servers say where the job is now";
        let fault = Fault::new(FaultKind::Conflict, "placement.epoch", placement.epoch, theirs, remedy);
        Err(Outdated { server: server.into(), job: job.clone(), fault }.into())
    }

    /// The servers of a placement that this rank has not joined, with their addresses.
    pub(crate) fn not_joined(&self, placement: &Placement) -> Vec<(ServerId, String)> {
        let new = self.members.read(|state| {
            let is_new = |server: &ServerId| !state.connected.contains(server);
            placement
                .members()
                .filter(is_new)
                .filter(|server| !state.lost.contains(server))
                .collect::<Vec<_>>()
        });
        new.into_iter().map(|server| (server, placement.servers[server.0 as usize].clone())).collect()
    }

    pub(crate) fn set_placement(&self, placement: Placement) {
        let members: Vec<ServerId> = placement.members().collect();
        self.members.change(|state| {
            state.connected.retain(|server| members.contains(server));
            state.placement = Arc::new(placement);
        });
    }
}

/// Placement of a job by its servers' answers.
pub(super) enum Discovered {
    Changed {
        /// The placement of the server with the most progress.
        placement: Placement,
        /// Number of each peer in the placement. None for a peer that is no member.
        numbers: Vec<Option<ServerId>>,
        /// Servers that are given up.
        lost: Vec<ServerId>,
    },
    /// All servers know the first placement only. `has_job` is the index of a peer with the job.
    Unchanged { has_job: Option<usize> },
    /// The peer of this index has not answered, so the placement may have changed.
    Unclear(usize),
}

impl Discovered {
    fn changed(self) -> Option<Placement> {
        match self {
            Discovered::Changed { placement, .. } => Some(placement),
            Discovered::Unchanged { .. } | Discovered::Unclear(_) => None,
        }
    }
}

/// Asks peers whether the job's servers have changed. Unless some peer tells of a change, silent peers are awaited
/// until `end`, recovering peers until `recovered`.
pub(super) async fn discover(job: &str, peers: &[Peer], (end, recovered): (Instant, Instant)) -> Discovered {
    let mut backoff = Backoff::new();
    loop {
        let answers = join_all(peers.iter().map(|peer| seen(peer, job))).await;
        // A wish alone is no change of the placement.
        let is_change = |seen: &Seen| seen.epoch > Epoch(1) || !seen.lost.is_empty();
        let is_known = answers.iter().flatten().flatten().any(|seen| is_change(seen) && !seen.is_loading);
        let end =
            if answers.iter().any(|answer| answer.as_ref().is_err_and(recovers)) { recovered } else { end };
        let mut missing = answers.iter().position(Result::is_err).unwrap_or_default();
        if is_known || answers.iter().all(Result::is_ok) {
            let answers: Vec<_> = answers.into_iter().map(|answer| answer.ok().flatten()).collect();
            let lost: Vec<ServerId> = answers.iter().flatten().flat_map(|seen| seen.lost.clone()).collect();
            let farthest = (0..peers.len())
                .filter(|&at| answers[at].is_some())
                .max_by_key(|&at| answers[at].as_ref().map(Seen::progress));
            let is_changed = |at: &usize| answers[*at].as_ref().is_some_and(|seen| seen.changed);
            let unchanged = Discovered::Unchanged { has_job: farthest };
            let Some(farthest) = farthest.filter(is_changed) else { return unchanged };
            if let Some(placement) = placement_of(&peers[farthest], job).await {
                if placement.epoch == Epoch(1) && lost.is_empty() {
                    return unchanged;
                }
                let is_member = |server: &ServerId| placement.members().any(|member| member == *server);
                let number = |seen: Option<Seen>| seen.map(|seen| seen.server).filter(is_member);
                let numbers = answers.into_iter().map(number).collect();
                return Discovered::Changed { placement, numbers, lost };
            }
            missing = farthest;
        }
        if !backoff.pause(end).await {
            return Discovered::Unclear(missing);
        }
    }
}

/// A server's answer about a job.
pub(super) struct Seen {
    pub(super) version: Version,
    pub(super) server: ServerId,
    /// The placement's epoch; 0 if `changed` is false.
    pub(super) epoch: Epoch,
    pub(super) changed: bool,
    /// The server waits for weights.
    pub(super) is_loading: bool,
    /// Servers that are given up.
    pub(super) lost: Vec<ServerId>,
}

impl Seen {
    /// Sort key of servers by progress. The phase precedes the epoch. A server prepared for a move already has the
    /// placement after the move, and waits for weights.
    pub(super) fn progress(&self) -> (Version, bool, Epoch, bool) {
        (self.version, !self.is_loading, self.epoch, self.changed)
    }
}

/// Asks a server about a job. Returns None if the server does not have the job.
pub(super) async fn seen(peer: &Peer, job: &str) -> std::result::Result<Option<Seen>, Fault> {
    let request = DescribeRequest { job: job.into(), brief: true, ..Default::default() };
    let asked = host::timeout(GLANCE, async { peer.admin().describe(request).await }).await;
    match asked.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer"))) {
        Ok(answer) => {
            let answer = answer.into_inner();
            let progress = answer.progress.unwrap_or_default();
            let (version, is_loading) = (Version(progress.version), progress.phase() == Phase::Loading);
            let (server, changed) = (ServerId(answer.server), answer.scaling.is_some());
            let scaling = answer.scaling.unwrap_or_default();
            let (epoch, lost) = (Epoch(scaling.epoch), scaling.lost.into_iter().map(ServerId).collect());
            Ok(Some(Seen { version, server, epoch, changed, is_loading, lost }))
        }
        Err(status) if matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded) => {
            Err(fault_from_status(&status, &peer.address))
        }
        Err(_) => Ok(None),
    }
}

async fn changed_placement(peer: &Peer, job: &str) -> Option<Placement> {
    seen(peer, job).await.ok()?.filter(|seen| seen.changed)?;
    placement_of(peer, job).await.filter(|placement| placement.epoch > Epoch(1))
}

pub(super) async fn placement_of(peer: &Peer, job: &str) -> Option<Placement> {
    let request = DescribeRequest { job: job.into(), ..Default::default() };
    let answer = whole(peer.admin(), request).await.ok()?.into_inner();
    Placement::from_wire(answer.placement).ok()
}
