//! Parameters that steps leave out: the constants of the others, and the check of a commit's list of them.

use std::{collections::BTreeMap, ops::Range};

use longshore_proto::{
    BlockId, Commit, Fault, FaultKind, Incarnation, Layout, Origin,
    left_out::{advance, now},
};

use super::{Job, compute::BLOCK};
use crate::{
    ids::OwnedShards,
    kernels::{self, ImageMut, Isa, Scalars},
    step::Machine,
    tier::StateMut,
};

const FIELD: &str = "commit.left_out";

/// The constants of a step, for each parameter.
pub(super) struct Constants {
    /// By param group.
    groups: Vec<Scalars>,
    /// The t of each parameter's update, or None if this step leaves it out. Parameters that no step has left
    /// out are absent.
    own: BTreeMap<usize, Option<u64>>,
    /// By param group and t, for those parameters.
    by_t: BTreeMap<(usize, u64), Scalars>,
}

impl Constants {
    /// `scalars` makes the constants of a param group for a t. `applied` is the job's t.
    pub(super) fn new(
        commit: &Commit,
        layout: &Layout,
        applied: u64,
        scalars: impl Fn(usize, u64) -> Scalars,
    ) -> Constants {
        let groups = (0..commit.groups.len()).map(|group| scalars(group, applied)).collect();
        let (mut own, mut by_t) = (BTreeMap::new(), BTreeMap::new());
        for left_out in &commit.left_out {
            let (param, t) = (left_out.param as usize, applied.saturating_sub(left_out.steps));
            own.insert(param, (!left_out.now).then_some(t));
            if !left_out.now {
                let group = layout.param_group(param) as usize;
                by_t.entry((group, t)).or_insert_with(|| scalars(group, t));
            }
        }
        Constants { groups, own, by_t }
    }

    /// Returns a block's ranges, cut where the constants change. The constants are None for parameters that
    /// the step leaves out.
    pub(super) fn of_block(&self, layout: &Layout, block: BlockId) -> Vec<(Range<usize>, Option<&Scalars>)> {
        if self.own.is_empty() {
            let groups = layout.block_groups(block).into_iter();
            return groups.map(|(range, group)| (range, Some(&self.groups[group as usize]))).collect();
        }
        let mut runs: Vec<(Range<usize>, Option<&Scalars>)> = Vec::new();
        for (range, param) in layout.block_params(block) {
            let group = layout.param_group(param) as usize;
            let scalars = match self.own.get(&param) {
                None => Some(&self.groups[group]),
                Some(t) => t.map(|t| &self.by_t[&(group, t)]),
            };
            let address = |scalars: Option<&Scalars>| scalars.map_or(std::ptr::null(), std::ptr::from_ref);
            match runs.last_mut() {
                Some((run, before)) if address(*before) == address(scalars) => run.end = range.end,
                _ => runs.push((range, scalars)),
            }
        }
        runs
    }

    /// Constants of this step's rule, for elements whose results are not kept.
    pub(super) fn any(&self) -> &Scalars {
        &self.groups[0]
    }
}

/// The state of one block's left-out parameters, saved while all of the block is updated.
pub(super) struct Aside {
    ranges: Vec<Range<usize>>,
    /// By range, then by array.
    bytes: Vec<Vec<Vec<u8>>>,
}

impl Aside {
    /// Copies the state of these ranges of elements. An element has whole bytes in each array.
    pub(super) fn take(state: &StateMut<'_>, ranges: Vec<Range<usize>>) -> Aside {
        let part = |array: &[u8], range: &Range<usize>| array[bytes_of(array.len(), range)].to_vec();
        let of_range = |range| state.as_ref().arrays.iter().map(|array| part(array, range)).collect();
        let bytes = ranges.iter().map(of_range).collect();
        Aside { ranges, bytes }
    }

    /// Restores the saved state, and makes its image from the restored master weights.
    pub(super) fn put_back(self, isa: Isa, state: &mut StateMut<'_>, image: &mut ImageMut<'_>) {
        for (range, saved) in self.ranges.iter().zip(self.bytes) {
            for (array, saved) in state.arrays.iter_mut().zip(saved) {
                let place = bytes_of(array.len(), range);
                array[place].copy_from_slice(&saved);
            }
            let image = image.slice(range.clone());
            state.as_ref().with_master(isa, 0, |master| kernels::cast(isa, &master[range.clone()], image));
        }
    }
}

/// Byte range of a block's elements in one of its arrays, which is `array` bytes long.
fn bytes_of(array: usize, range: &Range<usize>) -> Range<usize> {
    let width = array / BLOCK;
    range.start * width..range.end * width
}

impl Job {
    /// Refuses a decision whose left-out parameters do not follow from those of the decision before. Refuses
    /// also a decision that leaves out other parameters than those without a gradient here. Other checks
    /// cover the decision's origin and the completeness of contributions.
    ///
    /// A decision of an earlier process of rank 0 is not compared with the gradient: another server has
    /// applied it. If this server refused it, the job could never reach one version on all servers. A
    /// left-out parameter may well have a gradient here, since a restarted rank may have computed another
    /// one.
    pub(super) fn check_left_out(
        &self,
        machine: &Machine,
        incarnation: Incarnation,
        commit: &Commit,
        origin: Origin,
    ) -> Result<(), Fault> {
        let next = machine.version().next_step();
        if commit.step != next {
            return Ok(());
        }
        let without: Vec<u32> = now(&commit.left_out).collect();
        let due = advance(machine.left_out(), &without, commit.skip);
        if due != commit.left_out {
            machine.check_rank_zero(incarnation)?;
            let value = format!("{} parameters", commit.left_out.len());
            let limit = format!("the {} that follow from the commit before", due.len());
            let remedy = "make the commit from the one before, which Describe has as last_commit";
            return Err(Fault::invalid(FIELD, value, limit, remedy));
        }
        let earlier = ![Incarnation(0), incarnation].contains(&commit.decided_by);
        if !self.spec.leave_out || commit.skip || earlier || machine.check_origin(next, origin).is_err() {
            return Ok(());
        }
        let slot = self.gradients.slot(next);
        for owned in OwnedShards::all(self.owned.len()).filter(|&owned| machine.is_complete(owned, next)) {
            let params = self.layout.params_from(self.layout.shard_range(self.owned[owned.index()]));
            let here = self.gradients.left_out(owned, slot);
            let differs = |param: &u32| here.contains(param) != without.binary_search(param).is_ok();
            if let Some(param) = (params.start as u32..params.end as u32).find(differs) {
                machine.check_rank_zero(incarnation)?;
                return Err(other(&self.spec.params[param as usize].name, here.contains(&param)));
            }
        }
        Ok(())
    }
}

fn other(name: &str, is_nothing: bool) -> Fault {
    let (value, limit) = match is_nothing {
        true => (format!("without {name:?}"), "with it: nobody gave it a gradient"),
        false => (format!("with {name:?}"), "without it: it got a gradient"),
    };
    let remedy = "leave out what ShardStats.left_out names, from all servers";
    Fault::new(FaultKind::Conflict, FIELD, value, limit, remedy)
}
