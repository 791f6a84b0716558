//! Stage 3: a model's weights are in device memory unit by unit, each from just before its use on, as far as a budget
//! allows. If the budget holds all units, all of them stay there, and that is stage 2.
//!
//! ```no_run
//! # use longshore_worker::*;
//! # use std::sync::Arc;
//! # fn example(mut pipeline: Pipeline, device: Arc<dyn Device>, blocks: Vec<Unit>) -> Result<()> {
//! # let forward = |_weights: &UnitWeights| {}; let backward = |_weights: &UnitWeights| vec![(0, vec![0.0])];
//! let units = Units::new(pipeline.session(), device, blocks, None)?;
//! pipeline.begin()?;
//! units.begin(&mut pipeline, 0)?;
//! for unit in 0..units.len() {
//!     forward(&units.acquire(unit)?);
//!     units.release(unit)?;
//! }
//! for unit in (0..units.len()).rev() {
//!     let gradients = backward(&units.acquire(unit)?);
//!     units.release(unit)?;
//!     units.emit(unit, gradients)?;
//! }
//! units.end(&mut pipeline)?;
//! pipeline.finish(Vec::new())
//! # }
//! ```

mod acquire;
mod loads;
mod memory;
mod order;
mod place;
mod policy;

use std::{
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use longshore_proto::Version;

pub use self::place::Unit;
use self::{
    loads::{Loads, State},
    place::Place,
    policy::Label,
};
use crate::{
    device::Device,
    error::{Error, Misuse, Result, UnitError},
    pipeline::{PassWeights, Pipeline},
    push::Assembler,
    session::Session,
};

/// The units of a model as one rank uses them. All calls block, and may come from any thread.
pub struct Units {
    loads: Arc<Loads>,
    pass: Mutex<Pass>,
    /// Where the gradients of the micro-step in hand go.
    assembler: Mutex<Option<Assembler>>,
}

#[derive(Default)]
struct Pass {
    /// The micro-step in hand; None in an evaluation.
    micro_step: Option<u32>,
    begun: bool,
    report: UnitsReport,
}

/// A unit's weights in device memory, in the job's image type. They stay there until the unit is released; afterwards the
/// memory has other contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitWeights {
    /// Where they are on the device; None on the host, where [`Units::read`] shows them.
    pub address: Option<u64>,
    pub bytes: u64,
    pub version: Version,
}

/// What became of the units' pulls since the units were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitsReport {
    pub acquired: u64,
    /// How many acquired units were not there when they were needed.
    pub late: u64,
    /// How long the trainer waited for those.
    pub waited: Duration,
    /// How many units were pulled, ahead of their use or not.
    pub pulled: u64,
    pub pulled_bytes: u64,
}

impl Units {
    /// Divides a model's parameters into units, and gives them `budget` bytes of the device's memory, or what the device's
    /// own budget has left.
    ///
    /// # Errors
    /// `Unit` where the budget is below the largest unit, and for units that are not a division of the parameters.
    pub fn new(
        session: &Session,
        device: Arc<dyn Device>,
        units: Vec<Unit>,
        budget: Option<u64>,
    ) -> Result<Units> {
        let dtype = session.spec().image_dtype;
        let places = Place::all(units, session.spec(), session.layout())?;
        let capacity = budget.unwrap_or_else(|| device.budget().free());
        for place in &places {
            let bytes = place.elements * dtype.bytes();
            if bytes > capacity {
                return Err(
                    UnitError::TooLarge { unit: place.unit.name.clone(), bytes, budget: capacity }.into()
                );
            }
        }
        let loads = Loads::new(session.pulls.clone(), device, dtype, places, capacity);
        Ok(Units { loads: Arc::new(loads), pass: Mutex::default(), assembler: Mutex::new(None) })
    }

    pub fn len(&self) -> usize {
        self.loads.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of device memory that the units may take.
    pub fn budget(&self) -> u64 {
        self.loads.capacity
    }

    /// How many units stay in device memory from forward to backward, where forward uses them in their order.
    pub fn resident(&self) -> usize {
        staying(
            self.loads.places.iter().map(|place| place.elements * self.loads.dtype.bytes()),
            self.budget(),
        )
    }

    /// The elements of a parameter or another flat range, counted from the start of its unit's memory.
    pub fn within(&self, unit: usize, range: &Range<u64>) -> Option<Range<u64>> {
        self.loads.places.get(unit)?.within(range)
    }

    pub fn report(&self) -> UnitsReport {
        let state = self.loads.lock();
        UnitsReport { pulled: state.loads, pulled_bytes: state.loaded_bytes, ..self.pass().report }
    }

    /// Begins a micro-step of the step that `pipeline` is at, instead of [`Pipeline::assembler`].
    ///
    /// # Errors
    /// `Unit` where a unit is still acquired with another version.
    pub fn begin(&self, pipeline: &mut Pipeline, micro_step: u32) -> Result<()> {
        // A micro-step has one assembler, so a unit that is held is found before it is taken.
        pipeline.renew(micro_step)?;
        let now = pipeline.pass_weights()?;
        self.check_released(&self.loads.lock(), &now, label(&now, false))?;
        let assembler = pipeline.assembler(micro_step)?;
        let after = pipeline.weights_after(micro_step, false)?;
        self.turn(now, Some(after))?;
        *self.assembler.lock().unwrap_or_else(PoisonError::into_inner) = Some(assembler);
        self.pass().micro_step = Some(micro_step);
        Ok(())
    }

    /// Begins a forward pass outside of steps.
    ///
    /// # Errors
    /// `Unit` where a unit is still acquired with another version.
    pub fn evaluate(&self, version: Version) -> Result<()> {
        self.turn(PassWeights::of(version), None)?;
        self.pass().micro_step = None;
        Ok(())
    }

    /// Has a pass read `now`. After a training pass come those that read `after`.
    fn turn(&self, now: PassWeights, after: Option<Vec<PassWeights>>) -> Result<()> {
        let label = label(&now, after.is_none());
        let mut state = self.loads.lock();
        self.check_released(&state, &now, label)?;
        let actions = match after {
            Some(after) => {
                let labels = upcoming(&mut state, after);
                state.sources.insert(label, now);
                state.policy.begin(label, labels)
            }
            None => {
                state.sources.insert(label, now);
                state.policy.evaluate(label)
            }
        };
        self.loads.perform(&mut state, actions, None)?;
        drop(state);
        self.pass().begun = true;
        Ok(())
    }

    /// Ends the micro-step: the last gradient has been emitted. What comes next is pulled from now on.
    ///
    /// # Errors
    /// `Gradient` naming the first parameter without a gradient. Then the micro-step goes on: emit it, and end it again.
    pub fn end(&self, pipeline: &mut Pipeline) -> Result<()> {
        let Some(micro_step) = self.pass().micro_step else { return Err(OUTSIDE.into()) };
        let mut assembler = self.assembler();
        assembler.as_ref().map_or(Ok(()), Assembler::check_whole)?;
        if let Some(whole) = assembler.take() {
            whole.finish()?;
        }
        drop(assembler);
        let mut pass = self.pass();
        (pass.micro_step, pass.begun) = (None, false);
        drop(pass);
        let after = pipeline.weights_after(micro_step, true)?;
        let mut state = self.loads.lock();
        let labels = upcoming(&mut state, after);
        let actions = state.policy.end(labels);
        self.loads.perform(&mut state, actions, None)
    }

    /// Sends the gradients of some of a unit's parameters, the last one first, and frees each once it is on its way. They
    /// are multiplied by the step's loss scale.
    ///
    /// # Errors
    /// `Unit` for a parameter of another unit, one that takes no gradient, and one whose gradient was sent already;
    /// otherwise those of [`Assembler::put`].
    pub fn emit<G: AsRef<[f32]>>(&self, unit: usize, gradients: Vec<(usize, G)>) -> Result<()> {
        for (param, gradient) in gradients.into_iter().rev() {
            self.put(unit, param, |assembler| assembler.put(param, gradient.as_ref()))?;
        }
        Ok(())
    }

    /// Does what [`Units::emit`] does for one parameter, as [`Assembler::put_with`]: `write` puts the gradient straight
    /// into the memory that it is sent from.
    ///
    /// # Errors
    /// Those of [`Units::emit`].
    pub fn emit_with(
        &self,
        unit: usize,
        param: usize,
        elements: u64,
        write: &mut dyn FnMut(Range<usize>, &mut [u8]),
    ) -> Result<()> {
        self.put(unit, param, |assembler| assembler.put_with(param, elements, write))
    }

    fn put(&self, unit: usize, param: usize, put: impl FnOnce(&mut Assembler) -> Result<()>) -> Result<()> {
        self.check(unit)?;
        if !self.loads.places[unit].unit.params.contains(&param) {
            return Err(UnitError::OtherUnit { unit: self.name(unit), param }.into());
        }
        let mut assembler = self.assembler();
        put(assembler.as_mut().ok_or(OUTSIDE)?).map_err(|error| match error {
            Error::Gradient(source) => UnitError::Gradient { unit: self.name(unit), source }.into(),
            error => error,
        })
    }

    /// Refuses a pass while a unit is held with other weights.
    fn check_released(&self, state: &State, now: &PassWeights, label: Label) -> Result<(), UnitError> {
        let Some(item) = state.policy.held().find(|item| item.label != label) else { return Ok(()) };
        let unit = self.name(item.unit);
        Err(UnitError::VersionChanged { unit, held: version(item.label), wanted: now.version() })
    }

    fn check(&self, unit: usize) -> Result<(), UnitError> {
        if unit < self.len() { Ok(()) } else { Err(UnitError::Unknown { unit, units: self.len() }) }
    }

    fn name(&self, unit: usize) -> String {
        self.loads.places[unit].unit.name.clone()
    }

    // Nothing under these locks can leave what they guard half changed.
    fn pass(&self) -> MutexGuard<'_, Pass> {
        self.pass.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn assembler(&self) -> MutexGuard<'_, Option<Assembler>> {
        self.assembler.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Units {
    fn drop(&mut self) {
        self.loads.clear();
    }
}

const OUTSIDE: Misuse = Misuse("no micro-step is under way: call Units::begin first");

/// How many units stay from forward to backward: the last ones, as many as the budget holds.
fn staying(bytes: impl DoubleEndedIterator<Item = u64>, budget: u64) -> usize {
    let sums = bytes.rev().scan(0u64, |sum, bytes| {
        *sum = sum.saturating_add(bytes);
        Some(*sum)
    });
    sums.take_while(|&sum| sum <= budget).count()
}

/// Takes the sources of the passes to come. Those of passes gone by are forgotten, since they may hold memory of the host.
fn upcoming(state: &mut State, after: Vec<PassWeights>) -> Vec<Label> {
    state.sources.clear();
    let labels: Vec<Label> = after.iter().map(|weights| label(weights, false)).collect();
    state.sources.extend(labels.iter().copied().zip(after));
    labels
}

/// Weights that are amended have other bits, and what an evaluation has read says nothing of what a step reads.
fn label(weights: &PassWeights, evaluation: bool) -> Label {
    Label(weights.version().0 * 4 + u64::from(weights.amends()) + 2 * u64::from(evaluation))
}

fn version(label: Label) -> Version {
    Version(label.0 / 4)
}
