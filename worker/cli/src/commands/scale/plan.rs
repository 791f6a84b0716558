//! The moves of a wish, computed as rank 0 does, and the memory that they take of each server.

use std::collections::BTreeMap;

use longshore_engine::{admission::Need, tier::Storage};
use longshore_proto::{
    Fault, FaultKind, JobSpec, Layout, Lifetime, NO_SERVER, Placement, ServerId, ShardId, TierKind,
};
use longshore_wire::{Wire, v1};
use longshore_worker::{
    pipeline::{Moved, check_holders, plan_moves, wanted_tier},
    session::is_loading,
};
use serde_json::json;

use super::Seen;
use crate::{
    access::Access,
    servers::{PROMPTLY, Servers, brief},
    sizes::human,
};

pub(super) struct Plan {
    /// Number of shards that move, and the bytes of their state.
    pub(super) shards: usize,
    pub(super) bytes: u64,
    rows: Vec<Row>,
}

/// A server of the job before or after the moves.
struct Row {
    address: String,
    now: Part,
    then: Part,
    /// Memory that the server reserves before anything moves.
    takes: u64,
    /// Memory that the server has for the job. None for a server that the job leaves.
    free: Option<u64>,
    /// Refusal of a new server whose file systems of the job's tier cannot take its shards.
    lacks: Option<Fault>,
}

/// Number of a server's shards, and the bytes of their state.
#[derive(Clone, Copy, Default)]
struct Part {
    shards: usize,
    bytes: u64,
}

impl Plan {
    /// Plans the moves to the servers of `request`. The job's servers check the request, and change nothing.
    pub(super) fn make(
        members: &Servers,
        seen: &Seen,
        request: &v1::ScaleRequest,
        access: &Access,
    ) -> anyhow::Result<Plan> {
        let placement = &seen.placement;
        let stays = |answer: &&v1::DescribeResponse| {
            let address = placement.servers.get(answer.server as usize);
            address.is_some_and(|address| request.servers.contains(address))
        };
        let tier = |answer: &v1::DescribeResponse| TierKind::from_number(answer.tier);
        let tiers = seen.answers.iter().filter(stays).filter_map(tier);
        let tiers = tiers.chain(TierKind::from_number(request.tier)).collect();
        let spec =
            JobSpec { tier: wanted_tier(tiers, seen.answers.iter().filter_map(tier))?, ..seen.spec.clone() };
        let layout = spec.validate()?;
        members.each(async |mut admin| admin.scale(request.clone()).await)?;
        let number = |address: &String| {
            placement.members().find(|server| placement.servers[server.0 as usize] == *address)
        };
        let mut next = placement.servers.len() as u32;
        let known = |address: &&String| number(address).is_none();
        let added: Vec<String> = request.servers.iter().filter(known).cloned().collect();
        let wanted: Vec<ServerId> = request
            .servers
            .iter()
            .map(|address| {
                number(address).unwrap_or_else(|| {
                    next += 1;
                    ServerId(next - 1)
                })
            })
            .collect();
        let free = free(request, &spec, access)?;
        check_added(&added, &free, placement)?;
        let room = wanted.iter().zip(&request.servers);
        let room = room.filter_map(|(server, address)| Some((*server, free.get(address)?.room?))).collect();
        let keeps = |address: &String| free.get(address).is_none_or(|of| !of.is_witness);
        let holders = wanted.iter().zip(&request.servers).filter(|(_, address)| keeps(address));
        let holders: Vec<ServerId> = holders.map(|(server, _)| *server).collect();
        check_holders(spec.replicas, &holders, &request.servers)?;
        if spec.replicas > 1 && holders.len() == 1 {
            say_aside!(
                "one server keeps the shards of {} then: none has a replica, and its loss loses steps",
                spec.name
            );
        }
        let Moved { mut moves, replicas, placement: target } =
            plan_moves(placement, &layout, &holders, &added, &room);
        moves.extend(replicas.into_iter().filter(|(_, to)| *to != NO_SERVER));
        let part = |placement: &Placement, server| Part::of(&spec, &layout, placement, server);
        let mut rows: Vec<Row> = Vec::new();
        for (server, address) in wanted.iter().zip(&request.servers) {
            let mut gains = target.held(*server);
            gains.retain(|&shard| !placement.holds(*server, shard));
            let need = Need::of(&spec, &layout, &gains, &Storage::default());
            // A server of the job has its buffers and connections already.
            let takes = if number(address).is_some() {
                need.total() - need.transfers - need.buffers
            } else {
                need.total()
            };
            let (now, then) = (part(placement, *server), part(&target, *server));
            let of = free.get(address);
            let room = of.filter(|_| number(address).is_none()).and_then(|of| of.room);
            rows.push(Row {
                address: address.clone(),
                now,
                then,
                takes,
                free: of.map(|of| of.bytes),
                lacks: room.filter(|room| gains.len() > *room).and_then(|room| lacks(&spec, address, room)),
            });
        }
        for server in placement.members().filter(|server| !wanted.contains(server)) {
            let address = placement.servers[server.0 as usize].clone();
            let now = part(placement, server);
            rows.push(Row { address, now, then: Part::default(), takes: 0, free: None, lacks: None });
        }
        let bytes = moves.iter().map(|(shard, _)| state(&spec, &layout, &[*shard])).sum();
        Ok(Plan { shards: moves.len(), bytes, rows })
    }

    /// Refuses a plan that asks a server for more memory or space than it has.
    pub(super) fn check_fits(&self) -> Result<(), Fault> {
        let Some(row) = self.rows.iter().find(|row| !row.fits()) else { return Ok(()) };
        if let (true, Some(lacks)) = (row.has_memory(), &row.lacks) {
            return Err(lacks.clone());
        }
        let (then, free) = (row.then.shards, row.free.unwrap_or_default());
        let value = format!("{} bytes for {then} shards on {}", row.takes, row.address);
        let remedy = "raise --memory there, name more servers, or delete another job";
        Err(Fault::new(
            FaultKind::Exhausted,
            "memory",
            value,
            format!("at most {free}, which are free"),
            remedy,
        ))
    }

    /// Returns the moved shards and bytes, from what servers had fetched before and have now. Moves of an earlier wish may
    /// end meanwhile.
    pub(super) fn moved(&self, before: (u64, u64), now: (u64, u64)) -> (usize, u64) {
        let (shards, bytes) = (now.0.saturating_sub(before.0), now.1.saturating_sub(before.1));
        (self.shards.min(shards as usize), self.bytes.min(bytes))
    }

    /// `12 shards, 600 MiB`.
    pub(super) fn amount(&self) -> String {
        Part { shards: self.shards, bytes: self.bytes }.text()
    }

    pub(super) fn text(&self, job: &str) -> String {
        let rows = self.rows.iter().map(Row::text);
        std::iter::once(format!("{job} would move {}", self.amount()))
            .chain(rows)
            .collect::<Vec<_>>()
            .join("\n  ")
    }

    pub(super) fn object(&self, job: &str, servers: &[String]) -> serde_json::Value {
        let row = |row: &Row| {
            json!({
                "address": row.address,
                "shards": row.now.shards,
                "state_bytes": row.now.bytes,
                "shards_then": row.then.shards,
                "state_bytes_then": row.then.bytes,
                "takes_bytes": row.takes,
                "free_bytes": row.free,
                "fits": row.fits(),
            })
        };
        let rows: Vec<_> = self.rows.iter().map(row).collect();
        json!({"job": job, "servers": servers, "moved_shards": self.shards, "moved_bytes": self.bytes, "parts": rows})
    }
}

impl Row {
    fn fits(&self) -> bool {
        self.has_memory() && self.lacks.is_none()
    }

    fn has_memory(&self) -> bool {
        self.free.is_none_or(|free| self.takes <= free)
    }

    fn text(&self) -> String {
        let Row { address, now, then, takes, free, .. } = self;
        let takes = match free {
            Some(free) if *takes > 0 => {
                let fits = if self.fits() { "" } else { ": does not fit" };
                format!("; takes {} of {} free{fits}", human(*takes), human(*free))
            }
            _ => String::new(),
        };
        format!("{address}  {}, then {}{takes}", now.text(), then.text())
    }
}

impl Part {
    fn of(spec: &JobSpec, layout: &Layout, placement: &Placement, server: ServerId) -> Part {
        let held = placement.held(server);
        Part { shards: held.len(), bytes: state(spec, layout, &held) }
    }

    fn text(&self) -> String {
        match self.shards {
            0 => "no shard".to_string(),
            1 => format!("1 shard, {}", human(self.bytes)),
            shards => format!("{shards} shards, {}", human(self.bytes)),
        }
    }
}

/// Returns the refusal of a server whose file systems have no room for its shards. A server without a folder for the
/// tier has no room. None for tiers without files, where the bytes decide.
fn lacks(spec: &JobSpec, address: &str, room: usize) -> Option<Fault> {
    let (field, flag) = match spec.properties().lifetime {
        Lifetime::Process => return None,
        Lifetime::Host => ("shm_dir", "--shm-dir"),
        Lifetime::Drive => ("state_dir", "--state-dir"),
    };
    let value = format!("room for {room} shards of tier {} on {address}", spec.tier.name());
    let remedy = format!("start it with {flag}, free space there, or name other servers");
    Some(Fault::new(FaultKind::Exhausted, field, value, "room for all shards that it would get", remedy))
}

/// Returns the bytes of the state of `shards`, which a move transfers.
fn state(spec: &JobSpec, layout: &Layout, shards: &[ShardId]) -> u64 {
    let whole = JobSpec { tier: TierKind::Memory, ..spec.clone() };
    Need::of(&whole, layout, shards, &Storage::default()).state
}

/// Room of a server for the job.
struct Free {
    /// The server's number in the job. None: the job has not begun there.
    number: Option<u32>,
    bytes: u64,
    /// Further shards that fit. None: no limit is known.
    room: Option<usize>,
    is_witness: bool,
}

/// Asks the wanted servers for their room for the job, in bytes and in shards. Memory that is reserved for the job counts
/// as free where the job owns nothing yet.
fn free(
    request: &v1::ScaleRequest,
    spec: &JobSpec,
    access: &Access,
) -> anyhow::Result<BTreeMap<String, Free>> {
    let servers = Servers::connect(&request.servers, access)?;
    let asked = v1::ListJobsRequest { spec: Some(spec.to_wire()) };
    let lists = servers.each_promptly(async |mut admin| admin.list_jobs(asked.clone()).await)?;
    let described =
        servers.answers_within(PROMPTLY, async |mut admin| admin.describe(brief(&request.job)).await);
    let free = |((address, list), (_, answer)): ((String, v1::ListJobsResponse), (String, Result<_, _>))| {
        let answer: Option<v1::DescribeResponse> = answer.ok();
        let kept = answer.as_ref().filter(|answer| answer.elements == 0).map_or(0, |of| of.memory_bytes);
        let number = answer.as_ref().filter(|answer| !is_loading(answer)).map(|answer| answer.server);
        let bytes = list.memory_budget.saturating_sub(list.memory_reserved) + kept;
        let room = list.shard_room.map(|shards| shards as usize);
        (address, Free { number, bytes, room, is_witness: list.is_witness })
    };
    Ok(lists.into_iter().zip(described).map(free).collect())
}

/// Refuses a new address of a server that the job has under another address. The server's shards would move to itself.
fn check_added(added: &[String], free: &BTreeMap<String, Free>, placement: &Placement) -> Result<(), Fault> {
    for address in added {
        let number = free.get(address).and_then(|of| of.number);
        let Some(member) = placement.members().find(|member| number == Some(member.0)) else { continue };
        let known = &placement.servers[member.0 as usize];
        let value = format!("{address}, which the job has as {known}");
        let remedy = format!("name it {known}");
        return Err(Fault::invalid("servers", value, "each server by the job's name for it", remedy));
    }
    Ok(())
}
