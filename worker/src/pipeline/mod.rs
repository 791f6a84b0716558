//! A rank's steps, one after the other. Weights arrive, gradients leave and decisions are made in the background, as
//! far as the schedule allows. The trainer's thread calls the pipeline. Its driver and its watcher are tasks on the
//! session's runtime.

mod driver;
mod feeds;
mod idle;
mod moves;
mod options;
mod outcome;
mod plan;
mod prepare;
mod resume;
mod shared;
mod stats;
mod step;
mod watch;

use std::sync::{Arc, Mutex, atomic::AtomicU32};

use futures_util::future::AbortHandle;
use longshore_proto::{Fault, Rank, Step, Version};
use tokio::sync::{mpsc, oneshot, watch as channel};
use tracing::{Span, debug_span};

use self::{
    driver::{Driver, Finished, StepToDecide},
    feeds::{Feeds, has_room_ahead},
    moves::Moves,
    outcome::Outcomes,
    resume::Resume,
    shared::{Board, PipelineInner},
    step::{Current, Meters},
    watch::Watcher,
};
pub use self::{
    idle::move_idle,
    options::{Accumulate, DelayCorrection, HyperOf, PipelineOptions, Weights},
    outcome::{StepOutcome, Timing},
    plan::{Moved, check_holders, plan_moves},
    prepare::wanted_tier,
    step::StepInputs,
};
use crate::{
    cluster::{Cluster, Impatience},
    envelope::MAX_TRAINER_BYTES,
    error::{Misuse, Result},
    host::Instant,
    lock,
    push::Accumulator,
    session::{Joined, Session},
};

/// The steps of one rank, from the version that it joined at. A single thread at a time uses a pipeline; feeds and
/// assemblers may go to other threads.
pub struct Pipeline {
    /// Declared before `session`, so that the tasks end first.
    tasks: Tasks,
    session: Session,
    options: PipelineOptions,
    shared: Arc<PipelineInner>,
    /// Sends steps to rank 0's driver.
    work: Option<mpsc::UnboundedSender<StepToDecide>>,
    /// The trainer's own bytes in the commit of the version at which this rank joined.
    resumed: Option<Vec<u8>>,
    /// The last step that this rank finished.
    last: Step,
    current: Option<Current>,
    /// Meter readings at the end of the last step. Later bytes count for the next step, also if its weights are
    /// read before it begins.
    meters: Meters,
    /// Timing of the last finished step.
    timed: Option<Timing>,
    feeds: Feeds,
    /// Sums of a step's micro-steps, if this rank adds them up.
    accumulator: Option<Arc<Mutex<Accumulator>>>,
}

/// Background tasks. Dropping the value aborts them.
struct Tasks(Vec<AbortHandle>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

impl Pipeline {
    /// Makes a pipeline that continues from the result of `Session::join`, once every server trains.
    ///
    /// # Errors
    /// `Invalid` for options that contradict the job, or for resume data of another program.
    pub fn new(session: Session, joined: &Joined, options: PipelineOptions) -> Result<Pipeline> {
        options.validate(session.spec())?;
        let accumulator = options.accumulate.accumulator(&session)?;
        let resume = Resume::from(joined, &options)?;
        let (board, resumed) = (Board::new(resume.scales), Board::new([]));
        let shared = Arc::new(PipelineInner {
            board,
            resumed,
            outcomes: Outcomes::default(),
            trainer: Mutex::default(),
            wanted: channel::Sender::default(),
        });
        let (cluster, gradients) = (session.cluster.clone(), session.gradients.clone());
        session.rank.begin_training();
        if let Some(reason) = &joined.paused {
            cluster.waits.paused(reason);
        }
        let last = Step(joined.version.0);
        let decided = joined.last_commit.iter().map(|commit| (commit.step, commit.decided_by)).collect();
        let last_commit = joined.last_commit.as_ref();
        let left_out = last_commit.map_or(&joined.left_out, |commit| &commit.left_out).clone();
        let (joined, floor) = (joined.version, resume.floor);
        let watcher = Watcher {
            cluster: cluster.clone(),
            rank: session.rank.clone(),
            gradients: gradients.clone(),
            shared: shared.clone(),
            joined,
            seen: last,
            decided,
            floor,
            held: None,
        };
        let mut tasks = Tasks(vec![cluster.runtime.spawn(watcher.run())]);
        let work = (session.rank() == Rank(0)).then(|| {
            let (sender, work) = mpsc::unbounded_channel();
            // The last decision of an earlier rank 0 may still be on its way to a server's drives.
            let durable = driver::durable_everywhere(cluster.clone(), joined);
            let wanted = shared.wanted.subscribe();
            let moves = Moves::new(cluster.clone(), session.rank.clone(), gradients.clone(), wanted);
            let driver = Driver {
                cluster: cluster.clone(),
                rank: session.rank.clone(),
                gradients,
                shared: shared.clone(),
                options: options.clone(),
                scaler: resume.scaler,
                left_out,
                durable: Some(cluster.runtime.spawn_joined(durable)),
                moves,
            };
            tasks.0.push(cluster.runtime.spawn(driver.run(work)));
            sender
        });
        let resumed = resume.trainer;
        let meters = Meters::read(&session);
        Ok(Pipeline {
            tasks,
            session,
            options,
            shared,
            work,
            resumed,
            last,
            current: None,
            meters,
            timed: None,
            feeds: Feeds::default(),
            accumulator,
        })
    }

    /// The trainer's own bytes in the commit of the version that this rank joined at. None in a fresh job.
    pub fn resumed(&self) -> Option<&[u8]> {
        self.resumed.as_deref()
    }

    /// Returns rank 0's `trainer_state` of the newest step that was decided since this rank joined. None on rank 0.
    pub fn of_rank_0(&self) -> Option<Vec<u8>> {
        lock(&self.shared.trainer).take()
    }

    /// Begins the next step. Waits until the version that the step reads is decided, even during a pause. Then
    /// requests that version's weights.
    pub fn begin(&mut self) -> Result<StepInputs> {
        let started = Instant::now();
        self.cluster().waits.check()?;
        if self.current.is_some() {
            return Err(Misuse("a step is under way: call finish before the next begin").into());
        }
        let step = Step(self.last.0 + 1);
        let (job, rank) = (self.cluster().job().as_str(), self.cluster().options.rank.0);
        let span = debug_span!(target: "step", parent: None, "step", job, rank, step = step.0);
        let _stage = debug_span!(target: "stage", parent: &span, "begin", step = step.0).entered();
        let reads = self.options.schedule.reads(step);
        let before = Meters::read(&self.session);
        let loss_scale = self.await_decision(reads)?;
        self.feeds.take(&self.session, &self.options.weights, reads)?;
        if has_room_ahead(&self.session) {
            self.open_ahead(Step(step.0 + 1))?;
        }
        let plan = StepInputs { step, reads, loss_scale };
        let reading = self.reading(reads);
        let (finished_at, at) = channel::channel(None);
        let trainer = self.announce(plan, &span, at);
        let micro_steps = self.options.accumulate.micro_steps(self.session.spec()) as usize;
        self.current = Some(Current {
            plan,
            span,
            reading,
            started,
            begin: started.elapsed(),
            assembled: vec![false; micro_steps],
            loss: None,
            finished: Arc::new(AtomicU32::new(0)),
            trainer,
            finished_at,
            before,
            moved_before: self.meters,
        });
        Ok(plan)
    }

    /// Waits until the version that the next step reads is decided, and returns that step's loss scale.
    pub fn next_loss_scale(&self) -> Result<f64> {
        self.await_decision(self.next_reads())
    }

    /// Sends a step to rank 0's driver, which starts to collect the step's gradient statistics.
    fn announce(
        &self,
        plan: StepInputs,
        span: &Span,
        finished_at: stats::Finished,
    ) -> Option<oneshot::Sender<Finished>> {
        let work = self.work.as_ref()?;
        let (trainer, finished) = oneshot::channel();
        // If the driver has ended, the session has failed, and the next call returns the failure.
        let (step, loss_scale, span) = (plan.step, plan.loss_scale, span.clone());
        let _ = work.send(StepToDecide { step, loss_scale, span, finished_at, finished });
        Some(trainer)
    }

    /// Reports the current step's loss on this rank to the servers, for charts. Only rank 0's loss is kept.
    ///
    /// # Errors
    /// `Misuse` outside a step.
    pub fn report_loss(&mut self, loss: f64) -> Result<()> {
        self.current.as_mut().ok_or(OUTSIDE)?.loss = Some(loss);
        Ok(())
    }

    /// Ends the step. `trainer_state` holds the trainer's data for a resume after this step; only rank 0's is
    /// kept.
    ///
    /// If the next step reads this step's version, the call waits for the decision. A delayed step returns at once,
    /// and a later call returns an error of the decision.
    pub fn finish(&mut self, trainer_state: Vec<u8>) -> Result<()> {
        let started = Instant::now();
        self.cluster().waits.check()?;
        self.check_finished(trainer_state.len())?;
        let Some(mut current) = self.current.take() else { return Err(OUTSIDE.into()) };
        let step = current.plan.step;
        let _stage = debug_span!(target: "stage", parent: &current.span, "finish", step = step.0).entered();
        self.last = step;
        current.finished_at.send_replace(Some(started));
        let next = self.options.schedule.reads(Step(step.0 + 1));
        self.feeds.keep_only(next);
        // The pull goes first, so that servers send the weights as soon as the step is decided.
        let opened = self.open_ahead(Step(step.0 + 1));
        if let Some(trainer) = current.trainer.take() {
            let report = current.report(self.timed);
            let _ = trainer.send(Finished { trainer_state, report }); // see `announce`
        }
        let ended = opened.and_then(|()| match next == step.version() {
            true => self.await_decision(next).map(drop),
            false => Ok(()),
        });
        // The trainer's half of the outcome is recorded even after an interrupted wait: the step is decided in any
        // case.
        let meters = Meters::read(&self.session);
        let made = current.made(meters, started.elapsed());
        self.timed = Some(made.timing);
        self.shared.outcomes.made(step, made);
        self.meters = meters;
        ended
    }

    fn check_finished(&self, trainer_bytes: usize) -> Result<()> {
        if !self.current()?.is_pushed() {
            return Err(Misuse("not every micro-step was pushed: finish an assembler for each first").into());
        }
        if trainer_bytes > MAX_TRAINER_BYTES {
            let limit = format!("at most {MAX_TRAINER_BYTES} bytes");
            return Err(
                Fault::invalid("trainer_state", trainer_bytes, limit, "keep tensors out of it").into()
            );
        }
        Ok(())
    }

    /// Starts to pull the version that `next` reads, if this rank has finished the step that makes it. A delayed job
    /// starts this pull one step earlier.
    fn open_ahead(&mut self, next: Step) -> Result<()> {
        let version = self.options.schedule.reads(next);
        if version.0 <= self.last.0 {
            self.feeds.open_ahead(&self.session, &self.options.weights, version)?;
        }
        Ok(())
    }

    /// Waits until every finished step is decided, and returns the version then reached. The version that the next
    /// step reads depends on the schedule alone.
    pub fn drain(&mut self) -> Result<Version> {
        let version = Version(self.last.0);
        self.await_decision(version)?;
        self.cluster().waits.check()?;
        Ok(version)
    }

    /// Drains, and waits until no crash of a server can take the version back. A server that died with the last step
    /// may need that step's gradients again. If the step must be computed anew, the call returns an error.
    pub fn settle(&mut self) -> Result<Version> {
        let version = self.drain()?;
        let cluster = self.cluster();
        let durable = driver::durable_everywhere(self.session.cluster.clone(), version);
        // Only rank 0 must be there: it sends the version to a server that lost it.
        let durable = cluster.patiently_for(|rank| rank == Rank(0), durable);
        let durable = cluster.watched("the last version to be durable", durable);
        cluster.runtime.block_on(async {
            match durable.await {
                Ok(durable) => durable.map(|()| version),
                Err(Impatience::Failed(error)) => Err(error),
                Err(Impatience::Elapsed(waited)) => {
                    Err(cluster.late("the last version to be durable", version, waited).await)
                }
            }
        })
    }

    /// Returns the steps that were decided and finished since the last call, oldest first.
    pub fn outcomes(&mut self) -> Vec<StepOutcome> {
        self.shared.outcomes.take()
    }

    /// The newest decided version.
    pub fn decided(&self) -> Version {
        self.shared.board.newest()
    }

    /// The last step that this rank finished.
    pub fn last_step(&self) -> Step {
        self.last
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Settles, and returns the session, so that the caller can leave the job.
    pub fn close(mut self) -> Result<Session> {
        let version = self.settle()?;
        feeds::await_updates(&self.session, version);
        let Pipeline { tasks, session, .. } = self;
        drop(tasks);
        Ok(session)
    }

    /// Waits until `version` is decided. Returns the loss scale of the steps that read it.
    fn await_decision(&self, version: Version) -> Result<f64> {
        let (cluster, board) = (self.cluster(), &self.shared.board);
        let soon = cluster.runtime.block_briefly(board.known(version));
        soon.map_or_else(|| cluster.runtime.block_on(board.wait(cluster, version)), Ok)
    }

    fn cluster(&self) -> &Cluster {
        &self.session.cluster
    }

    fn current(&self) -> Result<&Current> {
        self.current.as_ref().ok_or_else(|| OUTSIDE.into())
    }
}

const OUTSIDE: Misuse = Misuse("no step is under way: call begin first");
