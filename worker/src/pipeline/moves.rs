//! Moves shards to the servers that an operator wants. Rank 0's driver calls this before each decision, which carries
//! the next change of the placement.
//!
//! New servers are opened in the background. Between two decisions the new servers begin without shards. The next
//! decision adds them to the placement. Once every rank has joined the new servers, each decision moves a few shards.
//! The number of shards is chosen so that they arrive about when their next update needs them. If a job has replicas, a
//! shard without one gets it before the shard moves. Servers without shards leave at the end.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use futures_util::future::join_all;
use longshore_proto::{
    Epoch, Fault, FaultKind, NO_SERVER, Placement, PlacementChange, ServerId, ShardId, Step, TierKind,
    Version,
    limits::{DEFAULT_MAX_EXPOSED, MAX_MOVING_SHARDS},
};
use longshore_wire::v1::{DescribeResponse, Wanted};
use tokio::sync::watch;

use super::{
    plan::{heal, without_replicas},
    prepare::{Added, Unprepared, begin_all, give_up, prepare},
};
use crate::{
    cluster::{Cluster, Task},
    error::Result,
    host::{self, Instant},
    push::Gradients,
    rank::{RankState, clock_ahead},
    session::admit_added,
};

/// Time until a plan that failed is tried again.
const AGAIN: Duration = Duration::from_secs(5);
/// Largest number of shards that one decision moves to a server: 25 GB by default, or two seconds at 100 Gbit/s.
const MOST_AT_ONCE: usize = 512;
/// Number of decisions without too long a wait, after which a decision moves one shard more.
const QUIET: u32 = 4;
/// Pause between two looks at servers that await shards.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Number of steps after which every rank knows of a server's removal.
const KNOWN_AFTER: u64 = 3;

pub(super) struct Moves {
    cluster: Arc<Cluster>,
    rank: Arc<RankState>,
    gradients: Arc<Gradients>,
    wanted: watch::Receiver<Wanted>,
    /// Time at which the newest fulfilled wish was asked for.
    pub(super) reached: u64,
    preparing: Option<Task<Result<Plan, Unprepared>>>,
    plan: Option<Plan>,
    /// Servers that were opened for an earlier wish, and that no plan uses.
    unused: Vec<Added>,
    looking: Option<Task<Vec<(ServerId, DescribeResponse)>>>,
    not_before: Instant,
    /// Reason why nothing moves. Empty if nothing is in the way.
    pub(super) obstacle: String,
    retiring: VecDeque<(Step, ServerId)>,
}

/// Moves that lead to the wanted servers.
pub(super) struct Plan {
    pub(super) asked: u64,
    /// Epoch of the placement that the plan begins with.
    pub(super) since: Epoch,
    pub(super) wanted: Vec<String>,
    pub(super) added: Vec<Added>,
    /// New owners of shards that no decision has taken yet. `replicas` has the new replicas in the same way.
    pub(super) moves: VecDeque<(ShardId, ServerId)>,
    pub(super) replicas: VecDeque<(ShardId, ServerId)>,
    pub(super) pace: Pace,
}

impl Plan {
    /// Takes the moves that come with the decision on `step`. A shard's second change waits until the first one is over.
    fn next(
        &mut self,
        placement: &Placement,
        destinations: &BTreeSet<ServerId>,
        step: Step,
    ) -> PlacementChange {
        let epoch = Epoch(placement.epoch.0 + 1);
        let none = PlacementChange { epoch, ..PlacementChange::default() };
        let may_replicate = |&of: &(ShardId, ServerId)| {
            placement.check(&PlacementChange { replicas: vec![of], ..none.clone() }, step).is_ok()
        };
        let may_move = |&of: &(ShardId, ServerId)| {
            placement.check(&PlacementChange { moves: vec![of], ..none.clone() }, step).is_ok()
        };
        // An empty change drops the handovers that are over.
        let mut then = placement.clone();
        then.apply(&none, step, 0);
        let mut left_in_all = MAX_MOVING_SHARDS.saturating_sub(then.handovers.len());
        let mut room: BTreeMap<ServerId, usize> =
            destinations.iter().map(|&server| (server, self.pace.shards)).collect();
        let moving: BTreeSet<ShardId> = self.moves.iter().map(|(shard, _)| *shard).collect();
        let is_first =
            |of: &&(ShardId, ServerId)| placement.replica(of.0).is_none() || !moving.contains(&of.0);
        let first: BTreeMap<ShardId, ServerId> = self.replicas.iter().filter(is_first).copied().collect();
        let is_first =
            |shard: ShardId| first.get(&shard).is_some_and(|&server| may_replicate(&(shard, server)));
        let mut take = |all: &mut VecDeque<(ShardId, ServerId)>,
                        may: &dyn Fn(&(ShardId, ServerId)) -> bool| {
            let mut taken = Vec::new();
            all.retain(|of| {
                let left = room.get_mut(&of.1).filter(|left| **left > 0);
                // Room is looked at first, since this is cheap: full checks of 16,700 shards took a second.
                if left_in_all == 0 || left.is_none() && of.1 != NO_SERVER || !may(of) {
                    return true;
                }
                left.into_iter().for_each(|left| *left -= 1);
                left_in_all -= 1;
                taken.push(*of);
                false
            });
            taken
        };
        let replicas = take(&mut self.replicas, &|of| is_first(of.0));
        let moves = take(&mut self.moves, &|of| !is_first(of.0) && may_move(of));
        PlacementChange { moves, replicas, ..PlacementChange::default() }
    }

    /// Takes the moves that may be made at a version, at most [`MAX_MOVING_SHARDS`].
    pub(super) fn all(&mut self, placement: &Placement, version: Step) -> PlacementChange {
        self.pace.shards = usize::MAX;
        let to = self.moves.iter().chain(&self.replicas).map(|(_, to)| *to);
        self.next(placement, &to.collect(), version)
    }

    pub(super) fn is_done(&self) -> bool {
        self.moves.is_empty() && self.replicas.is_empty()
    }
}

/// Number of shards that a decision moves to each server. Doubles until updates wait for more than `max_exposed`, and
/// halves then. Grows by one shard at a time afterwards.
pub(super) struct Pace {
    /// Part of the time between two decisions that updates may wait for shards.
    max_exposed: f64,
    shards: usize,
    has_waited: bool,
    quiet: u32,
    /// Seconds that updates of each server had waited at the last look.
    held: BTreeMap<ServerId, f64>,
    looked: Option<Instant>,
}

impl Pace {
    pub(super) fn new(max_exposed: f64) -> Pace {
        Pace { max_exposed, shards: 1, has_waited: false, quiet: 0, held: BTreeMap::new(), looked: None }
    }

    /// Takes the seconds for which updates of each server have waited so far.
    fn saw(&mut self, held: impl Iterator<Item = (ServerId, f64)>, now: Instant) {
        let waited = held.map(|(server, held)| held - self.held.insert(server, held).unwrap_or(held));
        let waited = waited.fold(0.0, f64::max);
        let since = self.looked.replace(now).map_or(Duration::ZERO, |before| now.duration_since(before));
        if waited > self.max_exposed * since.as_secs_f64() {
            (self.shards, self.has_waited, self.quiet) = ((self.shards / 2).max(1), true, 0);
        } else if !self.has_waited {
            self.shards = (2 * self.shards).min(MOST_AT_ONCE);
        } else {
            self.quiet = (self.quiet + 1) % QUIET;
            self.shards = (self.shards + usize::from(self.quiet == 0)).min(MOST_AT_ONCE);
        }
    }
}

impl Moves {
    pub(super) fn new(
        cluster: Arc<Cluster>,
        rank: Arc<RankState>,
        gradients: Arc<Gradients>,
        wanted: watch::Receiver<Wanted>,
    ) -> Moves {
        Moves {
            cluster,
            rank,
            gradients,
            wanted,
            reached: 0,
            preparing: None,
            plan: None,
            unused: Vec::new(),
            looking: None,
            not_before: Instant::now(),
            obstacle: String::new(),
            retiring: VecDeque::new(),
        }
    }

    /// Returns the change of the placement that comes with the decision on `step`. Returns at once unless servers join,
    /// or the first server leaves. `differing` are shards whose owner and replica have different gradients: their
    /// replicas are made anew. A `broken` shard goes on with its other holder.
    ///
    /// # Errors
    /// If both holders of a shard are broken.
    pub(super) async fn change(
        &mut self,
        step: Step,
        differing: &[ShardId],
        broken: &BTreeSet<(ShardId, ServerId)>,
    ) -> Result<Option<PlacementChange>> {
        self.retire(step);
        let lost = self.cluster.given_up();
        let placement = self.cluster.placement();
        // A lost server may be the other holder. So broken shards wait for the next decision while any server is lost.
        let is_held =
            |&(shard, server): &(ShardId, ServerId)| lost.is_empty() && placement.holds(server, shard);
        let broken: Vec<(ShardId, ServerId)> = broken.iter().copied().filter(is_held).collect();
        let change = if lost.is_empty() && differing.is_empty() && broken.is_empty() {
            self.take_wish(step);
            match self.next_change(step).await {
                Ok(change) => change,
                Err(error) => {
                    self.put_off(&error);
                    None
                }
            }
        } else {
            let job = self.cluster.job();
            for &shard in differing {
                tracing::error!(%job, %step, %shard, "owner and replica have other gradients: the replica is made anew");
            }
            for &(shard, server) in &broken {
                let server = &placement.servers[server.0 as usize];
                tracing::error!(%job, %step, %shard, server, "a bit of its state has flipped there: the other holder goes on with it");
            }
            for &server in &lost {
                tracing::warn!(%job, %step, server = self.cluster.placement().servers[server.0 as usize], "given up as lost");
            }
            if let Some(shard) = placement.last_of(&lost) {
                let value = format!("servers with the last of {shard}");
                let limit = "servers whose shards others hold too";
                let remedy = "restore the last checkpoint on the other servers";
                return Err(Fault::new(FaultKind::Precondition, "lost", value, limit, remedy).into());
            }
            // A plan fits only the placement before this change, so the plan is dropped.
            self.unused.extend(self.plan.take().into_iter().flat_map(|plan| plan.added));
            let healed = heal(&placement, &broken, step)?;
            let differing = differing.iter().filter(|shard| broken.iter().all(|(of, _)| of != *shard));
            let replicas = differing.map(|&shard| (shard, NO_SERVER)).chain(healed.replicas).collect();
            let change = PlacementChange { lost, replicas, ..healed };
            Some(change).filter(|change| *change != PlacementChange::default())
        };
        let change = change.map(|change| {
            let epoch = Epoch(self.cluster.placement().epoch.0 + 1);
            PlacementChange { epoch, ..change }
        });
        // A change that servers would refuse is put off, so that training goes on. If a shard's owner and replica have
        // different gradients, the refusal is returned. Each holder would make its own version.
        let checked = change.as_ref().map(|change| self.cluster.placement().check(change, step));
        if let Some(Err(fault)) = checked {
            if !differing.is_empty() {
                return Err(fault.into());
            }
            self.put_off(&fault);
            return Ok(None);
        }
        Ok(change)
    }

    /// Notes that the decision on `step` was made with a change.
    pub(super) fn decided(&mut self, change: &PlacementChange, step: Step) {
        let first = self.cluster.placement().servers.len() as u32;
        self.cluster.change_placement(change, step);
        admit_added(&self.cluster, &self.rank, &self.gradients, first, &change.added);
        // Answers from before the change do not show its effect.
        self.looking = self.plan.is_some().then(|| look(&self.cluster));
        self.retiring.extend(change.removed.iter().map(|&server| (step, server)));
        // The wish is looked at now, so new replicas come a step sooner.
        if !change.lost.is_empty() {
            self.take_wish(Step(step.0 + 1));
        }
        tracing::debug!(job = %self.cluster.job(), %step, ?change, "the placement changes");
    }

    /// Begins to prepare the newest wish before the decision on `step`, once no earlier change is under way.
    fn take_wish(&mut self, step: Step) {
        let Wanted { servers, asked_micros, max_exposed, tier, .. } = self.wanted.borrow().clone();
        if let Some(replaced) = self.plan.take_if(|plan| plan.asked < asked_micros) {
            self.unused.extend(replaced.added);
        }
        let placement = self.cluster.placement();
        if let Some(ended) = self.preparing.as_mut().and_then(Task::ended) {
            self.preparing = None;
            match ended {
                // A plan of an earlier epoch is dropped: a server may have been lost meanwhile.
                Ok(Ok(plan)) if plan.asked == asked_micros && plan.since == placement.epoch => {
                    (self.plan, self.obstacle) = (Some(plan), String::new());
                }
                Ok(Ok(replaced)) => self.unused.extend(replaced.added),
                Ok(Err(Unprepared { error, opened })) => {
                    self.unused.extend(opened);
                    self.put_off(&error);
                }
                Err(_) => {}
            }
        }
        // A server that is leaving cannot be opened anew.
        let is_free = self.plan.is_none() && self.preparing.is_none() && self.retiring.is_empty();
        if !is_free || Instant::now() < self.not_before || !placement.is_settled(Version(step.0 - 1)) {
            return;
        }
        if self.cluster.takes_back() {
            self.reached = 0;
        }
        let is_wish = asked_micros > self.reached && !servers.is_empty();
        // Replicas do not wait for a server that is wanted and cannot be opened.
        let unreplicated = without_replicas(&placement);
        let is_wish = is_wish && (self.obstacle.is_empty() || unreplicated.is_empty());
        let servers = if is_wish { servers } else { unreplicated };
        let is_said = is_wish && max_exposed > 0.0;
        let max_exposed = if is_said { max_exposed } else { DEFAULT_MAX_EXPOSED };
        let tier = TierKind::from_number(tier).filter(|_| is_wish);
        if !servers.is_empty() {
            let (cluster, incarnation) = (Arc::clone(&self.cluster), self.rank.incarnation().0);
            let mut unused = std::mem::take(&mut self.unused);
            unused.retain(|added| !servers.contains(&added.peer.address));
            self.preparing = Some(self.cluster.runtime.spawn_joined(async move {
                join_all(unused.iter().map(|added| give_up(&cluster, added, incarnation))).await;
                prepare(cluster, placement, (servers, tier), asked_micros, max_exposed, usize::MAX).await
            }));
        }
    }

    fn put_off(&mut self, error: &impl std::fmt::Display) {
        let (job, obstacle) = (self.cluster.job(), error.to_string());
        if self.obstacle != obstacle {
            tracing::warn!(%job, error = obstacle, "the job's servers cannot be changed yet; it is tried again");
        }
        self.obstacle = obstacle;
        self.not_before = Instant::now() + AGAIN;
        self.unused.extend(self.plan.take().into_iter().flat_map(|plan| plan.added));
    }

    async fn next_change(&mut self, step: Step) -> Result<Option<PlacementChange>> {
        let Some(plan) = &mut self.plan else { return Ok(None) };
        let before = Version(step.0 - 1);
        if !plan.added.is_empty() {
            let added = begin_all(&self.cluster, &self.rank, &plan.added, before).await?;
            for Added { server, peer } in plan.added.drain(..) {
                self.cluster.add_peer(server, peer);
                self.cluster.add_member(server);
            }
            return Ok(Some(PlacementChange { added, ..PlacementChange::default() }));
        }
        let to = plan.moves.iter().chain(&plan.replicas).map(|(_, to)| *to).filter(|&to| to != NO_SERVER);
        let destinations: BTreeSet<ServerId> = to.collect();
        let Some(seen) = self.looking.get_or_insert_with(|| look(&self.cluster)).ended() else {
            return Ok(None);
        };
        self.looking = Some(look(&self.cluster));
        let seen = seen.unwrap_or_default();
        let Some(plan) = &mut self.plan else { return Ok(None) };
        // A server may show this rank as connected before this rank's lanes are open, so lanes are checked too.
        let ready = |server: &ServerId| {
            self.gradients.has_lanes(*server)
                && seen.iter().any(|(of, answer)| of == server && is_ready(answer))
        };
        if !destinations.iter().all(ready) || !seen.iter().all(|(_, answer)| awaits_nothing(answer)) {
            return Ok(None);
        }
        if destinations.is_empty() && plan.replicas.is_empty() {
            return self.end(before).await;
        }
        let held = seen.iter().filter(|(server, _)| destinations.contains(server));
        let held = held.map(|(server, answer)| {
            (*server, answer.scaling.as_ref().map_or(0.0, |scaling| scaling.held_seconds))
        });
        plan.pace.saw(held, Instant::now());
        let change = plan.next(&self.cluster.placement(), &destinations, step);
        Ok(Some(change).filter(|change| *change != PlacementChange::default()))
    }

    /// Removes the servers that shall own nothing, once no step in flight asks for them.
    async fn end(&mut self, before: Version) -> Result<Option<PlacementChange>> {
        let (Some(plan), placement) = (&self.plan, self.cluster.placement()) else { return Ok(None) };
        if !placement.is_settled(before) {
            return Ok(None);
        }
        let change = leaving(&self.cluster, &plan.wanted).await?;
        // A plan that only adds missing replicas does not fulfil a wish, which may still wait for a server.
        if self.wanted.borrow().servers.iter().all(|server| plan.wanted.contains(server)) {
            self.reached = plan.asked;
        }
        let (job, servers) = (self.cluster.job(), &plan.wanted);
        if placement.unreplicated() > 0 && servers.len() > 1 {
            // Only one server keeps shards, since the others are witnesses or lack room. The next plan would find the
            // same, so it waits.
            self.not_before = Instant::now() + AGAIN;
        } else {
            tracing::info!(%job, ?servers, "the job is on the servers that were asked for");
        }
        (self.plan, self.looking) = (None, None);
        Ok(Some(change).filter(|change| !change.removed.is_empty()))
    }

    /// Ends the job on servers whose removal every rank knows by now.
    fn retire(&mut self, step: Step) {
        while self.retiring.front().is_some_and(|(removed, _)| removed.0 + KNOWN_AFTER <= step.0) {
            let Some((_, server)) = self.retiring.pop_front() else { return };
            let (cluster, incarnation) = (Arc::clone(&self.cluster), self.rank.incarnation());
            self.cluster.runtime.spawn_for_session(async move {
                _ = cluster.retire(server, incarnation, cluster.options.deadline).await;
            });
        }
    }
}

/// Returns the change that removes all servers but `wanted`. The removed servers own nothing.
pub(super) async fn leaving(cluster: &Cluster, wanted: &[String]) -> Result<PlacementChange> {
    let placement = cluster.placement();
    let unwanted = |server: &ServerId| !wanted.contains(&placement.servers[server.0 as usize]);
    let removed: Vec<ServerId> = placement.members().filter(unwanted).collect();
    let next = placement.members().find(|server| !removed.contains(server));
    let clock_ahead_ms = match (placement.members().next(), next) {
        (Some(first), Some(next)) if first != next => clock_ahead(cluster, first, next).await?,
        _ => 0,
    };
    Ok(PlacementChange { removed, clock_ahead_ms, ..PlacementChange::default() })
}

/// Returns true if every rank's process is connected with the server.
fn is_ready(answer: &DescribeResponse) -> bool {
    answer.ranks.iter().all(|rank| rank.left || !rank.transport.is_empty())
}

pub(super) fn awaits_nothing(answer: &DescribeResponse) -> bool {
    answer.scaling.as_ref().is_none_or(|scaling| scaling.awaited_shards == 0)
}

/// Describes the job on all servers, in the background, until no server awaits a shard or some server is silent.
fn look(cluster: &Arc<Cluster>) -> Task<Vec<(ServerId, DescribeResponse)>> {
    let asked = Arc::clone(cluster);
    cluster.runtime.spawn_joined(async move {
        loop {
            let answers = asked.on_each(|server| asked.glance(server)).await;
            let is_over = answers.values().all(|answer| answer.as_ref().is_ok_and(awaits_nothing));
            let is_silent = answers.values().any(Result::is_err);
            if is_over || is_silent {
                return answers
                    .into_iter()
                    .filter_map(|(server, answer)| Some((server, answer.ok()?)))
                    .collect();
            }
            host::sleep(LOOK_AGAIN).await;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{
        super::plan::{plan_moves, tests::layout},
        *,
    };

    /// Paces of some decisions. `step` is a step's time, and `waits` gives the wait by the number of shards.
    fn paced(max_exposed: f64, step: f64, waits: impl Fn(usize) -> f64, steps: usize) -> Vec<usize> {
        let (mut pace, start) = (Pace::new(max_exposed), Instant::now());
        let mut held = 0.0;
        let decision = |at: usize| {
            pace.saw([(ServerId(1), held)].into_iter(), start + Duration::from_secs_f64(step * at as f64));
            held += waits(pace.shards);
            pace.shards
        };
        (0..steps).map(decision).collect()
    }

    #[test]
    fn the_pace_halves_only_for_waits_that_cost_a_part_of_a_step() {
        let idle = paced(DEFAULT_MAX_EXPOSED, 1.0, |_| 0.0, 10);
        assert_eq!(idle, [2, 4, 8, 16, 32, 64, 128, 256, 512, 512]);
        assert_eq!(paced(DEFAULT_MAX_EXPOSED, 1.0, |_| 0.04, 4), [2, 4, 8, 16]);
        // Six shards a step fill the link.
        let full = paced(DEFAULT_MAX_EXPOSED, 1.0, |shards| (shards as f64 / 6.0 - 1.0).max(0.0), 14);
        assert_eq!(full, [2, 4, 8, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6]);
        assert_eq!(paced(DEFAULT_MAX_EXPOSED, 1.0, |_| 0.5, 4), [2, 1, 1, 1]);
        assert_eq!(paced(0.6, 1.0, |_| 0.5, 4), [2, 4, 8, 16]);
        assert_eq!(paced(0.01, 1.0, |_| 0.04, 4), [2, 1, 1, 1]);
        let halved = paced(0.5, 1.0, |shards| (shards as f64 / 6.0 - 1.0).max(0.0), 8);
        assert_eq!(halved, [2, 4, 8, 16, 8, 8, 8, 8]);
    }

    #[test]
    fn a_placement_names_a_bounded_number_of_moves_in_flight() {
        let mut placement = Placement::striped(vec!["a".into(), "b".into()], 20_000);
        let moves: VecDeque<_> =
            placement.owned(ServerId(0)).into_iter().map(|of| (of, ServerId(1))).collect();
        let (pace, since) = (Pace::new(DEFAULT_MAX_EXPOSED), placement.epoch);
        let mut plan =
            Plan { asked: 1, since, wanted: vec![], added: vec![], moves, replicas: VecDeque::new(), pace };
        let moved: Vec<usize> = (1..13)
            .map(|step| {
                let change = plan.all(&placement, Step(step));
                let change = PlacementChange { epoch: Epoch(placement.epoch.0 + 1), ..change };
                placement.apply(&change, Step(step), 0);
                change.moves.len()
            })
            .collect();
        assert_eq!(moved, [4096, 0, 0, 0, 4096, 0, 0, 0, 1808, 0, 0, 0]);
    }

    #[test]
    fn shards_without_a_replica_get_one_before_they_move() {
        let (layout, names) = (layout(24), ["a", "b", "c"].map(String::from).to_vec());
        let mut placement = Placement::striped(names, 24).with_replicas();
        let lost = PlacementChange { lost: vec![ServerId(1)], epoch: Epoch(2), ..PlacementChange::default() };
        placement.apply(&lost, Step(5), 0);
        let moved =
            plan_moves(&placement, &layout, &[0, 2, 3].map(ServerId), &["d".into()], &BTreeMap::new());
        assert_eq!((moved.moves.len(), moved.replicas.len()), (8, 16));
        let added =
            PlacementChange { added: vec!["d".into()], epoch: Epoch(3), ..PlacementChange::default() };
        placement.apply(&added, Step(6), 0);
        let mut pace = Pace::new(DEFAULT_MAX_EXPOSED);
        pace.shards = 2;
        let (moves, replicas) = (moved.moves.into(), moved.replicas.into());
        let since = placement.epoch;
        let mut plan = Plan { asked: 1, since, wanted: vec![], added: vec![], moves, replicas, pace };
        let mut lacking = Vec::new();
        for step in (7..40).map(Step) {
            let destinations = [0, 2, 3].map(ServerId).into();
            let mut change = plan.next(&placement, &destinations, step);
            change.epoch = Epoch(placement.epoch.0 + 1);
            assert_eq!(placement.check(&change, step), Ok(()));
            placement.apply(&change, step, 0);
            lacking.push(placement.unreplicated());
        }
        assert!(lacking.is_sorted_by(|before, after| before >= after), "{lacking:?}");
        assert_eq!(lacking[..5], [10, 4, 2, 0, 0]);
        assert_eq!(
            (&placement.owners, &placement.replicas),
            (&moved.placement.owners, &moved.placement.replicas)
        );
    }
}
