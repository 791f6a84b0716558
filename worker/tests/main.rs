//! The worker's tests against servers of the same process, as one program.

mod pipeline;
mod transports;
mod turns;
