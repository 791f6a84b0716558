//! Partitions: runs of parameters with the same contributors.

use crate::{
    fault::Fault,
    ids::Rank,
    limits::{MAX_CONTRIBUTORS, MAX_PARTITIONS},
};

/// A run of parameters whose gradients come from the same ranks. The partition ends where the next begins; no shard
/// spans two partitions. With ZeRO's partitions each rank pushes and pulls only its part of the model.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Partition {
    /// Index of the first parameter.
    pub first: u32,
    /// Contributors, ascending. A shard's gradient is the mean over them. Empty if frozen.
    pub ranks: Vec<Rank>,
}

impl Partition {
    /// Returns one partition of all parameters, with all ranks as contributors.
    pub fn whole(world_size: u32) -> Partition {
        Partition { first: 0, ranks: (0..world_size).map(Rank).collect() }
    }

    pub fn frozen(first: u32) -> Partition {
        Partition { first, ranks: Vec::new() }
    }

    /// Returns whether no step changes the parameters. Servers keep such parameters only as weights in the image dtype.
    pub fn is_frozen(&self) -> bool {
        self.ranks.is_empty()
    }
}

/// Checks a job's partitions: the first begins at parameter 0, and each has a parameter. Each rank contributes to at
/// least one partition. A contribution proves that the rank has read its weights. A rank without contributions could
/// still be pulling an image while the image is overwritten.
pub(crate) fn check(partitions: &[Partition], params: usize, world_size: u32) -> Result<(), Fault> {
    let field = |index: usize, name: &str| format!("spec.partitions[{index}].{name}");
    if partitions.len() > MAX_PARTITIONS {
        let limit = format!("at most {MAX_PARTITIONS}");
        let remedy = "put parameters with the same contributors next to each other";
        return Err(Fault::invalid("spec.partitions", partitions.len(), limit, remedy));
    }
    let contributors: usize = partitions.iter().map(|partition| partition.ranks.len()).sum();
    if partitions.len() > 1 && contributors > MAX_CONTRIBUTORS {
        let limit = format!("at most {MAX_CONTRIBUTORS} in all partitions together");
        let remedy = "make fewer partitions, or reduce gradients among ranks first";
        return Err(Fault::invalid("spec.partitions.ranks", contributors, limit, remedy));
    }
    let mut next = 0;
    for (index, partition) in partitions.iter().enumerate() {
        let first = partition.first as usize;
        let right = if index == 0 { first == 0 } else { first >= next };
        if !right || first >= params {
            let limit = match index {
                0 => "0".to_string(),
                _ => format!("in {next}..{}, after the partition before", params),
            };
            let remedy = "list partitions in the order of their parameters, without gaps";
            return Err(Fault::invalid(field(index, "first"), first, limit, remedy));
        }
        next = first + 1;
        let ascending = partition.ranks.is_sorted_by(|one, other| one < other);
        let known = partition.ranks.iter().all(|rank| rank.0 < world_size);
        if !ascending || !known {
            let named: Vec<u32> = partition.ranks.iter().take(8).map(|rank| rank.0).collect();
            let limit = format!("ascending ranks below the world size, {world_size}");
            let remedy = "name each contributor once";
            return Err(Fault::invalid(field(index, "ranks"), format!("{named:?}"), limit, remedy));
        }
    }
    if partitions.iter().all(Partition::is_frozen) {
        let remedy = "name the ranks that contribute to the parameters that are to be trained";
        return Err(Fault::invalid(
            "spec.partitions",
            "all of them frozen",
            "at least one that is trained",
            remedy,
        ));
    }
    let mut contributes = vec![false; world_size as usize];
    partitions
        .iter()
        .flat_map(|partition| &partition.ranks)
        .for_each(|rank| contributes[rank.index()] = true);
    if let Some(idle) = contributes.iter().position(|contributes| !contributes) {
        let value = format!("rank {idle} in none of them");
        let remedy = "give each rank a partition, or open the job for fewer ranks";
        return Err(Fault::invalid("spec.partitions", value, "each rank in at least one", remedy));
    }
    Ok(())
}
