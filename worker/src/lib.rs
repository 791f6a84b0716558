//! The worker library of Longshore: push 16-bit gradients, pull 16-bit weights, decide steps.
//!
//! The library is asynchronous inside and blocks its callers, since trainers are synchronous code. A run:
//!
//! ```no_run
//! # use longshore_worker::*;
//! # fn example(options: Options, initial: &dyn Fn(usize) -> Vec<f32>) -> Result<()> {
//! # let (param, range, mut values, gradient) = (0, 0..64, vec![0.0; 64], vec![0.0; 64]);
//! let mut session = Session::connect(options)?;
//! let joined = session.start(initial)?;
//! let options = PipelineOptions::new(LossScaler::fixed(1.0)?, |_step| vec![Default::default()]);
//! let mut pipeline = Pipeline::new(session, &joined, options)?;
//! for _ in 0..100 {
//!     let step = pipeline.begin()?;
//!     let weights = pipeline.weights()?;
//!     weights.read(range.clone(), &mut values)?; // forward, as the weights arrive
//!     let mut assembler = pipeline.assembler(0)?;
//!     assembler.put(param, &gradient)?; // backward, of the loss times step.loss_scale
//!     assembler.finish()?;
//!     drop(weights); // its memory serves the next pull
//!     pipeline.finish(Vec::new())?;
//! }
//! pipeline.close()?.leave()
//! # }
//! ```

mod cluster;
pub mod convert;
pub mod decide;
pub mod device;
mod envelope;
pub mod error;
pub mod export;
pub mod host;
pub mod loss_scale;
mod memfd;
mod meter;
pub mod pipeline;
pub mod pull;
pub mod push;
mod rank;
pub mod schedule;
pub mod session;

use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(feature = "cuda")]
pub use device::CudaDevice;
pub use device::{Budget, Device, DeviceChoice, HostDevice, Lease};
pub use error::{Error, Result};
pub use loss_scale::{LossScaler, LossScalerOptions};
pub use memfd::{GradientMemory, ImageMemory};
pub use pipeline::{Accumulate, DelayCorrection, Pipeline, PipelineOptions, StepInputs, StepOutcome};
pub use pull::{Feed, Lent};
pub use push::{Assembler, Slot};
pub use schedule::Schedule;
pub use session::{Filling, GoBack, Interrupt, Joined, Opened, Options, Session, StateHash, Transport};

/// Locks a mutex, poisoned or not. Its data are valid at every instruction, so a panic of an earlier holder does no
/// harm.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
