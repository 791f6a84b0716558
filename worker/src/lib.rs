//! The worker's side of Longshore: push 16-bit gradients, pull 16-bit weights, decide steps.
//!
//! Asynchronous inside, blocking outside, since trainers are. A run reads:
//!
//! ```no_run
//! # use longshore_worker::*;
//! # fn example(options: Options, initial: &dyn Fn(usize) -> Vec<f32>) -> Result<()> {
//! let mut session = Session::connect(options)?;
//! let opened = session.open()?;
//! let joined = session.join()?;
//! if opened.is_fresh() {
//!     session.initialise(initial)?; // rank 0 uploads, the others wait
//! }
////! let mut pipeline = Pipeline::new(session, &joined, PipelineOptions::default())?;
//! loop {
////!     let step = pipeline.begin()?;
////!     let weights = pipeline.weights()?;
//!     # let (param, range, mut values, gradient) = (0, 0..64, vec![0.0; 64], vec![0.0; 64]);
//!     weights.read(range, &mut values)?; // forward
////!     let mut assembler = pipeline.assembler(0)?;
//!     assembler.put(param, &gradient)?; // backward, times step.loss_scale
//!     assembler.finish()?;
////!     pipeline.finish(Vec::new())?;
//! }
//! # }
//! ```

pub mod convert;
pub mod decide;
pub mod device;
pub mod error;
pub mod loss_scale;
//pub mod pipeline;
pub mod pull;
pub mod push;
pub mod schedule;
pub mod session;

pub use device::{Budget, CudaDevice, Device, HostDevice, Lease};
pub use error::{Error, Result};
pub use loss_scale::{LossScaler, LossScalerOptions};
//pub use pipeline::{Pipeline, PipelineOptions, StepOutcome, StepPlan};
pub use pull::Feed;
pub use push::Assembler;
pub use schedule::Schedule;
pub use session::{Joined, Opened, Options, Session, StateHash};
