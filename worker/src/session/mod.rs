//! One rank's session with all servers of its job: connect, open, join, and the operators' calls.

mod admin;
mod checkpoint;
mod checkpoints;
mod export;
mod filling;
mod go_back;
mod join;
mod open;
mod probe;
mod restore;
mod resume;
mod takeover;
mod upload;
mod version;
#[cfg(test)]
mod waiting_tests;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use longshore_proto::{Dtype, JobSpec, Layout, Placement, Rank, Version};
use longshore_wire::v1;

use self::filling::ByParam;
pub(crate) use self::resume::resume_on;
pub use self::{
    admin::StateHash,
    checkpoint::is_taken,
    checkpoints::{Checkpoint, checkpoint_name, common, numbered},
    export::ExportedVersion,
    filling::Filling,
    go_back::GoBack,
    join::Joined,
    open::{Opened, is_loading},
    probe::Probe,
    resume::paused_at,
    version::{TRIES, has_passed, lead},
};
pub use crate::cluster::{Address, Interrupt, Options, Transport, untrusted, whole, with_sources};
use crate::{
    cluster::Cluster,
    error::Result,
    export::{Contents, Sink},
    memfd::{GradientMemory, ImageMemory},
    pull::{Feed, Pulls, Reading},
    push::{Gradients, start_lanes},
    rank::RankState,
};

/// Connections to every server of a job, as one rank. All calls block, with a deadline, and may be made from any
/// thread that is not an async runtime's. Every later call returns a failure that was found in the background.
pub struct Session {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) rank: Arc<RankState>,
    pub(crate) gradients: Arc<Gradients>,
    pub(crate) pulls: Arc<Pulls>,
    /// Whether the job's end was asked for: a server that does not have it may have done that.
    is_deleting: AtomicBool,
}

impl Session {
    /// Connects to every server, retrying until the deadline.
    ///
    /// # Errors
    /// `Invalid` for an option or spec that cannot be used; `Unreachable` naming the server.
    pub fn connect(options: Options) -> Result<Session> {
        let cluster = Arc::new(Cluster::connect(options)?);
        let rank = Arc::new(RankState::new(&cluster));
        let gradients = Arc::new(Gradients::new(cluster.clone(), rank.clone()));
        let pulls = Arc::new(Pulls::new(cluster.clone(), rank.clone()));
        Ok(Session { cluster, rank, gradients, pulls, is_deleting: AtomicBool::new(false) })
    }

    fn block_on<T>(&self, act: impl Future<Output = Result<T>>) -> Result<T> {
        self.cluster.runtime.block_on(act)
    }

    /// Does the same for a call that waits until all servers hold one version. Where a background failure says that
    /// this process must make a step anew, the servers wait for it: the call would wait for itself.
    fn block_unless_failed<T>(&self, act: impl Future<Output = Result<T>>) -> Result<T> {
        self.block_on(self.cluster.waits.unless_failed(act))
    }

    /// Creates the job on every server, or finds it there. It may be repeated. Where a server has trained and another
    /// has nothing, the job is not created on the other one.
    ///
    /// # Errors
    /// `Call` when a server refuses, as for a differing spec or too little memory; to rank 0 `StateLost` when some servers
    /// have trained and others have nothing.
    pub fn open(&self) -> Result<Opened> {
        self.block_on(self.cluster.watched_at_work("the job on all servers", open::open(&self.cluster)))
    }

    /// Takes the rank with a new incarnation, fencing an older process, and brings all servers to one version.
    ///
    /// # Errors
    /// `VersionsDiffer` when they do not get there in time; `Misuse` when the session has joined already.
    pub fn join(&mut self) -> Result<Joined> {
        let join = join::join(&self.cluster, &self.rank);
        let joined = self.block_on(self.cluster.watched("the servers' common version", join))?;
        start_lanes(&self.gradients);
        Ok(joined)
    }

    /// Streams the initial fp32 weights to their owners. Rank 0 calls it, after `join` on a fresh job. `weights(i)`
    /// returns all elements of parameter i and is called once each, in order (again for parameters whose server had
    /// to be retried); one parameter is held at a time.
    pub fn upload(&self, weights: &dyn Fn(usize) -> Vec<f32>) -> Result<()> {
        self.fill(&ByParam::new(self.spec(), self.layout(), weights))
    }

    /// Does what `upload` does with weights, or with the state of an optimizer.
    ///
    /// # Errors
    /// `OtherFilling` where a server is full of something else; `Call` where it began to be filled with something else.
    pub fn fill(&self, filling: &dyn Filling) -> Result<()> {
        upload::upload(&self.cluster, &self.rank, filling)
    }

    /// Waits until every server trains: rank 0 has opened the job, and uploaded or restored. Bound by `slow_deadline`.
    pub fn wait_training(&self) -> Result<()> {
        let training = open::wait_training(&self.cluster);
        self.block_on(self.cluster.watched_at_work("the initial weights", training))
    }

    /// The usual start of any rank: opens the job, joins it, and if it is fresh fills it: rank 0 uploads `weights`,
    /// and the others wait for that. A restore that was begun and cut off is brought to its end. To start from a
    /// checkpoint, rank 0 calls `open` and `restore` before this.
    pub fn start(&mut self, weights: &dyn Fn(usize) -> Vec<f32>) -> Result<Joined> {
        self.start_by(|session| session.upload(weights))
    }

    /// Does what `start` does, where there may be optimizer state as well as weights.
    pub fn start_from(&mut self, filling: &dyn Filling) -> Result<Joined> {
        self.start_by(|session| session.fill(filling))
    }

    fn start_by(&mut self, fill: impl FnOnce(&Session) -> Result<()>) -> Result<Joined> {
        if self.cluster.options.rank == Rank(0) {
            let opened = self.open()?;
            if let Opened::Restoring { checkpoint } = &opened {
                self.restore(checkpoint)?;
            }
            let mut joined = self.join()?;
            if opened.is_fresh() {
                fill(self)?;
                self.wait_training()?;
                // What the job was filled with may count updates.
                (joined.applied, joined.left_out) = self.block_on(open::filled(&self.cluster))?;
            }
            return Ok(joined);
        }
        // A rank that joined first would not see what a restore brings. After that, opening compares the job and
        // never creates it.
        self.wait_training()?;
        self.open()?;
        self.join()
    }

    /// Starts pulling `order` (flat ranges, in the order wanted) of one version, as `dtype`. The servers hold the pull
    /// until the version is there. The feed's memory comes from a pool: nothing is allocated in steady state.
    pub fn pull(&self, version: Version, order: &[Range<u64>], dtype: Dtype) -> Result<Feed> {
        self.cluster.waits.check()?;
        Feed::open(&self.pulls, Reading::new(version), order, dtype)
    }

    /// The most bytes of weights that this process has held in the host's memory at once: those on their way to readers, and
    /// memory that waits for the next ones. A pipeline that begins to pull on demand counts anew.
    pub fn weights_held(&self) -> u64 {
        self.pulls.most_held()
    }

    /// Pulls what a step computes with, in the job's own type.
    pub(crate) fn pull_as(&self, reading: Reading, order: &[Range<u64>]) -> Result<Feed> {
        self.cluster.waits.check()?;
        Feed::open(&self.pulls, reading, order, self.spec().image_dtype)
    }

    /// Hands one version's weights or all of its state to `sink`, from all servers at once: the newest version, or one to
    /// come where training goes on.
    pub fn export(&self, contents: Contents, sink: &Sink<'_>) -> Result<ExportedVersion> {
        self.block_unless_failed(export::export(&self.cluster, contents, sink))
    }

    /// Where the job stands, server by server.
    pub fn describe(&self) -> Result<Vec<v1::DescribeResponse>> {
        let answers = self.cluster.describe_all(false, self.cluster.options.deadline);
        Ok(self.block_on(answers)?.into_vec())
    }

    /// The hash of all state at one version, which is the same whatever the number of servers. Waits until the
    /// servers agree on a version, so call it between steps.
    pub fn state_hash(&self) -> Result<StateHash> {
        let hash = admin::state_hash(&self.cluster);
        self.block_unless_failed(self.cluster.watched_at_work("the servers' common version", hash))
    }

    /// The sealed checkpoints in the order in which they were sealed, which is not that of their versions once the
    /// job went back. Those that cannot be restored are among them, and say why.
    pub fn list_checkpoints(&self) -> Result<Vec<Checkpoint>> {
        self.list_checkpoints_within(self.cluster.options.deadline)
    }

    /// As [`Session::list_checkpoints`]; each server has `deadline` to answer.
    pub fn list_checkpoints_within(&self, deadline: Duration) -> Result<Vec<Checkpoint>> {
        self.block_on(checkpoint::list_checkpoints(&self.cluster, deadline))
    }

    /// Checks whether every server could write its part of a checkpoint now. A run that wants checkpoints asks before
    /// its first step.
    pub fn check_checkpoint(&self) -> Result<()> {
        self.block_on(checkpoint::check_room(&self.cluster))
    }

    /// Does what `checkpoint` does. Where another state has taken the name, as after the job went back, it takes the
    /// first of name.2, name.3, ... that is free.
    pub fn checkpoint_numbered(&self, name: &str) -> Result<Checkpoint> {
        self.block_unless_failed(checkpoint::checkpoint_numbered(&self.cluster, name))
    }

    /// Writes a checkpoint of the current version: every server writes its part, then the manifest beside it. If a
    /// sealed checkpoint of that name is of this very state, it is the answer.
    ///
    /// # Errors
    /// `Call` with a `Conflict` of `name`, when another state has taken it.
    pub fn checkpoint(&self, name: &str) -> Result<Checkpoint> {
        self.block_unless_failed(checkpoint::checkpoint(&self.cluster, name))
    }

    /// Fills a job that waits for weights from a sealed checkpoint, which may have been made by any number of
    /// servers. It is filled on all servers or on none. A job that is at the checkpoint's state already is left as it
    /// is, so that a restore may be repeated.
    pub fn restore(&self, name: &str) -> Result<Version> {
        self.block_on(restore::restore(&self.cluster, name))
    }

    /// Opens the job and fills it from a checkpoint, whichever servers have lost their part. State that servers hold
    /// is given up only where the caller says so, or where the `memory` tier has lost the rest of it.
    ///
    /// # Errors
    /// `StateKept` when something would have to be deleted and may not; `NoCheckpoint`; `NotRestored`.
    pub fn go_back(&self, how: &GoBack) -> Result<Checkpoint> {
        self.block_on(go_back::go_back(&self.cluster, how))
    }

    /// Forgets the job on every server and frees its memory. Checkpoints stay. It may be called again where it failed.
    pub fn delete_job(&self) -> Result<()> {
        let again = self.is_deleting.swap(true, Ordering::Relaxed);
        self.block_on(admin::delete_job(&self.cluster, again))
    }

    /// Stops the job on every server until `resume`. Only rank 0 may call it, after `join`.
    pub fn pause(&self, reason: &str) -> Result<()> {
        self.block_on(admin::pause_all(&self.cluster, &self.rank, reason))
    }

    /// Lets a paused job go on. With `loss_scale` it goes on from that scale, which only a pause that came with a
    /// decision allows. It may be called again where not every server was reached.
    pub fn resume(&self, loss_scale: Option<f64>) -> Result<()> {
        self.block_on(resume::resume_all(&self.cluster, loss_scale))
    }

    /// Gives the rank up. Its incarnation cannot be used again.
    pub fn leave(self) -> Result<()> {
        self.block_on(join::leave(&self.cluster, &self.rank))
    }

    pub fn spec(&self) -> &JobSpec {
        self.cluster.spec()
    }

    pub fn layout(&self) -> &Layout {
        &self.cluster.layout
    }

    pub fn placement(&self) -> &Placement {
        &self.cluster.placement
    }

    pub fn rank(&self) -> Rank {
        self.cluster.options.rank
    }

    pub fn deadline(&self) -> Duration {
        self.cluster.options.deadline
    }

    /// The memory that this rank's gradients leave from, which stays while what is returned is there; None where no server may read
    /// it, by the transport.
    pub fn gradient_memory(&self) -> Option<GradientMemory> {
        self.gradients.memory()
    }

    /// The memory of servers of this host that the job's weights lie in.
    pub fn image_memory(&self) -> Vec<ImageMemory> {
        self.pulls.image_memory()
    }

    /// Whether all weights can be read where they lie in the memory of servers of this host.
    pub fn lends_weights(&self) -> bool {
        self.pulls.are_lent()
    }

    /// How many gradient chunks no server has acknowledged yet.
    pub fn unacknowledged_chunks(&self) -> usize {
        self.gradients.unacknowledged()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.cluster.stop();
    }
}
