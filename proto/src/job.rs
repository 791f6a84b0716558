//! Specification of a job: the fields that stay fixed while it lives.

use std::{fmt, ops::Range};

use crate::{
    dtype::Dtype,
    fault::{Fault, FaultKind},
    hyper::Rule,
    ids::{BlockId, Rank},
    layout::{Layout, Param},
    limits::{
        BLOCK_ELEMENTS, DEFAULT_SHARD_ELEMENTS, MAX_DELAY, MAX_GROUPS, MAX_JOB_NAME_BYTES,
        MAX_LEAVE_OUT_PARAMS, MAX_MICRO_STEPS, MAX_SHARD_ELEMENTS, MAX_WORLD_SIZE,
    },
    partition::{self, Partition},
    placement::Placement,
    properties::{JobProperties, Lifetime, TierKind},
    state::{Formats, StateFormat},
};

/// A name that is also a safe file name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct JobName(String);

/// Number of characters of a refused name that an error quotes. Escaped, a character takes at most 10 bytes.
const MAX_QUOTED_CHARS: usize = 16;

impl JobName {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Checks a name that becomes a folder: a job's or a checkpoint's.
    pub fn parse(field: &str, text: &str) -> Result<JobName, Fault> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let right = (1..=MAX_JOB_NAME_BYTES).contains(&text.len()) && text.bytes().all(allowed);
        if right && !text.starts_with('.') {
            return Ok(JobName(text.to_string()));
        }
        let limit = format!("1 to {MAX_JOB_NAME_BYTES} of A-Z a-z 0-9 . _ - and not start with a dot");
        // The error quotes only the name's beginning, because a server holds the answer in memory until the client
        // reads it.
        let beginning: String = text.chars().take(MAX_QUOTED_CHARS).collect();
        let rest =
            if beginning.len() < text.len() { format!("... ({} bytes)", text.len()) } else { String::new() };
        Err(Fault::invalid(field, format!("{beginning:?}{rest}"), limit, "choose another name"))
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Specification of one training run. [`JobSpec::validate`] checks every spec that enters from outside.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct JobSpec {
    pub name: JobName,
    pub params: Vec<Param>,
    /// Names of the param groups. `Param::group` indexes them.
    pub groups: Vec<String>,
    pub rule: Rule,
    pub gradient_dtype: Dtype,
    pub image_dtype: Dtype,
    /// The largest number of ranks. Each time that the ranks start, fewer may take part.
    pub world_size: u32,
    pub micro_steps: u32,
    /// Largest delay. 0: exact steps only. 1: also steps that compute with the version before.
    pub max_delay: u32,
    pub shard_elements: u64,
    pub tier: TierKind,
    /// Formats of master weights and moments.
    #[serde(default, skip_serializing_if = "Formats::is_default")]
    pub formats: Formats,
    /// Contributors of each run of parameters. A frozen partition has no contributors. Empty: all ranks contribute to
    /// all parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub partitions: Vec<Partition>,
    /// Steps leave out parameters that got no gradient. Ranks send -0 in every element for such a parameter.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leave_out: bool,
    /// Number of servers that hold each shard: 1 or 2. With 2 the loss of a server loses no step.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub replicas: u32,
}

fn one() -> u32 {
    1
}

fn is_one(number: &u32) -> bool {
    *number == 1
}

impl JobSpec {
    pub fn properties(&self) -> JobProperties {
        self.tier.properties()
    }

    /// Returns a job of one rank and one group in tier `memory`: AdamW, exact steps, bf16 on the wire. Callers override
    /// fields with struct update syntax.
    pub fn new(name: JobName, params: Vec<Param>) -> JobSpec {
        JobSpec {
            name,
            params,
            groups: vec!["all".into()],
            rule: Rule::AdamW,
            gradient_dtype: Dtype::Bf16,
            image_dtype: Dtype::Bf16,
            world_size: 1,
            micro_steps: 1,
            max_delay: 0,
            shard_elements: DEFAULT_SHARD_ELEMENTS,
            tier: TierKind::Memory,
            formats: Formats::default(),
            partitions: Vec::new(),
            leave_out: false,
            replicas: 1,
        }
    }

    /// Returns the placement of a new job on these servers.
    pub fn striped(&self, servers: Vec<String>, shards: u32) -> Placement {
        let placement = Placement::striped(servers, shards);
        if self.replicas > 1 { placement.with_replicas() } else { placement }
    }

    /// Checks every field against its limit and returns the layout of the parameters.
    pub fn validate(&self) -> Result<Layout, Fault> {
        let range = |field: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Fault::invalid(
                format!("spec.{field}"),
                value,
                format!("in {low}..={high}"),
                "correct the job's spec",
            ))
        };
        range("world_size", self.world_size.into(), 1, MAX_WORLD_SIZE.into())?;
        range("micro_steps", self.micro_steps.into(), 1, MAX_MICRO_STEPS.into())?;
        range("max_delay", self.max_delay.into(), 0, MAX_DELAY.into())?;
        range("groups", self.groups.len() as u64, 1, MAX_GROUPS as u64)?;
        range("replicas", self.replicas.into(), 1, 2)?;
        if self.replicas > 1 && self.properties().survives_restart() {
            let limit = format!("{}, with replicas 2", Lifetime::Process.tiers());
            let remedy = "leave replicas out: drives keep what a server has lost";
            return Err(Fault::invalid("spec.tier", self.tier, limit, remedy));
        }
        range("shard_elements", self.shard_elements, BLOCK_ELEMENTS, MAX_SHARD_ELEMENTS)?;
        if !self.shard_elements.is_multiple_of(BLOCK_ELEMENTS) {
            let limit = format!("a multiple of the block, {BLOCK_ELEMENTS}");
            return Err(Fault::invalid("spec.shard_elements", self.shard_elements, limit, "round it up"));
        }
        self.check_leave_out()?;
        if self.partitions.is_empty() {
            let whole = [Partition::whole(self.world_size)];
            return Layout::new(&self.params, self.groups.len(), self.shard_elements, &whole);
        }
        partition::check(&self.partitions, self.params.len(), self.world_size)?;
        Layout::new(&self.params, self.groups.len(), self.shard_elements, &self.partitions)
    }

    /// Refuses specs that cannot be combined with `leave_out`.
    fn check_leave_out(&self) -> Result<(), Fault> {
        if !self.leave_out {
            return Ok(());
        }
        let refused = |field: &str, value: String, limit: &str| {
            let remedy = "open the job without leave_out: zeros then count as the gradient of a parameter that got none";
            Err(Fault::invalid(format!("spec.{field}"), value, format!("{limit} with leave_out"), remedy))
        };
        if self.params.len() > MAX_LEAVE_OUT_PARAMS {
            return refused(
                "params",
                self.params.len().to_string(),
                &format!("at most {MAX_LEAVE_OUT_PARAMS}"),
            );
        }
        if self.formats.state == StateFormat::Block8 {
            return refused(
                "state_format",
                self.formats.state.to_string(),
                "f32 or bf16 (parameters share 8-bit scales)",
            );
        }
        Ok(())
    }

    /// Returns the first parameter of each partition except the first. A partition begins at a whole block, so these
    /// parameters decide offsets in the flat space.
    pub fn partition_starts(&self) -> Vec<u32> {
        self.partitions.iter().skip(1).map(|partition| partition.first).collect()
    }

    pub fn frozen_starts(&self) -> Vec<u32> {
        let frozen = self.partitions.iter().filter(|partition| partition.is_frozen());
        frozen.map(|partition| partition.first).collect()
    }

    /// Returns `other`'s partitions if both specs lay out parameters alike: equal starts and equal frozen starts.
    /// Otherwise returns this spec's partitions.
    pub fn partitions_as(&self, other: &JobSpec) -> Vec<Partition> {
        let is_alike = self.partition_starts() == other.partition_starts()
            && self.frozen_starts() == other.frozen_starts();
        if is_alike { other.partitions.clone() } else { self.partitions.clone() }
    }

    /// Returns the number of contributions that this many ranks make to a step: a factor of the commit's gradient
    /// scale. The gradient of a shard with fewer contributors is divided by the scale times [`JobSpec::share`].
    pub fn contributions(&self, world_size: u32) -> u64 {
        u64::from(world_size) * u64::from(self.micro_steps)
    }

    /// Returns true if fewer ranks than `world_size` may train, which needs all ranks to contribute to every trained
    /// parameter.
    pub fn takes_fewer_ranks(&self) -> bool {
        let is_whole = |of: &Partition| of.is_frozen() || of.ranks.len() == self.world_size as usize;
        self.partitions.iter().all(is_whole)
    }

    /// Returns the same job for another number of ranks.
    pub fn of_ranks(&self, world_size: u32) -> JobSpec {
        let whole = |of: &Partition| Partition { first: of.first, ..Partition::whole(world_size) };
        let sized = |of: &Partition| if of.is_frozen() { of.clone() } else { whole(of) };
        let partitions = self.partitions.iter().map(sized).collect();
        JobSpec { world_size, partitions, ..self.clone() }
    }

    pub fn has_frozen(&self) -> bool {
        self.partitions.iter().any(Partition::is_frozen)
    }

    /// Returns the fraction of ranks that contribute to a shard: 1 for all ranks, 0 for a frozen shard.
    pub fn share(&self, contributors: &[Rank]) -> f64 {
        contributors.len() as f64 / f64::from(self.world_size)
    }

    /// Names the parameter and index of a flat element, for messages: "h.3.mlp.weight, element 17".
    pub fn name_element(&self, layout: &Layout, element: u64) -> String {
        match layout.param_at(element) {
            Some(param) => {
                let within = element - layout.param_range(param).start;
                format!("{}, element {within}", self.params[param].name)
            }
            None => {
                let block = BlockId((element / BLOCK_ELEMENTS) as u32);
                format!("padding at flat element {element} in {block}")
            }
        }
    }

    /// Returns the blocks of each trained partition, in order, with their [`JobSpec::share`].
    pub fn block_shares(&self, layout: &Layout) -> Vec<(Range<usize>, f64)> {
        let trained = layout.partitions().filter(|(_, contributors)| !contributors.is_empty());
        let blocks = trained.map(|(range, contributors)| {
            let blocks = range.start / BLOCK_ELEMENTS..range.end / BLOCK_ELEMENTS;
            (blocks.start as usize..blocks.end as usize, self.share(contributors))
        });
        blocks.collect()
    }

    /// Returns whether contributions to a shard with these contributors are summed. A single contribution is stored as
    /// received.
    pub fn accumulates(&self, contributors: &[Rank]) -> bool {
        contributors.len() > 1 || contributors.len() == 1 && self.micro_steps > 1
    }

    /// Returns the number of steps whose gradients may be held at once.
    pub fn gradient_slots(&self) -> usize {
        1 + self.max_delay as usize
    }

    /// Refuses a second open of the job whose spec differs, naming the first differing field.
    pub fn same_as(&self, other: &JobSpec) -> Result<(), Fault> {
        let differs = |field: &str, ours: String, theirs: String| {
            Err(Fault::new(
                FaultKind::Conflict,
                format!("spec.{field}"),
                theirs,
                format!("{ours}, as the job was opened"),
                "open it with the same spec, choose another job name, or delete the job",
            ))
        };
        if self.params != other.params {
            let pairs = self.params.iter().zip(&other.params);
            let first = pairs.enumerate().find(|(_, (ours, theirs))| ours != theirs);
            return match first {
                Some((index, (ours, theirs))) => {
                    differs(&format!("params[{index}]"), ours.to_string(), theirs.to_string())
                }
                None => differs("params", self.params.len().to_string(), other.params.len().to_string()),
            };
        }
        if self.groups != other.groups {
            return differs("groups", format!("{:?}", self.groups), format!("{:?}", other.groups));
        }
        let are_fewer = other.world_size < self.world_size && other.takes_fewer_ranks();
        if are_fewer && self.takes_fewer_ranks() {
            return self.same_as(&other.of_ranks(self.world_size));
        }
        if self.world_size < other.world_size {
            let limit = format!("at most {}, as the job was opened", self.world_size);
            let remedy =
                "start fewer ranks; for more, checkpoint the job and restore it in one opened with max_ranks";
            let field = "spec.world_size";
            return Err(Fault::new(FaultKind::Conflict, field, other.world_size, limit, remedy));
        }
        if self.world_size != other.world_size {
            return differs("world_size", self.world_size.to_string(), other.world_size.to_string());
        }
        if self.partitions != other.partitions {
            return differs("partitions", describe(&self.partitions), describe(&other.partitions));
        }
        let fields = [
            ("name", self.name.to_string(), other.name.to_string()),
            ("rule", self.rule.to_string(), other.rule.to_string()),
            ("gradient_dtype", self.gradient_dtype.to_string(), other.gradient_dtype.to_string()),
            ("image_dtype", self.image_dtype.to_string(), other.image_dtype.to_string()),
            ("micro_steps", self.micro_steps.to_string(), other.micro_steps.to_string()),
            ("max_delay", self.max_delay.to_string(), other.max_delay.to_string()),
            ("shard_elements", self.shard_elements.to_string(), other.shard_elements.to_string()),
            ("tier", self.tier.to_string(), other.tier.to_string()),
            ("state_format", self.formats.state.to_string(), other.formats.state.to_string()),
            ("master_format", self.formats.master.to_string(), other.formats.master.to_string()),
            ("leave_out", self.leave_out.to_string(), other.leave_out.to_string()),
            ("replicas", self.replicas.to_string(), other.replicas.to_string()),
            ("rounding_seed", self.formats.seed.to_string(), other.formats.seed.to_string()),
        ];
        for (field, ours, theirs) in fields {
            if ours != theirs {
                return differs(field, ours, theirs);
            }
        }
        Ok(())
    }
}

/// Describes partitions for an error's text: their number and the first 4.
fn describe(partitions: &[Partition]) -> String {
    let one = |partition: &Partition| {
        if partition.is_frozen() {
            return format!("from parameter {}: frozen", partition.first);
        }
        let ranks =
            partition.ranks.iter().take(8).map(|rank| rank.0.to_string()).collect::<Vec<_>>().join(",");
        let more = if partition.ranks.len() > 8 { ",..." } else { "" };
        format!("from parameter {}: ranks {ranks}{more}", partition.first)
    };
    let named: Vec<_> = partitions.iter().take(4).map(one).collect();
    format!("{} partitions [{}]", partitions.len(), named.join("; "))
}
