//! A rank's steps over tensors of Python. Each gradient is copied out of its tensor once, and each weight into its
//! tensor once.

use std::{ops::Range, sync::Arc};

use longshore_proto::{Fault, Hyper, JobSpec, Partition, Step, Version};
use longshore_worker::{
    Assembler, Error, Joined, Pipeline, PipelineOptions, Result, Session, Slot, StepOutcome,
    error::{GradientError, Misuse},
    pipeline::Weights,
};

use crate::{
    memory::HostTensor,
    settings::StepByStep,
    weights::{self, From, Places, Unread, Weighed},
};

/// A pipeline, and the progress of its current step.
pub(crate) struct Training {
    pub(crate) pipeline: Pipeline,
    steps: StepByStep,
    /// The weights that this rank reads.
    weights: Weights,
    pub(crate) places: Places,
    /// The version whose weights were requested last, or that the tensors held from the start.
    asked: Version,
    begun: Option<Step>,
    /// Loss scale of the step that was begun last.
    loss_scale: f64,
    /// Assembler of the current micro-step.
    assembler: Option<Assembler>,
    /// Number of complete micro-steps of the current step.
    micro_steps: u32,
    /// Requested weights that some tensor does not have yet.
    pub(crate) unread: Option<Unread>,
    /// The drained version whose master weights the next step computes with, since the version's images are corrected.
    pub(crate) drained: Option<Version>,
    /// Master weights of `drained`, once a part of them was pulled: pulls unit by unit share one export.
    master: Option<Arc<Vec<u8>>>,
    /// True after an interrupt while gradients were leaving: some have left, and which ones is unknown.
    is_broken: bool,
}

const BROKEN: Misuse = Misuse(
    "this step was interrupted while its gradients were leaving: call flush() and zero_grad(), and compute it again. A rank \
     of several is built again with the same servers and job, and goes on from the last whole step",
);

const NOT_BEGUN: Misuse = Misuse("no step has begun: call begin_step first");

impl Training {
    /// Continues from the joined version. Requests the weights of the next step, unless the tensors already hold
    /// them. Only the rank that filled a new job from its tensors holds them.
    ///
    /// `found` says that the job existed before, `in_units` that its weights are wanted in units.
    pub(crate) fn start(
        session: Session,
        joined: &Joined,
        (found, in_units): (bool, bool),
        options: PipelineOptions,
        steps: StepByStep,
    ) -> Result<Training> {
        let places = Places::new(session.layout(), session.spec().params.len());
        let weights = options.weights.clone();
        // With partitions per rank, all ranks read together, since they gather their parts from each other.
        let spec = session.spec();
        let shares = |partition: &Partition| {
            !partition.is_frozen() && partition.ranks.len() < spec.world_size as usize
        };
        let is_shared_out = spec.partitions.iter().any(shares);
        let holds_weights = !found && joined.version == Version(0) && session.rank().0 == 0 && !is_shared_out;
        let pipeline = Pipeline::new(session, joined, options)?;
        let mut training = Training {
            pipeline,
            steps,
            weights,
            places,
            asked: joined.version,
            begun: None,
            loss_scale: 1.0,
            assembler: None,
            micro_steps: 0,
            unread: None,
            drained: None,
            master: None,
            is_broken: false,
        };
        if in_units {
            training.pull_in_units();
        }
        if !holds_weights {
            // The step does not begin yet. The caller can still drain, so that the step computes with the newest
            // weights.
            let (version, from) = match training.is_on_demand() {
                true => (training.pipeline.next_reads(), From::OnDemand),
                false => {
                    let feed = training.pipeline.ask_for_next()?;
                    (feed.version(), From::Images(feed))
                }
            };
            training.ask(version, from);
        }
        Ok(training)
    }

    /// Switches to fetching weights on request, unless servers lend all of theirs.
    pub(crate) fn pull_in_units(&mut self) {
        if !self.pipeline.pull_on_demand() {
            return;
        }
        self.weights = Weights::OnDemand;
        if let Some(unread) = &mut self.unread
            && let From::Images(_) = unread.from
        {
            unread.from = From::OnDemand;
        }
    }

    fn is_on_demand(&self) -> bool {
        matches!(self.weights, Weights::OnDemand)
    }

    pub(crate) fn spec(&self) -> &JobSpec {
        self.pipeline.session().spec()
    }

    pub(crate) fn session(&self) -> &Session {
        self.pipeline.session()
    }

    /// Begins the next step, unless it has begun.
    pub(crate) fn begin_step(&mut self) -> Result<()> {
        if self.begun.is_none() {
            let inputs = self.pipeline.begin()?;
            (self.micro_steps, self.loss_scale) = (0, inputs.loss_scale);
            self.begun = Some(inputs.step);
        }
        Ok(())
    }

    /// Returns the loss scale of the current step, or of the next one.
    pub(crate) fn loss_scale(&self) -> Result<f64> {
        if self.begun.is_some() { Ok(self.loss_scale) } else { self.pipeline.next_loss_scale() }
    }

    /// Returns the trainer's own bytes in the commit of the joined version.
    pub(crate) fn resumed(&self) -> Option<Vec<u8>> {
        self.pipeline.resumed().map(<[u8]>::to_vec)
    }

    /// Returns rank 0's bytes of the newest step that was decided since this rank joined. None on rank 0.
    pub(crate) fn of_rank_0(&self) -> Option<Vec<u8>> {
        self.pipeline.of_rank_0()
    }

    /// Sends gradients of the current micro-step, times `scale`.
    pub(crate) fn push(&mut self, gradients: &[HostTensor], scale: f32) -> Result<()> {
        let wire = self.spec().gradient_dtype;
        gradients.iter().try_for_each(|gradient| {
            let mut write =
                |range: Range<usize>, target: &mut [u8]| gradient.write_to(range, wire, scale, target);
            self.put(|assembler| assembler.put_with(gradient.param, gradient.elements(), &mut write))
        })
    }

    /// Sends gradients of the current micro-step, which `write` copies into the memory from which they are sent.
    pub(crate) fn push_together(
        &mut self,
        gradients: &[(usize, u64)],
        mut write: impl FnMut(&[Slot]) -> Result<()>,
    ) -> Result<()> {
        self.put(|assembler| assembler.put_together(gradients, &mut write))
    }

    /// Notes that `params` got no gradient. The wire carries zeros for them, or -0 in a job that leaves parameters out.
    pub(crate) fn push_zeros(&mut self, params: &[usize]) -> Result<()> {
        params.iter().try_for_each(|&param| self.put(|assembler| assembler.put_nothing(param)))
    }

    fn put(&mut self, put: impl FnOnce(&mut Assembler) -> Result<()>) -> Result<()> {
        if self.is_broken {
            return Err(BROKEN.into());
        }
        if self.begun.is_none() {
            return Err(NOT_BEGUN.into());
        }
        let assembler = match &mut self.assembler {
            Some(assembler) => assembler,
            None => self.assembler.insert(self.pipeline.assembler(self.micro_steps)?),
        };
        let put = put(assembler);
        self.is_broken = matches!(put, Err(Error::Interrupted(_)));
        match put {
            // Python's side refuses a second gradient, unless an interrupt hid the first one's departure.
            Err(Error::Gradient(GradientError::Twice { .. })) => Err(BROKEN.into()),
            put => put,
        }
    }

    /// Ends the current micro-step, for which every parameter has its gradient.
    pub(crate) fn end_micro_step(&mut self) -> Result<()> {
        let assembler = self.assembler.take();
        assembler.ok_or(Misuse("no gradient was pushed in this micro-step"))?.finish()?;
        self.micro_steps += 1;
        Ok(())
    }

    /// Ends the step with the hyperparameters `hypers`, and requests the weights of the next step.
    pub(crate) fn commit(
        &mut self,
        hypers: Vec<Hyper>,
        trainer_state: Vec<u8>,
        loss: Option<f64>,
    ) -> Result<Step> {
        if self.is_broken {
            return Err(BROKEN.into());
        }
        let step = self.begun.ok_or(NOT_BEGUN)?;
        let groups = self.spec().groups.len();
        if hypers.len() != groups {
            let limit = format!("{groups}, as when the job was opened");
            let remedy = "open a new job for other param groups";
            return Err(Fault::invalid("param_groups", hypers.len(), limit, remedy).into());
        }
        hypers.iter().enumerate().try_for_each(|(group, hyper)| hyper.validate(group))?;
        self.steps.set_hypers(step, hypers);
        if let Some(loss) = loss {
            self.pipeline.report_loss(loss)?;
        }
        let finished = self.pipeline.finish(trainer_state);
        if self.pipeline.last_step() == step {
            // The step has ended, even if the wait for its decision was interrupted.
            self.begun = None;
            self.ask_for_next()?;
        }
        finished.map(|()| step)
    }

    /// Requests the weights of the next step, if its version differs from that of the last one.
    fn ask_for_next(&mut self) -> Result<()> {
        let (reads, upcoming) = (self.pipeline.next_reads(), self.pipeline.upcoming());
        if self.is_on_demand() {
            if reads != self.asked || self.drained == Some(reads) {
                self.ask(reads, From::OnDemand);
            }
        } else if let Some(feed) = upcoming {
            self.ask(feed.version(), From::Images(feed));
        } else if self.drained == Some(reads) {
            // The tensors have the master weights of that version, and a delayed step computes with its images.
            let images = self.images(reads)?;
            self.ask(reads, images);
        }
        Ok(())
    }

    /// Returns the images of a version that this rank reads.
    fn images(&self, version: Version) -> Result<From> {
        let whole = 0..self.session().layout().elements();
        let order = match &self.weights {
            Weights::Ranges(order) => order,
            Weights::Whole => std::slice::from_ref(&whole),
            Weights::OnDemand => return Ok(From::OnDemand),
        };
        Ok(From::Images(self.session().pull(version, order)?))
    }

    fn ask(&mut self, version: Version, from: From) {
        let left = self.places.read_by(|first| match &self.weights {
            Weights::Ranges(order) => order.iter().any(|range| range.contains(&first)),
            Weights::Whole | Weights::OnDemand => true,
        });
        self.asked = version;
        self.drained = matches!(from, From::Master(_)).then_some(version);
        self.master = None;
        self.unread = Some(Unread { version, from, left });
    }

    /// Waits for the requested weights of the parameters of `targets`, and writes them into these tensors. Returns
    /// their version; None if the tensors have them already.
    pub(crate) fn read_weights(&mut self, targets: &[HostTensor]) -> Result<Option<Version>> {
        let Some((version, from)) = self.unread_weights() else { return Ok(None) };
        for target in targets {
            self.write(&from, target)?;
            if let Some(unread) = &mut self.unread {
                unread.left.remove(&target.param);
            }
        }
        // Once no tensor lacks its weights, their memory is freed.
        self.unread.take_if(|unread| unread.left.is_empty());
        Ok(Some(version))
    }

    /// Requests weights of a version requested or read before, without waiting. A tensor may be a part of a
    /// parameter, from the given element on.
    pub(crate) fn fetch(&mut self, version: Version, given: Vec<(HostTensor, u64)>) -> Result<Weighed> {
        let part = |(target, start): &(HostTensor, u64)| self.places.of_part(target, *start);
        let places = given.iter().map(part).collect::<Result<Vec<_>>>()?;
        let targets: Vec<HostTensor> = given.into_iter().map(|(target, _)| target).collect();
        let from = if self.drained == Some(version) {
            From::Master(self.master_of(version)?)
        } else {
            From::Images(self.pipeline.pull(version, &places)?)
        };
        Ok(Weighed {
            from,
            dtype: self.spec().image_dtype,
            targets: targets.into_iter().zip(places).collect(),
        })
    }

    /// Returns the master weights of the drained version, which are exported once.
    fn master_of(&mut self, version: Version) -> Result<Arc<Vec<u8>>> {
        let weights = match &self.master {
            Some(weights) => Arc::clone(weights),
            None => weights::master(self.session(), version)?,
        };
        Ok(Arc::clone(self.master.insert(weights)))
    }

    /// Pulls a version that was read before again, and writes its weights into tensors.
    pub(crate) fn pull(&mut self, version: Version, targets: &[HostTensor]) -> Result<()> {
        let from = if self.drained == Some(version) {
            From::Master(self.master_of(version)?)
        } else {
            let order: Vec<Range<u64>> =
                targets.iter().map(|target| self.places.of(target)).collect::<Result<_>>()?;
            From::Images(self.session().pull(version, &order)?)
        };
        targets.iter().try_for_each(|target| self.write(&from, target))
    }

    fn write(&self, from: &From, target: &HostTensor) -> Result<()> {
        from.write(self.spec().image_dtype, target, self.places.of(target)?)
    }

    /// Returns the requested weights that some tensor does not have yet.
    pub(crate) fn unread_weights(&self) -> Option<(Version, From)> {
        self.unread.as_ref().map(|unread| (unread.version, unread.from.clone()))
    }

    /// Notes that `params` have the requested weights.
    pub(crate) fn have(&mut self, params: &[usize]) {
        if let Some(unread) = &mut self.unread {
            params.iter().for_each(|param| _ = unread.left.remove(param));
        }
        // Once no parameter lacks its weights, their memory is freed.
        self.unread.take_if(|unread| unread.left.is_empty());
    }

    /// Waits until no crash of a server can take the last step back, and requests the newest weights. The next
    /// step computes with them, also in a delayed job. Corrected images are not the master weights, so the master
    /// weights are exported then.
    pub(crate) fn drain(&mut self) -> Result<Version> {
        let version = self.pipeline.settle()?;
        let step = self.pipeline.last_step();
        if self.begun.is_none()
            && self.spec().max_delay > 0
            && step > Step(0)
            && self.drained != Some(version)
        {
            let from = match self.pipeline.images_are_corrected() {
                true => From::Master(weights::master(self.session(), version)?),
                false => self.images(version)?,
            };
            self.steps.drain_after(step);
            self.ask(version, from);
        }
        Ok(version)
    }

    /// Returns the version of the requested weights that some tensor does not have yet.
    pub(crate) fn unread(&self) -> Option<Version> {
        self.unread.as_ref().map(|unread| unread.version)
    }

    /// Returns the parameters that lack the requested weights.
    pub(crate) fn unread_params(&self) -> Vec<usize> {
        self.unread.iter().flat_map(|unread| unread.left.iter().copied()).collect()
    }

    /// Returns the version as `unread` does, and marks its weights as read, so that they are fetched from now on. A
    /// rank that fetches a part of the weights cannot tell when all tensors have theirs.
    pub(crate) fn take_unread(&mut self) -> Option<Version> {
        let unread = self.unread.take()?;
        // The unread weights are fetched in several calls, which share one export.
        if let From::Master(weights) = unread.from {
            self.master = Some(weights);
        }
        Some(unread.version)
    }

    pub(crate) fn outcomes(&mut self) -> Vec<StepOutcome> {
        self.pipeline.outcomes()
    }

    pub(crate) fn version(&self) -> Version {
        Version(self.pipeline.last_step().0)
    }

    /// Waits until the last step is durable, and ends the pipeline.
    pub(crate) fn close(self) -> Result<Session> {
        let Training { pipeline, assembler, unread, .. } = self;
        drop((assembler, unread));
        pipeline.close()
    }
}
