//! Moves a job without ranks. An operator's command fences rank 0, and gives all servers a new placement of their
//! version. Called by `longshore scale` where no rank is connected.
//!
//! Each placement is on all servers before the next one is sent:
//!
//! ```text
//! servers join    new servers are members, and own nothing
//! shards move     counts from the next step on; next owners fetch state and images of the version
//! arrived         nothing is on its way: next owners are asked for the version too, and servers without shards leave
//! ```
//!
//! A command that dies while it sends a placement leaves two placements of one version. The next rank 0 or command
//! first sends the newer placement to the servers that lack it.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::future::join_all;
use longshore_proto::{
    Epoch, Fault, FaultKind, Handover, Incarnation, Placement, PlacementChange, ServerId, Step, TierKind,
    Version,
    limits::{DEFAULT_MAX_EXPOSED, MAX_FETCHED_SHARDS},
};

use super::{
    moves::{Plan, awaits_nothing, leaving},
    prepare::{Added, Unprepared, begin_all, give_up, prepare},
};
use crate::{
    cluster::Cluster,
    error::Result,
    host,
    rank::{take, version},
    session::{Session, place_on, take_over},
};

/// Pause between two looks at servers that fetch.
const LOOK: Duration = Duration::from_millis(50);

/// Moves a job without ranks to `servers`. New servers keep the job in `tier`, or else in the present servers' tier.
/// `asked_micros` is the time of the wish.
///
/// # Errors
/// `Precondition` with field `lost` while a server is given up. `Fenced` once a rank 0 has started, which goes on with the
/// wish. `Deadline` if no shard arrives for the session's deadline. A failed call may be repeated.
pub fn move_idle(
    session: &Session,
    servers: &[String],
    tier: Option<TierKind>,
    asked_micros: u64,
) -> Result<()> {
    let cluster = &session.cluster;
    cluster.runtime.block_on(async {
        let incarnation = take(cluster).await?;
        take_over(cluster, incarnation).await?;
        session.rank.set_incarnation(incarnation);
        let version = common_version(cluster).await?;
        check_all_met(cluster)?;
        let mut idle = Idle { cluster, incarnation, version, placement: (*cluster.placement()).clone() };
        idle.end_handovers().await?;
        let (placement, wanted) = (Arc::new(idle.placement.clone()), (servers.to_vec(), tier));
        let give_up_all = async |opened: Vec<Added>| {
            join_all(opened.iter().map(|added| give_up(cluster, added, incarnation.0))).await;
        };
        let (cluster_of, exposed) = (Arc::clone(cluster), DEFAULT_MAX_EXPOSED);
        let prepared = prepare(cluster_of, placement, wanted, asked_micros, exposed, MAX_FETCHED_SHARDS);
        let mut plan = match prepared.await {
            Ok(plan) => plan,
            Err(Unprepared { error, opened }) => {
                give_up_all(opened).await;
                return Err(error);
            }
        };
        if !plan.added.is_empty() {
            let added = match begin_all(cluster, &session.rank, &plan.added, version).await {
                Ok(added) => added,
                Err(error) => {
                    give_up_all(plan.added).await;
                    return Err(error);
                }
            };
            for Added { server, peer } in plan.added.drain(..) {
                cluster.add_peer(server, peer);
                cluster.add_member(server);
            }
            idle.change(PlacementChange { added, ..PlacementChange::default() }).await?;
        }
        while let Some(change) = idle.next(&mut plan)? {
            idle.change(change).await?;
            idle.end_handovers().await?;
        }
        let change = leaving(cluster, servers).await?;
        let removed = change.removed.clone();
        if !removed.is_empty() {
            idle.change(change).await?;
        }
        join_all(
            removed.into_iter().map(|server| cluster.retire(server, incarnation, cluster.options.deadline)),
        )
        .await;
        Ok(())
    })
}

/// Refuses to move a job with a lost server: only a step's decision can give its shards to other servers.
fn check_all_met(cluster: &Cluster) -> Result<()> {
    let (placement, met) = (cluster.placement(), cluster.servers().collect::<Vec<_>>());
    let Some(lost) = placement.members().find(|member| !met.contains(member)) else { return Ok(()) };
    let remedy = "start the job's ranks: with their steps it leaves the lost server";
    let value = placement.servers[lost.0 as usize].clone();
    Err(Fault::new(FaultKind::Precondition, "lost", value, "no server of a job without ranks", remedy).into())
}

async fn common_version(cluster: &Cluster) -> Result<Version> {
    let answers = cluster.describe_all(false, cluster.options.deadline).await?;
    let versions: BTreeSet<u64> = answers.values().map(version).collect();
    match versions.first() {
        Some(&version) if versions.len() == 1 => Ok(Version(version)),
        _ => {
            let value = format!("{versions:?}");
            let remedy = "start the job's ranks: rank 0 brings the servers to one version";
            Err(Fault::new(FaultKind::Precondition, "version", value, "the same on all servers", remedy)
                .into())
        }
    }
}

/// A job while it moves.
struct Idle<'a> {
    cluster: &'a Arc<Cluster>,
    incarnation: Incarnation,
    version: Version,
    placement: Placement,
}

impl Idle<'_> {
    /// The next moves of a plan. None at its end.
    fn next(&self, plan: &mut Plan) -> Result<Option<PlacementChange>> {
        let change = plan.all(&self.placement, Step(self.version.0));
        if change != PlacementChange::default() {
            return Ok(Some(change));
        }
        match plan.is_done() {
            true => Ok(None),
            false => {
                let remedy = "ask for these servers again";
                Err(Fault::new(FaultKind::Internal, "placement", "no move is possible", "planned", remedy)
                    .into())
            }
        }
    }

    async fn change(&mut self, change: PlacementChange) -> Result<()> {
        let (step, change) = (Step(self.version.0), PlacementChange { epoch: self.next_epoch(), ..change });
        self.placement.check(&change, step)?;
        // Added and removed servers get the placement last. No such server alone must stand for a placement that no old
        // member has. A shard's next owner gets the placement after the owner before, since the next owner asks that
        // server at once.
        let gains =
            change.moves.iter().chain(&change.replicas).map(|&(shard, to)| (self.placement.owner(shard), to));
        let first = self.placement.servers.len() as u32;
        let added = (first..).map(ServerId).take(change.added.len());
        let members = || self.placement.members();
        let late = added.chain(change.removed.iter().copied());
        let order: Vec<_> =
            late.flat_map(|late| members().map(move |member| (member, late))).chain(gains).collect();
        // The change is applied with delay 0: no gradient of a later step is under way.
        let mut placement = self.placement.clone();
        placement.apply(&change, step, 0);
        self.place(placement, &order).await
    }

    /// Waits until no shard is on its way. Ranks then ask the next owners for this version too.
    async fn end_handovers(&mut self) -> Result<()> {
        if self.placement.handovers.is_empty() {
            return Ok(());
        }
        let next = self.version.next_step();
        let late = |of: &Handover| of.from_step > next;
        if self.placement.handovers.iter().any(late) {
            // A decision of a delayed job counts from a later step on. Without ranks no step is in flight, so handovers
            // can count from the next step on.
            let mut placement = Placement { epoch: self.next_epoch(), ..self.placement.clone() };
            placement.handovers.iter_mut().for_each(|of| of.from_step = of.from_step.min(next));
            self.place(placement, &[]).await?;
        }
        self.until_arrived().await?;
        let came = |of: &Handover| match of.is_replica {
            true => self.placement.replica(of.shard).unwrap_or_default(),
            false => self.placement.owner(of.shard),
        };
        // The owner before gets the placement last. Since it forgets the shard, the next owner must keep the shard
        // durably by then.
        let order: Vec<_> = self.placement.handovers.iter().map(|of| (came(of), of.before)).collect();
        let placement =
            Placement { epoch: self.next_epoch(), handovers: Vec::new(), ..self.placement.clone() };
        self.place(placement, &order).await
    }

    fn next_epoch(&self) -> Epoch {
        Epoch(self.placement.epoch.0 + 1)
    }

    /// Gives all servers a placement. In each pair of `order`, the first server gets the placement before the second.
    async fn place(&mut self, placement: Placement, order: &[(ServerId, ServerId)]) -> Result<()> {
        check_all_met(self.cluster)?;
        let mut left: Vec<ServerId> = self.cluster.servers().collect();
        while !left.is_empty() {
            let waits = |server: &ServerId| {
                order.iter().any(|(first, then)| then == server && first != then && left.contains(first))
            };
            let (mut later, mut now): (Vec<_>, Vec<_>) = left.iter().copied().partition(waits);
            if now.is_empty() {
                std::mem::swap(&mut later, &mut now);
            }
            let calls = now
                .into_iter()
                .map(|server| place_on(self.cluster, server, self.incarnation, (self.version, &placement)));
            join_all(calls).await.into_iter().collect::<Result<Vec<()>>>()?;
            left = later;
        }
        self.cluster.set_placement(placement.clone());
        self.placement = placement;
        Ok(())
    }

    async fn until_arrived(&self) -> Result<()> {
        let (mut since, mut before) = (host::Instant::now(), None);
        loop {
            let answers = self.cluster.describe_all(false, self.cluster.options.deadline).await?;
            if answers.values().all(awaits_nothing) {
                return Ok(());
            }
            let scaling = || answers.values().filter_map(|answer| answer.scaling.as_ref());
            let fetched: u64 = scaling().map(|scaling| scaling.fetched_bytes).sum();
            if before.replace(fetched) != Some(fetched) {
                since = host::Instant::now();
            }
            if since.elapsed() > self.cluster.options.deadline {
                let awaited: u32 = scaling().map(|scaling| scaling.awaited_shards).sum();
                let why = scaling().map(|scaling| scaling.failure.clone()).find(|why| !why.is_empty());
                let value = format!("{awaited} shards ({})", why.unwrap_or_else(|| "sent too slowly".into()));
                let limit = format!("one within {} s", self.cluster.options.deadline.as_secs());
                let remedy = "ask again once the servers reach each other; what has arrived stays";
                return Err(Fault::new(FaultKind::Deadline, "awaited_shards", value, limit, remedy).into());
            }
            host::sleep(LOOK).await;
        }
    }
}
