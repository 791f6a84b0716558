//! Conversion of wire messages to domain types, once, at the edge.

use std::time::Duration;

use longshore_proto::{
    contribution::{Contribution, ContributionChunk, Reads},
    dtype::Dtype,
    fault::Fault,
    hyper::Rule,
    ids::{ChunkId, Epoch, Incarnation, MicroStep, Rank, ServerId, ShardId, Step, Version},
    job::{JobName, JobSpec},
    layout::Param,
    limits::{DEFAULT_DEADLINE_MS, MAX_DEADLINE_MS},
    partition::Partition,
    placement::{Handover, Placement, PlacementChange},
    properties::TierKind,
    state::{Formats, MasterFormat, StateArray, StateFormat},
};

use super::v1;

/// Remedy for a correction of an earlier release.
pub(crate) const LOOK_AHEAD: &str =
    "start the workers again with the servers' version of Longshore, and with correction look-ahead or none";

/// Returns the fault of a message without a field that it needs.
pub fn missing(field: &str) -> Fault {
    Fault::invalid(field, "absent", "present", "fill the field in")
}

fn unknown(field: &str, value: i32) -> Fault {
    Fault::invalid(field, value, "a named enum value", "use a value of this server's protocol version")
}

/// Returns a caller's deadline; 0 means the default.
pub fn deadline(millis: u64) -> Result<Duration, Fault> {
    match millis {
        0 => Ok(Duration::from_millis(DEFAULT_DEADLINE_MS)),
        1..=MAX_DEADLINE_MS => Ok(Duration::from_millis(millis)),
        _ => {
            let limit = format!("at most {MAX_DEADLINE_MS}");
            Err(Fault::invalid("deadline_ms", millis, limit, "wait in several calls"))
        }
    }
}

/// A domain type with a message of its own.
pub trait Wire: Sized {
    type Message;

    /// Copies each field unchecked; the type's own `validate` checks its limits.
    ///
    /// # Errors
    /// `Invalid` for a missing message, and for a field that has no value of its type.
    fn from_wire(message: Option<Self::Message>) -> Result<Self, Fault>;

    fn to_wire(&self) -> Self::Message;
}

pub fn dtype_from_wire(field: &str, value: i32) -> Result<Dtype, Fault> {
    let found = Dtype::ALL.into_iter().find(|&dtype| dtype_to_wire(dtype) == value);
    found.ok_or_else(|| unknown(field, value))
}

pub fn tier_from_wire(field: &str, value: i32) -> Result<TierKind, Fault> {
    TierKind::from_number(value).ok_or_else(|| unknown(field, value))
}

pub fn dtype_to_wire(dtype: Dtype) -> i32 {
    dtype as i32
}

pub fn array_from_wire(field: &str, value: i32) -> Result<StateArray, Fault> {
    let found = StateArray::ALL.into_iter().find(|&array| array_to_wire(array) == value);
    found.ok_or_else(|| unknown(field, value))
}

pub fn array_to_wire(array: StateArray) -> i32 {
    array as i32
}

/// Returns the formats of a spec. A client without format fields gets fp32.
fn formats_from_wire(spec: &v1::JobSpec) -> Result<Formats, Fault> {
    let state = match spec.state_format {
        0 => Some(StateFormat::F32),
        number => StateFormat::ALL.into_iter().find(|&format| format as i32 == number),
    };
    let master = match spec.master_format {
        0 => Some(MasterFormat::F32),
        number => MasterFormat::ALL.into_iter().find(|&format| format as i32 == number),
    };
    Ok(Formats {
        state: state.ok_or_else(|| unknown("spec.state_format", spec.state_format))?,
        master: master.ok_or_else(|| unknown("spec.master_format", spec.master_format))?,
        seed: spec.rounding_seed,
    })
}

impl Wire for JobSpec {
    type Message = v1::JobSpec;

    #[expect(deprecated, reason = "a worker of an earlier version may still send them")]
    fn from_wire(spec: Option<v1::JobSpec>) -> Result<JobSpec, Fault> {
        let spec = spec.ok_or_else(|| missing("spec"))?;
        if spec.worker_local {
            let limit = "false: look-ahead is the one correction of a delay";
            return Err(Fault::invalid("spec.worker_local", "true", limit, LOOK_AHEAD));
        }
        let formats = formats_from_wire(&spec)?;
        if spec.unchecked {
            let remedy = "leave it out: a step whose gradient has inf or NaN is skipped";
            return Err(Fault::invalid(
                "spec.unchecked",
                true,
                "false: gradients are always checked",
                remedy,
            ));
        }
        let params =
            spec.params.into_iter().map(|p| Param { name: p.name, shape: p.shape, group: p.group }).collect();
        Ok(JobSpec {
            name: JobName::parse("spec.name", &spec.name)?,
            params,
            groups: spec.groups,
            rule: Rule::from_number(spec.rule).ok_or_else(|| unknown("spec.rule", spec.rule))?,
            gradient_dtype: dtype_from_wire("spec.gradient_dtype", spec.gradient_dtype)?,
            image_dtype: dtype_from_wire("spec.image_dtype", spec.image_dtype)?,
            world_size: spec.world_size,
            micro_steps: spec.micro_steps,
            max_delay: spec.max_delay,
            shard_elements: spec.shard_elements,
            tier: tier_from_wire("spec.tier", spec.tier)?,
            formats,
            partitions: partitions_from_wire(spec.partitions)?,
            leave_out: spec.leave_out,
            replicas: spec.replicas.max(1),
        })
    }

    #[expect(deprecated, reason = "the fields of earlier versions are named, so that none is forgotten")]
    fn to_wire(&self) -> v1::JobSpec {
        v1::JobSpec {
            name: self.name.to_string(),
            params: self.params.iter().map(param_to_wire).collect(),
            groups: self.groups.clone(),
            rule: self.rule.number(),
            gradient_dtype: dtype_to_wire(self.gradient_dtype),
            image_dtype: dtype_to_wire(self.image_dtype),
            world_size: self.world_size,
            micro_steps: self.micro_steps,
            max_delay: self.max_delay,
            shard_elements: self.shard_elements,
            tier: self.tier.number(),
            state_format: self.formats.state as i32,
            master_format: self.formats.master as i32,
            rounding_seed: self.formats.seed,
            unchecked: false,
            partitions: self.partitions.iter().map(partition_to_wire).collect(),
            worker_local: false,
            leave_out: self.leave_out,
            replicas: if self.replicas > 1 { self.replicas } else { 0 },
        }
    }
}

pub fn param_to_wire(param: &Param) -> v1::Param {
    v1::Param { name: param.name.clone(), shape: param.shape.clone(), group: param.group }
}

/// Converts partitions. An empty list of ranks freezes parameters only with `frozen` set, so a mistake
/// freezes nothing.
fn partitions_from_wire(partitions: Vec<v1::Partition>) -> Result<Vec<Partition>, Fault> {
    let partition = |(index, partition): (usize, v1::Partition)| {
        let v1::Partition { first, ranks, frozen } = partition;
        if frozen == ranks.is_empty() {
            return Ok(Partition { first, ranks: ranks.into_iter().map(Rank).collect() });
        }
        let field = format!("spec.partitions[{index}].ranks");
        let named: Vec<u32> = ranks.iter().take(8).copied().collect();
        let (limit, remedy) = match frozen {
            true => ("empty in a frozen partition", "nobody contributes to frozen parameters: name no rank"),
            false => ("at least one rank", "name each contributor once, or mark the partition frozen"),
        };
        Err(Fault::invalid(field, format!("{named:?}"), limit, remedy))
    };
    partitions.into_iter().enumerate().map(partition).collect()
}

fn partition_to_wire(partition: &Partition) -> v1::Partition {
    let (first, frozen) = (partition.first, partition.is_frozen());
    v1::Partition { first, ranks: partition.ranks.iter().map(|rank| rank.0).collect(), frozen }
}

impl Wire for Placement {
    type Message = v1::Placement;

    fn from_wire(placement: Option<v1::Placement>) -> Result<Placement, Fault> {
        let placement = placement.ok_or_else(|| missing("placement"))?;
        let mut handovers: Vec<Handover> = placement.handovers.into_iter().map(handover_from_wire).collect();
        // Servers of earlier releases send the oldest handovers first.
        handovers.sort_by_key(|of| of.shard);
        Ok(Placement {
            epoch: Epoch(placement.epoch),
            servers: placement.servers,
            owners: placement.owners.into_iter().map(ServerId).collect(),
            replicas: placement.replicas.into_iter().map(ServerId).collect(),
            handovers,
            clock_ahead_ms: placement.clock_ahead_ms,
        })
    }

    fn to_wire(&self) -> v1::Placement {
        v1::Placement {
            epoch: self.epoch.0,
            servers: self.servers.clone(),
            owners: self.owners.iter().map(|owner| owner.0).collect(),
            replicas: self.replicas.iter().map(|replica| replica.0).collect(),
            handovers: self.handovers.iter().map(handover_to_wire).collect(),
            clock_ahead_ms: self.clock_ahead_ms,
        }
    }
}

fn handover_from_wire(handover: v1::Handover) -> Handover {
    let v1::Handover { shard, from_step, before, is_replica } = handover;
    Handover { shard: ShardId(shard), from_step: Step(from_step), before: ServerId(before), is_replica }
}

fn handover_to_wire(handover: &Handover) -> v1::Handover {
    let Handover { shard, from_step, before, is_replica } = *handover;
    v1::Handover { shard: shard.0, from_step: from_step.0, before: before.0, is_replica }
}

impl Wire for PlacementChange {
    type Message = v1::PlacementChange;

    fn from_wire(change: Option<v1::PlacementChange>) -> Result<PlacementChange, Fault> {
        let change = change.ok_or_else(|| missing("commit.placement"))?;
        Ok(PlacementChange {
            added: change.added,
            moves: moves_from_wire(change.moves),
            replicas: moves_from_wire(change.replicas),
            removed: change.removed.into_iter().map(ServerId).collect(),
            lost: change.lost.into_iter().map(ServerId).collect(),
            epoch: Epoch(change.epoch),
            clock_ahead_ms: change.clock_ahead_ms,
        })
    }

    fn to_wire(&self) -> v1::PlacementChange {
        v1::PlacementChange {
            added: self.added.clone(),
            moves: moves_to_wire(&self.moves),
            replicas: moves_to_wire(&self.replicas),
            removed: self.removed.iter().map(|server| server.0).collect(),
            lost: self.lost.iter().map(|server| server.0).collect(),
            epoch: self.epoch.0,
            clock_ahead_ms: self.clock_ahead_ms,
        }
    }
}

fn moves_from_wire(moves: Vec<v1::Move>) -> Vec<(ShardId, ServerId)> {
    moves.into_iter().map(|of| (ShardId(of.shard), ServerId(of.to))).collect()
}

fn moves_to_wire(moves: &[(ShardId, ServerId)]) -> Vec<v1::Move> {
    moves.iter().map(|&(shard, to)| v1::Move { shard: shard.0, to: to.0 }).collect()
}

/// Returns the incarnation of a process that has joined or wants to join. 0 is refused: no process has it.
pub fn incarnation_from_wire(value: u64) -> Result<Incarnation, Fault> {
    match value {
        0 => Err(Fault::invalid(
            "incarnation",
            0,
            "at least 1",
            "choose one above the rank's last: see Admin.Describe",
        )),
        value => Ok(Incarnation(value)),
    }
}

/// Returns the version that a chunk was computed with. Versions from the chunk's own step on are refused.
fn reads_from_wire(request: &v1::PushRequest) -> Result<Reads, Fault> {
    let (version, step) = (request.reads_version, request.step);
    if version > 0 && version >= step {
        let remedy = "say which version the step's weights had, as Pull said it";
        return Err(Fault::invalid("push.reads_version", version, format!("below step {step}"), remedy));
    }
    Ok(Reads { version: Version(version), decided_by: Incarnation(request.reads_decided_by) })
}

/// Returns a pushed chunk whose payload has `bytes` bytes. The payload is compared with the checksum as it
/// arrives.
pub fn chunk_from_wire(request: &v1::PushRequest, bytes: u64) -> Result<ContributionChunk, Fault> {
    Ok(ContributionChunk {
        contribution: Contribution {
            step: Step(request.step),
            micro_step: MicroStep(request.micro_step),
            rank: Rank(request.rank),
            shard: ShardId(request.shard),
        },
        incarnation: incarnation_from_wire(request.incarnation)?,
        chunk: ChunkId(request.chunk),
        loss_scale: request.loss_scale,
        dtype: dtype_from_wire("push.dtype", request.dtype)?,
        bytes,
        crc32: request.crc32,
        reads: reads_from_wire(request)?,
        lent: request.place.is_some_and(|place| place.lent),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_messages() {
        let dtypes = [v1::Dtype::F32, v1::Dtype::F16, v1::Dtype::Bf16].map(i32::from);
        assert_eq!(Dtype::ALL.map(dtype_to_wire), dtypes);
        let arrays = [v1::StateArray::Master, v1::StateArray::First, v1::StateArray::Second].map(i32::from);
        assert_eq!(StateArray::ALL.map(array_to_wire), arrays);
        let states = [v1::StateFormat::F32, v1::StateFormat::Bf16, v1::StateFormat::Block8].map(i32::from);
        assert_eq!(StateFormat::ALL.map(|format| format as i32), states);
        let masters = [v1::MasterFormat::F32, v1::MasterFormat::Bf16].map(i32::from);
        assert_eq!(MasterFormat::ALL.map(|format| format as i32), masters);
        for rule in Rule::ALL {
            let name = format!("RULE_{}", rule.name().to_uppercase());
            assert_eq!(v1::Rule::from_str_name(&name).map(i32::from), Some(rule.number()), "{name}");
        }
        for tier in TierKind::ALL {
            let name = format!("TIER_{}", tier.name().to_uppercase());
            assert_eq!(v1::Tier::from_str_name(&name).map(i32::from), Some(tier.number()), "{name}");
        }
    }
}
