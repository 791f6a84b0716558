//! Listens to the job's first server, in a task that the pipeline owns. With replicas, each break moves the watch to
//! the next server. Ranks other than 0 learn of commits. All ranks learn of pauses, resumes, and the servers that an
//! operator wants.

use std::{collections::BTreeMap, sync::Arc};

use longshore_proto::{Commit, Fault, FaultKind, Incarnation, Rank, ServerId, Step, Version, fault::READS};
use longshore_wire::{
    Wire,
    v1::{self, Phase, WatchRequest, event},
};

use super::{outcome::Decided, shared::PipelineInner};
use crate::{
    cluster::{Backoff, Cluster},
    envelope::Envelope,
    error::Result,
    host::Instant,
    lock,
    push::Gradients,
    rank::RankState,
    session::{admit, admit_added, spread_on},
};

pub(super) struct Watcher {
    pub(super) cluster: Arc<Cluster>,
    pub(super) rank: Arc<RankState>,
    pub(super) gradients: Arc<Gradients>,
    pub(super) shared: Arc<PipelineInner>,
    /// The version that this rank joined at.
    pub(super) joined: Version,
    /// The last step that was heard of. The watch asks for later steps.
    pub(super) seen: Step,
    /// The newest commits that were heard of, and the incarnation that decided each. A step decided again after a
    /// step back has another decider.
    pub(super) decided: BTreeMap<Step, Incarnation>,
    /// Version and loss scale of a commit that paused the job. The version is posted when the job goes on, since
    /// an operator may change the scale.
    pub(super) floor: Option<(Version, f64)>,
    /// Outcome of the step that made the `floor` version. The outcome is posted when the job goes on, with the
    /// final scale. None on rank 0, whose driver posts it.
    pub(super) held: Option<Decided>,
}

impl Watcher {
    /// Runs until the pipeline is dropped or the session has failed. A watch beyond the failure would show other ranks
    /// a live process.
    pub(super) async fn run(self) {
        let cluster = Arc::clone(&self.cluster);
        let watching = async {
            self.watch().await;
            Ok(())
        };
        // The session keeps the failure, and every wait ends with it.
        let _ = cluster.waits.unless_failed(watching).await;
    }

    /// Opens a lost watch again without limit: the waits for its events have deadlines of their own.
    async fn watch(mut self) {
        let (mut backoff, mut breaks) = (Backoff::new(), 0);
        loop {
            // If shards have replicas, a server may be gone for good, and the other servers know of the loss.
            let turn = if self.cluster.spec().replicas > 1 { breaks } else { 0 };
            let servers = self.cluster.servers();
            let server = servers.clone().nth(turn % servers.len().max(1)).unwrap_or_default();
            let Err(status) = self.listen(server, &mut backoff).await else { return };
            if self.cluster.has_left(server) {
                continue;
            }
            let fault = self.cluster.fault(server, &status);
            if fault.kind == FaultKind::NotFound && fault.field == "after_step" {
                if let Err(error) = self.skip_ahead(server, fault).await {
                    return self.cluster.waits.fail(error);
                }
                continue;
            }
            if !matches!(fault.kind, FaultKind::Unavailable | FaultKind::Deadline) {
                return self.cluster.waits.fail(self.cluster.explain(server, "Watch", None, fault));
            }
            breaks += 1;
            tracing::debug!(%fault, "the watch broke, opening it again");
            backoff.pause(Instant::now() + self.cluster.options.deadline).await;
        }
    }

    /// Listens until the connection breaks. Returns Ok only if the session has failed.
    async fn listen(&mut self, server: ServerId, backoff: &mut Backoff) -> Result<(), tonic::Status> {
        let after = self.seen;
        let request = WatchRequest {
            job: self.cluster.job().to_string(),
            after_step: after.0,
            rank: self.cluster.options.rank.0,
            incarnation: self.rank.incarnation().0,
        };
        let mut events = self.cluster.peer(server).training().watch(request).await?.into_inner();
        if let Err(error) = self.catch_up(server).await {
            self.cluster.waits.fail(error);
            return Ok(());
        }
        if self.seen < after {
            return Err(tonic::Status::unavailable("the server is behind what was watched"));
        }
        loop {
            // A server that was given up may not know that, and then sends nothing.
            let event = tokio::select! {
                biased;
                event = events.message() => event?,
                () = self.cluster.left(server) => None,
            };
            let Some(event) = event else {
                return Err(tonic::Status::unavailable(
                    "the server has closed the watch, or has left the job",
                ));
            };
            backoff.reset();
            if let Err(error) = self.take(event).await {
                self.cluster.waits.fail(error);
                return Ok(());
            }
        }
    }

    /// Returns None if the server is given up meanwhile.
    async fn describe(&self, server: ServerId) -> Result<Option<v1::DescribeResponse>> {
        let answer = self.cluster.describe(server, false, self.cluster.options.deadline);
        self.cluster.unless_lost(server, answer).await
    }

    /// Catches up with a pause that began or ended while no watch was open.
    async fn catch_up(&mut self, server: ServerId) -> Result<()> {
        let was_paused = self.cluster.waits.is_paused();
        // A server that is given up breaks the watch, and the watch moves to another server.
        let Some(answer) = self.describe(server).await? else { return Ok(()) };
        let progress = answer.progress.unwrap_or_default();
        // A server that is behind lost a version that was not durable, and the version's step is decided again.
        self.seen = self.seen.min(Step(progress.version));
        match progress.phase() {
            Phase::Paused => self.cluster.waits.paused(&progress.pause_reason),
            _ if was_paused || self.floor.is_some() => {
                let scale = progress.last_commit.map(|commit| self.scale_after_pause(&commit)).transpose()?;
                self.resumed(scale.unwrap_or(0.0));
            }
            _ => {}
        }
        Ok(())
    }

    /// Returns the loss scale after a pause. A delayed job may have decided one more step since. The commit of that
    /// step names the scale after the pause as `previous_loss_scale`.
    fn scale_after_pause(&self, last: &v1::Commit) -> Result<f64> {
        let after = self.floor.is_some_and(|(version, _)| last.step == version.0 + 1);
        if after {
            Ok(Envelope::decode(&last.trainer_state)?.previous_loss_scale)
        } else {
            Ok(last.loss_scale)
        }
    }

    /// Skips to the newest commit, since a restarted server knows no other. The newest commit also names the loss
    /// scale of the version before.
    ///
    /// No earlier version can be missing. A step is decided only after this rank has pushed it. To push it, this rank
    /// must know the version that the step reads. Steps read at most two versions before their own.
    async fn skip_ahead(&mut self, server: ServerId, fault: Fault) -> Result<()> {
        let Some(answer) = self.describe(server).await? else { return Ok(()) };
        let last = answer.progress.and_then(|progress| progress.last_commit);
        let last = last.map(|commit| Commit::from_wire(Some(commit))).transpose()?;
        let made_here = self.cluster.options.rank == Rank(0);
        let Some(commit) = last.filter(|commit| made_here || commit.step.0 <= self.seen.0 + 2) else {
            return Err(self.cluster.explain(server, "Watch", None, fault));
        };
        if let Some(placement) = self.cluster.newest_placement().await {
            for (server, address) in self.cluster.not_joined(&placement) {
                admit(&self.cluster, &self.rank, &self.gradients, server, &address).await;
            }
            self.cluster.set_placement(placement);
        }
        if !made_here && commit.step.0 == self.seen.0 + 2 {
            let before = Envelope::decode(&commit.trainer_state)?.previous_loss_scale;
            self.shared.board.post(Version(commit.step.0 - 1), before);
        }
        self.committed(commit)
    }

    async fn take(&mut self, event: v1::Event) -> Result<()> {
        match event.event {
            Some(event::Event::Commit(commit)) => {
                let commit = Commit::from_wire(Some(commit))?;
                self.follow(&commit).await;
                self.committed(commit)?;
            }
            Some(event::Event::Wanted(wanted)) => {
                let lost: Vec<ServerId> = wanted.lost.iter().copied().map(ServerId).collect();
                self.cluster.give_up(&lost);
                drop(self.shared.wanted.send_replace(wanted));
            }
            Some(event::Event::Paused(paused)) => self.cluster.waits.paused(&paused.reason),
            Some(event::Event::Resumed(resumed)) => self.resumed(resumed.loss_scale),
            None => {}
        }
        Ok(())
    }

    /// Takes a commit's change of the placement, before any step for which the change counts can begin. On rank 0 the
    /// driver has taken it already.
    async fn follow(&self, commit: &Commit) {
        let Some(change) = &commit.placement else { return };
        if self.cluster.options.rank == Rank(0) || commit.step <= self.seen {
            return;
        }
        let first = self.cluster.placement().servers.len() as u32;
        admit_added(&self.cluster, &self.rank, &self.gradients, first, &change.added);
        self.cluster.reach_owners(change).await;
        self.cluster.change_placement(change, commit.step);
    }

    fn committed(&mut self, commit: Commit) -> Result<()> {
        if commit.step <= self.seen {
            return Ok(());
        }
        self.seen = commit.step;
        if let Some(&earlier) = self.decided.get(&commit.step) {
            return self.compare(&commit, earlier);
        }
        if commit.step.version() <= self.joined {
            return Ok(());
        }
        self.note(&commit);
        let paused = !commit.pause_reason.is_empty();
        if paused {
            self.cluster.waits.paused(&commit.pause_reason);
            self.floor = Some((commit.step.version(), commit.loss_scale));
        }
        if self.cluster.options.rank == Rank(0) {
            // Rank 0 made the commit. Its driver may wait for the end of a pause that ended before this commit was
            // heard.
            if !paused {
                self.shared.resumed.post(commit.step.version(), commit.loss_scale);
            }
            return Ok(());
        }
        let decided = Decided {
            skip: commit.skip,
            norm: commit.norm,
            clip_coefficient: commit.clip_coefficient,
            loss_scale_next: commit.loss_scale,
            overflow: None,
            scaler: None,
        };
        let trainer = Envelope::decode(&commit.trainer_state)?.trainer;
        *lock(&self.shared.trainer) = Some(trainer);
        self.gradients.committed(commit.step);
        if paused {
            self.held = Some(decided);
        } else {
            self.shared.outcomes.decided(commit.step, decided);
            self.shared.board.post(commit.step.version(), commit.loss_scale);
        }
        Ok(())
    }

    fn note(&mut self, commit: &Commit) {
        /// Number of commits remembered. A job steps back by at most one version, so a few are enough.
        const KEPT: usize = 4;
        self.decided.insert(commit.step, commit.decided_by);
        while self.decided.len() > KEPT {
            self.decided.pop_first();
        }
    }

    /// Compares a commit with the earlier commit of its step. Fails if the decisions differ: this rank must join
    /// again.
    fn compare(&self, commit: &Commit, earlier: Incarnation) -> Result<()> {
        if commit.decided_by == earlier {
            return Ok(());
        }
        let value = format!("{} as decided by {earlier}", commit.step.version());
        let limit = format!("as decided by {}", commit.decided_by);
        let fault = Fault::new(FaultKind::Conflict, READS, value, limit, "it was taken back");
        Err(self.cluster.explain(self.cluster.first(), "Watch", Some(commit.step), fault))
    }

    /// On rank 0, resumes all servers: an operator's call may have reached only the watched server.
    fn spread_resume(&self, loss_scale: f64) {
        if self.cluster.options.rank != Rank(0) {
            return;
        }
        // The pause was at the version that was decided last. A later pause stays.
        let version = Version(self.seen.0);
        for server in self.cluster.servers() {
            let cluster = Arc::clone(&self.cluster);
            self.cluster.runtime.spawn_for_session(async move {
                if let Err(error) = spread_on(&cluster, server, version, loss_scale).await {
                    tracing::warn!(server = cluster.address(server), %error, "not resumed: `longshore resume` again");
                }
            });
        }
    }

    /// Notes a resume. A `loss_scale` of 0 keeps the old scale. Servers accept a new scale only in a pause that came
    /// with a decision. In any other pause, ranks would apply the scale at different steps.
    fn resumed(&mut self, loss_scale: f64) {
        let floor = self.floor.take();
        // The driver waits for the end of a pause that it has decided, and resumes the other servers itself.
        let has_driver = |version| self.cluster.options.rank == Rank(0) && version > self.joined;
        if !floor.is_some_and(|(version, _)| has_driver(version)) {
            self.spread_resume(loss_scale);
        }
        if let Some((version, old)) = floor {
            let scale = if loss_scale > 0.0 { loss_scale } else { old };
            if let Some(decided) = self.held.take() {
                self.shared.outcomes.decided(Step(version.0), Decided { loss_scale_next: scale, ..decided });
            }
            // Rank 0's own version counts only once the driver has finished the step.
            let board = if has_driver(version) { &self.shared.resumed } else { &self.shared.board };
            board.post(version, scale);
        }
        self.cluster.waits.resumed();
    }
}
