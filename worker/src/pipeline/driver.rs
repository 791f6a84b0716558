//! Decides steps on rank 0, in order, in a task that the pipeline owns. The driver takes gradient statistics, sends
//! commits, and pauses the job at the smallest loss scale.

use std::{sync::Arc, time::Duration};

use longshore_proto::{
    Commit, LeftOut, Origin, Step, Version, left_out::advance, limits::MAX_PAUSE_REASON_BYTES,
};
use longshore_wire::v1::StepReport;
use tokio::sync::{mpsc, oneshot};
use tracing::{Instrument, Span};

use super::{
    moves::Moves,
    options::PipelineOptions,
    outcome::Decided,
    shared::PipelineInner,
    stats::{self, Collected, Statistics},
};
use crate::{
    cluster::{ByServer, Cluster, Ended, Impatience, Task},
    decide::{Decision, decide},
    envelope::Envelope,
    error::{Environment, Result},
    loss_scale::{Event, LossScaler},
    push::Gradients,
    rank::{OwnCommit, RankState, await_durable, decide_on},
    session::spread_on,
};

/// Extra time of the driver beyond a task's own longest wait. So the task's error comes first, which names the missing
/// rank. If the task returns no error, the driver's error names the rank that the servers wait for.
const GRACE: Duration = Duration::from_secs(5);

/// A step that awaits its decision.
pub(super) struct StepToDecide {
    pub(super) step: Step,
    /// Loss scale of the step's gradients.
    pub(super) loss_scale: f64,
    /// Tracing span of the step. The span's context goes with the commit.
    pub(super) span: Span,
    pub(super) finished_at: stats::Finished,
    /// The trainer's message at the end of the step.
    pub(super) finished: oneshot::Receiver<Finished>,
}

/// The trainer's part of a commit: its own bytes, and a report for charts.
pub(super) struct Finished {
    pub(super) trainer_state: Vec<u8>,
    pub(super) report: StepReport,
}

pub(super) struct Driver {
    pub(super) cluster: Arc<Cluster>,
    pub(super) rank: Arc<RankState>,
    pub(super) gradients: Arc<Gradients>,
    pub(super) shared: Arc<PipelineInner>,
    pub(super) options: PipelineOptions,
    pub(super) scaler: LossScaler,
    /// Parameters that steps have left out so far, or that had fewer updates when the job was filled.
    pub(super) left_out: Vec<LeftOut>,
    /// Ends once the last commit is durable on every server. The next commit waits for this end. So after any crash all
    /// servers have one version in common, and at most one step is sent again.
    pub(super) durable: Option<Task<Result<()>>>,
    pub(super) moves: Moves,
}

/// Waits until no crash of any server can take the version back.
pub(super) async fn durable_everywhere(cluster: Arc<Cluster>, version: Version) -> Result<()> {
    if cluster.has_durable_later() {
        cluster.on_all(|server| await_durable(&cluster, server, version)).await?;
    }
    Ok(())
}

impl Driver {
    /// Runs until the pipeline is dropped, or a step cannot be decided. Statistics are collected from a step's begin
    /// on, also while the step before is decided.
    pub(super) async fn run(mut self, mut work: mpsc::UnboundedReceiver<StepToDecide>) {
        let (begun, mut steps) = mpsc::unbounded_channel();
        let cluster = Arc::clone(&self.cluster);
        let collect = async move {
            while let Some(work) = work.recv().await {
                let collected = stats::collect(cluster.clone(), work.step, work.finished_at.clone());
                let _ = begun.send((work, cluster.runtime.spawn_joined(collected)));
            }
        };
        let decide = async {
            while let Some((work, stats)) = steps.recv().await {
                let span = work.span.clone();
                if let Err(error) = self.step(work, stats).instrument(span).await {
                    return self.cluster.waits.fail(error);
                }
            }
        };
        tokio::join!(collect, decide);
    }

    async fn step(&mut self, work: StepToDecide, stats: Task<Result<Statistics>>) -> Result<()> {
        let step = work.step;
        let Ok(finished) = work.finished.await else {
            return Ok(()); // the pipeline went away in the middle of a step
        };
        self.follow(step).await?;
        let statistics = self.patiently("the contributions of all ranks", step, stats).await?;
        let Collected { blocks, left_out, origins, differing, broken } =
            stats::basis(&self.cluster, step, statistics).await;
        let contributions = self.cluster.spec().contributions(self.cluster.options.world_size);
        let gradient_scale = work.loss_scale * contributions as f64;
        let shares = self.cluster.spec().block_shares(&self.cluster.layout);
        let decision = decide(&blocks, &shares, self.options.clip, gradient_scale);
        let event = self.scaler.update(decision.skip);
        let overflow =
            decision.first_nonfinite.map(|at| self.cluster.spec().name_element(&self.cluster.layout, at));
        let mut commit = self.commit(step, gradient_scale, &decision, &origins, finished.trainer_state);
        commit.left_out = advance(&self.left_out, &left_out, decision.skip);
        if event == Event::AtFloor {
            commit.pause_reason =
                at_floor(step, commit.loss_scale, overflow.as_deref().unwrap_or("the gradient's norm"));
        }
        if let Some(durable) = self.durable.take() {
            self.patiently("a version to be durable", step, durable).await?;
        }
        commit.placement = self.moves.change(step, &differing, &broken).await?;
        tracing::debug!(target: "stage", step = step.0, "decided");
        let (scaling, scaled_micros) = (self.moves.obstacle.clone(), self.moves.reached);
        let report = StepReport { scaling, scaled_micros, ..finished.report };
        let own = Arc::new(OwnCommit { commit, origins, report });
        self.rank.commits.remember(own.clone());
        self.left_out = own.commit.left_out.clone();
        self.cluster.on_all(|server| decide_on(&self.cluster, server, &own)).await?;
        if let Some(change) = &own.commit.placement {
            self.moves.decided(change, step);
        }
        let durable = durable_everywhere(self.cluster.clone(), step.version());
        self.durable = Some(self.cluster.runtime.spawn_joined(durable));
        let loss_scale = match own.commit.pause_reason.is_empty() {
            true => own.commit.loss_scale,
            false => self.await_resume(&own.commit).await?,
        };
        self.shared.outcomes.decided(
            step,
            Decided {
                skip: decision.skip,
                norm: decision.norm,
                clip_coefficient: decision.clip_coefficient,
                loss_scale_next: loss_scale,
                overflow,
                scaler: Some(event),
            },
        );
        self.gradients.committed(step);
        // The post comes last: a reader that waits for this version finds all the rest done.
        self.shared.board.post(step.version(), loss_scale);
        Ok(())
    }

    /// Sets the scaler to the loss scale of the version before, which an operator may have changed.
    async fn follow(&mut self, step: Step) -> Result<()> {
        let chosen = self.shared.board.wait(&self.cluster, Version(step.0 - 1)).await?;
        if chosen != self.scaler.scale() {
            self.scaler.set_scale(chosen)?;
        }
        Ok(())
    }

    /// Awaits a task that has a deadline of its own.
    async fn patiently<T>(&self, what: &'static str, step: Step, task: Task<Result<T>>) -> Result<T> {
        match self.cluster.waits.patiently(self.cluster.options.slow_deadline + GRACE, task).await {
            Ok(Ok(result)) => result,
            Ok(Err(Ended)) => Err(Environment {
                what: "deciding a step",
                cause: "its task ended early".into(),
                remedy: "this is a defect: report it with the log",
            }
            .into()),
            Err(Impatience::Failed(error)) => Err(error),
            Err(Impatience::Elapsed(waited)) => Err(self.cluster.late(what, step.version(), waited).await),
        }
    }

    fn commit(
        &self,
        step: Step,
        gradient_scale: f64,
        decision: &Decision,
        origins: &ByServer<Origin>,
        trainer: Vec<u8>,
    ) -> Commit {
        let before = Version(step.0 - 1);
        let envelope = Envelope {
            scaler: self.scaler.clone(),
            // The board has the version before: this rank decided that version, or joined at it.
            previous_loss_scale: self.shared.board.scale(before).unwrap_or(self.scaler.scale()),
            origins: by_number(origins),
            trainer,
        };
        Commit {
            step,
            skip: decision.skip,
            gradient_scale,
            clip_coefficient: decision.clip_coefficient,
            correction: self.options.correction_of(step),
            left_out: Vec::new(),
            groups: (self.options.hyper)(step),
            // JSON has no infinity, so a norm that is not finite is sent as 0. `skip` tells of the overflow.
            norm: if decision.norm.is_finite() { decision.norm } else { 0.0 },
            loss_scale: self.scaler.scale(),
            trainer_state: envelope.encode(),
            decided_by: self.rank.incarnation(),
            pause_reason: String::new(),
            placement: None,
        }
    }

    /// Waits until all servers are resumed after the pause of a commit, server 0 first. Returns the loss scale to
    /// continue with.
    async fn await_resume(&mut self, commit: &Commit) -> Result<f64> {
        self.cluster.waits.paused(&commit.pause_reason);
        let version = commit.step.version();
        let loss_scale = self.shared.resumed.wait(&self.cluster, version).await?;
        let cluster = &*self.cluster;
        cluster.on_all(|server| spread_on(cluster, server, version, loss_scale)).await?;
        cluster.waits.resumed();
        Ok(loss_scale)
    }
}

/// Returns origins indexed by the server's number. Servers without statistics have the unknown origin.
fn by_number(origins: &ByServer<Origin>) -> Vec<Origin> {
    let count = origins.ids().last().map_or(0, |server| server.0 as usize + 1);
    let mut numbered = vec![Origin::UNKNOWN; count];
    origins.iter().for_each(|(server, origin)| numbered[server.0 as usize] = *origin);
    numbered
}

/// Returns the reason of a pause at the smallest loss scale. A smaller scale would not help: a person must look,
/// and the job waits.
fn at_floor(step: Step, scale: f64, tensor: &str) -> String {
    let mut reason = format!(
        "{step} overflowed at the smallest loss scale, {scale}: first in {tensor}. The step was skipped and nothing is lost. \
         Look at the data of this step and at that tensor; lower the learning rate, use bf16 gradients, or restore an \
         earlier checkpoint; then `longshore resume`, with --loss-scale to change it"
    );
    reason.truncate(reason.floor_char_boundary(MAX_PAUSE_REASON_BYTES));
    reason
}
