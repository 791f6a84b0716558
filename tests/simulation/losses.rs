//! Servers that are lost for good, in jobs with replicas. An operator gives each lost server up, or rank 0 does.

use std::{
    collections::BTreeSet,
    slice,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use longshore_engine::step::Wanted;
use longshore_proto::{Epoch, ServerId, Version};

use crate::{
    Cluster, LONGEST, Process,
    host::{OUTSIDE, lock},
    server::{Disk, Server},
};

/// Time after an operator's command, within which each rank has heard of the loss or has ended.
const HEARD: Duration = Duration::from_secs(60);

impl Cluster {
    pub(crate) fn has_replicas(&self) -> bool {
        self.oracle.spec.replicas > 1
    }

    /// Returns the servers that are not lost, with their numbers.
    pub(crate) fn living(&self) -> impl Iterator<Item = (usize, Arc<Server>)> {
        let (servers, lost) = (lock(&self.servers).clone(), lock(&self.lost).clone());
        servers.into_iter().enumerate().filter(move |(server, _)| !lost.contains(server))
    }

    /// Returns the servers that a rank is started with. Most ranks get the job's present servers. Some get its first
    /// ones, if all of those answer and one still has the job.
    pub(crate) fn listed(&self) -> Vec<String> {
        let first = &self.oracle.placement.servers;
        let servers = lock(&self.servers).clone();
        let answer = servers.iter().take(first.len()).all(|of| !self.sim.is_dead(of.process));
        let members = self.members();
        let has_job = first.iter().any(|of| members.contains(of));
        if self.has_replicas() && answer && has_job && self.sim.one_in(4) { first.clone() } else { members }
    }

    /// Returns true if the job has exactly the servers of the newest wish, and each shard has two holders. With a
    /// `version`, both holders must have that version.
    pub(crate) fn is_whole(&self, version: Option<Version>) -> bool {
        let placements = || self.living().filter_map(|(_, server)| server.placement());
        let Some((_, newest)) = placements().max_by_key(|(version, of)| (*version, of.epoch)) else {
            return false;
        };
        let members: Vec<String> = newest.addresses().map(str::to_string).collect();
        let is_lost = lock(&self.lost).iter().any(|&lost| members.contains(&self.addresses[lost]));
        let mut of = self.living().filter(|(server, _)| members.contains(&self.addresses[*server]));
        let has_all = of.all(|(_, server)| server.has_all(version, newest.epoch));
        let wishes = self.living().map(|(_, server)| server.wanted());
        let mut wish: BTreeSet<String> =
            wishes.max_by_key(|wish| wish.asked_micros).into_iter().flat_map(|wish| wish.servers).collect();
        wish.retain(|server| lock(&self.lost).iter().all(|&lost| self.addresses[lost] != *server));
        let is_there = wish.is_empty() || members.iter().collect::<BTreeSet<_>>() == wish.iter().collect();
        let keep_shards = members.iter().filter(|member| !self.is_witness(member)).count();
        !is_lost && is_there && has_all && (newest.unreplicated() == 0 || keep_shards == 1)
    }

    /// Loses up to three servers, one after the other.
    pub(crate) async fn lose_servers(self: &Arc<Self>) {
        let sim = &self.sim;
        if let Some(witness) = self.witness {
            let (servers, asked_micros) = (self.addresses[..=witness].to_vec(), sim.now().as_micros() as u64);
            let wanted = Wanted { servers, asked_micros, ..Wanted::default() };
            // A server that recovers its job takes no wish, so the wish is repeated.
            let first = lock(&self.servers)[..witness].to_vec();
            for server in first {
                while !server.want(&wanted) {
                    sim.sleep(Duration::from_millis(20)).await;
                }
            }
            self.until_whole().await;
        }
        for _ in 0..sim.below(4) {
            let time = sim.part_of(self.plan.pause * 4);
            sim.sleep(time).await;
            self.lose_server().await;
            if sim.one_in(2) {
                self.until_whole().await;
            }
        }
    }

    /// Returns the numbers of those addresses that are in the job, by the newest placement.
    fn numbers_of(&self, addresses: &[String]) -> Vec<ServerId> {
        let placement = self.placement();
        let is_named = |server: &ServerId| addresses.contains(&placement.servers[server.0 as usize]);
        placement.members().filter(is_named).collect()
    }

    pub(crate) fn epoch(&self) -> Option<Epoch> {
        self.living().filter_map(|(_, server)| Some(server.placement()?.1.epoch)).max()
    }

    /// Sets the job's last step, once the losses are over. The last step is at least four steps away, so that no rank
    /// has begun a later one.
    pub(crate) async fn end_soon(self: &Arc<Self>) {
        self.repeat();
        let mut before = None;
        // A process that was started late may have sent an owner another gradient than the replica. The commit then
        // drops the replica, so the wait is repeated until the placement stays.
        while before != self.epoch() {
            self.until_whole().await;
            before = self.epoch();
            let version = self.version();
            while self.version().0 < version.0 + 4 {
                self.sim.sleep(Duration::from_millis(20)).await;
                self.launch_again();
            }
            self.until_whole().await;
        }
        *lock(&self.whole_at) = before;
        self.steps.store(self.version().0 + 4 + self.sim.below(6), Relaxed);
    }

    /// Returns true if no state of some shard would be left. The oracle reports a fault unless a decision has meanwhile
    /// dropped or is moving the shard's other holder. In that case the run is beyond help, as `is_beyond` says.
    fn leaves_nothing(&self, wanted: &Wanted, living: &[(usize, Arc<Server>)]) -> bool {
        // Only servers with the newest epoch judge. A server that is just being prepared for the job may know an
        // earlier placement.
        let knows = |of: &Server| of.placement().is_some_and(|(_, of)| Some(of.epoch) == self.epoch());
        let last = living
            .iter()
            .filter(|(_, of)| knows(of))
            .find_map(|(_, server)| server.last_after(wanted.clone()));
        let Some(shard) = last else { return false };
        let is_changing = |of: &Server| {
            of.placement().is_some_and(|(_, of)| {
                of.replica(shard).is_none() || of.handovers.iter().any(|of| of.shard == shard)
            })
        };
        match living.iter().any(|(_, server)| is_changing(server)) {
            true => self.is_beyond.store(true, Relaxed),
            false => self.oracle.fail(format!("{:?} are lost, with the last of {shard}", wanted.lost)),
        }
        true
    }

    /// Waits until each shard has two holders and the wish is fulfilled. Repeats the operator's command every `HEARD`.
    pub(crate) async fn until_whole(self: &Arc<Self>) {
        let mut again = self.sim.now() + HEARD;
        while !self.is_whole(None) {
            self.sim.sleep(Duration::from_millis(20)).await;
            self.launch_again();
            if self.sim.now() > again {
                again = self.sim.now() + HEARD;
                self.repeat();
            }
        }
    }

    /// Repeats the operator's command on each server that answers: which servers are lost, and that the job stays on
    /// the others.
    fn repeat(&self) {
        let is_lost = |member: &String| lock(&self.lost).iter().any(|&lost| self.addresses[lost] == *member);
        let is_unsaid = |member: &String| lock(&self.unsaid).iter().any(|&of| self.addresses[of] == *member);
        let members = self.members().into_iter().filter(|member| !is_unsaid(member));
        let (lost, servers): (Vec<String>, _) = members.partition(is_lost);
        let lost = self.numbers_of(&lost);
        let asked_micros = self.sim.now().as_micros() as u64;
        let wanted = Wanted { servers, asked_micros, lost, ..Wanted::default() };
        // A decision may have dropped a shard's other holder while the operator's command was on its way.
        if self.leaves_nothing(&wanted, &self.living().collect::<Vec<_>>()) {
            return;
        }
        self.sim.note(OUTSIDE, || format!("the job shall stay on {:?}", wanted.servers));
        let servers = lock(&self.servers).clone();
        for server in servers.iter().filter(|server| !self.sim.is_silent(server.process)) {
            server.want(&wanted);
        }
    }

    /// Loses a random server whose shards all have another holder. The loss follows a random event of that server, so
    /// that it hits any stage of a step.
    async fn lose_server(self: &Arc<Self>) {
        let sim = &self.sim;
        let members = self.members();
        let of = self.living().filter(|(server, _)| members.contains(&self.addresses[*server]));
        let of: Vec<_> = of.collect();
        let (number, server) = of[sim.below(of.len() as u64) as usize].clone();
        let mut changes = server.changes();
        for _ in 0..sim.below(8) {
            tokio::select! {
                biased;
                _ = changes.changed() => {}
                () = sim.sleep(Duration::from_millis(500)) => {}
            }
        }
        let (address, members) = (self.addresses[number].clone(), self.members());
        // An operator's command may have moved the job to this server alone meanwhile.
        if members.len() < 2 {
            return;
        }
        lock(&self.lost).insert(number);
        let lost: Vec<String> = lock(&self.lost).iter().map(|&lost| self.addresses[lost].clone()).collect();
        let wanted = Wanted { lost: self.numbers_of(&lost), ..Wanted::default() };
        let is_last = |(_, server): (_, Arc<Server>)| server.last_after(wanted.clone()).is_some();
        if of.len() < 2 || !members.contains(&address) || self.living().any(is_last) {
            lock(&self.lost).remove(&number);
            return;
        }
        self.has_lost.store(true, Relaxed);
        *lock(&self.may_end) = sim.now() + LONGEST;
        let rank = sim.below(2 * self.world_size() as u64) as usize;
        if rank < self.world_size() {
            let process = self.newest(rank);
            sim.note(process, || "is killed with a server".into());
            sim.kill(process);
        }
        let others_answer =
            lock(&self.lost).iter().filter(|&&lost| members.contains(&self.addresses[lost])).count() == 1;
        if of.len() > 2 && others_answer && sim.one_in(3) {
            return self.lose_alone(number, &server).await;
        }
        match sim.below(4) {
            0 => {
                sim.note(server.process, || "is stopped, and taken for lost".into());
                sim.stop(server.process, true);
                self.wakes(server.process);
            }
            1 => {
                let (out, back) = [(true, false), (false, true), (true, true)][sim.below(3) as usize];
                sim.note(server.process, || {
                    format!("is cut off, and taken for lost: out {out}, back {back}")
                });
                self.cut_off(&address, (out, back));
            }
            _ => {
                sim.note(server.process, || "is lost for good".into());
                sim.kill(server.process);
            }
        }
        let late = Duration::from_secs([1, 1, 10, 40][sim.below(4) as usize]);
        let first = async {
            let begun = sim.now() + sim.part_of(late);
            while sim.now() < begun || !self.give_up(&address).await {
                sim.sleep(Duration::from_millis(200)).await;
                self.launch_again();
            }
        };
        let second = async {
            sim.sleep(sim.part_of(2 * late)).await;
            if sim.one_in(3) {
                self.give_up(&address).await;
            }
        };
        tokio::join!(first, second);
        *lock(&self.may_end) = sim.now() + HEARD;
    }

    /// Loses a server that no operator gives up. The server stops for a while, starts again without the job, or never
    /// comes back.
    async fn lose_alone(self: &Arc<Self>, number: usize, server: &Arc<Server>) {
        let sim = &self.sim;
        sim.note(server.process, || "is lost, and no operator says so".into());
        lock(&self.unsaid).insert(number);
        let (leader, begun) = (self.newest(0), sim.now());
        let has_led = |of: &Process| of.began + Duration::from_secs(5) < begun;
        // Rank 0 gives the silent server up, and no rank may end meanwhile. A new rank 0 is excepted, since it measures
        // the silence from its own start. An earlier loss that is not decided everywhere is excepted too.
        if lock(&self.ranks)[0].last().is_some_and(has_led) && lock(&self.lost).len() == 1 {
            *lock(&self.may_end) = Duration::ZERO;
        }
        let is_stopped = sim.one_in(3);
        let comes_back = is_stopped || sim.one_in(2);
        if is_stopped {
            sim.stop(server.process, true);
            self.wakes(server.process);
        } else {
            sim.kill(server.process);
        }
        if comes_back && !is_stopped {
            let time = sim.part_of(Duration::from_secs(10));
            sim.sleep(time).await;
            *lock(&self.disks[number]) = Disk::default();
            self.start_server(number);
            lock(&self.lost).remove(&number);
        }
        let address = &self.addresses[number];
        let lost = Wanted { lost: self.numbers_of(slice::from_ref(address)), ..Wanted::default() };
        // A server that wakes up has an earlier placement, until rank 0 ends the job there.
        let has_job = || {
            let there = lock(&self.servers)[number].clone();
            let there = there.placement().filter(|_| !sim.is_silent(there.process));
            comes_back && there.is_some_and(|(_, placement)| Some(placement.epoch) == self.epoch())
        };
        while self.members().contains(address) && !has_job() {
            sim.sleep(Duration::from_millis(200)).await;
            self.launch_again();
            if self.newest(0) != leader {
                *lock(&self.may_end) = sim.now() + LONGEST;
            }
            if self.leaves_nothing(&lost, &self.living().collect::<Vec<_>>()) {
                return;
            }
            // No decision has named an earlier lost server yet. Too few servers may be left for a decision without an
            // operator's command.
            let is_other = |of: &ServerId| !lost.lost.contains(of);
            if self.living().any(|(_, server)| server.wanted().lost.iter().any(is_other)) {
                *lock(&self.may_end) = sim.now() + LONGEST;
                lock(&self.unsaid).remove(&number);
                return;
            }
        }
        if is_stopped {
            lock(&self.lost).remove(&number);
        }
        lock(&self.unsaid).remove(&number);
        *lock(&self.may_end) = sim.now() + HEARD;
    }

    /// Lets a stopped process continue later, with its memory.
    fn wakes(self: &Arc<Self>, process: usize) {
        let cluster = Arc::clone(self);
        self.sim.spawn(OUTSIDE, async move {
            let time = cluster.sim.part_of(Duration::from_secs(60));
            cluster.sim.sleep(time).await;
            cluster.sim.note(process, || "wakes up".into());
            cluster.sim.stop(process, false);
        });
    }

    /// Cuts the links between all processes and a server. After a minute at most, all links are mended.
    fn cut_off(self: &Arc<Self>, address: &str, (out, back): (bool, bool)) {
        let ranks: Vec<usize> = (0..self.world_size()).map(|rank| self.newest(rank)).collect();
        let servers = lock(&self.servers).iter().map(|server| server.process).collect::<Vec<_>>();
        for &process in ranks.iter().chain(&servers) {
            self.sim.network.change(process, address, |weather| {
                (weather.is_cut_out, weather.is_cut_back) = (out, back);
            });
        }
        let cluster = Arc::clone(self);
        self.sim.spawn(OUTSIDE, async move {
            let time = cluster.sim.part_of(Duration::from_secs(60));
            cluster.sim.sleep(time).await;
            cluster.sim.network.clear();
        });
    }

    /// Tells the job's servers that one is lost, as `longshore scale --lost` does. Returns false if the command must be
    /// repeated.
    async fn give_up(&self, address: &str) -> bool {
        let sim = &self.sim;
        let members = self.members();
        let lost = self.numbers_of(&[address.to_string()]);
        let living = self.living().filter(|(server, _)| members.contains(&self.addresses[*server]));
        let mut living: Vec<_> = living.collect();
        let known: Vec<ServerId> = living.iter().flat_map(|(_, server)| server.wanted().lost).collect();
        let stays = |member: &&String| {
            *member != address
                && self.numbers_of(slice::from_ref(*member)).iter().all(|of| !known.contains(of))
        };
        let mut servers: Vec<String> = members.iter().filter(stays).cloned().collect();
        let spare = self.living().map(|(server, _)| &self.addresses[server]);
        let spare: Vec<&String> = spare.filter(|spare| !members.contains(spare)).collect();
        if let Some(spare) = spare.first().filter(|_| sim.one_in(2)) {
            servers.push((*spare).clone());
        }
        // An operator's clock may be an hour slow. A loss must count all the same.
        let late = Duration::from_secs(if sim.one_in(4) { 3600 } else { 0 });
        let asked_micros = (sim.now() - late).as_micros() as u64;
        let wanted = Wanted { servers, asked_micros, lost, ..Wanted::default() };
        if self.leaves_nothing(&wanted, &living) {
            return true;
        }
        // A server that was given up too early is told too, because some ranks may listen to that server alone.
        let servers = lock(&self.servers).clone();
        let alive = servers
            .iter()
            .zip(&self.addresses)
            .find(|(server, of)| *of == address && !self.sim.is_silent(server.process));
        if let Some((server, _)) = alive {
            // The job has moved to the given-up server meanwhile, and the server may have the last state of a shard.
            if server.last_after(wanted.clone()).is_some() {
                self.is_beyond.store(true, Relaxed);
                return true;
            }
            living.push((usize::MAX, Arc::clone(server)));
        }
        sim.note(OUTSIDE, || format!("{address} is lost, and the job shall have {:?}", wanted.servers));
        while !living.is_empty() {
            let (_, server) = living.swap_remove(sim.below(living.len() as u64) as usize);
            server.want(&wanted);
            if sim.one_in(8) && !living.is_empty() {
                sim.note(OUTSIDE, || "the operator's command is killed".into());
                return false;
            }
            let time = sim.part_of(Duration::from_millis(100));
            sim.sleep(time).await;
        }
        true
    }
}
