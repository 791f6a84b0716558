//! A worker's steps, one after the other: which version each reads, its weights already on the way, its gradient
//! pushed, its decision made or awaited, in the background where the schedule allows.

mod board;
mod driver;
mod envelope;
mod options;
mod outcome;
mod resume;
mod stats;
mod watch;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use longshore_proto::{Fault, MicroStep, Rank, ShardId, Step, TierKind, Version};
use tokio::{
    sync::{mpsc, oneshot, watch as channel},
    task::AbortHandle,
};
use tracing::debug_span;

use self::{
    board::Board,
    driver::{Driver, Work},
    envelope::MAX_TRAINER_BYTES,
    outcome::{Made, Outcomes},
    resume::Resume,
    watch::Watcher,
};
pub use self::{
    options::{HyperOf, PipelineOptions, Weights},
    outcome::{StepOutcome, Timing},
};
use crate::{
    error::{Misuse, Result},
    pull::{Feed, Reading},
    push::{Assembler, Collector, Outbox, Way},
    session::{Core, Joined, Session, SharedCore},
};

/// What a step must do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPlan {
    pub step: Step,
    /// The version to compute with.
    pub reads: Version,
    /// Multiply the loss by this.
    pub loss_scale: f64,
}

/// Steps of one rank, from the version it joined at. Not shared between threads; feeds and assemblers may go to others.
pub struct Pipeline {
    /// Before `session`, so that the tasks end first.
    tasks: Tasks,
    session: Session,
    options: PipelineOptions,
    shared: Arc<Shared>,
    /// To rank 0's driver.
    work: Option<mpsc::UnboundedSender<Work>>,
    /// The trainer's bytes of the commit that was joined at.
    resumed: Option<Vec<u8>>,
    /// The last step finished here.
    last: Step,
    current: Option<Current>,
    feed: Option<Feed>,
    next_feed: Option<Feed>,
}

/// Background tasks; ended on drop.
struct Tasks(Vec<AbortHandle>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// What trainer, driver and watcher share.
struct Shared {
    board: Board,
    /// Versions decided at the loss scale's floor, with the scale to go on with: from the watcher to the driver.
    resumed: Board,
    outcomes: Outcomes,
}

impl Shared {
    /// Frees the gradients that no server can need any more. One step more is kept where a server may come back a
    /// version behind (`nvme`: a step is committed anywhere only once the one before is durable everywhere), and on
    /// ranks that hear of a commit from one server while another may not have it yet.
    fn release(&self, core: &Core, committed: Step) {
        let hearsay = core.options.rank != Rank(0) && core.peers.len() > 1;
        let lag = u64::from(hearsay || core.spec().tier == TierKind::Nvme);
        core.retained.release(Step(committed.0.saturating_sub(lag)));
    }
}

/// The step between `begin` and `finish`.
struct Current {
    plan: StepPlan,
    /// The version it reads, over all of its pulls.
    reading: Reading,
    started: Instant,
    /// Time in `begin`.
    begin: Duration,
    assembled: Vec<bool>,
    finished: Arc<AtomicU32>,
    trainer: Option<oneshot::Sender<Vec<u8>>>,
    finished_at: channel::Sender<Option<Instant>>,
    before: Meters,
}

#[derive(Clone, Copy)]
struct Meters {
    weights: u64,
    push: u64,
    pushed_bytes: u64,
    pulled_bytes: u64,
}

impl Meters {
    fn read(core: &Core) -> Meters {
        Meters {
            weights: core.meter.weights_nanos.load(Relaxed),
            push: core.meter.push_nanos.load(Relaxed),
            pushed_bytes: core.meter.pushed_bytes.load(Relaxed),
            pulled_bytes: core.meter.pulled_bytes.load(Relaxed),
        }
    }
}

impl Pipeline {
    /// Continues from what `Session::join` returned, once every server trains.
    ///
    /// # Errors
    /// `Invalid` for options that contradict the job, or resume data of another program.
    pub fn new(session: Session, joined: &Joined, options: PipelineOptions) -> Result<Pipeline> {
        options.validate(session.spec())?;
        let resume = Resume::from(joined, &options)?;
        let (board, resumed) = (Board::new(resume.scales), Board::new([]));
        let shared = Arc::new(Shared { board, resumed, outcomes: Outcomes::default() });
        let core = session.core().clone();
        core.begin_training();
        if let Some(reason) = &joined.paused {
            core.paused(reason);
        }
        let last = Step(joined.version.0);
        let decided = joined.last_commit.iter().map(|commit| (commit.step, commit.decided_by)).collect();
        let (joined, floor) = (joined.version, resume.floor);
        let watcher = Watcher {
            core: core.clone(),
            shared: shared.clone(),
            joined,
            seen: last,
            decided,
            floor,
            held: None,
        };
        let mut tasks = Tasks(vec![core.spawn(watcher.run())]);
        let work = (session.rank() == Rank(0)).then(|| {
            let (sender, work) = mpsc::unbounded_channel();
            let (core, shared, options) = (core.clone(), shared.clone(), options.clone());
            // What an earlier rank 0 decided last may still be on its way to the drives of a server.
            let durable = Some(core.spawn_joined(driver::durable_everywhere(core.clone(), joined)));
            let driver = Driver { core: core.clone(), shared, options, scaler: resume.scaler, work, durable };
            tasks.0.push(core.spawn(driver.run()));
            sender
        });
        let resumed = resume.trainer;
        let (current, feed, next_feed) = (None, None, None);
        Ok(Pipeline { tasks, session, options, shared, work, resumed, last, current, feed, next_feed })
    }

    /// The trainer's own bytes from the commit that was joined at; None for a fresh job.
    pub fn resumed(&self) -> Option<&[u8]> {
        self.resumed.as_deref()
    }

    /// Starts the next step: waits until the version it reads is decided (and while the job is paused), and has its
    /// weights under way.
    pub fn begin(&mut self) -> Result<StepPlan> {
        let started = Instant::now();
        self.core().check()?;
        if self.current.is_some() {
            return Err(Misuse("a step is under way: call finish before the next begin").into());
        }
        let step = Step(self.last.0 + 1);
        let _stage = debug_span!(target: "stage", "begin", step = step.0).entered();
        let reads = self.options.schedule.reads(step);
        let before = Meters::read(self.core());
        let loss_scale = self.core().block_on(self.shared.board.wait(self.core(), reads))?;
        self.take_feed(reads)?;
        if self.has_room_ahead() {
            self.open_ahead(Step(step.0 + 1))?;
        }
        let plan = StepPlan { step, reads, loss_scale };
        let reading = self.feed.as_ref().map_or_else(|| Reading::new(reads), |feed| feed.reading().clone());
        let (finished_at, at) = channel::channel(None);
        let trainer = self.announce(plan, at);
        let micro_steps = self.session.spec().micro_steps as usize;
        self.current = Some(Current {
            plan,
            reading,
            started,
            begin: started.elapsed(),
            assembled: vec![false; micro_steps],
            finished: Arc::new(AtomicU32::new(0)),
            trainer,
            finished_at,
            before,
        });
        Ok(plan)
    }

    /// Tells rank 0's driver of a step, and starts collecting its figures.
    fn announce(&self, plan: StepPlan, finished_at: stats::Finished) -> Option<oneshot::Sender<Vec<u8>>> {
        let work = self.work.as_ref()?;
        let (trainer, finished) = oneshot::channel();
        let stats = self.core().spawn_joined(stats::collect(self.core().clone(), plan.step, finished_at));
        // A driver that has ended has left the session's failure, which the next call returns.
        let _ = work.send(Work { step: plan.step, loss_scale: plan.loss_scale, stats, finished });
        Some(trainer)
    }

    /// The weights this step reads, on their way since the version was ready or asked for.
    ///
    /// # Errors
    /// `Misuse` outside a step, or with `Weights::OnDemand`.
    pub fn weights(&self) -> Result<Feed> {
        self.current()?;
        self.feed.clone().ok_or_else(|| Misuse("the pipeline pulls on demand: use Pipeline::pull").into())
    }

    /// The weights of the next step, once they have been asked for: after [`Pipeline::finish`], and of a delayed job with room for
    /// them in the host's memory from [`Pipeline::begin`] on.
    pub fn upcoming(&self) -> Option<Feed> {
        self.next_feed.clone()
    }

    /// Pulls some flat ranges of the version this step reads, as a stage 3 layer does.
    pub fn pull(&self, order: &[Range<u64>]) -> Result<Feed> {
        let reading = self.current()?.reading.clone();
        self.core().check()?;
        Feed::open(self.core(), reading, order, self.session.spec().image_dtype)
    }

    /// The way for the gradient of one micro-step, counted from 0; each once.
    pub fn assembler(&mut self, micro_step: u32) -> Result<Assembler> {
        let core: SharedCore = self.core().clone();
        let Some(current) = &mut self.current else { return Err(OUTSIDE.into()) };
        match current.assembled.get_mut(micro_step as usize) {
            Some(assembled) if !*assembled => *assembled = true,
            Some(_) => return Err(Misuse("this micro-step has its assembler already").into()),
            None => {
                let limit = format!("below {}, the job's micro_steps", current.assembled.len());
                return Err(
                    Fault::invalid("micro_step", micro_step, limit, "count micro-steps from 0").into()
                );
            }
        }
        let (plan, reading, finished) = (current.plan, current.reading.clone(), current.finished.clone());
        let (params, ways) = (core.spec().params.len(), self.ways());
        let collector = Collector::new(plan.step, MicroStep(micro_step), params, ways);
        let outbox = Outbox::new(core, plan.loss_scale, reading, finished);
        Ok(Assembler::new(collector, outbox, self.feed.clone()))
    }

    /// Servers of this host use gradients where they are, if this rank will see when they have: by all their weights.
    fn ways(&self) -> Vec<Way> {
        let core = self.core();
        let whole = matches!(self.options.weights, Weights::Whole);
        let way = |server| if whole && core.link(server).is_some() { Way::Lent } else { Way::Chunks };
        let by_server: Vec<Way> = (0..core.peers.len()).map(way).collect();
        (0..core.layout.shards()).map(|shard| by_server[core.owner(ShardId(shard))]).collect()
    }

    /// Ends the step. `trainer_state` is what the trainer needs to resume after it (rank 0's is kept). Returns when
    /// the step is decided if the next one reads its version, else at once: an error then surfaces at a later call.
    pub fn finish(&mut self, trainer_state: Vec<u8>) -> Result<()> {
        let started = Instant::now();
        self.core().check()?;
        self.check_finished(trainer_state.len())?;
        let Some(mut current) = self.current.take() else { return Err(OUTSIDE.into()) };
        let step = current.plan.step;
        let _stage = debug_span!(target: "stage", "finish", step = step.0).entered();
        self.last = step;
        current.finished_at.send_replace(Some(started));
        if let Some(trainer) = current.trainer.take() {
            let _ = trainer.send(trainer_state); // see `announce`
        }
        let next = self.options.schedule.reads(Step(step.0 + 1));
        if self.feed.as_ref().is_some_and(|feed| feed.version() != next) {
            self.feed = None; // its memory serves the next one
        }
        self.open_ahead(Step(step.0 + 1))?;
        if next == step.version() {
            self.core().block_on(self.shared.board.wait(self.core(), next))?;
        }
        self.record(&current, started.elapsed());
        Ok(())
    }

    fn check_finished(&self, trainer_bytes: usize) -> Result<()> {
        let current = self.current()?;
        if (current.finished.load(Relaxed) as usize) < current.assembled.len() {
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

    /// The feed of `version`: opened ahead, kept from the step before, or opened now.
    fn take_feed(&mut self, version: Version) -> Result<()> {
        let of = |feed: &Feed| feed.version() == version;
        if self.feed.as_ref().is_some_and(of) {
            return Ok(());
        }
        self.feed = None;
        self.feed = match self.next_feed.take().filter(of) {
            Some(feed) => Some(feed),
            None => self.open_feed(version)?,
        };
        Ok(())
    }

    /// Whether the next step's weights can come while this one's gradient is made and kept.
    fn has_room_ahead(&self) -> bool {
        let spec = self.session.spec();
        let both = spec.image_dtype.bytes() + spec.gradient_dtype.bytes();
        self.core().options.host_budget.free() >= self.session.layout().elements() * both
    }

    /// Starts pulling what the next step reads as soon as this rank has pushed all that goes into it, before the step in hand
    /// where that is delayed: the servers hold the pull until the version is there.
    fn open_ahead(&mut self, next: Step) -> Result<()> {
        let version = self.options.schedule.reads(next);
        let open = [&self.feed, &self.next_feed].into_iter().flatten().any(|feed| feed.version() == version);
        if !open && version.0 <= self.last.0 {
            self.next_feed = self.open_feed(version)?;
        }
        Ok(())
    }

    fn open_feed(&self, version: Version) -> Result<Option<Feed>> {
        let whole = 0..self.session.layout().elements();
        let order = match &self.options.weights {
            Weights::Whole => std::slice::from_ref(&whole),
            Weights::Ranges(order) => order,
            Weights::OnDemand => return Ok(None),
        };
        self.session.pull(version, order, self.session.spec().image_dtype).map(Some)
    }

    fn record(&self, current: &Current, commit: Duration) {
        let (before, after) = (current.before, Meters::read(self.core()));
        let weights = Duration::from_nanos(after.weights - before.weights);
        let push = Duration::from_nanos(after.push - before.push);
        let timing = Timing {
            wall: current.started.elapsed(),
            begin: current.begin,
            weights,
            push,
            commit,
            exposed: current.begin + weights + push + commit,
            pushed_bytes: after.pushed_bytes - before.pushed_bytes,
            pulled_bytes: after.pulled_bytes - before.pulled_bytes,
        };
        let StepPlan { step, reads, loss_scale } = current.plan;
        self.shared.outcomes.made(step, Made { read: reads, loss_scale, timing });
    }

    /// Waits until every finished step is decided; returns the version then reached. What the next step reads stays
    /// with the schedule.
    pub fn drain(&mut self) -> Result<Version> {
        let version = Version(self.last.0);
        self.core().block_on(self.shared.board.wait(self.core(), version))?;
        self.core().check()?;
        Ok(version)
    }

    /// Steps decided and finished since the last call, oldest first.
    pub fn outcomes(&mut self) -> Vec<StepOutcome> {
        self.shared.outcomes.take()
    }

    /// The newest decided version.
    pub fn decided(&self) -> Version {
        self.shared.board.newest()
    }

    /// The last step finished here.
    pub fn last_step(&self) -> Step {
        self.last
    }

    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Drains, waits until no crash of a server can take the last version back, and gives the session back, to leave with.
    pub fn close(mut self) -> Result<Session> {
        let version = self.drain()?;
        let core = self.core().clone();
        self.core().block_on(driver::durable_everywhere(core, version))?;
        self.await_updates(version);
        let Pipeline { tasks, session, .. } = self;
        drop(tasks);
        Ok(session)
    }

    /// Waits until nothing is lent any more, so that its memory can be used again. Where that fails it is given up.
    fn await_updates(&self, version: Version) {
        let whole = 0..self.session.layout().elements();
        let order = std::slice::from_ref(&whole);
        if !self.core().retained.is_lending() {
            return;
        }
        let pulled = self.session.pull(version, order, self.session.spec().image_dtype);
        match pulled.and_then(|feed| feed.wait(whole.clone())) {
            Ok(()) => self.core().retained.updated(Step(version.0)),
            Err(error) => tracing::debug!(%error, "gradients lent to servers are given up"),
        }
    }

    fn core(&self) -> &SharedCore {
        self.session.core()
    }

    fn current(&self) -> Result<&Current> {
        self.current.as_ref().ok_or_else(|| OUTSIDE.into())
    }
}

const OUTSIDE: Misuse = Misuse("no step is under way: call begin first");
