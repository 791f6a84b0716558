//! Jobs whose worker amends its weights with the gradient that it holds: which steps amend what, and the rates of a
//! version that was not made by an update here.

use longshore_proto::{Amendment, Commit, Correction, Fault, Step, Version};

use super::{Job, compute::BLOCK};
use crate::{
    ids::{OwnedShard, OwnedShards},
    kernels::{Amended, rates},
    record::Record,
    step::Machine,
    tier::StateRef,
};

/// How many rates a block has.
pub(super) const BLOCK_RATES: usize = BLOCK / longshore_proto::limits::RATE_ELEMENTS as usize;

/// What an update makes beside the new state and image.
#[derive(Default)]
pub(super) struct Amending {
    /// The constants of the version before, by param group, and how the gradient amends its image. If they are there, the
    /// update makes the amended image.
    pub(super) before: Option<(Vec<Amended>, Amendment)>,
    /// The constants of the new version, by param group. If they are there, the update makes rates.
    pub(super) after: Option<Vec<Amended>>,
}

impl Amending {
    pub(super) fn is_nothing(&self) -> bool {
        self.before.is_none() && self.after.is_none()
    }
}

impl Job {
    /// What the update of a decided step makes beside state and image. It makes no amended image where the commit before is
    /// not known any more. A crash leads to that only if the step after this one was decided too. That step's amended image
    /// then takes the place of this one's.
    pub(super) fn amending(&self, commit: &Commit, applied: u64, share: f64) -> Amending {
        if !self.spec.worker_local {
            return Amending::default();
        }
        let before = commit.amendment(share).and_then(|amendment| {
            let version = Version(commit.step.0 - 1);
            Some((self.amended(version)?, amendment))
        });
        Amending { before, after: self.amended_of(commit, applied) }
    }

    /// The constants of a version whose images the worker amends, by param group. None for any other version, and for one
    /// whose commit is not known any more.
    fn amended(&self, version: Version) -> Option<Vec<Amended>> {
        let machine = self.protocol.machine();
        let (commit, applied) = machine.decision(Step(version.0))?;
        self.amended_of(commit, applied)
    }

    fn amended_of(&self, commit: &Commit, applied: u64) -> Option<Vec<Amended>> {
        let Correction::WorkerLocal(lr) = &commit.correction else { return None };
        let groups = commit.groups.iter().zip(lr);
        groups.map(|(hyper, lr)| Amended::new(self.spec.rule, hyper, applied, *lr)).collect()
    }

    /// Makes the rates of one block from its state.
    pub(super) fn rates_of_block(
        &self,
        block: u32,
        amended: &[Amended],
        state: StateRef<'_>,
        to: &mut [f32],
    ) {
        let group_of = longshore_proto::limits::RATE_ELEMENTS as usize;
        for (range, group) in self.layout.block_groups(longshore_proto::BlockId(block)) {
            let of = range.start / group_of..range.end / group_of;
            rates(self.compute.isa(), &amended[group as usize], &state.second()[range], &mut to[of]);
        }
    }

    /// Makes the rates of a version that no update has made in this process: a recovered one, or a checkpoint's. The state
    /// of `shards` is that of the version.
    pub(super) fn make_rates(
        &self,
        version: Version,
        applied: u64,
        commit: Option<&Commit>,
        shards: impl Iterator<Item = OwnedShard>,
    ) -> Result<(), Fault> {
        let amended =
            commit.filter(|_| self.spec.worker_local).and_then(|commit| self.amended_of(commit, applied));
        let Some(amended) = amended else { return Ok(()) };
        for owned in shards {
            let first = self.layout.shard_blocks(self.owned[owned.index()]).start;
            let Some(mut made) = self.images.rates.to_make(owned, version) else { return Ok(()) };
            self.tier.state.read(owned, &mut |state| {
                let blocks = made.overwrite().chunks_mut(BLOCK_RATES).enumerate().collect();
                self.compute.blocks(blocks, |(block, to): (usize, &mut [f32])| {
                    self.rates_of_block(first + block as u32, &amended, state.block(block), to);
                });
            })?;
            made.set(Some(version));
        }
        Ok(())
    }

    /// Whether the older image of a version, as a checkpoint has it, is the amended one.
    pub(super) fn is_amended(&self, record: &Record) -> bool {
        self.spec.worker_local && record.commit.as_ref().is_some_and(Commit::amends)
    }

    /// The owned shards that are trained.
    pub(crate) fn trained(&self) -> impl Iterator<Item = OwnedShard> + use<'_> {
        OwnedShards::all(self.owned.len()).filter(|&owned| !self.is_frozen(owned))
    }

    /// Whether a decided step made an amended image.
    pub(super) fn amends(machine: &Machine, step: Step) -> bool {
        machine.decision(step).is_some_and(|(commit, _)| commit.amends())
    }

    /// Checks that the next commit goes on from the one before. It has `amend` if and only if the worker amends that one's
    /// images. If it skips, it repeats what belongs to them.
    pub(super) fn check_amends(&self, machine: &Machine, commit: &Commit) -> Result<(), Fault> {
        if !self.spec.worker_local || commit.step != machine.version().next_step() {
            return Ok(());
        }
        let before = machine.decision(Step(machine.version().0)).map(|(before, _)| before);
        let local = before.is_some_and(Commit::is_worker_local);
        let refused = |field: &str, value: String, limit: &str| {
            let remedy = "make the commit from the one before, which Describe has as last_commit";
            Err(Fault::invalid(format!("commit.{field}"), value, limit, remedy))
        };
        if commit.skip {
            let same = before.is_some_and(|before| {
                commit.correction == before.correction && commit.groups == before.groups
            });
            return match (local, commit.is_worker_local()) {
                (true, _) if !same => refused(
                    "worker_local",
                    "not that of the commit before".into(),
                    "repeated, with groups, by a skip",
                ),
                (false, true) => {
                    refused("worker_local", "given".into(), "none in a skip, if the commit before has none")
                }
                _ => Ok(()),
            };
        }
        match (local, commit.amend) {
            (true, None) => refused("amend", "none".into(), "given after a commit with worker_local"),
            (false, Some(gamma)) => {
                refused("amend", gamma.to_string(), "none, as the commit before has no worker_local")
            }
            _ => Ok(()),
        }
    }
}
