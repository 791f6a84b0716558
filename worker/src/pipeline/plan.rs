//! Plans the shards of each server: pure functions of a placement and the wanted servers. Rank 0 carries plans out
//! (`moves`), and `longshore scale` shows them first.

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

/// Plans the moves to the wanted servers. `added` are the addresses of the new servers, in the order of their numbers.
/// `room` has the number of further shards that fit on a server. A server without an entry has no limit. If no plan
/// keeps the limits, the result ignores them, and a server then refuses and names the shortage.
pub fn plan_moves(
    placement: &Placement,
    layout: &Layout,
    wanted: &[ServerId],
    added: &[String],
    room: &BTreeMap<ServerId, usize>,
) -> Moved {
    let mut target = placement.clone();
    target.servers.extend(added.iter().cloned());
    let plan = |left| plan_within(&target, layout, wanted, &Room { before: placement, left });
    let moved = plan(room.clone()).or_else(|| plan(BTreeMap::new()));
    moved.unwrap_or(Moved { moves: Vec::new(), replicas: Vec::new(), placement: target.clone() })
}

/// Room of servers for shards that they do not hold yet.
#[derive(Clone)]
struct Room<'a> {
    /// The placement before any move.
    before: &'a Placement,
    /// Number of shards for which each server still has room. A server without an entry has no limit.
    left: BTreeMap<ServerId, usize>,
}

impl Room<'_> {
    fn left(&self, server: ServerId) -> usize {
        self.left.get(&server).copied().unwrap_or(usize::MAX)
    }

    fn has(&self, server: ServerId, shard: ShardId) -> bool {
        self.before.holds(server, shard) || self.left(server) > 0
    }

    fn take(&mut self, server: ServerId, shard: ShardId) {
        if let (false, Some(left)) = (self.before.holds(server, shard), self.left.get_mut(&server)) {
            *left = left.saturating_sub(1);
        }
    }

    /// Returns the number of shards that fit on the wanted servers, beside the shards that must leave other servers.
    fn spare(&self, placement: &Placement, wanted: &[ServerId]) -> usize {
        let holders = placement.owners.iter().chain(&placement.replicas);
        let leaving = holders.filter(|server| !wanted.contains(server)).count();
        let all = wanted.iter().map(|&server| self.left(server)).fold(0, usize::saturating_add);
        all.saturating_sub(leaving)
    }
}

/// Returns None if no plan was found that keeps the limits of `room`.
fn plan_within(placement: &Placement, layout: &Layout, wanted: &[ServerId], room: &Room) -> Option<Moved> {
    if wanted.iter().any(|&server| room.left(server) == 0 && placement.held(server).is_empty()) {
        return None;
    }
    if placement.unreplicated() > 0
        && let Some(moved) = replicas_first(placement, layout, wanted, &mut room.clone())
    {
        return Some(moved);
    }
    let (mut target, mut room) = (placement.clone(), room.clone());
    let moves = assign_among(placement, layout, wanted, &mut room, |_, _| true)?;
    for &(shard, to) in &moves {
        target.owners[shard.index()] = to;
        if target.replica(shard) == Some(to) {
            target.replicas[shard.index()] = NO_SERVER;
        }
    }
    let replicas = replicate(&target, layout, wanted, &mut room);
    for &(shard, to) in &replicas {
        target.replicas[shard.index()] = to;
    }
    let is_legal = wanted.len() == 1 || target.unreplicated() == 0;
    is_legal.then_some(Moved { moves, replicas, placement: target })
}

/// Plans the replicas first, beside the present owners. Then plans moves to servers without a replica of the shard.
/// None if replicas stay uneven, or if a server cannot be emptied.
fn replicas_first(
    placement: &Placement,
    layout: &Layout,
    wanted: &[ServerId],
    room: &mut Room,
) -> Option<Moved> {
    let mut target = placement.clone();
    let replicas = replicate(&target, layout, wanted, room);
    for &(shard, to) in &replicas {
        target.replicas[shard.index()] = to;
    }
    let may_take = |server: ServerId, shard: ShardId| target.replica(shard) != Some(server);
    let moves = assign_among(&target, layout, wanted, room, may_take)?;
    for &(shard, to) in &moves {
        target.owners[shard.index()] = to;
    }
    let is_even = replicate(&target, layout, wanted, room).is_empty();
    let is_legal = wanted.len() == 1 || target.unreplicated() == 0;
    (is_even && is_legal).then_some(Moved { moves, replicas, placement: target })
}

/// Returns even shares of the elements. A server whose cap is below its share has its cap, and the others share the rest.
/// None if the caps together are below `total`.
fn shares(total: u64, caps: &BTreeMap<ServerId, u64>) -> Option<BTreeMap<ServerId, u64>> {
    if caps.values().fold(0, |sum: u64, &cap| sum.saturating_add(cap)) < total {
        return None;
    }
    let (mut shares, mut rest, mut open) = (BTreeMap::new(), total, caps.clone());
    loop {
        let level = rest / open.len().max(1) as u64;
        let full: Vec<(ServerId, u64)> = open.extract_if(.., |_, cap| *cap < level).collect();
        if full.is_empty() {
            shares.extend(open.into_keys().map(|server| (server, level)));
            return Some(shares);
        }
        rest -= full.iter().map(|(_, cap)| cap).sum::<u64>();
        shares.extend(full);
    }
}

/// Chooses moves that empty all other servers, and give the wanted servers about equal elements within their room.
/// Each server keeps shards from all parts of the model. None if no server takes a shard that must move.
fn assign_among(
    placement: &Placement,
    layout: &Layout,
    wanted: &[ServerId],
    room: &mut Room,
    may_take: impl Fn(ServerId, ShardId) -> bool,
) -> Option<Vec<(ShardId, ServerId)>> {
    let shards: Vec<ShardId> = (0..layout.shards()).map(ShardId).collect();
    let length = |shard: ShardId| layout.shard_len(shard);
    let total: u64 = shards.iter().map(|&shard| length(shard)).sum();
    let longest = shards.iter().map(|&shard| length(shard)).max().unwrap_or_default();
    let load = |&server: &ServerId| (server, placement.owned(server).into_iter().map(length).sum());
    let mut loads: BTreeMap<ServerId, u64> = wanted.iter().map(load).collect();
    // A replica becomes the owner without more room.
    let cap = |(&server, load): (&ServerId, &u64)| {
        let held: u64 = room.before.held(server).into_iter().map(length).sum();
        let more = u64::try_from(room.left(server)).unwrap_or(u64::MAX).saturating_mul(longest);
        (server, held.max(*load).saturating_add(more))
    };
    let shares = shares(total, &loads.iter().map(cap).collect())?;
    let (mut leaving, mut free) = (Vec::new(), Vec::new());
    let may_go = |&shard: &ShardId| {
        let gets = |&server: &ServerId| loads[&server] < shares[&server] && room.has(server, shard);
        wanted.iter().any(|server| gets(server) && may_take(*server, shard))
    };
    for &server in wanted {
        let owned = placement.owned(server);
        let (load, count) = (loads[&server], owned.len() as u64);
        let mean = (load / count.max(1)).max(1);
        let owned: Vec<ShardId> = owned.into_iter().filter(may_go).collect();
        let surplus = load.saturating_sub(shares[&server]).div_ceil(mean);
        let surplus = (surplus as usize).min(owned.len());
        free.extend((0..surplus).map(|at| owned[at * owned.len() / surplus]));
    }
    leaving.extend(shards.iter().copied().filter(|&shard| !loads.contains_key(&placement.owner(shard))));
    let mut all: Vec<(ShardId, bool)> = leaving.into_iter().map(|shard| (shard, true)).collect();
    all.extend(free.into_iter().map(|shard| (shard, false)));
    all.sort_unstable();
    let (mut moves, mut spare) = (Vec::new(), room.spare(placement, wanted));
    for (shard, must) in all {
        let owner = placement.owner(shard);
        let takes = |&server: &ServerId| {
            server != owner && room.has(server, shard) && may_take(server, shard) && (must || spare > 0)
        };
        // The load relative to the share decides. So a server with less room also gets shards from all parts of the
        // model.
        let fill = |server: &ServerId| (u128::from(loads[server]) << 64) / u128::from(shares[server].max(1));
        let Some(to) = wanted.iter().copied().filter(takes).min_by_key(fill) else {
            if must {
                return None;
            }
            continue;
        };
        let bytes = length(shard);
        if !must && loads[&to] + bytes >= loads[&owner] {
            continue;
        }
        spare -= usize::from(!must && !room.before.holds(to, shard)).min(spare);
        room.take(to, shard);
        *loads.entry(to).or_default() += bytes;
        if let Some(load) = loads.get_mut(&owner) {
            *load -= bytes;
        }
        moves.push((shard, to));
    }
    Some(moves)
}

/// Refuses wanted servers that are all witnesses, and any witness of a job without replicas. `holders` are the wanted
/// servers that keep shards.
///
/// # Errors
/// `Precondition` with field `servers`.
pub fn check_holders(replicas: u32, holders: &[ServerId], wanted: &[String]) -> Result<(), Fault> {
    let (what, limit, remedy) = match holders.len() {
        0 => ("witnesses alone", "a server that keeps shards", "name other servers too"),
        some if some < wanted.len() && replicas == 1 => {
            ("with a witness", "servers that keep shards, in a job without replicas", "leave the witness out")
        }
        _ => return Ok(()),
    };
    let value = format!("{}, {what}", wanted.join(","));
    Err(Fault::new(FaultKind::Precondition, "servers", value, limit, remedy))
}

/// Returns the job's servers if some shard lacks its replica, and a second server could hold it.
pub(super) fn without_replicas(placement: &Placement) -> Vec<String> {
    let lacks = placement.unreplicated() > 0 && placement.members().count() > 1;
    if lacks { placement.addresses().map(str::to_string).collect() } else { Vec::new() }
}

/// Chooses new replicas for shards without one, on another server than the owner. The wanted servers then hold about
/// equal elements of replicas. A single server gets none, and neither does a shard for which no server has room.
fn replicate(
    placement: &Placement,
    layout: &Layout,
    wanted: &[ServerId],
    room: &mut Room,
) -> Vec<(ShardId, ServerId)> {
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
    let mut spare = room.spare(placement, wanted);
    for (shard, &owner) in shards().take(replicas.len()) {
        let (replica, elements) = (replicas[shard.index()], layout.shard_len(shard));
        let stays = stays(replica, owner);
        if stays && (loads[&replica] <= share + elements || spare == 0) {
            continue;
        }
        let others = wanted.iter().copied().filter(|&server| server != owner && room.has(server, shard));
        let least = others.min_by_key(|server| loads[server]).unwrap_or(NO_SERVER);
        if stays && loads.get(&least).is_none_or(|load| load + elements >= loads[&replica]) {
            continue;
        }
        if stays {
            loads.entry(replica).and_modify(|load| *load -= elements);
            spare -= usize::from(!room.before.holds(least, shard)).min(spare);
        }
        room.take(least, shard);
        loads.entry(least).and_modify(|load| *load += elements);
        replicas[shard.index()] = least;
    }
    let changed = (0..).map(ShardId).zip(replicas).zip(&placement.replicas);
    changed.filter(|((_, new), old)| new != *old).map(|(change, _)| change).collect()
}

/// Gives broken shards to their other holders. A shard that moves now is given with a later decision, and ranks ask
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
    use proptest::prelude::*;

    use super::*;

    pub(in crate::pipeline) fn layout(shards: u64) -> Layout {
        let params = vec![Param { name: "all".into(), shape: vec![shards * BLOCK_ELEMENTS], group: 0 }];
        let spec = JobSpec::new(JobName::parse("name", "moved").unwrap(), params);
        JobSpec { shard_elements: BLOCK_ELEMENTS, ..spec }.validate().unwrap()
    }

    /// Moves between servers without limits.
    fn assign(placement: &Placement, layout: &Layout, wanted: &[ServerId]) -> Vec<(ShardId, ServerId)> {
        let mut room = Room { before: placement, left: BTreeMap::new() };
        assign_among(placement, layout, wanted, &mut room, |_, _| true).unwrap()
    }

    fn owned(placement: &Placement, moves: &[(ShardId, ServerId)]) -> BTreeMap<ServerId, Vec<u32>> {
        let mut after = placement.clone();
        moves.iter().for_each(|&(shard, to)| after.owners[shard.index()] = to);
        let servers: BTreeSet<ServerId> = after.owners.iter().copied().collect();
        let of = |server| (server, after.owned(server).into_iter().map(|shard| shard.0).collect());
        servers.into_iter().map(of).collect()
    }

    #[test]
    fn a_witness_is_a_server_of_jobs_with_replicas_and_never_the_only_one() {
        let wanted = ["a", "witness"].map(String::from);
        let check = |replicas, holders: &[u32]| {
            let holders: Vec<ServerId> = holders.iter().copied().map(ServerId).collect();
            check_holders(replicas, &holders, &wanted).map_err(|fault| fault.value)
        };
        assert_eq!((check(2, &[0]), check(1, &[0, 1])), (Ok(()), Ok(())));
        assert_eq!(check(1, &[0]), Err("a,witness, with a witness".into()));
        assert_eq!(check(2, &[]), Err("a,witness, witnesses alone".into()));
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
            let moved = plan_moves(placement, &layout, &wanted, &added, &BTreeMap::new());
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

    #[test]
    fn a_server_with_less_room_has_what_fits_and_the_others_share_the_rest() {
        let (layout, placement) = (layout(24), Placement::striped(vec!["a".into(), "b".into()], 24));
        let (wanted, added) = ([0, 1, 2, 3].map(ServerId), ["c".into(), "d".into()]);
        let plan = |room: &[usize]| {
            let room = wanted.into_iter().zip(room.iter().copied()).collect();
            plan_moves(&placement, &layout, &wanted, &added, &room)
        };
        let counts = |moved: &Moved| wanted.map(|server| moved.placement.owned(server).len());
        let moved = plan(&[0, 0, 2, 90]);
        assert_eq!((counts(&moved), moved.moves.len()), ([7, 8, 2, 7], 9));
        // Shards of the server with less room are not all from the model's first layers.
        let of_c = moved.placement.owned(ServerId(2));
        assert!(of_c[1].0 - of_c[0].0 > 8, "{of_c:?}");
        let even = plan_moves(&placement, &layout, &wanted, &added, &BTreeMap::new());
        assert_eq!((counts(&even), plan(&[90; 4]).moves), ([6; 4], even.moves));
        // Without a plan within all limits the shares are even, and servers name the shortage.
        assert_eq!(counts(&plan(&[90, 90, 0, 90])), [6; 4]);
    }

    /// Owners of shards, each server's room, and whether the job stays on the server.
    fn cases() -> impl Strategy<Value = (Vec<u32>, Vec<usize>, Vec<bool>)> {
        let room = prop_oneof![4 => 0..40usize, 1 => Just(usize::MAX)];
        let servers = prop::collection::vec((room, prop::bool::weighted(0.8)), 2..7);
        (2..48usize, servers).prop_flat_map(|(shards, servers)| {
            let owners = prop::collection::vec(0..servers.len() as u32, shards);
            let (rooms, stays) = servers.into_iter().unzip();
            (owners, Just(rooms), Just(stays))
        })
    }

    /// Checks a plan. Each shard is on one wanted server, no server exceeds its room, shares are even, and moves are
    /// few.
    fn check(owners: &[u32], rooms: &[usize], stays: &[bool], has_replicas: bool) {
        let (layout, all) = (layout(owners.len() as u64), (0..rooms.len() as u32).map(ServerId));
        let shards = layout.shards() as usize;
        let names = all.clone().map(|server| server.to_string()).collect();
        let owners = owners.iter().copied().map(ServerId).collect();
        let placement = Placement { owners, ..Placement::striped(names, layout.shards()) };
        let placement = if has_replicas { placement.with_replicas() } else { placement };
        let mut wanted: Vec<ServerId> = all.clone().filter(|server| stays[server.0 as usize]).collect();
        if wanted.is_empty() {
            wanted.push(ServerId(0));
        }
        wanted.truncate(shards);
        let room = Room { before: &placement, left: all.clone().zip(rooms.iter().copied()).collect() };
        let copies = if has_replicas && wanted.len() > 1 { 2 } else { 1 };
        let Some(moved) = plan_within(&placement, &layout, &wanted, &room) else {
            let held = |server: ServerId| placement.held(server).len();
            let places = wanted.iter().map(|&server| held(server).saturating_add(room.left(server)));
            let is_bare = wanted.iter().any(|&server| held(server) == 0 && room.left(server) == 0);
            // Replicas may fit in sum, and yet on no other server than the owner.
            assert!(is_bare || has_replicas || places.fold(0, usize::saturating_add) < shards);
            return;
        };
        let then = &moved.placement;
        for shard in (0..layout.shards()).map(ShardId) {
            assert!(wanted.contains(&then.owner(shard)), "{shard} is on no wanted server");
            assert_ne!(then.replica(shard), Some(then.owner(shard)));
            assert_eq!(then.replica(shard).is_some(), copies == 2);
        }
        let left = |server: ServerId| {
            let gained = then.held(server).into_iter().filter(|&shard| !placement.holds(server, shard));
            room.left(server).checked_sub(gained.count()).expect("no more than there is room for")
        };
        let least = wanted.iter().filter(|&&server| left(server) > 0 && !has_replicas);
        let least = least.map(|&server| then.owned(server).len()).min().unwrap_or(shards);
        let most = wanted.iter().map(|&server| then.owned(server).len()).max().unwrap_or_default();
        assert!(most <= least + 1, "{most} shards, and {least} on a server with room");
        let share = |server: &ServerId| if wanted.contains(server) { shards / wanted.len() } else { 0 };
        let surplus = all.map(|server| placement.owned(server).len().saturating_sub(share(&server)));
        assert!(moved.moves.len() <= surplus.sum() || has_replicas, "{:?}", moved.moves);
    }

    proptest! {
        #[test]
        fn no_server_gets_more_than_it_has_room_for((owners, rooms, stays) in cases(), has_replicas: bool) {
            check(&owners, &rooms, &stays, has_replicas);
        }
    }
}
