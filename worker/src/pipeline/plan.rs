//! Which server shall have which shard: pure functions of a placement and of the wanted servers. Rank 0 carries the plans
//! out (`moves`), and `longshore scale` computes the same ones to show them.

use std::collections::BTreeMap;

use longshore_proto::{
    Epoch, Fault, FaultKind, Layout, NO_SERVER, Placement, PlacementChange, ServerId, ShardId, Step,
};

/// Moves that lead to other servers: new owners of shards, new replicas after them, and the placement at the end.
pub struct Moved {
    pub moves: Vec<(ShardId, ServerId)>,
    pub replicas: Vec<(ShardId, ServerId)>,
    pub placement: Placement,
}

/// Plans the moves to the wanted servers. `added` are the addresses of those that are new, in the order of their numbers.
pub fn plan_moves(placement: &Placement, layout: &Layout, wanted: &[ServerId], added: &[String]) -> Moved {
    let mut target = placement.clone();
    target.servers.extend(added.iter().cloned());
    if placement.unreplicated() > 0
        && let Some(moved) = replicas_first(&target, layout, wanted)
    {
        return moved;
    }
    let moves = assign(placement, layout, wanted);
    for &(shard, to) in &moves {
        target.owners[shard.index()] = to;
        if target.replica(shard) == Some(to) {
            target.replicas[shard.index()] = NO_SERVER;
        }
    }
    let replicas = replicate(&target, layout, wanted);
    for &(shard, to) in &replicas {
        target.replicas[shard.index()] = to;
    }
    Moved { moves, replicas, placement: target }
}

/// Plans replicas of the shards where they are, and then moves of shards to servers that have no replica of them. None if
/// that leaves replicas uneven, or some server cannot be left.
fn replicas_first(placement: &Placement, layout: &Layout, wanted: &[ServerId]) -> Option<Moved> {
    let mut target = placement.clone();
    let replicas = replicate(&target, layout, wanted);
    for &(shard, to) in &replicas {
        target.replicas[shard.index()] = to;
    }
    let may_take = |server: ServerId, shard: ShardId| target.replica(shard) != Some(server);
    let moves = assign_among(&target, layout, wanted, may_take)?;
    for &(shard, to) in &moves {
        target.owners[shard.index()] = to;
    }
    let is_even = replicate(&target, layout, wanted).is_empty();
    is_even.then_some(Moved { moves, replicas, placement: target })
}

/// Chooses the moves after which the wanted servers own about as many elements each, and no other server owns any.
/// Forward order is kept mixed over the servers.
fn assign(placement: &Placement, layout: &Layout, wanted: &[ServerId]) -> Vec<(ShardId, ServerId)> {
    assign_among(placement, layout, wanted, |_, _| true).unwrap_or_default()
}

/// Moves of [`assign`], where a server takes only some of the shards. None if no server takes a shard that must move.
fn assign_among(
    placement: &Placement,
    layout: &Layout,
    wanted: &[ServerId],
    may_take: impl Fn(ServerId, ShardId) -> bool,
) -> Option<Vec<(ShardId, ServerId)>> {
    let shards: Vec<ShardId> = (0..layout.shards()).map(ShardId).collect();
    let length = |shard: ShardId| layout.shard_len(shard);
    let total: u64 = shards.iter().map(|&shard| length(shard)).sum();
    let share = total / wanted.len().max(1) as u64;
    let load = |&server: &ServerId| (server, placement.owned(server).into_iter().map(length).sum());
    let mut loads: BTreeMap<ServerId, u64> = wanted.iter().map(load).collect();
    let (mut leaving, mut free) = (Vec::new(), Vec::new());
    let may_go =
        |&shard: &ShardId| wanted.iter().any(|&server| loads[&server] < share && may_take(server, shard));
    for &server in wanted {
        let owned = placement.owned(server);
        let (load, count) = (loads[&server], owned.len() as u64);
        let mean = (load / count.max(1)).max(1);
        let owned: Vec<ShardId> = owned.into_iter().filter(may_go).collect();
        let surplus = ((load.saturating_sub(share) / mean) as usize).min(owned.len());
        free.extend((0..surplus).map(|at| owned[at * owned.len() / surplus]));
    }
    leaving.extend(shards.iter().copied().filter(|&shard| !loads.contains_key(&placement.owner(shard))));
    let mut all: Vec<(ShardId, bool)> = leaving.into_iter().map(|shard| (shard, true)).collect();
    all.extend(free.into_iter().map(|shard| (shard, false)));
    all.sort_unstable();
    let mut moves = Vec::new();
    for (shard, must) in all {
        let owner = placement.owner(shard);
        let others = wanted.iter().copied().filter(|&server| server != owner && may_take(server, shard));
        let Some(to) = others.min_by_key(|server| loads[server]) else {
            if must {
                return None;
            }
            continue;
        };
        let bytes = length(shard);
        if !must && loads[&to] + bytes > loads[&owner] {
            continue;
        }
        *loads.entry(to).or_default() += bytes;
        if let Some(load) = loads.get_mut(&owner) {
            *load -= bytes;
        }
        moves.push((shard, to));
    }
    Some(moves)
}

/// Returns the job's servers if some shard lacks its replica, and another server could have one.
pub(super) fn without_replicas(placement: &Placement) -> Vec<String> {
    let lacks = placement.unreplicated() > 0 && placement.members().count() > 1;
    if lacks { placement.addresses().map(str::to_string).collect() } else { Vec::new() }
}

/// Chooses the new replicas after which each shard has one, on a server that does not own it, and the wanted servers have
/// about as many elements of them each. A single server has no replicas.
fn replicate(placement: &Placement, layout: &Layout, wanted: &[ServerId]) -> Vec<(ShardId, ServerId)> {
    let mut loads: BTreeMap<ServerId, u64> = wanted.iter().map(|&server| (server, 0)).collect();
    let mut replicas = placement.replicas.clone();
    let shards = || (0..).map(ShardId).zip(&placement.owners);
    let stays = |replica: ServerId, owner: ServerId| wanted.contains(&replica) && replica != owner;
    for (shard, &owner) in shards().take(replicas.len()) {
        let replica = replicas[shard.index()];
        if stays(replica, owner) {
            *loads.entry(replica).or_default() += layout.shard_len(shard);
        }
    }
    let share = layout.elements() / wanted.len().max(1) as u64;
    for (shard, &owner) in shards().take(replicas.len()) {
        let (replica, elements) = (replicas[shard.index()], layout.shard_len(shard));
        let stays = stays(replica, owner);
        if stays && loads[&replica] <= share + elements {
            continue;
        }
        let others = wanted.iter().copied().filter(|&server| server != owner);
        let least = others.min_by_key(|server| loads[server]).unwrap_or(NO_SERVER);
        if stays && loads.get(&least).is_none_or(|load| load + elements >= loads[&replica]) {
            continue;
        }
        if stays {
            loads.entry(replica).and_modify(|load| *load -= elements);
        }
        loads.entry(least).and_modify(|load| *load += elements);
        replicas[shard.index()] = least;
    }
    let changed = (0..).map(ShardId).zip(replicas).zip(&placement.replicas);
    changed.filter(|((_, new), old)| new != *old).map(|(change, _)| change).collect()
}

/// Gives broken shards to their other holders. A shard that a change moves now is given with a later decision: ranks ask
/// its other holder meanwhile.
///
/// # Errors
/// A shard without another holder.
pub(super) fn heal(
    placement: &Placement,
    broken: &[(ShardId, ServerId)],
    step: Step,
) -> Result<PlacementChange, Fault> {
    let mut healed = PlacementChange::default();
    for &(shard, server) in broken {
        let is_owner = placement.owner(shard) == server;
        let other = if is_owner { placement.replica(shard) } else { Some(placement.owner(shard)) };
        let whole = other.filter(|&other| !broken.contains(&(shard, other)));
        let Some(other) = whole else {
            let limit = "whole on one of its servers: bits have flipped on both";
            let remedy = "restore the last checkpoint, and test the memory of both hosts";
            return Err(Fault::new(FaultKind::Corrupt, "state", shard, limit, remedy));
        };
        let epoch = Epoch(placement.epoch.0 + 1);
        let change = match is_owner {
            true => PlacementChange { moves: vec![(shard, other)], epoch, ..PlacementChange::default() },
            false => {
                PlacementChange { replicas: vec![(shard, NO_SERVER)], epoch, ..PlacementChange::default() }
            }
        };
        if placement.check(&change, step).is_ok() {
            healed.moves.extend(change.moves);
            healed.replicas.extend(change.replicas);
        }
    }
    Ok(healed)
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use longshore_proto::{JobName, JobSpec, Param, limits::BLOCK_ELEMENTS};

    use super::*;

    pub(in crate::pipeline) fn layout(shards: u64) -> Layout {
        let params = vec![Param { name: "all".into(), shape: vec![shards * BLOCK_ELEMENTS], group: 0 }];
        let spec = JobSpec::new(JobName::parse("name", "moved").unwrap(), params);
        JobSpec { shard_elements: BLOCK_ELEMENTS, ..spec }.validate().unwrap()
    }

    fn owned(placement: &Placement, moves: &[(ShardId, ServerId)]) -> BTreeMap<ServerId, Vec<u32>> {
        let mut after = placement.clone();
        moves.iter().for_each(|&(shard, to)| after.owners[shard.index()] = to);
        let servers: BTreeSet<ServerId> = after.owners.iter().copied().collect();
        let of = |server| (server, after.owned(server).into_iter().map(|shard| shard.0).collect());
        servers.into_iter().map(of).collect()
    }

    #[test]
    fn new_servers_get_their_share_from_all_parts_of_the_model() {
        let (layout, placement) = (layout(16), Placement::striped(vec!["a".into(), "b".into()], 16));
        let moves = assign(&placement, &layout, &[0, 1, 2, 3].map(ServerId));
        let after = owned(&placement, &moves);
        assert_eq!((moves.len(), after.values().map(Vec::len).max()), (8, Some(4)));
        let of_new = &after[&ServerId(2)];
        assert!(
            of_new.first().is_some_and(|first| *first < 4) && of_new.last().is_some_and(|last| *last >= 10)
        );
    }

    #[test]
    fn every_shard_gets_a_replica_elsewhere_and_all_servers_about_as_many() {
        let (layout, names) = (layout(24), ["a", "b", "c"].map(String::from).to_vec());
        let placement = Placement::striped(names, 24).with_replicas();
        let check = |placement: &Placement, servers: &[u32], most: usize| {
            for shard in (0..24).map(ShardId) {
                assert_ne!(placement.replica(shard), Some(placement.owner(shard)));
            }
            let wanted: Vec<ServerId> = servers.iter().copied().map(ServerId).collect();
            let added: Vec<String> =
                (3..=servers.iter().copied().max().unwrap_or(0)).map(|of| of.to_string()).collect();
            let moved = plan_moves(placement, &layout, &wanted, &added);
            for server in &wanted {
                let replicas = moved.placement.replicas.iter().filter(|&of| of == server).count();
                assert!(replicas <= most, "{replicas} of {server}");
            }
            assert_eq!(moved.placement.unreplicated(), if servers.len() > 1 { 0 } else { 24 });
            moved
        };
        assert!(check(&placement, &[0, 1, 2], 8).replicas.is_empty());
        let lost = PlacementChange { lost: vec![ServerId(1)], epoch: Epoch(2), ..PlacementChange::default() };
        assert_eq!(placement.check(&lost, Step(5)), Ok(()));
        let mut left = placement.clone();
        left.apply(&lost, Step(5), 0);
        assert_eq!((left.unreplicated(), left.held(ServerId(1)).len()), (16, 0));
        check(&left, &[0, 2], 13);
        check(&left, &[0, 2, 3], 9);
        check(&left, &[2], 0);
        let last = PlacementChange {
            lost: vec![ServerId(0), ServerId(2)],
            epoch: Epoch(3),
            ..PlacementChange::default()
        };
        assert!(left.check(&last, Step(9)).unwrap_err().to_string().contains("the last of"));
    }

    #[test]
    fn the_other_holder_of_a_broken_shard_goes_on_with_it() {
        let names = ["a", "b", "c"].map(String::from).to_vec();
        let mut placement = Placement::striped(names, 6).with_replicas();
        let (shard, step) = (ShardId(1), Step(5));
        let (owner, replica) = (placement.owner(shard), placement.replica(shard).unwrap());
        let of_replica = heal(&placement, &[(shard, replica)], step).unwrap();
        assert_eq!((of_replica.moves, of_replica.replicas), (vec![], vec![(shard, NO_SERVER)]));
        assert!(heal(&placement, &[(shard, owner), (shard, replica)], step).is_err());
        let healed = heal(&placement, &[(shard, owner)], step).unwrap();
        assert_eq!((&healed.moves, healed.replicas.len()), (&vec![(shard, replica)], 0));
        placement.apply(&PlacementChange { epoch: Epoch(2), ..healed }, step, 0);
        assert_eq!((placement.owner(shard), placement.replica(shard)), (replica, None));
        assert!(heal(&placement, &[(shard, replica)], Step(6)).is_err());
        // A shard that moves now is given to its other holder later.
        let change = PlacementChange {
            replicas: vec![(ShardId(5), ServerId(0))],
            epoch: Epoch(3),
            ..Default::default()
        };
        assert_ne!(placement.replica(ShardId(5)), Some(ServerId(0)));
        placement.apply(&change, Step(6), 0);
        let owner = placement.owner(ShardId(5));
        assert_eq!(heal(&placement, &[(ShardId(5), owner)], Step(7)), Ok(PlacementChange::default()));
        assert_ne!(heal(&placement, &[(ShardId(5), owner)], Step(20)), Ok(PlacementChange::default()));
    }

    #[test]
    fn a_leaving_server_gives_all_shards() {
        let (layout, placement) =
            (layout(9), Placement::striped(["a", "b", "c"].map(String::from).into(), 9));
        let moves = assign(&placement, &layout, &[0, 1].map(ServerId));
        assert!(moves.iter().all(|(shard, _)| shard.0 % 3 == 2) && moves.len() == 3, "{moves:?}");
        assert_eq!(assign(&placement, &layout, &[0, 1, 2].map(ServerId)), Vec::new());
    }
}
