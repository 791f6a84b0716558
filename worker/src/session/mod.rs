//! A rank's session with all servers of its job: connect, open, join, and an operator's calls. A trainer or a command
//! owns the session, and its calls block their thread.

mod admin;
mod checkpoints;
mod export;
mod go_back;
mod join;
mod open;
mod probe;
mod restore;
mod resume;
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

use longshore_proto::{Incarnation, JobSpec, Layout, Rank, TierKind, Version, check_max_exposed};
use longshore_wire::{Author, v1};

pub use self::{
    admin::{StateHash, asked_after},
    checkpoints::{Checkpoint, checkpoint_name, common, is_taken, numbered},
    export::{ExportedVersion, export_by},
    go_back::GoBack,
    join::Joined,
    open::{Opened, is_loading},
    probe::Probe,
    resume::paused_at,
    upload::Filling,
    version::{TRIES, asked_version, has_passed, is_busy},
};
pub(crate) use self::{
    join::{admit, admit_added, place_on, take_over},
    resume::spread_on,
};
pub use crate::cluster::{Address, Interrupt, Options, Process, Transport, untrusted, whole, with_sources};
use crate::{
    cluster::{Cluster, Losses},
    error::{Error, Result},
    export::{Contents, Sink},
    host::Instant,
    memfd::{GradientMemory, ImageMemory},
    pull::{Feed, Pulls, Reading},
    push::{Gradients, start_lanes},
    rank::{RankState, begin, cause},
};

/// Connections to every server of a job, as one rank. All calls block, with a deadline, and may come from any thread
/// that belongs to no async runtime. After a background failure every later call returns it.
pub struct Session {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) rank: Arc<RankState>,
    pub(crate) gradients: Arc<Gradients>,
    pub(crate) pulls: Arc<Pulls>,
    /// True after the first `delete_job`: a server without the job may have deleted it then.
    is_deleting: AtomicBool,
    /// True once rank 0 has opened a job without any state.
    is_new: AtomicBool,
}

impl Session {
    /// Connects to every server, retrying until the deadline.
    ///
    /// # Errors
    /// `Invalid` for an option or spec that cannot be used; `Unreachable` naming the server.
    pub fn connect(options: Options) -> Result<Session> {
        let start = Instant::now();
        let cluster = Arc::new(Cluster::connect(options)?);
        if cluster.spec().replicas > 1 {
            let mut losses = Losses::new(cluster.clone());
            cluster.runtime.block_on(async {
                losses.look().await;
                Ok(())
            })?;
            cluster.runtime.spawn_for_session(losses.watch());
        }
        cluster.runtime.block_on(begin(&cluster, start))?;
        let rank = Arc::new(RankState::new(&cluster));
        let gradients = Arc::new(Gradients::new(cluster.clone(), rank.clone()));
        let pulls = Arc::new(Pulls::new(cluster.clone(), rank.clone()));
        let (is_deleting, is_new) = Default::default();
        Ok(Session { cluster, rank, gradients, pulls, is_deleting, is_new })
    }

    fn block_on<T>(&self, act: impl Future<Output = Result<T>>) -> Result<T> {
        self.cluster.runtime.block_on(act)
    }

    /// Runs a call that waits until all servers hold one version, and ends it at a background failure. Such a
    /// failure may mean that this process must compute a step again. The servers wait for that step, so the call
    /// would wait for itself.
    fn block_unless_failed<T>(&self, act: impl Future<Output = Result<T>>) -> Result<T> {
        self.block_on(self.cluster.waits.unless_failed(act))
    }

    /// Returns the cause of a call's error. `Outdated` becomes `Fenced` if a newer process has taken the rank.
    /// `StateLost` becomes `Outdated` if the job has left that server since this session connected.
    pub fn cause(&self, error: Error) -> Error {
        cause(&self.cluster, error)
    }

    /// Creates the job on every server that lacks it. Calls may be repeated. If a server has trained, the job is not
    /// created on servers that have nothing.
    ///
    /// # Errors
    /// `Call` if a server refuses, for example a differing spec or too little memory. On rank 0, `StateLost` if
    /// some servers have trained and others have nothing.
    pub fn open(&self) -> Result<Opened> {
        let opened = self.cluster.watched_at_work("the job on all servers", open::open(&self.cluster));
        let opened = self.block_on(opened).map_err(|error| self.cause(error))?;
        let is_new = opened.is_fresh() && self.cluster.options.rank == Rank(0);
        self.is_new.store(is_new, Ordering::Relaxed);
        Ok(opened)
    }

    /// Takes the rank with a new incarnation, fences an older process, and brings all servers to one version.
    ///
    /// # Errors
    /// `VersionsDiffer` if the servers do not reach one version in time; `Misuse` if the session has joined
    /// already.
    pub fn join(&mut self) -> Result<Joined> {
        let join = join::join(&self.cluster, &self.rank, self.is_new.load(Ordering::Relaxed));
        let joined = self.block_on(self.cluster.watched("the servers' common version", join));
        let joined = joined.map_err(|error| self.cause(error))?;
        start_lanes(&self.gradients);
        Ok(joined)
    }

    /// Uploads the initial fp32 weights. Called on rank 0, after `join` of a fresh job.
    ///
    /// `weights(i)` returns all elements of parameter i. Each parameter is requested once, in order, and again for
    /// a server that is retried. A single parameter is in memory at a time.
    pub fn upload(&self, weights: &dyn Fn(usize) -> Vec<f32>) -> Result<()> {
        self.fill(&upload::ByParam::new(self.spec(), self.layout(), weights))
    }

    /// Fills a fresh job as `upload` does, with weights or an optimizer's state.
    ///
    /// # Errors
    /// `OtherFilling` if a server was filled with other contents; `Call` if other contents have begun to fill it.
    pub fn fill(&self, filling: &dyn Filling) -> Result<()> {
        upload::upload(&self.cluster, &self.rank, filling)
    }

    /// Waits until every server trains: rank 0 has opened the job, and uploaded or restored. Bounded by
    /// `slow_deadline`.
    pub fn wait_training(&self) -> Result<()> {
        self.wait_training_from(None)
    }

    /// Waits as `wait_training` does, in a run whose rank 0 may go back to a checkpoint as `how` says. The wait ends at
    /// once if rank 0 must refuse that.
    pub fn wait_training_from(&self, how: Option<&GoBack>) -> Result<()> {
        let training = go_back::wait_training(&self.cluster, how);
        let waited = self.block_on(self.cluster.watched_at_work("the initial weights", training));
        waited.map_err(|error| self.cause(error))
    }

    /// Starts any rank: opens the job, joins it, and fills a fresh job. Rank 0 uploads `weights`, and the other
    /// ranks wait. A restore that was cut off is completed. To start from a checkpoint, rank 0 calls `open` and
    /// `restore` first.
    pub fn start(&mut self, weights: &dyn Fn(usize) -> Vec<f32>) -> Result<Joined> {
        self.start_by(|session| session.upload(weights))
    }

    /// Starts any rank as `start` does, with weights or an optimizer's state.
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
                // The filling may count updates.
                (joined.applied, joined.left_out) = self.block_on(open::filled(&self.cluster))?;
            }
            return Ok(joined);
        }
        // A rank that joined before this wait would not see the result of a restore. The later `open` compares the job,
        // and never creates it.
        self.follow(None)
    }

    /// Starts a rank other than 0 behind rank 0, which may go back to a checkpoint as `how` says.
    pub fn follow(&mut self, how: Option<&GoBack>) -> Result<Joined> {
        self.wait_training_from(how)?;
        self.open()?;
        self.join()
    }

    /// Starts to pull flat ranges of one version, in the given order. Servers hold the pull until the version is
    /// made. The feed's memory comes from a pool: nothing is allocated in steady state.
    pub fn pull(&self, version: Version, order: &[Range<u64>]) -> Result<Feed> {
        self.pull_as(Reading::new(version), order)
    }

    /// The most bytes of weights that this process has held in host memory at once, idle buffers included. A pipeline
    /// that begins to pull on demand resets the count.
    pub fn weights_held(&self) -> u64 {
        self.pulls.most_held()
    }

    /// Pulls as `pull` does, with the reading that all pulls of a step share.
    pub(crate) fn pull_as(&self, reading: Reading, order: &[Range<u64>]) -> Result<Feed> {
        self.cluster.waits.check()?;
        Feed::open(&self.pulls, reading, order)
    }

    /// Passes one version's weights, or all of its state, to `sink`, from all servers at once. The version is the
    /// newest, or one to come while training goes on.
    pub fn export(&self, contents: Contents, sink: &Sink<'_>) -> Result<ExportedVersion> {
        self.block_unless_failed(export::export(&self.cluster, contents, sink))
    }

    /// Returns each server's description of the job.
    pub fn describe(&self) -> Result<Vec<v1::DescribeResponse>> {
        let answers = self.cluster.describe_all(false, self.cluster.options.deadline);
        Ok(self.block_on(answers)?.into_vec())
    }

    /// Returns the hash of all state at one version, independent of the number of servers. Waits until the servers
    /// agree on a version, so call it between steps.
    pub fn state_hash(&self) -> Result<StateHash> {
        let hash = admin::state_hash(&self.cluster);
        self.block_unless_failed(self.cluster.watched_at_work("the servers' common version", hash))
    }

    /// Returns the sealed checkpoints in the order of their sealing. Versions have another order once the job went
    /// back. Checkpoints that cannot be restored are included, with the reason.
    pub fn list_checkpoints(&self) -> Result<Vec<Checkpoint>> {
        self.list_checkpoints_within(self.cluster.options.deadline)
    }

    /// Lists as [`Session::list_checkpoints`] does; each server has `deadline` to answer.
    pub fn list_checkpoints_within(&self, deadline: Duration) -> Result<Vec<Checkpoint>> {
        self.block_on(checkpoints::list_checkpoints(&self.cluster, deadline))
    }

    /// Checks that every server could write its part of a checkpoint now. A run with checkpoints asks before its
    /// first step.
    pub fn check_checkpoint(&self) -> Result<()> {
        self.block_on(checkpoints::check_room(&self.cluster))
    }

    /// Writes as `checkpoint` does. A name that belongs to another state gets the first free number, as name.2.
    pub fn checkpoint_numbered(&self, name: &str) -> Result<Checkpoint> {
        self.block_unless_failed(checkpoints::checkpoint_numbered(&self.cluster, self.author(), name))
    }

    /// Writes a checkpoint of the current version. Every server writes its part, and then a manifest beside the part. A
    /// sealed checkpoint of that name and of this very state is returned as it is.
    ///
    /// # Errors
    /// `Call` with a `Conflict` of `name`, if another state has taken it.
    pub fn checkpoint(&self, name: &str) -> Result<Checkpoint> {
        self.block_unless_failed(checkpoints::checkpoint(&self.cluster, self.author(), name))
    }

    /// Author of this process's checkpoints. Servers refuse a fenced rank 0.
    fn author(&self) -> Author {
        match (self.cluster.options.rank, self.rank.incarnation()) {
            (_, Incarnation(0)) => Author::Unknown,
            (Rank(0), incarnation) => Author::Rank(incarnation),
            (_, incarnation) => Author::Operator(incarnation.0),
        }
    }

    /// Fills a job that waits for weights from a sealed checkpoint, made by any number of servers. Either all
    /// servers are filled or none. A job that is already at the checkpoint's state is unchanged, so a restore may
    /// be repeated.
    pub fn restore(&self, name: &str) -> Result<Version> {
        self.block_on(restore::restore(&self.cluster, name))
    }

    /// Opens the job and fills it from a checkpoint, whether or not servers have lost their part. A job on another
    /// number of servers is brought from those servers, if they are at the checkpoint's version. Other state is deleted
    /// only if the caller allows it, or if tier `memory` has lost the rest.
    ///
    /// # Errors
    /// `StateKept` if state would have to be deleted and may not; `Invalid` if the servers hold parts of several jobs;
    /// `NoCheckpoint`; `NotRestored`.
    pub fn go_back(&self, how: &GoBack) -> Result<Checkpoint> {
        let parts = self.block_on(open::parts(&self.cluster))?;
        if !how.discard_state {
            self.block_on(open::check_one_job(&self.cluster, &parts))?;
        }
        let Some((_, elsewhere)) = open::elsewhere(&self.cluster, parts) else {
            return self.block_on(go_back::go_back(&self.cluster, how));
        };
        let old = Cluster::connect(Options { servers: elsewhere.servers, ..self.cluster.options.clone() })?;
        self.block_on(go_back::move_from(&old, &self.cluster, how))
    }

    /// Returns true if the job is open on another number of servers. [`Session::go_back`] can bring the job to this
    /// session's servers.
    pub fn is_elsewhere(&self) -> Result<bool> {
        let parts = self.block_on(open::parts(&self.cluster))?;
        Ok(open::elsewhere(&self.cluster, parts).is_some())
    }

    /// Deletes the job on every server, and frees its memory. Checkpoints stay. A failed call may be repeated.
    pub fn delete_job(&self) -> Result<()> {
        let again = self.is_deleting.swap(true, Ordering::Relaxed);
        self.block_on(admin::delete_job(&self.cluster, again))
    }

    /// Asks the job to move to `servers`, while its ranks train. New servers keep the job in `tier`, or in the present
    /// servers' tier. Updates wait for moves at most for `max_exposed` of the time between two decisions. Returns once
    /// its servers know of the wish.
    ///
    /// # Errors
    /// `Call` if a server refuses: `Invalid` for a list that is empty or has repetitions, `Forbidden` for an identity
    /// without the role operator. `Invalid` unless `max_exposed` is above 0 and at most 1.
    pub fn scale(&self, servers: &[String], tier: Option<TierKind>, max_exposed: f64) -> Result<()> {
        check_max_exposed(max_exposed)?;
        self.block_on(admin::scale_all(&self.cluster, servers, tier, max_exposed))
    }

    /// Returns a function that tells whether the job is paused, for an [`Interrupt`] of this session.
    pub fn asks_if_paused(&self) -> impl Fn() -> bool + Send + Sync + use<> {
        let cluster = Arc::downgrade(&self.cluster);
        move || cluster.upgrade().is_some_and(|cluster| cluster.waits.is_paused())
    }

    /// Stops the job on every server until `resume`. Rank 0 only, after `join`.
    pub fn pause(&self, reason: &str) -> Result<()> {
        self.block_on(admin::pause_all(&self.cluster, &self.rank, reason))
    }

    /// Ends a pause. With `loss_scale` the job continues with that scale. Servers accept a scale only if the pause came
    /// with a decision. A call that did not reach every server may be repeated.
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

    /// Addresses of the job's present servers, as ranks dial them. The job may have left servers of this session's options.
    pub fn servers(&self) -> Vec<String> {
        let placement = self.cluster.placement();
        placement.members().map(|server| placement.servers[server.0 as usize].clone()).collect()
    }

    pub fn rank(&self) -> Rank {
        self.cluster.options.rank
    }

    /// Keeps the memory of this rank's gradients in place while the returned value lives. None if the transport lets no
    /// server read that memory.
    pub fn gradient_memory(&self) -> Option<GradientMemory> {
        self.gradients.memory()
    }

    /// Memory of servers of this host that holds the job's weights.
    pub fn image_memory(&self) -> Vec<ImageMemory> {
        self.pulls.image_memory()
    }

    /// Returns true if all weights are readable in the memory of servers of this host.
    pub fn lends_weights(&self) -> bool {
        self.pulls.are_lent()
    }

    /// Number of gradient chunks that no server has acknowledged yet.
    pub fn unacknowledged_chunks(&self) -> usize {
        self.gradients.unacknowledged()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.cluster.stop();
    }
}
