//! Connects a session with its job's servers: the listed servers, and servers that the job has moved to.
//! `Cluster::connect` calls this once, before any other call.

use std::collections::BTreeMap;

use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
use longshore_proto::{Fault, Placement, Rank, ServerId};
use longshore_wire::{local, v1::MemberAddress};

use super::{
    Backoff, Cluster, Peer,
    call::recovers,
    losses::{Answer, LOOK},
    members::{Discovered, GLANCE, Members, Seen, discover, placement_of, seen},
};
use crate::{
    error::{Result, Unreachable},
    host::{self, Instant},
};

/// Listed servers that are connected, and lost servers.
#[derive(Default)]
struct Reached {
    /// The connected servers, keyed by their place in the list.
    peers: BTreeMap<ServerId, Peer>,
    /// Servers that are gone for good.
    lost: Vec<ServerId>,
}

impl Cluster {
    /// Connects with the listed servers. If the job's servers have changed since the job was opened, connects with the
    /// new servers too, and returns the members.
    pub(super) async fn connect_all(&self, servers: &[String]) -> Result<Option<Members>> {
        let (Reached { peers, mut lost }, found) = self.discover_all(servers).await?;
        let asked: Vec<Peer> = peers.values().cloned().collect();
        let has_job = match &found {
            Discovered::Unchanged { has_job } => *has_job,
            Discovered::Changed { .. } | Discovered::Unclear(_) => None,
        };
        let Discovered::Changed { placement, numbers, lost: known } = found else {
            peers.into_iter().for_each(|(server, peer)| self.add_peer(server, peer));
            if self.options.rank == Rank(0)
                && let Some(peer) = has_job
                && let Some(known) = placement_of(&asked[peer], self.job().as_str()).await
            {
                self.members.readdress(self.moved_from(&known).await);
            }
            self.give_up(&lost);
            // Losses that would leave a shard without a holder are ignored here. Such losses belong to a newer
            // placement, whose answer was lost.
            for server in self.servers() {
                self.meet(server, &self.placement().servers[server.0 as usize]).await?;
            }
            return Ok(None);
        };
        lost.extend(known);
        for (number, peer) in numbers.into_iter().zip(asked.clone()) {
            // A member that is slow to answer has not given its number. Its address gives the number.
            let of_address = || {
                let is_it = |of: &ServerId| placement.servers[of.0 as usize] == peer.address;
                placement.members().find(is_it)
            };
            match number.or_else(of_address) {
                Some(server) => self.add_peer(server, peer),
                None => {
                    let (job, on) = (self.job(), placement.addresses().collect::<Vec<_>>().join(","));
                    let named = &peer.address;
                    tracing::warn!(
                        "job {job} is on {on}, and not on {named}: `longshore scale --servers {on} --job={job} --add {named}` takes it \
                         there while it trains"
                    );
                }
            }
        }
        if self.spec().replicas > 1 {
            // A member that is not listed was not dialled yet, and may be lost too.
            let members: Vec<ServerId> = placement.members().collect();
            let address = |&server: &ServerId| match self.peers.get(server) {
                Some(peer) => peer.address.clone(),
                None => placement.servers[server.0 as usize].clone(),
            };
            let addresses: Vec<String> = members.iter().map(address).collect();
            let met = self.reach(&addresses, Instant::now(), &asked).await?;
            met.peers.into_iter().for_each(|(at, peer)| self.add_peer(members[at.0 as usize], peer));
            lost.extend(met.lost);
        }
        let (mut gone, mut connected): (Vec<ServerId>, Vec<ServerId>) =
            placement.members().partition(|server| lost.contains(server));
        if placement.last_of(&gone).is_some() {
            connected.append(&mut gone);
            connected.sort_unstable();
        }
        for &server in &connected {
            self.meet(server, &placement.servers[server.0 as usize]).await?;
        }
        let moved = self.moved_from(&placement).await;
        let members = Members::new(placement, connected);
        members.readdress(moved);
        members.give_up(&lost);
        Ok(Some(members))
    }

    /// Connects with the listed servers, and asks for the newest placement until the answers settle it.
    async fn discover_all(&self, servers: &[String]) -> Result<(Reached, Discovered)> {
        let (start, mut backoff) = (Instant::now(), Backoff::new());
        let end = start + self.options.deadline;
        let has_replicas = self.spec().replicas > 1;
        loop {
            let reached = self.reach(servers, start, &[]).await?;
            let asked: Vec<Peer> = reached.peers.values().cloned().collect();
            // In a job with replicas `reach` keeps only servers that have just answered, so no silent server is
            // awaited.
            let silent = if has_replicas { Instant::now() } else { end };
            match discover(self.job().as_str(), &asked, (silent, start + self.options.slow_deadline)).await {
                Discovered::Unclear(_) if has_replicas && backoff.pause(end).await => {}
                Discovered::Unclear(silent) => {
                    let (server, cause) = (asked[silent].address.clone(), "no answer to Describe".into());
                    return Err(Unreachable { server, tried: start.elapsed(), cause }.into());
                }
                found => return Ok((reached, found)),
            }
        }
    }

    /// Connects with `servers` until the deadline. A silent server is left out once the other servers tell that the job
    /// has left it. Peers in `known` are connected already.
    async fn reach(&self, servers: &[String], start: Instant, known: &[Peer]) -> Result<Reached> {
        let time = (start, start + self.options.deadline);
        let dial = |(server, address): (ServerId, &'_ String)| {
            let address = address.clone();
            let known = known.iter().find(|peer| peer.address == address).cloned();
            async move {
                let found = match known {
                    Some(peer) => Ok(peer),
                    None => self.find(&address, time).await,
                };
                (server, found)
            }
        };
        let mut dials: FuturesUnordered<_> = (0..).map(ServerId).zip(servers).map(dial).collect();
        let mut reached = Reached::default();
        loop {
            match host::timeout(LOOK, dials.next()).await {
                Ok(Some((server, peer))) => drop(reached.peers.insert(server, peer?)),
                Ok(None) => return Ok(reached),
                Err(_) if self.goes_without(servers, &mut reached, start).await => return Ok(reached),
                Err(_) => {}
            }
        }
    }

    /// Servers that rank 0 has reached at another address than the placement's, where the server no longer answers.
    /// Empty on other ranks.
    async fn moved_from(&self, placement: &Placement) -> Vec<MemberAddress> {
        let moved = async |server: ServerId| {
            let (known, peer) = (&placement.servers[server.0 as usize], self.peers.get(server)?);
            if *known == peer.address || self.options.rank != Rank(0) {
                return None;
            }
            let is_there = self.is_held_at(server, known).await;
            (!is_there).then(|| MemberAddress { server: server.0, address: peer.address.clone() })
        };
        join_all(placement.members().map(moved)).await.into_iter().flatten().collect()
    }

    /// Returns true if the server at `address` answers and has the job, as `server`.
    pub(crate) async fn is_held_at(&self, server: ServerId, address: &str) -> bool {
        let soon = (Instant::now(), Instant::now() + GLANCE);
        let Ok(peer) = self.dial(address, soon).await else { return false };
        let answer = seen(&peer, self.job().as_str()).await;
        answer.is_ok_and(|seen| seen.is_some_and(|seen| seen.server == server))
    }

    /// Connects with a server. In a job with replicas the server must answer too, since its process may be stopped.
    async fn find(&self, address: &str, time: (Instant, Instant)) -> Result<Peer> {
        let peer = self.dial(address, time).await?;
        let mut backoff = Backoff::new();
        while self.spec().replicas > 1 {
            match seen(&peer, self.job().as_str()).await {
                Err(fault) if !recovers(&fault) && backoff.pause(time.1).await => {}
                _ => break,
            }
        }
        Ok(peer)
    }

    /// Returns true if the job needs none of the servers that are not reached yet. Rank 0 gives up servers that are
    /// silent for long.
    async fn goes_without(&self, servers: &[String], reached: &mut Reached, start: Instant) -> bool {
        let job = self.job().as_str();
        let mut peers: Vec<Peer> = reached.peers.values().cloned().collect();
        let mut seen = seen_by(&peers, job).await;
        let known =
            || peers.iter().zip(&seen).filter_map(|(peer, seen)| Some((peer, seen.as_ref().ok()?.as_ref()?)));
        let farthest = known().max_by_key(|(_, seen)| seen.progress());
        // Losses are named by the server's number in the job. This rank's list may have another order.
        let placement = match farthest {
            Some((peer, _)) => placement_of(peer, job).await,
            None => Some(Placement::clone(&self.placement())),
        };
        let Some(placement) = placement else { return false };
        reached.lost = known().flat_map(|(_, seen)| seen.lost.clone()).collect();
        let is_reached = |address: &str| peers.iter().any(|peer| peer.address == address);
        let mut awaited = placement.members().filter(|server| !reached.lost.contains(server));
        let is_awaited = |address: &str| is_listed(servers, address) && !is_reached(address);
        if !awaited.any(|server| is_awaited(&placement.servers[server.0 as usize])) {
            return true;
        }
        if self.options.rank == Rank(0) && start.elapsed() >= self.silence() {
            // Servers that the job was moved to need not be listed.
            let soon = (Instant::now(), Instant::now() + GLANCE);
            let unlisted = placement.addresses().filter(|address| !is_listed(servers, address));
            let met = join_all(unlisted.map(|address| self.dial(address, soon))).await;
            let met: Vec<Peer> = met.into_iter().flatten().collect();
            seen.extend(seen_by(&met, job).await);
            peers.extend(met);
            let answer = |address: &str| match peers.iter().position(|peer| peer.address == address) {
                Some(at) => Answer::of(&seen[at]),
                None if is_listed(servers, address) || start.elapsed() >= 2 * self.silence() => {
                    Answer::SilentForLong
                }
                None => Answer::Silent,
            };
            let address = |server: ServerId| placement.servers[server.0 as usize].clone();
            let members: BTreeMap<ServerId, String> =
                placement.members().map(|server| (server, address(server))).collect();
            // As in `Losses::look`, a server that is given up has no vote, and counts as a member.
            let asked = members.iter().filter(|(server, _)| !reached.lost.contains(server));
            let answers: Vec<_> = asked.map(|(&server, address)| (server, answer(address))).collect();
            let known = |address: &str| peers.iter().find(|peer| peer.address == address).cloned();
            let peers: BTreeMap<ServerId, Peer> =
                members.iter().filter_map(|(&server, address)| Some((server, known(address)?))).collect();
            reached.lost.extend(self.say_lost(&answers, &members, &peers).await);
        }
        false
    }

    /// Connects with a server, retrying until the end of `time`.
    pub(crate) async fn dial(&self, address: &str, time: (Instant, Instant)) -> Result<Peer> {
        let connections = self.options.connections;
        // Calls to an embedded server run on the threads of this session's runtime. A runtime of the caller may have no
        // thread to spare.
        let may_be_here = self.options.transport.may_share() && self.pace.is_none() && self.runtime.is_own();
        if let Some(channel) = local::channel(address).filter(|_| may_be_here) {
            return Ok(Peer::without_sockets(address, connections, &channel));
        }
        Peer::connect(address, self.credentials.as_ref(), connections, self.pace.as_ref(), time).await
    }
}

fn is_listed(servers: &[String], address: &str) -> bool {
    servers.iter().any(|listed| listed == address)
}

async fn seen_by(peers: &[Peer], job: &str) -> Vec<Result<Option<Seen>, Fault>> {
    join_all(peers.iter().map(|peer| seen(peer, job))).await
}
