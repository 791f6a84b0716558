//! A rank's job for Python. Every call that may wait releases the GIL, and ends with Ctrl-C.

use std::{borrow::Cow, process, ptr};

use longshore_proto::{Dtype, Fault, Hyper, Version};
use longshore_worker::{
    Error, Filling, GoBack, Result, Session, Slot, StepOutcome, error::Misuse, export::Contents,
    session::is_loading,
};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    call::Call,
    error::{exception, is_ended, raise, raised, signals, without_gil},
    export::export,
    fetch::Fetch,
    filling::{self, Pieces, Read, Weights},
    lent::{GradientMemory, ImageMemory, LentWeights},
    log,
    memory::HostTensor,
    settings::{GivenHyper, Settings, StepByStep},
    training::Training,
    turns::Turns,
};

enum Stage {
    Connected(Box<Session>),
    Training(Box<Training>),
    Closed,
}

impl Stage {
    /// Returns `Fenced` in place of `Outdated`, if a newer process has taken the rank.
    fn cause(&self, error: Error) -> Error {
        match self {
            Stage::Connected(session) => session.cause(error),
            Stage::Training(training) => training.session().cause(error),
            Stage::Closed => error,
        }
    }
}

const NOT_STARTED: Misuse = Misuse("the job is not started here: call start first");
const CLOSED: Misuse = Misuse("the optimizer was closed: build a new one");

/// A rank of a job. Private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct Job {
    stage: Turns<Stage>,
    settings: Settings,
    steps: StepByStep,
    /// Id of the process that built the job. A fork has none of the session's threads.
    process: u32,
}

impl Job {
    /// A number that is unique among the living jobs of this process.
    fn number(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    /// Runs `act` on the job's stage, without the GIL.
    fn with<T: Send>(&self, py: Python<'_>, act: impl FnOnce(&mut Stage) -> Result<T> + Send) -> PyResult<T> {
        if self.process != process::id() {
            let message = "the optimizer was built in another process, and a fork has none of its connections: call flush() of it \
                           before a process that uses the model is forked, build it in the process that trains, or start \
                           processes with the method spawn";
            return Err(exception(py, "UsageError", message, None)?);
        }
        let _call = Call::of(py, self.number())?;
        without_gil(py, || self.stage.with(is_ended, |stage| act(stage).map_err(|error| stage.cause(error))))
    }

    fn train<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&mut Training) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.with(py, |stage| match stage {
            Stage::Training(training) => act(training),
            Stage::Connected(_) => Err(NOT_STARTED.into()),
            Stage::Closed => Err(CLOSED.into()),
        })
    }

    fn session<T: Send>(
        &self,
        py: Python<'_>,
        act: impl FnOnce(&Session) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.with(py, |stage| match stage {
            Stage::Training(training) => act(training.session()),
            Stage::Connected(session) => act(session),
            Stage::Closed => Err(CLOSED.into()),
        })
    }
}

#[pymethods]
impl Job {
    /// Connects to the servers.
    #[new]
    fn new(py: Python<'_>, settings: Settings) -> PyResult<Job> {
        log::listen();
        let options = settings.options(signals()).map_err(|fault| raise(py, &fault.into()))?;
        let steps = StepByStep::default();
        // Contradictory settings raise before anything is opened.
        let pipeline = settings.pipeline(&steps, &options.spec).map_err(|fault| raise(py, &fault.into()))?;
        pipeline.validate(&options.spec).map_err(|fault| raise(py, &fault.into()))?;
        let session = without_gil(py, || Session::connect(options))?;
        let stage = Turns::new(Stage::Connected(Box::new(session)));
        Ok(Job { stage, settings, steps, process: process::id() })
    }

    /// Returns the job's version on its servers, or None if they do not have the job. To rank 0, which fills the
    /// job, None also means that a server still lacks a part.
    fn find(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.session(py, |session| match session.describe() {
            // A checkpoint brings a job from another number of servers.
            Ok(_) if session.is_elsewhere()? => Ok(None),
            Ok(servers) => {
                let lacks = session.rank().0 == 0 && servers.iter().any(is_loading);
                let versions =
                    servers.iter().filter_map(|server| server.progress.as_ref()).map(|p| p.version);
                Ok(versions.min().filter(|_| !lacks))
            }
            Err(Error::StateLost(_)) => Ok(None),
            Err(error) => Err(error),
        })
    }

    /// Fills the job from a checkpoint, and gives up the servers' state of it. Called on rank 0 before `start`.
    /// Returns the version.
    fn go_back(&self, py: Python<'_>, checkpoint: String) -> PyResult<u64> {
        self.with(py, |stage| match stage {
            Stage::Connected(session) => {
                let how = GoBack { checkpoint: Some(checkpoint), discard_state: true };
                Ok(session.go_back(&how)?.version.0)
            }
            _ => Err(Misuse("the job is started already").into()),
        })
    }

    /// Returns the parameters that steps have left out, each with the number of steps. Parameters that had fewer
    /// updates when the job was filled are included.
    fn left_out(&self, py: Python<'_>) -> PyResult<Vec<(u32, u64)>> {
        let described = self.session(py, Session::describe)?;
        let progress = described.into_iter().find_map(|server| server.progress).unwrap_or_default();
        let left_out = progress.last_commit.map_or(progress.left_out, |commit| commit.left_out);
        Ok(left_out.into_iter().map(|param| (param.param, param.steps)).collect())
    }

    /// Returns name and version of each restorable checkpoint, in the order of their sealing.
    fn checkpoints(&self, py: Python<'_>) -> PyResult<Vec<(String, u64)>> {
        let listed = self.session(py, Session::list_checkpoints)?;
        let whole = listed.into_iter().filter(|checkpoint| checkpoint.damage.is_none());
        Ok(whole.map(|checkpoint| (checkpoint.name, checkpoint.version.0)).collect())
    }

    /// Returns the trainer's bytes in the commit of the version that the job was joined at; None in a fresh job.
    fn resumed(&self, py: Python<'_>) -> PyResult<Option<Cow<'static, [u8]>>> {
        Ok(self.train(py, |training| Ok(training.resumed()))?.map(Cow::Owned))
    }

    /// Returns the bytes that rank 0 gave to the newest commit since this rank joined. None on rank 0.
    fn of_rank_0(&self, py: Python<'_>) -> PyResult<Option<Cow<'static, [u8]>>> {
        Ok(self.train(py, |training| Ok(training.of_rank_0()))?.map(Cow::Owned))
    }

    /// Begins the next step, unless it has begun. Waits until the version that it computes with is decided.
    fn begin_step(&self, py: Python<'_>) -> PyResult<()> {
        self.train(py, Training::begin_step)
    }

    /// Returns the factor of the losses in the current step, or in the next one.
    fn loss_scale(&self, py: Python<'_>) -> PyResult<f64> {
        let factor = self.settings.scale_factor();
        self.train(py, |training| Ok(training.loss_scale()? * factor))
    }

    /// Opens and joins the job, and fills a new one. Returns the job's version, and the number of updates that
    /// made it.
    ///
    /// The default filling is the parameters, one tensor each. With `filling`, tensors are read one by one: a
    /// callable returns the tensor of an array's number and a parameter's. `filling` also has the number of
    /// updates that made them, None for weights alone. With `pieces`, a callable from a parameter's number, its
    /// first element and a count returns weights.
    ///
    /// `found` says that the job existed before. `in_units` has the effect of `pull_in_units`.
    #[pyo3(signature = (params, filling=None, found=false, pieces=None, in_units=false))]
    fn start(
        &self,
        py: Python<'_>,
        params: Vec<HostTensor>,
        filling: Option<filling::Given>,
        found: bool,
        pieces: Option<Py<PyAny>>,
        in_units: bool,
    ) -> PyResult<(u64, u64)> {
        let filling: Box<dyn Filling + Send> = match (filling, pieces) {
            (Some(given), _) => Box::new(Read::new(given)),
            (None, Some(source)) => Box::new(Pieces(source)),
            (None, None) => Box::new(Weights(params)),
        };
        self.with(py, move |stage| {
            let mut session = match std::mem::replace(stage, Stage::Closed) {
                Stage::Connected(session) => session,
                Stage::Closed => return Err(CLOSED.into()),
                training => {
                    *stage = training;
                    return Err(Misuse("the job is started already").into());
                }
            };
            let joined = session.start_from(&*filling)?;
            let options = self.settings.pipeline(&self.steps, session.spec())?;
            let how = (found, in_units);
            let training = Training::start(*session, &joined, how, options, self.steps.clone())?;
            let version = training.version();
            *stage = Stage::Training(Box::new(training));
            Ok((version.0, joined.applied))
        })
    }

    /// Sends gradients of the current micro-step, times `scale`.
    #[pyo3(signature = (gradients, scale=1.0))]
    fn push(&self, py: Python<'_>, gradients: Vec<HostTensor>, scale: f32) -> PyResult<()> {
        self.train(py, |training| training.push(&gradients, scale))
    }

    /// Sends gradients of the current micro-step that the host cannot read, given by parameter and number of
    /// elements. `write` is called with slots: the gradient's place in the list, a first element, a count and an
    /// address. When it returns, the elements are there, in the job's gradient type.
    fn push_together(&self, py: Python<'_>, gradients: Vec<(usize, u64)>, write: Py<PyAny>) -> PyResult<()> {
        let write = |slots: &[Slot]| {
            let slot = |slot: &Slot| (slot.gradient, slot.range.start, slot.range.len(), slot.address);
            let slots: Vec<_> = slots.iter().map(slot).collect();
            Python::attach(|py| write.call1(py, (slots,)).map(drop).map_err(raised))
        };
        self.train(py, |training| training.push_together(&gradients, write))
    }

    /// Returns the memory of gradients; None if the transport lets no server read it.
    fn gradient_memory(&self, py: Python<'_>) -> PyResult<Option<GradientMemory>> {
        self.session(py, |session| Ok(session.gradient_memory().map(GradientMemory::new)))
    }

    /// Notes that `params` got no gradient in the current micro-step.
    fn push_zeros(&self, py: Python<'_>, params: Vec<usize>) -> PyResult<()> {
        self.train(py, |training| training.push_zeros(&params))
    }

    fn end_micro_step(&self, py: Python<'_>) -> PyResult<()> {
        self.train(py, Training::end_micro_step)
    }

    /// Ends the step. `loss` is for charts. Returns the step's number.
    #[pyo3(signature = (groups, trainer_state, loss=None))]
    fn commit(
        &self,
        py: Python<'_>,
        groups: Vec<GivenHyper>,
        trainer_state: Vec<u8>,
        loss: Option<f64>,
    ) -> PyResult<u64> {
        let hypers: Vec<Hyper> = groups.into_iter().map(Hyper::from).collect();
        self.train(py, |training| Ok(training.commit(hypers, trainer_state, loss)?.0))
    }

    /// Waits for the requested weights of these parameters, and writes them into the tensors. Returns their
    /// version; None if all were read before.
    fn read_weights(&self, py: Python<'_>, params: Vec<HostTensor>) -> PyResult<Option<u64>> {
        self.train(py, |training| Ok(training.read_weights(&params)?.map(|version| version.0)))
    }

    /// Returns the requested weights of `params` in servers' memory. None if the weights do not come from there. The
    /// caller reports with `have_weights` that it read them.
    fn lent_weights(&self, py: Python<'_>, params: Vec<usize>) -> PyResult<Option<LentWeights>> {
        let lent = self.train(py, |training| training.lent_weights(&params))?;
        Ok(lent.map(|(feed, places)| LentWeights::new(self.number(), feed, places)))
    }

    /// Requests parts of parameters as `fetch` does, if servers of this host have the weights in their memory; None
    /// otherwise. A part is a parameter, its first element and a count.
    fn lend(
        &self,
        py: Python<'_>,
        version: u64,
        parts: Vec<(usize, u64, u64)>,
    ) -> PyResult<Option<LentWeights>> {
        let lent = self.train(py, |training| training.lend(Version(version), &parts))?;
        Ok(lent.map(|(feed, places)| LentWeights::new(self.number(), feed, places)))
    }

    /// Returns the memory of servers of this host that holds weights.
    fn image_memory(&self, py: Python<'_>) -> PyResult<Vec<ImageMemory>> {
        self.session(py, |session| Ok(session.image_memory().into_iter().map(ImageMemory::new).collect()))
    }

    /// Returns the version of requested weights that some parameter has not read; None if all have.
    fn unread_weights(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.train(py, |training| Ok(training.unread().map(|version| version.0)))
    }

    /// Returns the parameters that lack the requested weights.
    fn unread_params(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.train(py, |training| Ok(training.unread_params()))
    }

    /// Returns the version as `unread_weights` does, and marks these weights as read: from now on `fetch` brings them.
    fn take_unread_weights(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.train(py, |training| Ok(training.take_unread().map(|version| version.0)))
    }

    /// Switches to weights by `fetch` alone, so that this process does not hold the whole image. If servers lend
    /// their memory, nothing changes, since lent weights take none here.
    fn pull_in_units(&self, py: Python<'_>) -> PyResult<()> {
        self.train(py, |training| {
            training.pull_in_units();
            Ok(())
        })
    }

    /// Requests weights of some parameters, of a version requested or read before, without waiting. Each tensor
    /// takes elements of its parameter from the given one on.
    fn fetch(&self, py: Python<'_>, version: u64, parts: Vec<(HostTensor, u64)>) -> PyResult<Fetch> {
        let weights = self.train(py, |training| training.fetch(Version(version), parts))?;
        Ok(Fetch::new(self.number(), weights.are_lent(), || weights.write()))
    }

    /// Notes that `params` have the requested weights.
    fn have_weights(&self, py: Python<'_>, params: Vec<usize>) -> PyResult<()> {
        self.train(py, |training| {
            training.have(&params);
            Ok(())
        })
    }

    /// Returns the most bytes of weights in host memory at once, beside those in tensors.
    fn weights_held(&self, py: Python<'_>) -> PyResult<u64> {
        self.session(py, |session| Ok(session.weights_held()))
    }

    /// Writes the weights of an earlier read version into the parameters.
    fn pull(&self, py: Python<'_>, version: u64, params: Vec<HostTensor>) -> PyResult<()> {
        self.train(py, |training| training.pull(Version(version), &params))
    }

    /// Waits until every step is decided and durable; the newest weights can be read afterwards. Returns the version.
    fn drain(&self, py: Python<'_>) -> PyResult<u64> {
        self.train(py, |training| Ok(training.drain()?.0))
    }

    /// Returns the outcomes of the steps since the last call.
    fn outcomes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let outcomes = self.train(py, |training| Ok(training.outcomes()))?;
        let factor = self.settings.scale_factor();
        outcomes.iter().map(|outcome| of_outcome(py, outcome, factor)).collect()
    }

    /// Writes the newest version's weights into tensors of one type, one per parameter. Returns the version, and
    /// the number of updates that made it.
    fn export_weights(&self, py: Python<'_>, dtype: &str, targets: Vec<HostTensor>) -> PyResult<(u64, u64)> {
        let dtype: Dtype = dtype.parse().map_err(|fault: Fault| raise(py, &fault.into()))?;
        self.session(py, |session| export(session, Contents::Weights(dtype), &[targets]))
    }

    /// Exports all state as `export_weights` does weights. `targets` has a list of tensors per array of the rule, empty
    /// for an unwanted array.
    fn export_state(&self, py: Python<'_>, targets: Vec<Vec<HostTensor>>) -> PyResult<(u64, u64)> {
        self.session(py, |session| export(session, Contents::State(session.spec().rule), &targets))
    }

    /// Returns the version and the hash of all state.
    fn state_hash(&self, py: Python<'_>) -> PyResult<(u64, String)> {
        let hash = self.session(py, Session::state_hash)?;
        Ok((hash.version.0, hash.hash))
    }

    /// Writes a checkpoint on the servers. Returns its name and version.
    fn checkpoint(&self, py: Python<'_>, name: &str) -> PyResult<(String, u64)> {
        let checkpoint = self.session(py, |session| session.checkpoint_numbered(name))?;
        Ok((checkpoint.name, checkpoint.version.0))
    }

    /// Asks the job to move to `servers` while it trains.
    fn scale(
        &self,
        py: Python<'_>,
        servers: Vec<String>,
        tier: Option<&str>,
        max_exposed: f64,
    ) -> PyResult<()> {
        let tier = tier.map(str::parse).transpose().map_err(|fault: Fault| raise(py, &fault.into()))?;
        self.session(py, |session| session.scale(&servers, tier, max_exposed))
    }

    /// Waits until the last step is durable, and gives the rank up. With `delete` the job is deleted; a failed
    /// call may be repeated.
    fn close(&self, py: Python<'_>, delete: bool) -> PyResult<()> {
        self.with(py, |stage| {
            if delete {
                match stage {
                    Stage::Closed => {}
                    Stage::Connected(session) => session.delete_job()?,
                    Stage::Training(training) => training.session().delete_job()?,
                }
                *stage = Stage::Closed;
                return Ok(());
            }
            match std::mem::replace(stage, Stage::Closed) {
                Stage::Closed => Ok(()),
                Stage::Connected(session) => session.leave(),
                Stage::Training(training) => training.close()?.leave(),
            }
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.process != process::id() {
            // A fork has none of the session's threads, and its parent still trains.
            std::mem::forget(std::mem::replace(self.stage.get_mut(), Stage::Closed));
        }
    }
}

/// Returns the fields of `longshore.StepReport`. A loss is larger than the scaler's by `scale_factor`.
fn of_outcome<'py>(
    py: Python<'py>,
    outcome: &StepOutcome,
    scale_factor: f64,
) -> PyResult<Bound<'py, PyDict>> {
    let report = PyDict::new(py);
    report.set_item("step", outcome.step.0)?;
    report.set_item("read", outcome.read.0)?;
    report.set_item("skipped", outcome.skip)?;
    report.set_item("grad_norm", outcome.norm)?;
    report.set_item("clip_coefficient", outcome.clip_coefficient)?;
    report.set_item("loss_scale", outcome.loss_scale * scale_factor)?;
    report.set_item("overflow", &outcome.overflow)?;
    report.set_item("wall_s", outcome.timing.wall.as_secs_f64())?;
    report.set_item("exposed_s", outcome.timing.exposed.as_secs_f64())?;
    report.set_item("pushed_bytes", outcome.timing.pushed_bytes)?;
    report.set_item("pulled_bytes", outcome.timing.pulled_bytes)?;
    Ok(report)
}
