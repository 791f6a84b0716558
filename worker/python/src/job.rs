//! A rank's job, as Python sees it. Every call that may wait does so without the GIL, and ends with Ctrl-C.

use std::{borrow::Cow, ops::Range, process, ptr};

use longshore_proto::{Dtype, Fault, Hyper, Version};
use longshore_worker::{
    Error, Filling, GoBack, Result, Session, error::Misuse, export::Contents, session::is_loading,
};
use pyo3::{prelude::*, types::PyDict};

use crate::{
    call::Call,
    error::{exception, is_ended, raise, raised, signals, without_gil},
    export::export,
    fetch::Fetch,
    filling::{self, Pieces, Read, Weights},
    gradients::GradientMemory,
    lent::{ImageMemory, LentWeights},
    log,
    memory::HostTensor,
    report,
    settings::{GivenHyper, Settings, StepByStep},
    training::Training,
    turns::Turns,
};

enum Stage {
    Connected(Box<Session>),
    Training(Box<Training>),
    Closed,
}

const NOT_STARTED: Misuse = Misuse("the job is not started here: call start first");
const CLOSED: Misuse = Misuse("the optimizer was closed: build a new one");

/// One rank of a job. It is private to the package.
#[pyclass(frozen, module = "longshore._longshore")]
pub(crate) struct Job {
    stage: Turns<Stage>,
    settings: Settings,
    steps: StepByStep,
    /// The process that it belongs to: a fork has none of its threads.
    process: u32,
}

impl Job {
    /// Tells it from all other jobs that are there.
    fn number(&self) -> usize {
        ptr::from_ref(self).addr()
    }

    /// Runs `act` on what the job is, without the GIL.
    fn with<T: Send>(&self, py: Python<'_>, act: impl FnOnce(&mut Stage) -> Result<T> + Send) -> PyResult<T> {
        if self.process != process::id() {
            let message = "the optimizer was built in another process, and a fork has none of its connections: build it in \
                           the process that trains, or start processes with the method spawn";
            return Err(exception(py, "UsageError", message, None)?);
        }
        let _call = Call::of(py, self.number())?;
        without_gil(py, || self.stage.with(is_ended, act))
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
        // What contradicts itself is said before anything is opened.
        let pipeline = settings.pipeline(&steps, &options.spec).map_err(|fault| raise(py, &fault.into()))?;
        pipeline.validate(&options.spec).map_err(|fault| raise(py, &fault.into()))?;
        let session = without_gil(py, || Session::connect(options))?;
        let stage = Turns::new(Stage::Connected(Box::new(session)));
        Ok(Job { stage, settings, steps, process: process::id() })
    }

    /// The job's version on its servers; None where they have nothing of it. To rank 0, which fills it, that is None also
    /// where a server still lacks a part.
    fn find(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.session(py, |session| match session.describe() {
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

    /// Fills the job from a checkpoint, and gives up what its servers have of it. Rank 0 calls it before `start`. Returns the
    /// version.
    fn go_back(&self, py: Python<'_>, checkpoint: String) -> PyResult<u64> {
        self.with(py, |stage| match stage {
            Stage::Connected(session) => {
                let how = GoBack { checkpoint: Some(checkpoint), discard_state: true };
                Ok(session.go_back(&how)?.version.0)
            }
            _ => Err(Misuse("the job is started already").into()),
        })
    }

    /// The parameters that steps have left out, or that fewer updates had made when the job was filled; and how many steps.
    fn left_out(&self, py: Python<'_>) -> PyResult<Vec<(u32, u64)>> {
        let described = self.session(py, Session::describe)?;
        let progress = described.into_iter().find_map(|server| server.progress).unwrap_or_default();
        let left_out = progress.last_commit.map_or(progress.left_out, |commit| commit.left_out);
        Ok(left_out.into_iter().map(|param| (param.param, param.steps)).collect())
    }

    /// The name and version of each checkpoint that can be restored, in the order in which they were sealed.
    fn checkpoints(&self, py: Python<'_>) -> PyResult<Vec<(String, u64)>> {
        let listed = self.session(py, Session::list_checkpoints)?;
        let whole = listed.into_iter().filter(|checkpoint| checkpoint.damage.is_none());
        Ok(whole.map(|checkpoint| (checkpoint.name, checkpoint.version.0)).collect())
    }

    /// What the trainer gave with the commit of the version that the job was joined at; None in a fresh job.
    fn resumed(&self, py: Python<'_>) -> PyResult<Option<Cow<'static, [u8]>>> {
        Ok(self.train(py, |training| Ok(training.resumed()))?.map(Cow::Owned))
    }

    /// What the losses of the step in hand are multiplied by.
    fn loss_scale(&self, py: Python<'_>) -> PyResult<f64> {
        let factor = self.settings.scale_factor();
        self.train(py, |training| Ok(training.loss_scale()? * factor))
    }

    /// Opens and joins the job. A new one is filled from the parameters, one tensor each. With `filling` it is filled from tensors
    /// that are read one by one: the number of updates that made them (none for weights alone) and a callable from an array's number
    /// and a parameter's to a tensor. With `pieces` a callable from a parameter's number, its first element and a count returns
    /// weights. `found` says that the job was there before, and `in_units` does what `pull_in_units` does. Returns its version, and
    /// how many updates made that.
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
            let Stage::Connected(_) = stage else { return Err(Misuse("the job is started already").into()) };
            let Stage::Connected(mut session) = std::mem::replace(stage, Stage::Closed) else {
                return Err(CLOSED.into());
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

    /// Sends gradients of the micro-step in hand, times `scale`.
    #[pyo3(signature = (gradients, scale=1.0))]
    fn push(&self, py: Python<'_>, gradients: Vec<HostTensor>, scale: f32) -> PyResult<()> {
        self.train(py, |training| training.push(&gradients, scale))
    }

    /// Sends a gradient of the micro-step in hand that the host cannot read. `write` is called with an address, the first element and
    /// how many. When it returns they are there, in the job's gradient type.
    fn push_with(&self, py: Python<'_>, param: usize, elements: u64, write: Py<PyAny>) -> PyResult<()> {
        let write = |address: usize, range: Range<usize>| {
            Python::attach(|py| {
                write.call1(py, (address, range.start, range.len())).map(drop).map_err(raised)
            })
        };
        self.train(py, |training| training.push_with(param, elements, write))
    }

    /// The memory that gradients leave from; None where the transport has no server read it.
    fn gradient_memory(&self, py: Python<'_>) -> PyResult<Option<GradientMemory>> {
        self.session(py, |session| Ok(session.gradient_memory().map(GradientMemory::new)))
    }

    /// Says that these parameters got no gradient in the micro-step in hand.
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

    /// Waits for the weights of these parameters that were asked for, and writes them there. Returns their version; None
    /// where nothing was to be read.
    fn read_weights(&self, py: Python<'_>, params: Vec<HostTensor>) -> PyResult<Option<u64>> {
        self.train(py, |training| Ok(training.read_weights(&params)?.map(|version| version.0)))
    }

    /// The weights of these parameters that were asked for, which may lie in servers' memory; None where they do not come from
    /// there. `have_weights` says that they were read.
    fn lent_weights(&self, py: Python<'_>, params: Vec<usize>) -> PyResult<Option<LentWeights>> {
        let lent = self.train(py, |training| training.lent_weights(&params))?;
        Ok(lent.map(|(feed, places)| LentWeights::new(self.number(), feed, places)))
    }

    /// Does what `fetch` does with parts of parameters, where servers of this host have the weights in their memory; None elsewhere. Each
    /// part is a parameter, its first element and how many.
    fn lend(
        &self,
        py: Python<'_>,
        version: u64,
        parts: Vec<(usize, u64, u64)>,
    ) -> PyResult<Option<LentWeights>> {
        let lent = self.train(py, |training| training.lend(Version(version), &parts))?;
        Ok(lent.map(|(feed, places)| LentWeights::new(self.number(), feed, places)))
    }

    /// The memory of servers of this host that weights lie in.
    fn image_memory(&self, py: Python<'_>) -> PyResult<Vec<ImageMemory>> {
        self.session(py, |session| Ok(session.image_memory().into_iter().map(ImageMemory::new).collect()))
    }

    /// The version of the weights that were asked for and were not read for all parameters; None where all were.
    fn unread_weights(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.train(py, |training| Ok(training.unread().map(|version| version.0)))
    }

    /// Does what `unread_weights` does, and lets these weights count as read: from now on `fetch` brings them.
    fn take_unread_weights(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.train(py, |training| Ok(training.take_unread().map(|version| version.0)))
    }

    /// Has weights come by `fetch` alone from now on, so that this process does not hold the whole image. Where servers lend
    /// their own memory nothing changes, since they take none here.
    fn pull_in_units(&self, py: Python<'_>) -> PyResult<()> {
        self.train(py, |training| {
            training.pull_in_units();
            Ok(())
        })
    }

    /// Asks for the weights of some parameters, of a version that was asked for or read, and waits for nothing. Each tensor
    /// has the elements of its parameter from the one on that is named with it.
    fn fetch(&self, py: Python<'_>, version: u64, parts: Vec<(HostTensor, u64)>) -> PyResult<Fetch> {
        let weights = self.train(py, |training| training.fetch(Version(version), parts))?;
        Ok(Fetch::new(self.number(), weights.are_lent(), || weights.write()))
    }

    /// Says that these parameters have the weights that were asked for.
    fn have_weights(&self, py: Python<'_>, params: Vec<usize>) -> PyResult<()> {
        self.train(py, |training| {
            training.have(&params);
            Ok(())
        })
    }

    /// The most bytes of weights that were in the host's memory at once, beside those in tensors.
    fn weights_held(&self, py: Python<'_>) -> PyResult<u64> {
        self.session(py, |session| Ok(session.weights_held()))
    }

    /// Writes the weights of a version that was read before into the parameters.
    fn pull(&self, py: Python<'_>, version: u64, params: Vec<HostTensor>) -> PyResult<()> {
        self.train(py, |training| training.pull(Version(version), &params))
    }

    /// Waits until every step is decided; after that the newest weights can be read. Returns the version.
    fn drain(&self, py: Python<'_>) -> PyResult<u64> {
        self.train(py, |training| Ok(training.drain()?.0))
    }

    /// What became of the steps since the last call.
    fn outcomes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let outcomes = self.train(py, |training| Ok(training.outcomes()))?;
        let factor = self.settings.scale_factor();
        outcomes.iter().map(|outcome| report::of_outcome(py, outcome, factor)).collect()
    }

    /// Writes the newest version's weights into tensors of one type, one for each parameter. Returns the version, and
    /// how many updates made it.
    fn export_weights(&self, py: Python<'_>, dtype: &str, targets: Vec<HostTensor>) -> PyResult<(u64, u64)> {
        let dtype: Dtype = dtype.parse().map_err(|fault: Fault| raise(py, &fault.into()))?;
        self.session(py, |session| export(session, Contents::Weights(dtype), &[targets]))
    }

    /// Does what `export_weights` does with all state: tensors for each array that the rule has, or none where it is not
    /// wanted.
    fn export_state(&self, py: Python<'_>, targets: Vec<Vec<HostTensor>>) -> PyResult<(u64, u64)> {
        self.session(py, |session| export(session, Contents::State(session.spec().rule), &targets))
    }

    /// The hash of all state, and its version.
    fn state_hash(&self, py: Python<'_>) -> PyResult<(u64, String)> {
        let hash = self.session(py, Session::state_hash)?;
        Ok((hash.version.0, hash.hash))
    }

    /// Has the servers write a checkpoint. Returns its name and version.
    fn checkpoint(&self, py: Python<'_>, name: &str) -> PyResult<(String, u64)> {
        let checkpoint = self.session(py, |session| session.checkpoint_numbered(name))?;
        Ok((checkpoint.name, checkpoint.version.0))
    }

    /// Waits until the last step is safe and gives the rank up; with `delete` the job is forgotten, which may be asked for again
    /// where it failed.
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
            // This is a fork, which has none of the session's threads, and whose parent still trains.
            std::mem::forget(std::mem::replace(self.stage.get_mut(), Stage::Closed));
        }
    }
}
