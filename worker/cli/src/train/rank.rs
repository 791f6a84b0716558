//! The run of one rank: opens or continues the job, makes steps, evaluates, writes checkpoints, and ends.

mod evaluate;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use longshore_proto::{FaultKind, Layout, Rank, Version};
use longshore_worker::{
    Feed,
    device::{Budget, Device},
    error::Error,
    pipeline::{Pipeline, StepInputs},
    session::{GoBack, Interrupt, Joined, Opened, Options, Process, Session},
};

use super::{
    DeviceImages, Flags, ImageWeights, LayerGradients, Settings, Sink,
    gpt::{self, Gpt},
    keep::{Keeper, cut_off},
    memory::{activations, check_room, with_kept_activations},
    recorded,
    report::{Opening, Report},
    stop::{LastWords, Part, Stop, Stopped},
    text::{Batch, Corpus},
};
use crate::progress::Progress;

/// Sequences of a validation batch: few, so that an evaluation has fewer activations than a step.
const VALIDATION_SEQUENCES: usize = 4;

struct Run<'a> {
    settings: &'a Settings,
    model: Gpt,
    corpus: Corpus,
    text: String,
    validation: Vec<Batch>,
    layout: Layout,
    device: Arc<dyn Device>,
    rank: u32,
    /// Shared by all sessions of this run. So a run that starts over never replaces a process that has taken the rank
    /// meanwhile.
    process: Process,
    stop: Stop,
}

struct DeviceBuffers {
    images: DeviceImages,
    gradients: LayerGradients,
}

pub(super) fn run(settings: &Settings, rank: u32, servers: &[String], embedded: bool) -> anyhow::Result<()> {
    // A rank other than 0 that was started by hand catches no signal. Its sudden end loses nothing, as with kill -9.
    let part = match (rank, settings.flags.launched) {
        (0, _) => Some(Part::Decides),
        (_, launched) => launched.then_some(Part::Follows),
    };
    let words = LastWords { said: cut_off(settings, embedded), as_json: settings.out.errors_are_json() };
    let stop = part.map(|part| Stop::catch(part, words)).transpose()?.unwrap_or_default();
    let run = Run::prepare(settings, rank, stop)?;
    let tokens = (settings.flags.batch * run.model.config().context) as u64
        * u64::from(settings.flags.micro_steps)
        * u64::from(settings.flags.world_size);
    let mut report = Report::new(rank, settings, tokens, (servers, embedded));
    loop {
        match run.train((servers, embedded), &mut report) {
            Err(error) if is(&error, |error| matches!(error, Error::Outdated(_))) => {
                report.note(&format!("{error}. Starting over"));
            }
            Err(error) if is(&error, |error| matches!(error, Error::Interrupted(_))) => {
                let said = format!("while the job is paused, {}", cut_off(settings, embedded));
                return Err(Stopped { signal: run.stop.asked().unwrap_or_default(), said }.into());
            }
            ended => return ended,
        }
    }
}

type Asks = Box<dyn Fn() -> bool + Send + Sync>;

impl<'a> Run<'a> {
    fn prepare(settings: &'a Settings, rank: u32, stop: Stop) -> anyhow::Result<Run<'a>> {
        let model = Gpt::new(settings.model)?;
        let model = with_kept_activations(model, settings.flags.device_budget());
        let corpus = Corpus::load(&settings.flags.data)?;
        corpus.check_context(settings.model.context)?;
        let validation =
            corpus.validation(settings.flags.eval_batches, VALIDATION_SEQUENCES, settings.model.context);
        let spec = settings.spec(&model);
        let layout = spec.validate()?;
        let device = settings.flags.device.open(rank, settings.flags.device_budget())?;
        check_room(&model, &layout, &settings.flags, device.budget())?;
        let text = corpus.digest();
        let process = Process::default();
        Ok(Run { settings, model, corpus, text, validation, layout, device, rank, process, stop })
    }

    /// Trains from the connection to the servers to the last step.
    ///
    /// # Errors
    /// After `Outdated` nothing is lost, and the call may be repeated.
    fn train(&self, (servers, embedded): (&[String], bool), report: &mut Report) -> anyhow::Result<()> {
        let settings = self.settings;
        let host = Budget::unlimited("host memory of the worker");
        let (interrupt, paused) = self.interrupt();
        let options = Options {
            transport: if embedded {
                settings.flags.transport.of_embedded()
            } else {
                settings.flags.transport
            },
            deadline: Duration::from_secs(settings.flags.deadline_s),
            host_budget: host.clone(),
            interrupt,
            process: self.process.clone(),
            ..Options::new(servers.to_vec(), settings.spec(&self.model), Rank(self.rank))
        };
        let options = if embedded { options } else { settings.flags.access.of(options) };
        let session = Session::connect(options)?;
        let _ = paused.set(Box::new(session.asks_if_paused()));
        let (session, joined) = self.enter(session, report)?;
        let mut keeper = Keeper::new(settings, servers, embedded);
        if self.rank == 0 {
            keeper.check(&session, joined.version, report)?;
        }
        let mut memory = self.allocate()?;
        report.opening(&Opening {
            parameters: self.model.params().iter().map(|param| param.elements() as u64).sum(),
            shards: self.layout.shards(),
            text: self.corpus.summary(),
            first_step: joined.version.0 + 1,
            device: self.device.name(),
        });
        // The pipeline's watch shows this process to other ranks from here on, however long it evaluates.
        let mut pipeline = Pipeline::new(session, &joined, settings.pipeline_options()?)?;
        let first_loss = self.evaluate_at(&pipeline, joined.version, &mut memory, report)?;
        self.check_resumed(&pipeline, report);
        if self.rank == 0 {
            self.say_when_the_delay_begins(report);
        }
        self.stop.steps_begin();
        while pipeline.last_step().0 < settings.flags.steps && !self.is_stopped() {
            self.step(&mut pipeline, &mut memory, report)?;
            self.after_step(&mut pipeline, &mut memory, &mut keeper, report)?;
        }
        // After the settle no crash takes the version back, so the end reports and writes a version that stays.
        let version = pipeline.settle()?;
        report.decided(pipeline.outcomes());
        let stopped = self.stop.asked().filter(|_| self.rank == 0 && version.0 < settings.flags.steps);
        let mut failure = None;
        if self.rank == 0 {
            let ending = self.end(&pipeline, version, &mut memory, (first_loss, host.peak()))?;
            let kept = keeper.finish(pipeline.session(), version, report)?;
            report.ending(&ending, &kept);
            failure = match (kept.failure, stopped) {
                (None, Some(signal)) => {
                    Some(Stopped { signal, said: keeper.way_on(pipeline.session(), version) }.into())
                }
                (failure, _) => failure,
            };
        }
        drop(memory);
        pipeline.close()?.leave()?;
        failure.map_or(Ok(()), Err)
    }

    /// Returns true if rank 0 was told to stop. Other ranks go on until they are ended: the current step needs
    /// them.
    fn is_stopped(&self) -> bool {
        self.rank == 0 && self.stop.asked().is_some()
    }

    /// Returns the interrupt of rank 0's waits. A signal ends the waits during a pause, since no step can finish then.
    /// The caller puts the session's function that returns whether the job is paused into the cell.
    fn interrupt(&self) -> (Interrupt, Arc<OnceLock<Asks>>) {
        let paused: Arc<OnceLock<Asks>> = Arc::default();
        if self.rank != 0 {
            return (Interrupt::default(), paused);
        }
        let (stop, asks) = (self.stop.clone(), Arc::clone(&paused));
        let is_paused = move || asks.get().is_some_and(|asks| asks());
        (Interrupt::when(move || stop.asked().is_some() && is_paused()), paused)
    }

    /// Creates or finds the job, fills a new one with weights, and takes the rank.
    fn enter(&self, mut session: Session, report: &mut Report) -> anyhow::Result<(Session, Joined)> {
        if self.rank != 0 {
            let joined = session.follow(self.settings.flags.go_back().as_ref())?;
            return Ok((session, joined));
        }
        let opened = session.open();
        if let Some(how) = self.goes_back(&session, &opened, report)? {
            let restored = session.go_back(&how)?;
            if let Err(Error::StateLost(lost)) = &opened {
                report.note(&format!("server {} lost its part of the job: {}", lost.server, lost.detail));
            }
            report.note(&format!("restored checkpoint {} of {}", restored.name, restored.version));
            return Ok(session.join().map(|joined| (session, joined))?);
        }
        let fresh = opened?.is_fresh();
        if fresh {
            say_what_is_left_aside(&session, report);
        }
        let joined = session.join()?;
        if fresh {
            let elements: usize = self.model.params().iter().map(|param| param.elements()).sum();
            let bytes = (elements * size_of::<f32>()) as u64;
            let progress = Progress::bytes("uploading weights", bytes, self.settings.out);
            session.upload(&|param| {
                let weights = self.model.init(self.settings.flags.seed, param);
                progress.add((weights.len() * size_of::<f32>()) as u64);
                weights
            })?;
            session.wait_training()?;
        }
        Ok((session, joined))
    }

    /// Returns how to fill the job from a checkpoint, or None. A restore that was begun is completed, whoever
    /// began it. A job with state continues from that state.
    fn goes_back(
        &self,
        session: &Session,
        opened: &Result<Opened, Error>,
        report: &Report,
    ) -> anyhow::Result<Option<GoBack>> {
        let asked = self.settings.flags.go_back();
        Ok(match opened {
            Ok(Opened::Running { version, .. }) => {
                if let Some(name) = asked.and_then(|how| how.checkpoint) {
                    report.note(&format!(
                        "the servers hold {version}: going on from there, and not from checkpoint {name}"
                    ));
                }
                None
            }
            Ok(Opened::Restoring { checkpoint }) => {
                let how = asked.unwrap_or_default();
                Some(GoBack { checkpoint: how.checkpoint.or_else(|| Some(checkpoint.clone())), ..how })
            }
            Ok(Opened::Fresh) | Err(Error::StateLost(_)) => asked,
            // A state folder cannot be used, as when its drive is not mounted.
            Err(Error::Call(failed))
                if failed.fault.field == "state_dir"
                    && asked.as_ref().is_some_and(|how| how.discard_state) =>
            {
                asked
            }
            Err(Error::Call(failed))
                if asked.is_some()
                    && failed.fault.kind == FaultKind::Conflict
                    && session.is_elsewhere()? =>
            {
                asked
            }
            Err(_) => None,
        })
    }

    fn allocate(&self) -> anyhow::Result<DeviceBuffers> {
        let gradients = LayerGradients::allocate(self.device.clone(), &self.model)?;
        let dtype = self.settings.flags.weight_dtype;
        let images = DeviceImages::allocate(self.device.clone(), (&self.model, &self.layout), dtype)?;
        Ok(DeviceBuffers { images, gradients })
    }

    fn step(
        &self,
        pipeline: &mut Pipeline,
        memory: &mut DeviceBuffers,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let plan = pipeline.begin()?;
        let mut loss = 0.0;
        for micro_step in 0..self.settings.flags.micro_steps {
            loss +=
                self.micro_step(pipeline, plan, micro_step, memory)? / self.settings.flags.micro_steps as f32;
        }
        report.loss(plan.step, loss);
        pipeline.report_loss(loss.into())?;
        pipeline.finish(recorded::state(self.settings, &self.text))?;
        if let Some(state) = pipeline.of_rank_0() {
            recorded::check_rank(self.rank, &state, self.settings, &self.text)?;
        }
        report.decided(pipeline.outcomes());
        Ok(())
    }

    fn micro_step(
        &self,
        pipeline: &mut Pipeline,
        plan: StepInputs,
        micro_step: u32,
        memory: &mut DeviceBuffers,
    ) -> anyhow::Result<f32> {
        let Flags { seed, batch, .. } = self.settings.flags;
        let batch =
            self.corpus.batch(seed, plan.step.0, micro_step, self.rank, batch, self.model.config().context);
        let _activations = self.device.reserve("activations", self.activations())?;
        let DeviceBuffers { images, gradients } = memory;
        let mut assembler = pipeline.assembler(micro_step)?;
        if micro_step == 0 {
            images.forget();
        }
        let mut weights = self.weights(pipeline.weights()?, images);
        let mut sink = Sink::new(&self.model, gradients, &mut assembler);
        let scale = plan.loss_scale as f32;
        let loss =
            gpt::micro_step(&self.model, &mut weights, &mut sink, &batch, scale).map_err(unwrap_library)?;
        assembler.finish()?;
        Ok(loss)
    }

    fn activations(&self) -> u64 {
        activations(&self.model, self.settings.flags.batch, self.settings.flags.device_budget())
    }

    fn weights<'s>(&'s self, feed: Feed, images: &'s mut DeviceImages) -> ImageWeights<'s> {
        ImageWeights::new((&self.model, &self.layout), feed, images)
    }

    fn say_when_the_delay_begins(&self, report: &Report) {
        let Flags { delay, warmup_steps: exact, steps, .. } = self.settings.flags;
        match delay {
            0 => {}
            _ if exact < steps => {
                report.note(&format!("steps are exact to step {exact} (--warmup-steps), then delayed"))
            }
            _ => report.note(&format!("no step is delayed: the first {exact} are exact (--warmup-steps)")),
        }
    }

    fn check_resumed(&self, pipeline: &Pipeline, report: &Report) {
        let before = pipeline.resumed().into_iter();
        before
            .flat_map(|state| recorded::differences(state, self.settings, &self.text))
            .for_each(|text| report.note(&text));
    }
}

/// Notes existing checkpoints of a job that starts afresh: its servers may have lost the job.
fn say_what_is_left_aside(session: &Session, report: &Report) {
    // Servers without a folder for checkpoints list none. A folder that hangs must not delay the run for a note.
    let Ok(checkpoints) = session.list_checkpoints_within(Duration::from_secs(2)) else { return };
    // The list is in the order of sealing.
    let Some(newest) = checkpoints.last().filter(|newest| newest.version > Version(0)) else { return };
    report.note(&format!(
        "the servers have nothing of job {}, so it starts afresh, at version 0, though checkpoint {} of {} is there: to go on from it, stop \
         this, delete the job where it stays on servers (`longshore delete`), and run the same command with --resume",
        session.spec().name,
        newest.name,
        newest.version
    ));
}

/// Unwraps an error of the worker library that passed through the model.
fn unwrap_library(error: gpt::Error) -> anyhow::Error {
    match error {
        gpt::Error::Acquire { source, .. } | gpt::Error::Emit { source, .. } => {
            match source.downcast::<Error>() {
                Ok(error) => (*error).into(),
                Err(source) => anyhow::Error::from_boxed(source),
            }
        }
        other => other.into(),
    }
}

fn is(error: &anyhow::Error, kind: impl Fn(&Error) -> bool) -> bool {
    error.downcast_ref().is_some_and(kind)
}
