//! A rank's steps over memory that Python names: gradients are copied from there once, and weights to there.

use std::ops::Range;

use longshore_proto::{Dtype, Fault, Hyper, JobSpec, Step, Version};
use longshore_worker::{
    Assembler, Error, Feed, Joined, Pipeline, PipelineOptions, Result, Session, StepOutcome, error::Misuse,
};

use crate::{memory::HostTensor, settings::StepByStep};

/// A pipeline, and how far its step in hand has come.
pub(crate) struct Training {
    pipeline: Pipeline,
    steps: StepByStep,
    /// Where each parameter lies in the flat space.
    places: Vec<Range<u64>>,
    begun: Option<Step>,
    /// What takes the gradients of the micro-step in hand.
    assembler: Option<Assembler>,
    /// How many micro-steps of the step in hand are whole.
    micro_steps: u32,
    /// Weights that were asked for and are not in the tensors yet.
    unread: Option<Feed>,
    /// A wait was interrupted while gradients were leaving, so nobody knows which of them have left.
    is_broken: bool,
}

const BROKEN: Misuse = Misuse(
    "this step was interrupted while its gradients were leaving, so it cannot go on: build the optimizer again with the \
     same servers and job, and it goes on from the last whole step",
);

impl Training {
    /// Goes on from where the rank joined. If its tensors may hold other weights than those that the next step
    /// computes with, these are asked for: all but those of the rank that filled a new job from them.
    pub(crate) fn start(
        session: Session,
        joined: &Joined,
        found: bool,
        options: PipelineOptions,
        steps: StepByStep,
    ) -> Result<Training> {
        let params = session.spec().params.len();
        let places = (0..params).map(|param| session.layout().param_range(param)).collect();
        let holds_weights = !found && joined.version == Version(0) && session.rank().0 == 0;
        let pipeline = Pipeline::new(session, joined, options)?;
        let mut training = Training {
            pipeline,
            steps,
            places,
            begun: None,
            assembler: None,
            micro_steps: 0,
            unread: None,
            is_broken: false,
        };
        if !holds_weights {
            training.begin()?;
            training.unread = Some(training.pipeline.weights()?);
        }
        Ok(training)
    }

    pub(crate) fn spec(&self) -> &JobSpec {
        self.pipeline.session().spec()
    }

    pub(crate) fn session(&self) -> &Session {
        self.pipeline.session()
    }

    fn begin(&mut self) -> Result<Step> {
        match self.begun {
            Some(step) => Ok(step),
            None => {
                let step = self.pipeline.begin()?.step;
                self.micro_steps = 0;
                Ok(*self.begun.insert(step))
            }
        }
    }

    /// Sends gradients of the micro-step in hand, times `scale`.
    pub(crate) fn push(&mut self, gradients: &[HostTensor], scale: f32) -> Result<()> {
        let wire = self.spec().gradient_dtype;
        self.put_all(
            gradients.iter().map(|gradient| (gradient.param, gradient.elements())),
            |at, range, target| {
                gradients[at].write_to(range, wire, scale, target);
            },
        )
    }

    /// Sends gradients of zeros.
    pub(crate) fn push_zeros(&mut self, params: &[usize]) -> Result<()> {
        let places = &self.places;
        let elements = |&param: &usize| (param, places.get(param).map_or(0, |place| place.end - place.start));
        let given: Vec<(usize, u64)> = params.iter().map(elements).collect();
        self.put_all(given.into_iter(), |_, _, target| target.fill(0))
    }

    fn put_all(
        &mut self,
        given: impl Iterator<Item = (usize, u64)>,
        write: impl Fn(usize, Range<usize>, &mut [u8]),
    ) -> Result<()> {
        if self.is_broken {
            return Err(BROKEN.into());
        }
        self.begin()?;
        let assembler = match &mut self.assembler {
            Some(assembler) => assembler,
            None => self.assembler.insert(self.pipeline.assembler(self.micro_steps)?),
        };
        for (at, (param, elements)) in given.enumerate() {
            let put = assembler.put_with(param, elements, &mut |range, target| write(at, range, target));
            if let Err(Error::Interrupted(_)) = put {
                self.is_broken = true;
            }
            put?;
        }
        Ok(())
    }

    /// Ends the micro-step in hand, to which every parameter has given its gradient.
    pub(crate) fn end_micro_step(&mut self) -> Result<()> {
        let assembler = self.assembler.take();
        assembler.ok_or(Misuse("no gradient was pushed in this micro-step"))?.finish()?;
        self.micro_steps += 1;
        Ok(())
    }

    /// Ends the step with these hyperparameters, and asks for the weights of the next one.
    pub(crate) fn commit(&mut self, hypers: Vec<Hyper>, trainer_state: Vec<u8>) -> Result<Step> {
        if self.is_broken {
            return Err(BROKEN.into());
        }
        let step = self.begun.ok_or(Misuse("no gradient was pushed in this step"))?;
        let groups = self.spec().groups.len();
        if hypers.len() != groups {
            let limit = format!("{groups}, as when the job was opened");
            let remedy = "open a new job for other param groups";
            return Err(Fault::invalid("param_groups", hypers.len(), limit, remedy).into());
        }
        hypers.iter().enumerate().try_for_each(|(group, hyper)| hyper.validate(group))?;
        self.steps.set_hypers(step, hypers);
        let finished = self.pipeline.finish(trainer_state);
        if self.pipeline.last_step() == step {
            // Though the wait for its decision may have been interrupted, the step has ended.
            self.begun = None;
            self.unread = self.pipeline.upcoming();
        }
        finished.map(|()| step)
    }

    /// Writes the weights that were asked for into the tensors. Returns their version, or none where there are no other
    /// weights than the tensors have.
    pub(crate) fn read_weights(&mut self, targets: &[HostTensor]) -> Result<Option<Version>> {
        let Some(feed) = self.unread.clone() else { return Ok(None) };
        for target in targets {
            let place = self.place(target)?;
            target.read_weights(&feed, place)?;
        }
        self.unread = None;
        Ok(Some(feed.version()))
    }

    /// Writes the weights of a version that was read before into tensors, which it asks the servers for again.
    pub(crate) fn pull(&self, version: Version, targets: &[HostTensor]) -> Result<()> {
        let order: Vec<Range<u64>> =
            targets.iter().map(|target| self.place(target)).collect::<Result<_>>()?;
        let feed = self.session().pull(version, &order, self.spec().image_dtype)?;
        targets.iter().zip(order).try_for_each(|(target, place)| target.read_weights(&feed, place))
    }

    fn place(&self, tensor: &HostTensor) -> Result<Range<u64>> {
        let fault = |value: u64, limit: String| {
            Err(Fault::invalid("tensor", value, limit, "name the parameters in the job's order").into())
        };
        match self.places.get(tensor.param) {
            Some(place) if place.end - place.start == tensor.elements() => Ok(place.clone()),
            Some(place) => fault(tensor.elements(), format!("{} elements", place.end - place.start)),
            None => fault(tensor.param as u64, format!("below {} parameters", self.places.len())),
        }
    }

    /// Waits until every step is decided, and asks for the newest weights. The next step computes with them, also in a
    /// delayed job.
    pub(crate) fn drain(&mut self) -> Result<Version> {
        let version = self.pipeline.drain()?;
        let step = self.pipeline.last_step();
        if self.begun.is_none() && self.spec().max_delay > 0 && step > Step(0) {
            self.steps.drain_after(step);
            let whole = 0..self.session().layout().elements();
            let dtype: Dtype = self.spec().image_dtype;
            self.unread = Some(self.session().pull(version, std::slice::from_ref(&whole), dtype)?);
        }
        Ok(version)
    }

    pub(crate) fn has_unread_weights(&self) -> bool {
        self.unread.is_some()
    }

    pub(crate) fn outcomes(&mut self) -> Vec<StepOutcome> {
        self.pipeline.outcomes()
    }

    pub(crate) fn version(&self) -> Version {
        Version(self.pipeline.last_step().0)
    }

    /// Waits until the last step is safe, and gives the rank up.
    pub(crate) fn close(self) -> Result<Session> {
        let Training { pipeline, assembler, unread, .. } = self;
        drop((assembler, unread));
        pipeline.close()
    }
}
