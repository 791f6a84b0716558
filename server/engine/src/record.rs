//! Record of a decided version, and of the processes that have joined. The step machine makes records; tiers and
//! checkpoints store them.
//!
//! JSON keeps floats as strings, to the bit: a resumed run needs exactly the loss scale that it stopped with. JSON
//! numbers would not do. The norm of an overflowed step is NaN, and serde_json rounds some decimals to another f64.

use std::ops::{Range, RangeInclusive};

use longshore_proto::{
    Commit, Correction, Hyper, Incarnation, LeftOut, Placement, PlacementChange, ServerId, ShardId, Step,
    Version,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// A decided version, as a tier keeps it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub version: Version,
    /// The number of steps that updated: Adam's t.
    pub applied: u64,
    /// The commit that decided it. None at version 0.
    #[serde(with = "commit")]
    pub commit: Option<Commit>,
    /// Parameters with fewer updates than `applied`. Present only at version 0: later, the commit has the list.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// The last pause or resume, if there was one since the version was decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standing: Option<Standing>,
    /// The placement at this version, if it changed since the server was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

impl Record {
    /// Returns the record of a version that was just reached.
    pub fn new(version: Version, applied: u64, commit: Option<Commit>) -> Record {
        Record { version, applied, commit, left_out: Vec::new(), standing: None, placement: None }
    }

    /// The record of a job that is filled with state, before its first step.
    pub fn filled(applied: u64, left_out: Vec<LeftOut>) -> Record {
        Record { left_out, ..Record::new(Version(0), applied, None) }
    }

    /// Returns the versions of a shard that `server` has had up to this record's version. The range begins with the
    /// fetched version. None if another server has the shard.
    pub fn versions_of(
        &self,
        shard: ShardId,
        server: ServerId,
        opened: bool,
    ) -> Option<RangeInclusive<Version>> {
        let Some(placement) = &self.placement else { return opened.then_some(Version(0)..=self.version) };
        let span = placement.span(server, shard);
        let is_here = !span.is_empty() && span.start <= self.version.0;
        is_here.then(|| Version(span.start.saturating_sub(1))..=self.version.min(Version(span.end - 1)))
    }

    /// Returns true if the step that made the version left the state unchanged.
    pub fn is_skipped(&self) -> bool {
        self.commit.as_ref().is_some_and(|commit| commit.skip)
    }
}

/// Versions, beside `max_delay`, between a server's last version of a shard and the release of the shard's state there.
/// By then every rank has computed with a version of the next owner, so the next owner has the state. Two versions
/// would do; the third is a reserve.
const HELD: u64 = 3;

/// `span` has the steps at which a server owned a shard. Returns true if they are over, and no step in flight reads
/// that server's last version.
pub fn is_handed(span: &Range<u64>, version: Version, max_delay: u32) -> bool {
    !span.is_empty() && span.end <= version.0.saturating_sub(HELD + u64::from(max_delay))
}

/// A shard in memory that an earlier process has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptShard {
    /// Version of its state.
    pub version: Version,
    /// True if the state was being fetched from another server. The state is fetched again then.
    pub awaited: bool,
    /// True if the image of the version before is whole.
    pub older_image: bool,
    /// The steps whose contributions are all summed, by parity. Some of them may be decided.
    pub summed: [Step; 2],
}

/// The last pause or resume since a version was decided. Without a standing, the commit's pause holds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Standing {
    /// Why the job is paused; None once it was resumed.
    pub paused: Option<String>,
    /// The loss scale that an operator chose with the resume, for steps that read this version.
    #[serde(default, serialize_with = "Exact::write_option", deserialize_with = "Exact::read_option")]
    pub loss_scale: Option<f64>,
}

/// A rank's process that has joined, as a tier keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    pub incarnation: Incarnation,
    /// The job's version at the join or fence.
    pub at: Version,
    /// True if the process has only fenced earlier ones, and has not joined.
    pub fence_only: bool,
    /// On rank 0: the number of ranks that take part, if fewer than the spec's world size; else 0.
    pub world_size: u32,
}

/// An f64 as Rust prints it: the shortest decimal that reads back as the same bits.
#[derive(Clone, Copy)]
struct Exact(f64);

impl Exact {
    fn write<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        Exact(*value).serialize(serializer)
    }

    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Exact::deserialize(deserializer).map(|Exact(value)| value)
    }

    fn write_option<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(Exact).serialize(serializer)
    }

    fn read_option<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<Exact>::deserialize(deserializer)?.map(|Exact(value)| value))
    }
}

impl Serialize for Exact {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:?}", self.0))
    }
}

impl<'de> Deserialize<'de> for Exact {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map(Exact).map_err(|_| D::Error::custom(format!("{text:?} is not a number")))
    }
}

#[derive(Serialize, Deserialize)]
struct CommitRecord {
    step: Step,
    skip: bool,
    gradient_scale: Exact,
    clip_coefficient: Exact,
    /// Always 0. The stored format keeps this field of earlier versions.
    compensation: Exact,
    /// Present only in commits whose images look ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    look_ahead: Option<Vec<Exact>>,
    /// Parameter, steps, and 1 if this step leaves it out. Present only in commits of jobs that leave
    /// parameters out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    left_out: Vec<(u32, u64, u8)>,
    norm: Exact,
    loss_scale: Exact,
    groups: Vec<Group>,
    /// In hex, since each byte of a JSON array would take a line.
    trainer_state: String,
    decided_by: Incarnation,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pause_reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    placement: Option<PlacementChange>,
}

/// JSON of [`Hyper`], field by field. A field of `Hyper` that is missing here is a compile error.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Hyper")]
struct HyperRecord {
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    lr: f64,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    beta1: f64,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    beta2: f64,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    eps: f64,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    weight_decay: f64,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    momentum: f64,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    dampening: f64,
    nesterov: bool,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    lr_decay: f64,
    #[serde(serialize_with = "Exact::write", deserialize_with = "Exact::read")]
    momentum_decay: f64,
}

#[derive(Serialize, Deserialize)]
struct Group(#[serde(with = "HyperRecord")] Hyper);

/// Used by `#[serde(with = "record::commit")]`.
pub(crate) mod commit {
    use super::*;

    pub(crate) fn serialize<S: Serializer>(
        commit: &Option<Commit>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        commit.as_ref().map(record).serialize(serializer)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Commit>, D::Error> {
        let Some(record) = Option::<CommitRecord>::deserialize(deserializer)? else { return Ok(None) };
        let trainer_state =
            unhex(&record.trainer_state).ok_or_else(|| D::Error::custom("trainer_state is not hex"))?;
        Ok(Some(Commit {
            step: record.step,
            skip: record.skip,
            gradient_scale: record.gradient_scale.0,
            clip_coefficient: record.clip_coefficient.0,
            correction: record.look_ahead.map_or(Correction::None, |lr| {
                Correction::LookAhead(lr.into_iter().map(|Exact(lr)| lr).collect())
            }),
            left_out: record
                .left_out
                .into_iter()
                .map(|(param, steps, now)| LeftOut { param, steps, now: now != 0 })
                .collect(),
            groups: record.groups.into_iter().map(|Group(hyper)| hyper).collect(),
            norm: record.norm.0,
            loss_scale: record.loss_scale.0,
            trainer_state,
            decided_by: record.decided_by,
            pause_reason: record.pause_reason,
            placement: record.placement,
        }))
    }
}

fn record(commit: &Commit) -> CommitRecord {
    let Commit {
        step,
        skip,
        gradient_scale,
        clip_coefficient,
        correction,
        left_out,
        groups,
        norm,
        loss_scale,
        trainer_state,
        decided_by,
        pause_reason,
        placement,
    } = commit;
    CommitRecord {
        step: *step,
        skip: *skip,
        gradient_scale: Exact(*gradient_scale),
        clip_coefficient: Exact(*clip_coefficient),
        compensation: Exact(0.0),
        look_ahead: match correction {
            Correction::LookAhead(lr) => Some(lr.iter().copied().map(Exact).collect()),
            Correction::None => None,
        },
        left_out: left_out
            .iter()
            .map(|&LeftOut { param, steps, now }| (param, steps, u8::from(now)))
            .collect(),
        norm: Exact(*norm),
        loss_scale: Exact(*loss_scale),
        groups: groups.iter().copied().map(Group).collect(),
        trainer_state: hex(trainer_state),
        decided_by: *decided_by,
        pause_reason: pause_reason.clone(),
        placement: placement.clone(),
    }
}

fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
    let pairs = text.as_bytes().chunks(2);
    pairs.map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_bit_returns(
            bits in prop::array::uniform5(any::<u64>()),
            state in prop::collection::vec(any::<u8>(), 0..40),
            now in any::<bool>(),
        ) {
            let [scale, clip, norm, loss_scale, lr] = bits.map(f64::from_bits);
            let commit = Commit {
                step: Step(7),
                skip: true,
                gradient_scale: scale,
                clip_coefficient: clip,
                correction: Correction::LookAhead(vec![0.1, lr]),
                left_out: vec![LeftOut { param: 3, steps: bits[0], now }],
                groups: vec![Hyper { lr, ..Hyper::default() }],
                norm,
                loss_scale,
                trainer_state: state.clone(),
                decided_by: Incarnation(9),
                pause_reason: "overflowed \"hot\"".into(),
                placement: None,
            };
            let standing = Standing { paused: Some("why".into()), loss_scale: Some(loss_scale) };
            let record = Record { standing: Some(standing), ..Record::new(Version(7), 5, Some(commit)) };
            let text = serde_json::to_string(&record).unwrap();
            let record = serde_json::from_str::<Record>(&text).unwrap();
            let (back, standing) = (record.commit.unwrap(), record.standing.unwrap());
            let same = |a: f64, b: f64| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            prop_assert!(same(back.gradient_scale, scale) && same(back.clip_coefficient, clip));
            prop_assert!(same(back.norm, norm) && same(back.loss_scale, loss_scale));
            prop_assert!(same(back.groups[0].lr, lr) && same(back.correction.look_ahead()[1], lr));
            prop_assert_eq!(back.left_out, [LeftOut { param: 3, steps: bits[0], now }]);
            prop_assert_eq!(back.trainer_state, state);
            prop_assert_eq!(back.pause_reason, "overflowed \"hot\"");
            prop_assert!(standing.paused.as_deref() == Some("why") && same(standing.loss_scale.unwrap(), loss_scale));
        }
    }
}
