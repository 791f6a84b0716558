//! The HTTP address: metrics for Prometheus, health for orchestrators, and a status page for people. All requests are
//! read-only.

mod answers;
mod drives;
mod families;
mod hosts;
mod listen;
mod metrics;
mod report;
mod room;
mod seen;
mod wanted;

pub(crate) use self::{listen::serve, report::Listen};
